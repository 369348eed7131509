"""How fast the engines are here: one table, ratios within one run."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Any

import torch

from fedcc.core.model import Arch
from fedcc.core.options import Precision
from fedcc.core.requests import Fit, Init, Predict, Recipe, Request
from fedcc.core.rng import Key
from fedcc.core.step import Loss
from fedcc.engine import Fused, Plain
from fedcc.engine.mapped import attention_by_products
from fedcc.engine.recurrent import unroll_recurrent
from fedcc.experiments.bench_networks import CLASSES, IMAGE, BenchNetwork, BenchRun
from fedcc.experiments.rounds import FinishedRound, Observer
from fedcc.experiments.run import run
from fedcc.losses import CrossEntropy, SoftCrossEntropy
from fedcc.nets import build, network

PRIVATE, PUBLIC = 1024, 1024
READINGS = 20  # of the device's utilisation, of which the second half counts
MINUTES = 2  # the longest run that a CPU is given, as estimated
PHASES = ("fit", "refine", "predict")


@dataclass(frozen=True)
class Setup:
    """What all rows of a table have in common."""

    device: torch.device
    usual: Precision  # the number format of runs on the device
    steps: int
    batch: int
    augment: str
    predicted: int  # number of inputs


@dataclass(frozen=True)
class Row:
    """One measurement. ``ms`` is per client and step; for ``predict`` per client and thousand inputs."""

    phase: str
    engine: str
    clients: int
    ms: float
    ratio: float | None  # how many times faster than the plain engine in fp32
    first: float  # seconds of the first call: compiling, capturing, warming up
    memory: float | None  # peak on the device, GiB
    busy: float | None  # the device's utilisation, percent
    way: str  # how the engine computes: own kernels, stacked, vmap, or plain and why


def bench(setup: Setup, clients: list[int], own: BenchNetwork) -> Iterator[Row]:
    """Measure the engines on made-up inputs."""
    for phase in PHASES:
        base: float | None = None
        units = setup.predicted / 1000 if phase == "predict" else setup.steps
        for name, make in engines(setup.device, setup.usual).items():
            for number in clients if name.startswith("fused") else [1]:  # a loop costs the same for each client
                requests = work(phase, number, setup, own)
                engine = make()
                serve = partial(engine.serve, requests)
                first, seconds, memory = timed(serve, setup.device)
                ms = 1000 * seconds / number / units
                way = engine.way(own.arch) if isinstance(engine, Fused) else "plain"
                yield Row(phase, name, number, ms, base and base / ms, first, memory, busy(serve, setup.device), way)
                base = base or ms


@dataclass(frozen=True)
class NetworkRow:
    """One network of the comparison; times in ms per client and step of a fit."""

    network: str
    clients: int
    plain: float  # fp32, one client after another
    plain_bf16: float | None  # None on a GPU that has no bf16
    fused: float  # bf16 on a GPU that has it, else fp32; all clients together
    ratio: float  # how many times faster than the faster plain one
    way: str  # how the fused engine trains it
    gflop: float  # of a client-step
    share: float  # of the rate of a large matrix product here, in the same number format; percent
    first: float  # seconds of the fused engine's first call
    memory: float | None  # its peak on the device, GiB


@dataclass(frozen=True)
class FailedRow:
    """A network that could not be measured."""

    network: str
    clients: int
    reason: str


def bench_all(setup: Setup, clients: int, networks: Sequence[BenchNetwork]) -> Iterator[NetworkRow | FailedRow]:
    """Measure a fit of each network by the plain and the fused engine; one that fails does not end the others."""
    product_rate = matrix_product_rate(setup.device, torch.bfloat16 if setup.usual == "bf16" else torch.float32)
    for own in networks:
        row: NetworkRow | FailedRow
        try:
            row = _network_row(setup, clients, own, product_rate)
        except Exception as error:
            row = FailedRow(own.name, clients, f"{type(error).__name__}: {error}".splitlines()[0])
        yield row
        if isinstance(row, FailedRow) and setup.device.type == "cuda":
            torch.cuda.empty_cache()


def _network_row(setup: Setup, clients: int, own: BenchNetwork, product_rate: float) -> NetworkRow:
    device, arch = setup.device, own.arch
    alone, together = (work("fit", n, setup, own) for n in (1, clients))
    plain = {
        precision: 1000 * timed(partial(Plain(device, precision).serve, alone), device)[1] / setup.steps
        for precision in plain_precisions(device, setup.usual)
    }
    engine = Fused(device, setup.usual)
    first, seconds, memory = timed(partial(engine.serve, together), device)
    ms, gflop = 1000 * seconds / clients / setup.steps, work_of_a_step(arch, setup.batch) / 1e9
    share = 100 * (gflop / ms * 1e12) / product_rate
    ratio, way = min(plain.values()) / ms, engine.way(arch)
    slow, low = plain["fp32"], plain.get("bf16")
    return NetworkRow(own.name, clients, slow, low, ms, ratio, way, gflop, share, first, memory)


@dataclass(frozen=True)
class RunRow:
    """The time of a run: of its last round, and of all that it takes but reading data and evaluation."""

    run: BenchRun
    round: float | None = None  # seconds
    total: float | None = None  # seconds
    memory: float | None = None  # peak on the device, GiB
    reason: str = ""  # why there are no times


def bench_runs(setup: Setup, runs: Sequence[BenchRun]) -> Iterator[RunRow]:
    """Time whole runs; on a CPU only those that end within minutes."""
    for own in runs:
        try:
            row = _too_long(setup, own) or _run_row(setup, own)
        except Exception as error:
            row = RunRow(own, reason=f"{type(error).__name__}: {error}".splitlines()[0])
        yield row


def _too_long(setup: Setup, own: BenchRun) -> RunRow | None:
    if setup.device.type != "cpu":
        return None
    one = BenchNetwork(own.model, network(own.model, IMAGE))
    step = timed(partial(Plain().serve, work("fit", 1, replace(setup, steps=1), one)), setup.device)[1]
    minutes = step * own.steps(setup.batch) / 60
    return RunRow(own, reason=f"skipped: about {minutes:,.0f} minutes or more") if minutes > MINUTES else None


def _run_row(setup: Setup, own: BenchRun) -> RunRow:
    federation, gpu, ends = own.federation(setup.augment), setup.device.type == "cuda", list[float]()

    class Clock(Observer):
        def round(self, done: FinishedRound) -> None:
            ends.append(time.perf_counter())

    if gpu:
        torch.cuda.reset_peak_memory_stats(setup.device)
    ends.append(time.perf_counter())
    run(
        own.method, federation, own.rounds, epochs=own.epochs, batch=setup.batch, participation=own.participation,
        device=str(setup.device), precision=setup.usual, threads=torch.get_num_threads(), observers=[Clock()],
    )  # fmt: skip
    memory = torch.cuda.max_memory_allocated(setup.device) / 2**30 if gpu else None
    return RunRow(own, ends[-1] - ends[-2], ends[-1] - ends[0], memory)


def timed(serve: Callable[[], Any], device: torch.device) -> tuple[float, float, float | None]:
    """Seconds of a first call, seconds of the faster of two more, and their peak on the device in GiB."""
    gpu = device.type == "cuda"
    first = _seconds(serve, gpu)
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = min(_seconds(serve, gpu) for _ in range(2))
    return first, seconds, torch.cuda.max_memory_allocated(device) / 2**30 if gpu else None


def busy(serve: Callable[[], Any], device: torch.device) -> float | None:
    """The device's utilisation in percent while calls that are warm repeat, as nvidia-smi reads it."""
    tool = shutil.which("nvidia-smi") if device.type == "cuda" else None
    if tool is None:
        return None
    own = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    query, readings, over = [tool, own, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"], [], Event()

    def read() -> None:
        while not over.wait(0.1):
            readings.append(subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip())

    with ThreadPoolExecutor(1) as thread:
        reader = thread.submit(read)
        try:
            while len(readings) < READINGS and not reader.done():
                serve()
        finally:
            over.set()
    use = [float(text) for text in readings[len(readings) // 2 :] if text.isdigit()]  # one reading is of up to a second
    return statistics.median(use) if use else None


def work_of_a_step(arch: Arch, batch: int) -> int:
    """Floating-point operations of a client's step: products and convolutions, forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    module, few = build(arch, Key(0)), 2
    unroll_recurrent(module)
    x = torch.zeros(few, *arch.shape, dtype=torch.long if arch.tokens else torch.float32)
    with FlopCounterMode(display=False) as counter, attention_by_products():
        module(x).logits.sum().backward()
    return int(counter.get_total_flops()) * batch // few


def matrix_product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large product."""
    gpu = device.type == "cuda"
    size, number = (8192, 10) if gpu else (1024, 1)
    a = torch.ones(size, size, device=device, dtype=dtype)
    _, seconds, _ = timed(lambda: [a @ a for _ in range(number)], device)
    return 2 * size**3 * number / seconds


def engines(device: torch.device, usual: Precision) -> dict[str, Callable[[], Plain | Fused]]:
    """What there is to compare on a device of which ``usual`` is the number format; the plain engine in fp32 first."""
    plain = {f"plain {precision}": partial(Plain, device, precision) for precision in plain_precisions(device, usual)}
    if device.type == "cpu":
        return {**plain, f"fused {usual}": partial(Fused, device, usual)}
    fused = {f"fused {usual}, library kernels": partial(Fused, device, usual, kernels=False)}
    if Fused(device, usual).kernels:
        fused[f"fused {usual}, own kernels"] = partial(Fused, device, usual)
    return {**plain, **fused}


def plain_precisions(device: torch.device, usual: Precision) -> tuple[Precision, ...]:
    """The number formats to compare: fp32, and bf16 but on GPUs that lack it."""
    return ("fp32",) if device.type == "cuda" and usual == "fp32" else ("fp32", "bf16")


def work(phase: str, clients: int, setup: Setup, own: BenchNetwork) -> list[Request[Any]]:
    """The requests of a phase: FedAvg's fit, FedCC's refine on two streams, or predictions on the public inputs."""
    device, recipe = setup.device, Recipe(batch=setup.batch, steps=setup.steps)
    generator = torch.Generator().manual_seed(0)
    number = setup.predicted if phase == "predict" else PUBLIC
    public = own.samples(number, setup.augment, generator).to(device)
    engine, requests = Plain(device), list[Request[Any]]()
    for k in range(clients):
        first = engine.init(Init(own.arch, Key(0, 0, k)))
        if phase == "predict":
            requests.append(Predict(first, public))
            continue
        labels = torch.randint(0, CLASSES, (PRIVATE,), generator=generator)
        streams = {"private": own.samples(PRIVATE, setup.augment, generator).with_(y=labels).to(device)}
        loss: Loss = CrossEntropy("private")
        if phase == "refine":
            target = torch.rand(PUBLIC, CLASSES + 1, generator=generator).to(device)
            streams["public"] = public.with_(target=target)
            loss = loss + 0.2 * SoftCrossEntropy("public")
        requests.append(Fit(first, loss, streams, Key(0, 1, k, phase), recipe))
    return requests


def _seconds(call: Callable[[], Any], gpu: bool) -> float:
    start = time.perf_counter()
    call()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start
