"""How fast the engines are here: one table, ratios within one run."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fedcc.core.model import Arch
from fedcc.core.requests import Fit, Init, Predict, Recipe, Request
from fedcc.core.rng import Key
from fedcc.core.samples import Samples, View
from fedcc.core.step import Loss
from fedcc.engine import Fused, Plain, Precision
from fedcc.losses import CrossEntropy, SoftCrossEntropy
from fedcc.nets import network

CLASSES, SHAPE, PRIVATE, PUBLIC = 10, (3, 32, 32), 1024, 1024
VIEW = View(1 / 255, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26), pad=4, flip=True)
PHASES = ("fit", "refine", "predict")


@dataclass(frozen=True)
class Row:
    """One measurement. ``ms`` is per client and step; for ``predict`` per client and thousand images."""

    phase: str
    engine: str
    clients: int
    ms: float
    ratio: float | None  # how many times faster than the plain engine in fp32
    first: float  # seconds of the first call: compiling, capturing, warming up
    memory: float | None  # peak on the device, GiB
    busy: float | None  # the device's use, percent

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def bench(
    device: torch.device,
    clients: list[int],
    steps: int,
    model: str = "resnet20",
    batch: int = 64,
    augment: str = "standard",
) -> Iterator[Row]:
    """Measure the engines on made-up images: 32x32x3 uint8, augmented as CIFAR's."""
    for phase in PHASES:
        base: float | None = None
        for name, make in engines(device).items():
            for number in clients if name.startswith("fused") else [1]:  # a loop costs the same for each client
                requests = work(phase, number, steps, model, batch, device, VIEW.with_augment(augment))
                row = measured(phase, name, make, requests, number, steps, device, base)
                base = row.ms if base is None else base
                yield row


def engines(device: torch.device) -> dict[str, Callable[[], Plain | Fused]]:
    """What there is to compare on a device; the plain engine in fp32 first."""

    def plain(precision: Precision) -> Callable[[], Plain]:
        return lambda: Plain(device, precision)

    found: dict[str, Callable[[], Plain | Fused]] = {"plain fp32": plain("fp32"), "plain bf16": plain("bf16")}
    if device.type == "cpu":
        return found | {"fused fp32": lambda: Fused(device, "fp32")}
    found["fused bf16, library kernels"] = lambda: Fused(device, "bf16", kernels=False)
    if Fused(device, "bf16").kernels:
        found["fused bf16, own kernels"] = lambda: Fused(device, "bf16")
    return found


def work(
    phase: str, clients: int, steps: int, model: str, batch: int, device: torch.device, view: View = VIEW
) -> list[Request[Any]]:
    """The requests of a phase: FedAvg's fit, FedCC's refine on two streams, or predictions on the public images."""
    arch = Arch((network(model, SHAPE),), CLASSES + 1, SHAPE)
    generator = torch.Generator().manual_seed(0)

    def images(n: int) -> Samples:
        x = torch.randint(0, 256, (n, *SHAPE), dtype=torch.uint8, generator=generator)
        return Samples({"x": x.to(device)}, view)

    maker, public, found = Plain(device), images(PUBLIC), list[Request[Any]]()
    for k in range(clients):
        first = maker.init(Init(arch, Key(0, 0, k)))
        if phase == "predict":
            found.append(Predict(first, public))
            continue
        labels = torch.randint(0, CLASSES, (PRIVATE,), generator=generator)
        streams = {"private": images(PRIVATE).with_(y=labels.to(device))}
        loss: Loss = CrossEntropy("private")
        if phase == "refine":
            target = torch.rand(PUBLIC, CLASSES + 1, generator=generator).to(device)
            streams["public"] = public.with_(target=target)
            loss = loss + 0.2 * SoftCrossEntropy("public")
        found.append(Fit(first, loss, streams, Key(0, 1, k, phase), Recipe(batch=batch, steps=steps)))
    return found


def measured(
    phase: str,
    name: str,
    make: Callable[[], Plain | Fused],
    requests: list[Request[Any]],
    clients: int,
    steps: int,
    device: torch.device,
    base: float | None,
) -> Row:
    engine, gpu = make(), device.type == "cuda"
    first = _seconds(lambda: engine.serve(requests), gpu)
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with _watched(gpu) as use:
        seconds = min(_seconds(lambda: engine.serve(requests), gpu) for _ in range(2))
    units = PUBLIC / 1000 if phase == "predict" else steps
    ms = 1000 * seconds / clients / units
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if gpu else None
    busy = statistics.median(use) if use else None
    return Row(phase, name, clients, ms, None if base is None else base / ms, first, memory, busy)


def _seconds(call: Callable[[], Any], gpu: bool) -> float:
    begun = time.perf_counter()
    call()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begun


@contextmanager
def _watched(gpu: bool) -> Iterator[list[float]]:
    """The device's use in percent, as nvidia-smi reads it ten times a second while the block runs."""
    use: list[float] = []
    tool = shutil.which("nvidia-smi") if gpu else None
    if tool is None:
        yield use
        return
    query = [tool, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as watcher:
        try:
            yield use
        finally:
            watcher.terminate()
            use += [float(line) for line in (watcher.communicate()[0] or "").split() if line.strip().isdigit()]
