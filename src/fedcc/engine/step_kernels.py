"""The launches of ``step.cu``: what a training step does besides the trunks, for all lanes at once."""

import math
from ctypes import c_double
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedcc.core.samples import View
from fedcc.engine import cuda

FILE, THREADS, EACH = "step.cu", 256, 2048  # EACH: numbers of an image that one block writes
PARTS = 4  # of a gradient, as step.cu has it
ROWS, OUTPUTS, COLUMNS = 8, 32, 64  # of a block of the head's kernels, as step.cu has them
HEAD_SHARED, BACK_SHARED = (ROWS + OUTPUTS) * 33 * 16, THREADS * ROWS * 16 + THREADS // 16 * ROWS * 4  # bytes


def image_defines(channels: int, height: int, width: int, view: View) -> dict[str, int]:
    """What the kernel ``images`` is compiled for."""
    sizes = {"CHANNELS": channels, "HEIGHT": height, "WIDTH": width, "EACH": EACH}
    return sizes | {"DRAWS": view.draws_per_image, "STRONG": int(view.strong)}


def images(
    pool: Tensor, plan: Tensor, draws: Tensor, position: Tensor, offset: Tensor, view: View, out: Tensor, first: int
) -> None:  # fmt: skip
    """Write this step's batch of a stream into ``out`` [lanes, images, H, W, channels], bf16, from ``first`` on."""
    lanes, window, batch = plan.shape
    _, channels, height, width = pool.shape
    defines = image_defines(channels, height, width, view)
    mean, std = view.numbers(channels, out.device)
    sizes = window, batch, out.shape[1], first, view.pad
    values: tuple[Any, ...] = pool, plan, draws, position, offset, mean, std, out, float(view.scale), *sizes
    if view.strong:
        values += *view.levels(torch.float32, out.device).values(), *view.hole_size(height, width)
    grid = batch, lanes, -(-channels * height * width // EACH)
    cuda.launch(FILE, "images", defines, grid, THREADS, 0, values)


def rows(pool: Tensor, plan: Tensor, position: Tensor, offset: Tensor) -> Tensor:
    """This step's batch of a column, [lanes, batch, ...]."""
    lanes, window, batch = plan.shape
    out = torch.empty((lanes, batch, *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
    size = math.prod(pool.shape[1:]) * pool.element_size()  # bytes of a row
    wide = size % 4 == 0
    each = size // 4 if wide else size
    if out.numel():
        grid = -(-batch * each // THREADS), lanes, 1
        cuda.launch(FILE, "rows", {}, grid, THREADS, 0, (pool, plan, position, offset, out, window, batch, each, wide))
    return out


class Head(torch.autograd.Function):
    """A linear layer of every lane, in fp32: x [lanes, batch, inputs], weight [lanes, outputs, inputs], bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        (lanes, batch, inputs), outputs = x.shape, weight.shape[1]
        if inputs % 4:
            raise ValueError(f"the head's kernels read four features at a time, got {inputs} of them")
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        z = torch.empty((lanes, batch, outputs), dtype=torch.float32, device=x.device)
        grid = -(-batch // ROWS), -(-outputs // OUTPUTS), lanes
        values = x, weight, bias.contiguous(), z, batch, inputs, outputs
        cuda.launch(FILE, "head", {}, grid, THREADS, HEAD_SHARED, values)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of weights, then of biases, adjacent in memory; None for what needs none."""
        x, weight = ctx.saved_tensors
        (lanes, batch, inputs), outputs = x.shape, weight.shape[1]
        back, trains = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:])
        dx = torch.empty_like(x) if back else None
        sizes = [lanes * outputs * inputs, lanes * outputs]
        flat = torch.empty(sum(sizes) if trains else 0, dtype=torch.float32, device=x.device)
        dw, db = torch.split(flat, sizes) if trains else (None, None)
        tiles = -(-batch // ROWS) if back else 0
        grid = tiles + (-(-outputs // ROWS) if trains else 0), -(-inputs // COLUMNS), lanes
        outs = [x if t is None else t for t in (dx, dw, db)]  # the kernel writes only what is needed
        values = dz.contiguous(), x, weight, *outs, batch, inputs, outputs, tiles
        cuda.launch(FILE, "head_back", {}, grid, THREADS, BACK_SHARED, values)
        return dx, None if dw is None else dw.view_as(weight), None if db is None else db.view(lanes, outputs)


def head(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``[lanes, batch, inputs] -> [lanes, batch, outputs]``, one launch each way."""
    run: Any = Head.apply
    z: Tensor = run(x, weight, bias)
    return z


def tick(losses: Tensor, numbers: dict[str, Tensor], betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Count a step of every lane in ``numbers``; returns Adam's step sizes and bias corrections, [lanes] each."""
    lanes, device = len(losses), losses.device
    size, root = torch.empty(2, lanes, dtype=torch.float32, device=device)
    state = [numbers[name] for name in ("loss", "finite_steps", "age", "step", "position", "lr", "length", "cosine")]
    logs = [c_double(math.log(beta)) for beta in betas]
    values = losses.float().contiguous(), *state, size, root, *logs, lanes
    cuda.launch(FILE, "tick", {}, (-(-lanes // THREADS), 1, 1), THREADS, 0, values)
    return size, root


def adam(
    p: Tensor, m: Tensor, v: Tensor, g: list[Tensor], lane: Tensor, size: Tensor, root: Tensor,
    betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """One step of Adam on flat tensors, in place; the gradient may be in parts, wherever these lie."""
    parts = g if len(g) <= PARTS else [torch.cat(g)]
    none = PARTS - len(parts)
    begins = [*accumulate(map(len, parts[:-1]), initial=0), *[len(p)] * none]
    values: list[Tensor | float] = [p, m, v, *parts, *[p] * none, lane, size, root, *begins, len(p), *betas, eps]
    cuda.launch(FILE, "adam", {}, (-(-len(p) // THREADS), 1, 1), THREADS, 0, values)
