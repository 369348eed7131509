"""What a training step does besides the network, for all lanes at once, by the kernels of ``step.cu``."""

from __future__ import annotations

import math
from ctypes import c_double
from itertools import accumulate

import torch
from torch import Tensor

from fedcc.core.samples import View
from fedcc.engine import cuda

FILE, THREADS, EACH = "step.cu", 256, 2048  # EACH: numbers of an image that one block writes
PARTS = 4  # of a gradient, as step.cu has it


def image_defines(channels: int, height: int, width: int, augments: bool) -> dict[str, int]:
    """What the kernel ``images`` is compiled for."""
    return {"CHANNELS": channels, "HEIGHT": height, "WIDTH": width, "AUGMENTS": int(augments), "EACH": EACH}


def images(
    pool: Tensor, plan: Tensor, draws: Tensor, place: Tensor, offset: Tensor, view: View, out: Tensor, first: int
) -> None:  # fmt: skip
    """Write this step's batch of a stream into ``out`` [lanes, images, H, W, channels], bf16, from ``first`` on."""
    lanes, window, batch = plan.shape
    _, channels, height, width = pool.shape
    defines = image_defines(channels, height, width, view.augments)
    mean, std = view.numbers(channels, out.device)
    sizes = window, batch, out.shape[1], first, view.pad
    given = pool, plan, draws, place, offset, mean, std, out, float(view.scale), *sizes
    grid = batch, lanes, -(-channels * height * width // EACH)
    cuda.launch(FILE, "images", defines, grid, THREADS, 0, given)


def rows(pool: Tensor, plan: Tensor, place: Tensor, offset: Tensor) -> Tensor:
    """This step's batch of a column, [lanes, batch, ...]."""
    lanes, window, batch = plan.shape
    out = torch.empty((lanes, batch, *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
    size = math.prod(pool.shape[1:]) * pool.element_size()  # bytes of a row
    wide = size % 4 == 0
    each = size // 4 if wide else size
    if out.numel():
        grid = -(-batch * each // THREADS), lanes, 1
        cuda.launch(FILE, "rows", {}, grid, THREADS, 0, (pool, plan, place, offset, out, window, batch, each, wide))
    return out


def tick(losses: Tensor, numbers: dict[str, Tensor], betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """A step more for every lane, in ``numbers``; Adam's step sizes and bias corrections, [lanes] each."""
    lanes, device = len(losses), losses.device
    size, root = torch.empty(2, lanes, dtype=torch.float32, device=device)
    state = [numbers[name] for name in ("loss", "age", "at", "place", "lr", "length", "cosine")]
    logs = [c_double(math.log(beta)) for beta in betas]
    given = losses.float().contiguous(), *state, size, root, *logs, lanes
    cuda.launch(FILE, "tick", {}, (-(-lanes // THREADS), 1, 1), THREADS, 0, given)
    return size, root


def adam(
    p: Tensor, m: Tensor, v: Tensor, g: list[Tensor], lane: Tensor, size: Tensor, root: Tensor,
    betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """One step of Adam on flat tensors, in place; the gradient may be in parts, wherever these lie."""
    parts = g if len(g) <= PARTS else [torch.cat(g)]
    none = PARTS - len(parts)
    begins = [*accumulate(map(len, parts[:-1]), initial=0), *[len(p)] * none]
    given: list[Tensor | float] = [p, m, v, *parts, *[p] * none, lane, size, root, *begins, len(p), *betas, eps]
    cuda.launch(FILE, "adam", {}, (-(-len(p) // THREADS), 1, 1), THREADS, 0, given)
