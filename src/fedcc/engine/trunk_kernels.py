"""The launches of ``trunk.cu``: layers of residual trunks of 16 to 64 channels, all lanes at once, in bf16.

Images are ``[lanes, batch, H, W, C]``. Of a layer only its convolution is stored; the kernel that reads it applies
BatchNorm and ReLU. Each kernel leaves sums over pixels, a row per program, for the BatchNorm that follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedcc.engine import cuda

THREADS, WARPS = 256, 8
NUMBERS, SUMS = 7 * 64, 4 * THREADS  # floats of shared memory for coefficients and for sums
IMAGE, NORM, RESIDUAL, PLAIN = range(4)  # what a kernel's tiles are made of (trunk.cu)


class Tuning(NamedTuple):
    """How a kernel divides its work."""

    pixels: int  # of a tile
    blocks: int  # per multiprocessor: more have fewer registers each
    loads: int  # under way in each thread
    programs: int  # at most: as many as run at once, since a few more would take as long again
    prefetch: bool = False  # the next tile while this one is worked on; takes shared memory
    min_tiles: int = 64  # in all: with fewer, tiles are halved

    def prefetches(self, tiles: int, shared: int) -> int:
        """Whether a program of so many tiles prefetches, given the shared memory it would then take."""
        return int(self.prefetch and tiles > FEW and shared <= HALF)


# By kernel and the wider channel count; the fastest with 1, 3 and 10 lanes on a GPU of 132 multiprocessors.
TUNING = {
    ("conv", 16): Tuning(512, 2, 3, 264, prefetch=True),
    ("conv", 32): Tuning(256, 3, 2, 396),
    ("conv", 64): Tuning(128, 2, 3, 264),
    ("back", 16): Tuning(512, 2, 3, 264, prefetch=True),
    ("back", 32): Tuning(256, 3, 2, 396),
    ("back", 64): Tuning(128, 2, 3, 264),
    ("grad", 16): Tuning(512, 2, 2, 264, prefetch=True),
    ("grad", 32): Tuning(256, 2, 2, 132, prefetch=True, min_tiles=256),
    ("grad", 64): Tuning(256, 2, 2, 264, prefetch=True, min_tiles=256),
}
HALF = 113 * 1024  # bytes of shared memory, with which two blocks share a multiprocessor
FEW = 2  # tiles of a program: with so few, prefetching is not worth its memory
BESIDE = 64  # programs of weight gradients per lane at most, so that the chain of layers finds room beside them
Defines = dict[str, int]
Values = list[Tensor | float]


class Tiles(NamedTuple):
    """How a layer's pixels are divided: tiles of ``rows`` x all columns of ``images`` images."""

    rows: int
    images: int
    per_lane: int  # tiles
    pixels: int  # of a tile
    bands: int  # tiles per image

    @staticmethod
    def divide(batch: int, high: int, wide: int, target: int, least: float, even: bool = False) -> Tiles:
        """Tiles of about ``target`` pixels, or half of that if a lane would have fewer than ``least`` of them."""
        if batch * high * wide < least * target:
            target //= 2
        bands = -(-high * wide // target)
        rows = -(-high // bands)
        rows += even and bands > 1 and rows % 2
        bands = -(-high // rows)
        most = min(target // (high * wide), 4 * target // ((high + 2) * (wide + 2)))  # tiny ones are mostly edge
        images = max(1, min(batch, most)) if bands == 1 else 1
        return Tiles(rows, images, -(-batch // images) * bands, images * rows * wide, bands)

    def pixels_read(self, high: int, wide: int, rows: int) -> int:
        """Pixels of images of this size that a tile reads: whole images, or so many rows of one."""
        return (rows if self.bands > 1 else self.images * high) * wide

    def per_program(self, programs: float) -> int:
        """Tiles of a program, so that a lane has at most so many programs."""
        return -(-self.per_lane // max(1, int(programs)))


@dataclass(frozen=True)
class Layer:
    """A convolution and the BatchNorm after it: weights [lanes, 9, in, out] in bf16, the others [lanes, C]."""

    weight: Tensor
    gamma: Tensor
    beta: Tensor
    mean: Tensor
    var: Tensor
    momentum: float
    eps: float


@dataclass(frozen=True)
class ConvOutput:
    """A convolution's output, the sums of its programs, and the BatchNorm that follows."""

    y: Tensor
    sums: Tensor  # [lanes, programs, 2, C]
    norm: Layer
    stats: Tensor  # [4, lanes, C]: mean, 1/std, scale, shift; written by the kernel that reads the output


@dataclass(frozen=True)
class NormGrad:
    """The gradient of a BatchNorm's output, and the sums of its programs."""

    g: Tensor
    sums: Tensor


Launches = list[tuple[str, str, Defines]]
_collected: list[Launches] = []


@contextmanager
def collect_launches() -> Iterator[Launches]:
    """List kernels instead of launching them."""
    _collected.append([])
    try:
        yield _collected[-1]
    finally:
        _collected.pop()


def launch(
    name: str, grid: tuple[int, int, int], shared: int, defines: Defines, values: Values, early: bool = False
) -> None:  # fmt: skip
    """Launch a kernel of ``trunk.cu``; ``early``: it may begin while the layer before ends, and waits by itself."""
    own = {name.upper(): 1} | {f"GIVEN_{n}": int(v) for n, v in defines.items()}
    if _collected:
        _collected[-1].append(("trunk.cu", name, own))
        return
    cuda.launch("trunk.cu", name, own, grid, THREADS, shared, values, early)


def _new(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=like.device)


def floats(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


class ConvInput(NamedTuple):
    """What a convolution reads: images, or a layer's activations, perhaps with a shortcut."""

    images: Tensor | None = None
    layer: ConvOutput | None = None
    shortcut: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        tensor = self.images if self.layer is None else self.layer.y
        assert tensor is not None
        return tensor

    @property
    def kind(self) -> int:
        return IMAGE if self.layer is None else NORM if self.shortcut is None else RESIDUAL

    def defines(self) -> Defines:
        """The shortcut's shape."""
        x = self.tensor if self.shortcut is None else self.shortcut
        _, _, high, wide, channels = x.shape
        same = (high, wide) == tuple(self.tensor.shape[2:4])
        return {"XC": channels, "XS": 1 if same else 2, "XH": high, "XW": wide}

    def values(self, store: Tensor | None) -> list[Tensor]:
        """What a kernel computes activations from, and where it stores them; for images it reads none of these."""
        if self.layer is None:
            return [self.tensor] * 9
        layer, norm = self.layer, self.layer.norm
        shortcut, out = (layer.y if t is None else t for t in (self.shortcut, store))
        return [layer.y, shortcut, out, layer.sums, norm.gamma, norm.beta, norm.mean, norm.var, layer.stats]

    def numbers(self, *between: int) -> list[float]:
        """Rows of sums, then the numbers between, then momentum and eps."""
        if self.layer is None:
            return [0, *between, 0.0, 0.0]
        return [self.layer.sums.shape[1], *between, self.layer.norm.momentum, self.layer.norm.eps]


def conv(
    source: ConvInput, layer: Layer, stride: int, track: bool, keep: bool, fixed: bool = False
) -> tuple[ConvOutput, Tensor | None]:  # fmt: skip
    """A layer's convolution, and the activations that it read if asked to ``keep`` them.

    ``track``: update running statistics. ``fixed``: BatchNorm by running statistics; there are no sums then.
    """
    lanes, batch, high, wide, real = source.tensor.shape
    cin, cout = layer.weight.shape[2:]
    ho, wo = -(-high // stride), -(-wide // stride)
    if not fixed and batch * ho * wo == 1:
        raise ValueError("BatchNorm needs more than one value per channel to train, got one image of one pixel")
    if batch * high * wide * cin >= 2**31:
        raise ValueError(f"kernels count a lane's numbers with 32 bits: {batch} images of {high}x{wide} are too many")
    tuning = TUNING["conv", max(cin, cout)]
    tiles = Tiles.divide(batch, ho, wo, tuning.pixels, tuning.min_tiles / lanes)
    across = 2 if cout == 64 else 1
    per = tiles.per_program(tuning.programs / lanes)
    programs = -(-tiles.per_lane // per)
    sh, sw = (tiles.rows - 1) * stride + 3, (wo - 1) * stride + 3
    room = max(tiles.images * sh * sw * (cin + 8), tiles.pixels * (cout + 8), 2 * SUMS)
    shared = 4 * NUMBERS + 2 * (room + 9 * cin * (cout + 8))
    fetched = 2 * source.kind * tiles.pixels_read(high, wide, sh) * cin  # one tensor for NORM, two for RESIDUAL
    ahead = tuning.prefetches(per, shared + fetched)
    y, sums = _new(layer.weight, lanes, batch, ho, wo, cout), floats(layer.weight, lanes, programs, 2, cout)
    output = ConvOutput(y, sums, layer, floats(layer.weight, 4, lanes, cout))
    activations = _new(layer.weight, lanes, batch, high, wide, cin) if keep else None
    defines = {
        "SOURCE": source.kind, "KEEP": keep, "FIXED": fixed, "REAL": real, "CI": cin, "CO": cout, "H": high,
        "W": wide, "STRIDE": stride, "ROWS": tiles.rows, "IMAGES": tiles.images, "NB": cout,
        "MT": -(-tiles.pixels // (16 * WARPS // across)), "DEPTH": tuning.loads, "AHEAD": ahead,
        "TOGETHER": tuning.blocks, **source.defines(),
    }  # fmt: skip
    values: Values = [*source.values(activations), layer.weight, y, sums, batch, lanes]
    numbers = source.numbers(per, tiles.per_lane, int(track))
    launch("conv", (programs, lanes, 1), shared + ahead * fetched, defines, [*values, *numbers],
           early=source.kind != IMAGE)  # fmt: skip
    return output, activations


def features(source: ConvInput, track: bool, fixed: bool = False) -> tuple[Tensor, Tensor]:
    """The features, means over pixels [lanes, batch, C], and the activations that they are means of."""
    lanes, batch, high, wide, channels = source.tensor.shape
    activations, means = torch.empty_like(source.tensor), floats(source.tensor, lanes, batch, channels)
    defines = {"C": channels, "H": high, "W": wide, "FIXED": fixed, **source.defines()}
    values: Values = [*source.values(activations), means, batch, lanes, *source.numbers(int(track))]
    launch("tail", (batch, lanes, 1), 4 * (SUMS + NUMBERS), defines, values, early=True)
    return means, activations


def features_grad(df: Tensor, activations: Tensor, last: ConvOutput) -> NormGrad:
    """The gradient of the last BatchNorm's output, from that of the features."""
    lanes, batch, high, wide, channels = last.y.shape
    images = max(1, TUNING["back", channels].pixels // (high * wide))
    programs = -(-batch // images)
    grad = NormGrad(torch.empty_like(last.y), floats(df, lanes, programs, 2, channels))
    values: Values = [df, activations, last.y, last.stats, grad.g, grad.sums, batch, lanes, images]
    launch("pool", (programs, lanes, 1), 4 * (SUMS + NUMBERS), {"C": channels, "H": high, "W": wide}, values)
    return grad


def conv_grad(
    grad: NormGrad, conv: ConvOutput, stride: int, before: ConvOutput, outer: tuple[Tensor, Tensor] | None
) -> NormGrad:  # fmt: skip
    """The gradient of the BatchNorm before a convolution, from that of the BatchNorm after it.

    ``outer``: the convolution's input, and the gradient of the shortcut that starts from the same input.
    """
    lanes, batch, high, wide, cin = before.y.shape
    wo, cout = conv.y.shape[3:]
    tuning = TUNING["back", max(cin, cout)]
    tiles = Tiles.divide(batch, high, wide, tuning.pixels, tuning.min_tiles / lanes, even=stride == 2)
    across = 2 if cin == 64 else 1
    per = tiles.per_program(tuning.programs / lanes)
    programs = -(-tiles.per_lane // per)
    sh, sw = (tiles.rows + 2, wide + 2) if stride == 1 else (tiles.rows // 2 + 1, wo + 1)
    room = max((tiles.images * sh * sw + 1) * (cout + 8), tiles.pixels * (cin + 8), 2 * SUMS)
    shared = 4 * NUMBERS + 2 * (room + 9 * cin * (cout + 8))
    fetched = 4 * tiles.pixels_read(conv.y.shape[2], wo, sh) * cout
    ahead = tuning.prefetches(per, shared + fetched)
    out = NormGrad(torch.empty_like(before.y), floats(before.y, lanes, programs, 2, cin))
    x, shortcut = outer or (before.y, before.y)
    defines = {
        "OUTER": outer is not None, "CI": cin, "CO": cout, "H": high, "W": wide, "STRIDE": stride, "ROWS": tiles.rows,
        "IMAGES": tiles.images, "NB": cin, "MT": -(-tiles.pixels // (16 * WARPS // across)),
        "DEPTH": tuning.loads, "AHEAD": ahead, "TOGETHER": tuning.blocks,
    }  # fmt: skip
    values: Values = [
        grad.g, conv.y, grad.sums, conv.norm.gamma, conv.stats, conv.norm.weight, before.y, before.stats, x, shortcut,
        out.g, out.sums, batch, lanes, grad.sums.shape[1], per, tiles.per_lane,
    ]  # fmt: skip
    launch("back", (programs, lanes, 1), shared + ahead * fetched, defines, values, early=True)
    return out


def weight_grads(
    x: Tensor, before: ConvOutput | None, grad: NormGrad, conv: ConvOutput, stride: int, real: int,
    out: Tensor | None = None, alone: bool = False,
) -> list[Tensor]:  # fmt: skip
    """The gradients of a layer's weights, scales and shifts, as the network has them, one after another in ``out``.

    ``x``: images, activations, or the output of the layer ``before``. ``alone``: no chain needs room beside it.
    """
    lanes, batch, high, wide = x.shape[:4]
    cin, cout = conv.norm.weight.shape[2:]
    ho, wo = conv.y.shape[2:4]
    tuning = TUNING["grad", max(cin, cout)]
    inner, outer = min(cin, 32), min(cout, 32)
    blocks = cin // inner * (cout // outer)
    tiles = Tiles.divide(batch, ho, wo, tuning.pixels, tuning.min_tiles / (lanes * blocks))
    most = tuning.programs / lanes
    per = tiles.per_program((most if alone else min(most, BESIDE)) / blocks)
    programs = -(-tiles.per_lane // per)
    sh, sw = (tiles.rows - 1) * stride + 3, (wo - 1) * stride + 3
    room = max(2 * (tiles.images * sh * sw * (inner + 8) + -(-tiles.pixels // 16) * 16 * (outer + 8)), 4 * SUMS)
    activations = 0 if real < cin else tiles.pixels_read(high, wide, sh) * inner
    fetched = 2 * (activations + 2 * tiles.pixels_read(ho, wo, tiles.rows) * outer)
    ahead = tuning.prefetches(per, 4 * NUMBERS + room + fetched)
    part, sizes = floats(x, programs, lanes, 9, cin, cout), [lanes * cout * n for n in (9 * real, 1, 1)]
    grads = torch.split(floats(x, sum(sizes)) if out is None else out, sizes)
    defines = {
        "SOURCE": NORM if before is not None else PLAIN if real == cin else IMAGE, "REAL": real, "CI": cin, "CO": cout,
        "H": high, "W": wide, "STRIDE": stride, "ROWS": tiles.rows, "IMAGES": tiles.images, "DEPTH": tuning.loads,
        "AHEAD": ahead, "TOGETHER": tuning.blocks,
    }  # fmt: skip
    values: Values = [
        x, conv.stats if before is None else before.stats, grad.g, conv.y, grad.sums, conv.norm.gamma, conv.stats,
        grads[1], grads[2], part, batch, lanes, grad.sums.shape[1], per, tiles.per_lane,
    ]  # fmt: skip
    halves = max(1, WARPS // (inner * outer // 256) // 2)  # of the groups of warps that add up
    shared = 4 * NUMBERS + max(room + ahead * fetched, 4 * 9 * inner * outer * halves)
    launch("grad", (programs, lanes, blocks), shared, defines, values)
    defines = {"CI": cin, "CO": cout, "REAL": real}
    launch("collect", (9 * cin * cout // 128, lanes, 1), 16 * THREADS, defines, [part, grads[0], lanes, programs])
    return [grads[0].view(lanes, cout, real, 3, 3), grads[1].view(lanes, cout), grads[2].view(lanes, cout)]


def gather(flat: Tensor, order: Tensor) -> Tensor:
    """Numbers in another order, in bf16; zero where the order says -1."""
    out = _new(flat, len(order))
    launch("gather", (-(-len(order) // (2 * THREADS)), 1, 1), 0, {}, [flat, order, out, len(order)])
    return out
