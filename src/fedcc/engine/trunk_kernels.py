"""Residual trunks of 16 to 64 channels on the project's own kernels (``trunk.cu``), all lanes at once, in bf16.

Images are ``[lanes, batch, H, W, C]``. Of a layer only its convolution is stored; whoever reads it next applies
BatchNorm and ReLU on the way. Each kernel leaves sums over pixels, a row per program, for the BatchNorm behind it.
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


class Setting(NamedTuple):
    """How a kernel works, as measured."""

    pixels: int  # of a tile
    together: int  # blocks that share a multiprocessor: more have fewer registers each
    depth: int  # loads under way in each thread
    programs: int  # in all at most: as many as run at once, since a few more would take as long as all
    ahead: int = 0  # whether the next tile is fetched while this one is worked on: takes shared memory
    least: int = 64  # tiles in all: where there would be fewer they are halved

    def fetches(self, per: int, room: int) -> int:
        """Whether a program of so many tiles does, given the shared memory that it would take then."""
        return int(self.ahead and per > FEW and room <= HALF)


# By kernel and the wider channel count, as measured with 1, 3 and 10 lanes on a GPU of 132 multiprocessors.
SETTINGS = {
    ("conv", 16): Setting(512, 2, 3, 264, ahead=1),
    ("conv", 32): Setting(256, 3, 2, 396),
    ("conv", 64): Setting(128, 2, 3, 264),
    ("back", 16): Setting(512, 2, 3, 264, ahead=1),
    ("back", 32): Setting(256, 3, 2, 396),
    ("back", 64): Setting(128, 2, 3, 264),
    ("grad", 16): Setting(512, 2, 2, 264, ahead=1),
    ("grad", 32): Setting(256, 2, 2, 132, ahead=1, least=256),
    ("grad", 64): Setting(256, 2, 2, 264, ahead=1, least=256),
}
HALF = 113 * 1024  # bytes of shared memory, with which two blocks share a multiprocessor
FEW = 2  # tiles of a program: with so few the room is worth more than to fetch ahead
BESIDE = 64  # programs a lane of weights' gradients at most, so that the chain of layers finds room beside them
Defines = dict[str, int]
Values = list[Tensor | float]


class Tiles(NamedTuple):
    """How a layer's pixels are shared out: tiles of ``rows`` x all columns of ``images`` images."""

    rows: int
    images: int
    each: int  # tiles of a lane
    pixels: int  # of a tile
    bands: int  # tiles of an image

    @staticmethod
    def of(batch: int, high: int, wide: int, target: int, least: float, even: bool = False) -> Tiles:
        """Tiles of about ``target`` pixels, or half of that where a lane would have fewer than ``least`` of them."""
        if batch * high * wide < least * target:
            target //= 2
        bands = -(-high * wide // target)
        rows = -(-high // bands)
        rows += even and bands > 1 and rows % 2
        bands = -(-high // rows)
        most = min(target // (high * wide), 4 * target // ((high + 2) * (wide + 2)))  # tiny ones are mostly edge
        images = max(1, min(batch, most)) if bands == 1 else 1
        return Tiles(rows, images, -(-batch // images) * bands, images * rows * wide, bands)

    def read(self, high: int, wide: int, rows: int) -> int:
        """Pixels that a tile is made of, of images of this size: whole ones, or so many rows of one."""
        return (rows if self.bands > 1 else self.images * high) * wide

    def per(self, wanted: float) -> int:
        """Tiles of a program, so that there are at most so many programs a lane."""
        return -(-self.each // max(1, int(wanted)))


@dataclass(frozen=True)
class Layer:
    """A convolution and the BatchNorm behind it: weights [lanes, 9, in, out] in bf16, the others [lanes, C]."""

    weight: Tensor
    gamma: Tensor
    beta: Tensor
    mean: Tensor
    var: Tensor
    momentum: float
    eps: float


@dataclass(frozen=True)
class Made:
    """A convolution's result, the sums of its programs, and the BatchNorm behind it, whose statistics are yet to be."""

    y: Tensor
    sums: Tensor  # [lanes, programs, 2, C]
    norm: Layer
    stats: Tensor  # [4, lanes, C]: mean, 1/std, scale, shift


@dataclass(frozen=True)
class Back:
    """A gradient behind a BatchNorm, and the sums of its programs."""

    g: Tensor
    sums: Tensor


# ------------------------------------------------------------------------------------------------------------- launch


Wanted = list[tuple[str, str, Defines]]
_listing: list[Wanted] = []


@contextmanager
def listed() -> Iterator[Wanted]:
    """Meanwhile kernels are written down instead of launched."""
    _listing.append([])
    try:
        yield _listing[-1]
    finally:
        _listing.pop()


def launch(
    name: str, grid: tuple[int, int, int], shared: int, defines: Defines, values: Values, early: bool = False
) -> None:  # fmt: skip
    """Run a kernel of ``trunk.cu``; ``early``: it may begin while the layer before ends, and waits by itself."""
    given = {name.upper(): 1} | {f"GIVEN_{n}": int(v) for n, v in defines.items()}
    if _listing:
        _listing[-1].append(("trunk.cu", name, given))
        return
    cuda.launch("trunk.cu", name, given, grid, THREADS, shared, values, early)


def _new(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=like.device)


def floats(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


# ------------------------------------------------------------------------------------------------------------- layers


class Input(NamedTuple):
    """What a convolution reads: images, or the activations of a layer, perhaps with a shortcut from ``x``."""

    images: Tensor | None = None
    made: Made | None = None
    x: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        tensor = self.images if self.made is None else self.made.y
        assert tensor is not None
        return tensor

    @property
    def source(self) -> int:
        return IMAGE if self.made is None else NORM if self.x is None else RESIDUAL

    def defines(self) -> Defines:
        """The shortcut's shape."""
        x = self.tensor if self.x is None else self.x
        _, _, high, wide, channels = x.shape
        same = (high, wide) == tuple(self.tensor.shape[2:4])
        return {"XC": channels, "XS": 1 if same else 2, "XH": high, "XW": wide}

    def values(self, kept: Tensor | None) -> list[Tensor]:
        """What a kernel needs to make activations; images need none of it, so that anything will do."""
        if self.made is None:
            return [self.tensor] * 9
        made, norm = self.made, self.made.norm
        shortcut, out = (made.y if t is None else t for t in (self.x, kept))
        return [made.y, shortcut, out, made.sums, norm.gamma, norm.beta, norm.mean, norm.var, made.stats]

    def numbers(self, *between: int) -> list[float]:
        """Rows of sums, what stands between, and momentum and eps."""
        rows = 0 if self.made is None else self.made.sums.shape[1]
        norm = (0.0, 0.0) if self.made is None else (self.made.norm.momentum, self.made.norm.eps)
        return [rows, *between, *norm]


def conv(
    given: Input, layer: Layer, stride: int, track: bool, keeps: bool, fixed: bool = False
) -> tuple[Made, Tensor | None]:  # fmt: skip
    """A layer's convolution, and the activations that it read, if they are to be kept.

    ``fixed``: BatchNorm by its running statistics; there are no sums then.
    """
    lanes, batch, high, wide, real = given.tensor.shape
    cin, cout = layer.weight.shape[2:]
    ho, wo = -(-high // stride), -(-wide // stride)
    if not fixed and batch * ho * wo == 1:
        raise ValueError("BatchNorm needs more than one value per channel to train, got one image of one pixel")
    if batch * high * wide * cin >= 2**31:
        raise ValueError(f"kernels count a lane's numbers with 32 bits: {batch} images of {high}x{wide} are too many")
    how = SETTINGS["conv", max(cin, cout)]
    tiles = Tiles.of(batch, ho, wo, how.pixels, how.least / lanes)
    block, across = cout, 2 if cout == 64 else 1
    per = tiles.per(how.programs / lanes)
    programs = -(-tiles.each // per)
    sh, sw = (tiles.rows - 1) * stride + 3, (wo - 1) * stride + 3
    room = max(tiles.images * sh * sw * (cin + 8), tiles.pixels * (block + 8), 2 * SUMS)
    shared = 4 * NUMBERS + 2 * (room + 9 * cin * (block + 8))
    fetched = 2 * given.source * tiles.read(high, wide, sh) * cin  # one tensor for NORM, two for RESIDUAL
    ahead = how.fetches(per, shared + fetched)
    made = Made(_new(layer.weight, lanes, batch, ho, wo, cout), floats(layer.weight, lanes, programs, 2, cout), layer,
                floats(layer.weight, 4, lanes, cout))  # fmt: skip
    kept = _new(layer.weight, lanes, batch, high, wide, cin) if keeps else None
    defines = {
        "SOURCE": given.source, "KEEP": keeps, "FIXED": fixed, "REAL": real, "CI": cin, "CO": cout, "H": high,
        "W": wide, "STRIDE": stride, "ROWS": tiles.rows, "IMAGES": tiles.images, "NB": block,
        "MT": -(-tiles.pixels // (16 * WARPS // across)), "DEPTH": how.depth, "AHEAD": ahead,
        "TOGETHER": how.together, **given.defines(),
    }  # fmt: skip
    values: Values = [*given.values(kept), layer.weight, made.y, made.sums, batch, lanes]
    numbers = given.numbers(per, tiles.each, int(track))
    launch("conv", (programs, lanes, cout // block), shared + ahead * fetched, defines, [*values, *numbers],
           early=given.source != IMAGE)  # fmt: skip
    return made, kept


def tail(given: Input, track: bool, fixed: bool = False) -> tuple[Tensor, Tensor]:
    """The last activations, and the features: their means over pixels, [lanes, batch, C]."""
    lanes, batch, high, wide, channels = given.tensor.shape
    kept, features = torch.empty_like(given.tensor), floats(given.tensor, lanes, batch, channels)
    defines = {"C": channels, "H": high, "W": wide, "FIXED": fixed, **given.defines()}
    values: Values = [*given.values(kept), features, batch, lanes, *given.numbers(int(track))]
    launch("tail", (batch, lanes, 1), 4 * (SUMS + NUMBERS), defines, values, early=True)
    return features, kept


def pool(df: Tensor, kept: Tensor, made: Made) -> Back:
    """The gradient behind the last ReLU, from that of the features."""
    lanes, batch, high, wide, channels = made.y.shape
    images = max(1, SETTINGS["back", channels].pixels // (high * wide))
    programs = -(-batch // images)
    back = Back(torch.empty_like(made.y), floats(df, lanes, programs, 2, channels))
    values: Values = [df, kept, made.y, made.stats, back.g, back.sums, batch, lanes, images]
    launch("pool", (programs, lanes, 1), 4 * (SUMS + NUMBERS), {"C": channels, "H": high, "W": wide}, values)
    return back


def conv_back(
    back: Back, made: Made, stride: int, before: Made, outer: tuple[Tensor, Tensor] | None
) -> Back:  # fmt: skip
    """The gradient of a convolution's input, behind the ReLU before it, from that behind its BatchNorm.

    ``outer``: the input, where it was kept, and the gradient of the shortcut that it went into too.
    """
    lanes, batch, high, wide, cin = before.y.shape
    wo, cout = made.y.shape[3:]
    how = SETTINGS["back", max(cin, cout)]
    tiles = Tiles.of(batch, high, wide, how.pixels, how.least / lanes, even=stride == 2)
    block, across = cin, 2 if cin == 64 else 1
    per = tiles.per(how.programs / lanes)
    programs = -(-tiles.each // per)
    sh, sw = (tiles.rows + 2, wide + 2) if stride == 1 else (tiles.rows // 2 + 1, wo + 1)
    room = max((tiles.images * sh * sw + 1) * (cout + 8), tiles.pixels * (block + 8), 2 * SUMS)
    shared = 4 * NUMBERS + 2 * (room + 9 * block * (cout + 8))
    fetched = 4 * tiles.read(made.y.shape[2], wo, sh) * cout
    ahead = how.fetches(per, shared + fetched)
    out = Back(torch.empty_like(before.y), floats(before.y, lanes, programs, 2, cin))
    x, shortcut = outer or (before.y, before.y)
    defines = {
        "OUTER": outer is not None, "CI": cin, "CO": cout, "H": high, "W": wide, "STRIDE": stride, "ROWS": tiles.rows,
        "IMAGES": tiles.images, "NB": block, "MT": -(-tiles.pixels // (16 * WARPS // across)),
        "DEPTH": how.depth, "AHEAD": ahead, "TOGETHER": how.together,
    }  # fmt: skip
    values: Values = [
        back.g, made.y, back.sums, made.norm.gamma, made.stats, made.norm.weight, before.y, before.stats, x, shortcut,
        out.g, out.sums, batch, lanes, back.sums.shape[1], per, tiles.each,
    ]  # fmt: skip
    launch("back", (programs, lanes, cin // block), shared + ahead * fetched, defines, values, early=True)
    return out


def weights(
    given: Tensor, known: Made | None, back: Back, made: Made, stride: int, real: int, out: Tensor | None = None,
    alone: bool = False,
) -> list[Tensor]:  # fmt: skip
    """The gradients of a layer's weights, scales and shifts, as the network has them, one behind another in ``out``.

    ``given``: images, activations, or with ``known`` the convolution before. ``alone``: no chain needs room beside it.
    """
    lanes, batch, high, wide = given.shape[:4]
    cin, cout = made.norm.weight.shape[2:]
    ho, wo = made.y.shape[2:4]
    how = SETTINGS["grad", max(cin, cout)]
    inner, outer = min(cin, 32), min(cout, 32)
    blocks = cin // inner * (cout // outer)
    tiles = Tiles.of(batch, ho, wo, how.pixels, how.least / (lanes * blocks))
    most = how.programs / lanes
    per = tiles.per((most if alone else min(most, BESIDE)) / blocks)
    programs = -(-tiles.each // per)
    sh, sw = (tiles.rows - 1) * stride + 3, (wo - 1) * stride + 3
    room = max(2 * (tiles.images * sh * sw * (inner + 8) + -(-tiles.pixels // 16) * 16 * (outer + 8)), 4 * SUMS)
    activations = 0 if real < cin else tiles.read(high, wide, sh) * inner
    fetched = 2 * (activations + 2 * tiles.read(ho, wo, tiles.rows) * outer)
    ahead = how.fetches(per, 4 * NUMBERS + room + fetched)
    part, sizes = floats(given, programs, lanes, 9, cin, cout), [lanes * cout * n for n in (9 * real, 1, 1)]
    found = torch.split(floats(given, sum(sizes)) if out is None else out, sizes)
    defines = {
        "SOURCE": NORM if known is not None else PLAIN if real == cin else IMAGE, "REAL": real, "CI": cin, "CO": cout,
        "H": high, "W": wide, "STRIDE": stride, "ROWS": tiles.rows, "IMAGES": tiles.images, "DEPTH": how.depth,
        "AHEAD": ahead, "TOGETHER": how.together,
    }  # fmt: skip
    values: Values = [
        given, made.stats if known is None else known.stats, back.g, made.y, back.sums, made.norm.gamma, made.stats,
        found[1], found[2], part, batch, lanes, back.sums.shape[1], per, tiles.each,
    ]  # fmt: skip
    halves = max(1, WARPS // (inner * outer // 256) // 2)  # of the groups of warps that add up
    shared = 4 * NUMBERS + max(room + ahead * fetched, 4 * 9 * inner * outer * halves)
    launch("grad", (programs, lanes, blocks), shared, defines, values)
    defines = {"CI": cin, "CO": cout, "REAL": real}
    launch("collect", (9 * cin * cout // 128, lanes, 1), 16 * THREADS, defines, [part, found[0], lanes, programs])
    return [found[0].view(lanes, cout, real, 3, 3), found[1].view(lanes, cout), found[2].view(lanes, cout)]


def gathered(flat: Tensor, order: Tensor) -> Tensor:
    """Numbers in another order, in bf16; zero where it says -1."""
    out = _new(flat, len(order))
    launch("gather", (-(-len(order) // (2 * THREADS)), 1, 1), 0, {}, [flat, order, out, len(order)])
    return out
