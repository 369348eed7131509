"""How fast the engines are here: one table, ratios within one run."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fedcc.core.model import Arch
from fedcc.core.requests import Fit, Init, Predict, Recipe, Request
from fedcc.core.rng import Key
from fedcc.core.samples import Samples, View
from fedcc.core.step import Loss
from fedcc.engine import Fused, Plain
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
    busy: float | None  # the device's utilisation, percent


def bench(device: torch.device, clients: list[int], steps: int, model: str, batch: int, augment: str) -> Iterator[Row]:
    """Measure the engines on made-up images: 32x32x3 uint8, augmented as CIFAR's."""
    gpu = device.type == "cuda"
    for phase in PHASES:
        base: float | None = None
        units = PUBLIC / 1000 if phase == "predict" else steps
        for name, make in engines(device).items():
            for number in clients if name.startswith("fused") else [1]:  # a loop costs the same for each client
                requests = work(phase, number, steps, model, batch, device, VIEW.with_augment(augment))
                serve = partial(make().serve, requests)
                first = _seconds(serve, gpu)
                if gpu:
                    torch.cuda.reset_peak_memory_stats(device)
                with _device_use(gpu) as use:
                    ms = 1000 * min(_seconds(serve, gpu) for _ in range(2)) / number / units
                memory = torch.cuda.max_memory_allocated(device) / 2**30 if gpu else None
                busy = statistics.median(use) if use else None
                yield Row(phase, name, number, ms, base and base / ms, first, memory, busy)
                base = base or ms


def engines(device: torch.device) -> dict[str, Callable[[], Plain | Fused]]:
    """What there is to compare on a device; the plain engine in fp32 first."""
    plain = {f"plain {precision}": partial(Plain, device, precision) for precision in ("fp32", "bf16")}
    if device.type == "cpu":
        return {**plain, "fused fp32": partial(Fused, device, "fp32")}
    fused = {"fused bf16, library kernels": partial(Fused, device, "bf16", kernels=False)}
    if Fused(device, "bf16").kernels:
        fused["fused bf16, own kernels"] = partial(Fused, device, "bf16")
    return {**plain, **fused}


def work(
    phase: str, clients: int, steps: int, model: str, batch: int, device: torch.device, view: View
) -> list[Request[Any]]:
    """The requests of a phase: FedAvg's fit, FedCC's refine on two streams, or predictions on the public images."""
    arch = Arch((network(model, SHAPE),), CLASSES + 1, SHAPE)
    generator = torch.Generator().manual_seed(0)

    def images(n: int) -> Samples:
        x = torch.randint(0, 256, (n, *SHAPE), dtype=torch.uint8, generator=generator)
        return Samples({"x": x.to(device)}, view)

    engine, public, requests = Plain(device), images(PUBLIC), list[Request[Any]]()
    for k in range(clients):
        first = engine.init(Init(arch, Key(0, 0, k)))
        if phase == "predict":
            requests.append(Predict(first, public))
            continue
        labels = torch.randint(0, CLASSES, (PRIVATE,), generator=generator)
        streams = {"private": images(PRIVATE).with_(y=labels.to(device))}
        loss: Loss = CrossEntropy("private")
        if phase == "refine":
            target = torch.rand(PUBLIC, CLASSES + 1, generator=generator).to(device)
            streams["public"] = public.with_(target=target)
            loss = loss + 0.2 * SoftCrossEntropy("public")
        requests.append(Fit(first, loss, streams, Key(0, 1, k, phase), Recipe(batch=batch, steps=steps)))
    return requests


def _seconds(call: Callable[[], Any], gpu: bool) -> float:
    start = time.perf_counter()
    call()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def _device_use(gpu: bool) -> Iterator[list[float]]:
    """The device's utilisation in percent, as nvidia-smi reads it ten times a second while the block runs."""
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
