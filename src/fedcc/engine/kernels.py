"""Triton kernels for residual trunks of 16 to 64 channels, all lanes at once; images are ``[lanes, batch, H, W, C]``.

What libraries do in separate passes happens here where the data is at hand: BatchNorm's sums are taken as a
convolution's results leave it, and the masks, sums and shortcuts of the backward pass ride along with the gradients'
convolutions. Whatever a convolution reads has a frame of zeros one pixel wide, ``[lanes, batch, H + 2, W + 2, C]``, so
that its loads need no masks: narrow convolutions are bound by such arithmetic, not by memory. Sums over pixels are
taken tile by tile; the program that comes last adds them up in a fixed order, so the same step gives the same bits.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedcc.core.samples import View

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,index,arg-type"
# ruff: noqa: ARG004

SIZES = {"ROWS", "H", "W", "HO", "WO", "HX", "WX", "TILES", "LANES", "N", "WINDOW", "BATCH", "ALL", "FIRST", "PAD"}


def jit(kernel: Any) -> Any:
    """Compiled once for all sizes: whole numbers are not specialised on (a multiple of 16, one)."""
    names = inspect.signature(kernel).parameters
    fixed = {name for name, about in names.items() if about.annotation not in (inspect.Parameter.empty,)}
    return triton.jit(kernel, do_not_specialize=[name for name in names if name in SIZES and name not in fixed])


@triton.jit
def _last(counter, lane, TILES):
    """Whether this program is the last of its lane to arrive here; the count starts anew."""
    tl.debug_barrier()
    last = tl.atomic_add(counter + lane, 1, sem="acq_rel") == TILES - 1
    if last:
        tl.store(counter + lane, 0)
    return last


@triton.jit
def _total(part, TILES, C: tl.constexpr):
    """The tiles' two sums per channel, added up."""
    BT: tl.constexpr = 4096 // C
    c, t = tl.arange(0, C), tl.arange(0, BT)
    first = tl.zeros((C,), dtype=tl.float32)
    second = tl.zeros((C,), dtype=tl.float32)
    start = TILES * 0
    while start < TILES:
        rows = (start + t)[:, None]
        at = part + rows * 2 * C + c[None, :]
        first += tl.sum(tl.load(at, mask=rows < TILES, other=0.0, cache_modifier=".cg"), 0)
        second += tl.sum(tl.load(at + C, mask=rows < TILES, other=0.0, cache_modifier=".cg"), 0)
        start += BT
    return first, second


@triton.jit
def _statistics(part, norm, out, lane, COUNT, TILES, LANES, momentum, eps, C: tl.constexpr, TRACK: tl.constexpr):
    """Mean, 1/std, scale and shift of each channel from the tiles' sums; running statistics move on."""
    gamma, beta, running_mean, running_var = norm
    first, second = _total(part + lane * TILES * 2 * C, TILES, C)
    mean = first / COUNT
    var = tl.maximum(second / COUNT - mean * mean, 0.0)
    rstd = 1.0 / tl.sqrt(var + eps)
    at = lane * C + tl.arange(0, C)
    scale = tl.load(gamma + at) * rstd
    tl.store(out + at, mean)
    tl.store(out + LANES * C + at, rstd)
    tl.store(out + 2 * LANES * C + at, scale)
    tl.store(out + 3 * LANES * C + at, tl.load(beta + at) - mean * scale)
    if TRACK:
        old_mean, old_var = tl.load(running_mean + at), tl.load(running_var + at)
        tl.store(running_mean + at, old_mean + momentum * (mean - old_mean))
        tl.store(running_var + at, old_var + momentum * (var * (COUNT / (COUNT - 1)) - old_var))


@triton.jit
def _coefficients(part, gamma, stats, grads, lane, COUNT, TILES, LANES, C: tl.constexpr):
    """Gradients of scale and shift, and the numbers that BatchNorm's backward pass needs, from the tiles' sums."""
    first, second = _total(part + lane * TILES * 2 * C, TILES, C)
    at = lane * C + tl.arange(0, C)
    tl.store(grads + at, second)  # of gamma
    tl.store(grads + LANES * C + at, first)  # of beta
    tl.store(grads + 2 * LANES * C + at, tl.load(gamma + at) * tl.load(stats + LANES * C + at))
    tl.store(grads + 3 * LANES * C + at, first / COUNT)
    tl.store(grads + 4 * LANES * C + at, second / COUNT)


@triton.jit
def _summed(part, lane, tile, TILES, first, second, C: tl.constexpr):
    """A tile's two sums per channel go where the last program finds them."""
    c = tl.arange(0, C)
    part += (lane * TILES + tile) * 2 * C
    tl.store(part + c, tl.sum(first, 0))
    tl.store(part + C + c, tl.sum(second, 0))


@jit
def _conv(
    x, w, y, part, counter, gamma, beta, running_mean, running_var, stats,
    ROWS, HX, WX, HO, WO, TILES, LANES, momentum, eps,
    CIN: tl.constexpr, COUT: tl.constexpr, STRIDE: tl.constexpr, TRACK: tl.constexpr, BM: tl.constexpr,
    SPAN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Y = conv3x3(x), and its statistics.

    With SPAN 3 the three taps of a row, which lie side by side in memory, make one product.
    """
    tile, lane = tl.program_id(0), tl.program_id(1)
    m = tile * BM + tl.arange(0, BM)
    n, k = tl.arange(0, COUT), tl.arange(0, BK)
    row = tl.minimum(m, ROWS - 1)
    wo, ho, b = row % WO, (row // WO) % HO, row // (WO * HO)
    x += lane.to(tl.int64) * (ROWS // (HO * WO)) * HX * WX * CIN
    w += lane * 9 * CIN * COUT + k[:, None] * COUT + n[None, :]
    corner = x + (((b * HX + ho * STRIDE) * WX + wo * STRIDE) * CIN)[:, None] + k[None, :]
    acc = tl.zeros((BM, COUT), dtype=tl.float32)
    for tap in tl.static_range(0, 9, SPAN):
        a = tl.load(corner + ((tap // 3) * WX + tap % 3) * CIN)
        acc += tl.dot(a, tl.load(w + tap * CIN * COUT, mask=(k < SPAN * CIN)[:, None], other=0.0))
    kept = acc.to(y.dtype.element_ty)
    y += lane.to(tl.int64) * ROWS * COUT
    tl.store(y + m[:, None] * COUT + n[None, :], kept, mask=(m < ROWS)[:, None])
    value = tl.where((m < ROWS)[:, None], kept.to(tl.float32), 0.0)
    _summed(part, lane, tile, TILES, value, value * value, COUT)
    if _last(counter, lane, TILES):
        norm = (gamma, beta, running_mean, running_var)
        _statistics(part, norm, stats, lane, ROWS, TILES, LANES, momentum, eps, COUT, TRACK)


@jit
def _stem(
    x, w, y, part, counter, gamma, beta, running_mean, running_var, stats, ROWS, H, W, TILES, LANES, momentum, eps,
    CIN: tl.constexpr, COUT: tl.constexpr, TRACK: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The first convolution, of images without a frame: 9 x CIN inputs in one product; and its statistics."""
    tile, lane = tl.program_id(0), tl.program_id(1)
    m, n, k = tile * BM + tl.arange(0, BM), tl.arange(0, COUT), tl.arange(0, BK)
    wo, ho, b = m % W, (m // W) % H, m // (W * H)
    tap, c = k // CIN, k % CIN
    hi, wi = ho[:, None] + (tap // 3)[None, :] - 1, wo[:, None] + (tap % 3)[None, :] - 1
    inside = (m < ROWS)[:, None] & (k < 9 * CIN)[None, :] & (hi >= 0) & (hi < H) & (wi >= 0) & (wi < W)
    x += lane.to(tl.int64) * ROWS * CIN
    a = tl.load(x + ((b[:, None] * H + hi) * W + wi) * CIN + c[None, :], mask=inside, other=0.0)
    weight = tl.load(w + lane * 9 * CIN * COUT + k[:, None] * COUT + n[None, :], mask=(k < 9 * CIN)[:, None], other=0.0)
    kept = tl.dot(a, weight).to(y.dtype.element_ty)
    y += lane.to(tl.int64) * ROWS * COUT
    tl.store(y + m[:, None] * COUT + n[None, :], kept, mask=(m < ROWS)[:, None])
    value = tl.where((m < ROWS)[:, None], kept.to(tl.float32), 0.0)
    _summed(part, lane, tile, TILES, value, value * value, COUT)
    if _last(counter, lane, TILES):
        norm = (gamma, beta, running_mean, running_var)
        _statistics(part, norm, stats, lane, ROWS, TILES, LANES, momentum, eps, COUT, TRACK)


@jit
def _finish(
    y, stats, x, out, ROWS, H, W, HX, WX, LANES, C: tl.constexpr, CX: tl.constexpr, STRIDE: tl.constexpr,
    SHORTCUT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Out = relu(scale y + shift + shortcut(x)); the shortcut takes every STRIDE-th pixel and pads channels with 0."""
    tile, lane = tl.program_id(0), tl.program_id(1)
    m, c = tile * BM + tl.arange(0, BM), tl.arange(0, C)
    w, h, b = m % (W + 2) - 1, (m // (W + 2)) % (H + 2) - 1, m // ((W + 2) * (H + 2))  # m counts pixels of out
    inside = ((m < ROWS) & (h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None]
    images = ROWS // ((W + 2) * (H + 2))
    y += lane.to(tl.int64) * images * H * W * C
    scale = tl.load(stats + 2 * LANES * C + lane * C + c)[None, :]
    shift = tl.load(stats + 3 * LANES * C + lane * C + c)[None, :]
    value = tl.load(y + (((b * H + h) * W + w) * C)[:, None] + c[None, :], mask=inside, other=0.0)
    value = value.to(tl.float32) * scale + shift
    if SHORTCUT:
        extra = (C - CX) // 2
        source = ((b * HX + h * STRIDE + 1) * WX + w * STRIDE + 1)[:, None] * CX + (c - extra)[None, :]
        own = inside & ((c >= extra) & (c < extra + CX))[None, :]
        x += lane.to(tl.int64) * images * HX * WX * CX
        value += tl.load(x + source, mask=own, other=0.0).to(tl.float32)
    value = tl.where(inside, tl.maximum(value, 0.0), 0.0)
    out += lane.to(tl.int64) * ROWS * C
    tl.store(out + m[:, None] * C + c[None, :], value.to(out.dtype.element_ty), mask=(m <= ROWS)[:, None])


@jit
def _pooled(
    df, out, y, gamma, stats, g, part, counter, grads, ROWS, H, W, TILES, LANES, C: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """G = the gradient behind the last ReLU, from that of the features (means over pixels); and its coefficients."""
    tile, lane = tl.program_id(0), tl.program_id(1)
    m, c = tile * BM + tl.arange(0, BM), tl.arange(0, C)
    w, h, b = m % W, (m // W) % H, m // (W * H)
    there = (m < ROWS)[:, None]
    images = ROWS // (H * W)
    framed = lane.to(tl.int64) * images * (H + 2) * (W + 2) * C
    framed += (((b * (H + 2) + h + 1) * (W + 2) + w + 1) * C)[:, None] + c[None, :]
    value = tl.load(df + ((lane * images + b) * C)[:, None] + c[None, :], mask=there, other=0.0) / (H * W)
    value = tl.where(tl.load(out + framed, mask=there, other=0.0).to(tl.float32) > 0, value, 0.0)
    at = lane.to(tl.int64) * ROWS * C + m[:, None] * C + c[None, :]
    kept = value.to(g.dtype.element_ty)
    tl.store(g + at, kept, mask=there)
    value = kept.to(tl.float32)
    mean = tl.load(stats + lane * C + c)[None, :]
    rstd = tl.load(stats + LANES * C + lane * C + c)[None, :]
    xhat = (tl.load(y + at, mask=there, other=0.0).to(tl.float32) - mean) * rstd
    _summed(part, lane, tile, TILES, value, value * xhat, C)
    if _last(counter, lane, TILES):
        _coefficients(part, gamma, stats, grads, lane, ROWS, TILES, LANES, C)


@jit
def _through(g, y, stats, grads, dy, ROWS, H, W, LANES, C: tl.constexpr, BM: tl.constexpr):
    """BatchNorm's backward pass: dy = c (g - mean g - xhat mean(g xhat)), in a frame."""
    tile, lane = tl.program_id(0), tl.program_id(1)
    m, c = tile * BM + tl.arange(0, BM), tl.arange(0, C)
    w, h, b = m % (W + 2) - 1, (m // (W + 2)) % (H + 2) - 1, m // ((W + 2) * (H + 2))  # m counts pixels of dy
    inside = ((m < ROWS) & (h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None]
    at = lane.to(tl.int64) * (ROWS // ((W + 2) * (H + 2))) * H * W * C
    at += (((b * H + h) * W + w) * C)[:, None] + c[None, :]
    value = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    own = lane * C + c
    mean, rstd = tl.load(stats + own)[None, :], tl.load(stats + LANES * C + own)[None, :]
    factor = tl.load(grads + 2 * LANES * C + own)[None, :]
    k1, k2 = tl.load(grads + 3 * LANES * C + own)[None, :], tl.load(grads + 4 * LANES * C + own)[None, :]
    xhat = (tl.load(y + at, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
    value = tl.where(inside, factor * (value - k1 - xhat * k2), 0.0)
    dy += lane.to(tl.int64) * ROWS * C
    tl.store(dy + m[:, None] * C + c[None, :], value.to(dy.dtype.element_ty), mask=(m <= ROWS)[:, None])


@jit
def _conv_back(
    dy, w, y, gamma, stats, x, shortcut, g, part, counter, grads,
    ROWS, H, W, HO, WO, TILES, LANES,
    CIN: tl.constexpr, COUT: tl.constexpr, STRIDE: tl.constexpr, INNER: tl.constexpr, BM: tl.constexpr,
    SPAN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """G = the gradient of a convolution's input, behind the ReLU before it, and its coefficients; SPAN as in _conv.

    y and stats are of the BatchNorm before. INNER: the input was relu(scale y + shift). Else it was x, with a frame,
    and went into the block's shortcut too, whose gradient is added.
    """
    tile, lane = tl.program_id(0), tl.program_id(1)
    m = tile * BM + tl.arange(0, BM)
    n, k = tl.arange(0, CIN), tl.arange(0, BK)
    row = tl.minimum(m, ROWS - 1)
    wi, hi, b = row % W, (row // W) % H, row // (W * H)
    images = ROWS // (H * W)
    dy += lane.to(tl.int64) * images * (HO + 2) * (WO + 2) * COUT + k[None, :]
    w += lane * 9 * CIN * COUT + n[None, :] * COUT
    acc = tl.zeros((BM, CIN), dtype=tl.float32)
    if STRIDE == 1:
        corner = dy + (((b * (HO + 2) + hi) * (WO + 2) + wi) * COUT)[:, None]
        # from left to right in dy is from right to left in the taps
        taps = w + ((8 - k // COUT) * CIN * COUT + k % COUT)[:, None]
        for tap in tl.static_range(0, 9, SPAN):
            a = tl.load(corner + ((tap // 3) * (WO + 2) + tap % 3) * COUT)
            acc += tl.dot(a, tl.load(taps - tap * CIN * COUT, mask=(k < SPAN * COUT)[:, None], other=0.0))
    else:
        for tap in tl.static_range(9):
            h, v = hi + 1 - tap // 3, wi + 1 - tap % 3
            met = ((h % STRIDE == 0) & (v % STRIDE == 0) & (h >= 0) & (v >= 0))[:, None]
            source = ((b * (HO + 2) + h // STRIDE + 1) * (WO + 2) + v // STRIDE + 1) * COUT
            a = tl.load(dy + source[:, None], mask=met, other=0.0)
            acc += tl.dot(a, tl.load(w + tap * CIN * COUT + k[:, None]))
    there = (m < ROWS)[:, None]
    own = lane * CIN + n
    at = lane.to(tl.int64) * ROWS * CIN + m[:, None] * CIN + n[None, :]
    value = tl.load(y + at, mask=there, other=0.0).to(tl.float32)
    if INNER:
        scale = tl.load(stats + 2 * LANES * CIN + own)[None, :]
        shift = tl.load(stats + 3 * LANES * CIN + own)[None, :]
        alive = value * scale + shift > 0
    else:
        extra = (COUT - CIN) // 2
        met = there & ((hi % STRIDE == 0) & (wi % STRIDE == 0))[:, None]
        source = ((b * HO + hi // STRIDE) * WO + wi // STRIDE)[:, None] * COUT + (n + extra)[None, :]
        shortcut += lane.to(tl.int64) * images * HO * WO * COUT
        acc += tl.load(shortcut + source, mask=met, other=0.0).to(tl.float32)
        x += lane.to(tl.int64) * images * (H + 2) * (W + 2) * CIN
        framed = (((b * (H + 2) + hi + 1) * (W + 2) + wi + 1) * CIN)[:, None] + n[None, :]
        alive = tl.load(x + framed).to(tl.float32) > 0
    kept = tl.where(alive & there, acc, 0.0).to(g.dtype.element_ty)
    tl.store(g + at, kept, mask=there)
    kept = kept.to(tl.float32)
    xhat = (value - tl.load(stats + own)[None, :]) * tl.load(stats + LANES * CIN + own)[None, :]
    _summed(part, lane, tile, TILES, kept, kept * xhat, CIN)
    if _last(counter, lane, TILES):
        _coefficients(part, gamma, stats, grads, lane, ROWS, TILES, LANES, CIN)


@jit
def _weights(
    x, dy, part, ROWS, HX, WX, HO, WO,
    PER: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, STRIDE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """The gradient of a convolution's weights: EACH rows of three taps and one share of the pixels per program."""
    split, first, lane = tl.program_id(0), tl.program_id(1) * EACH, tl.program_id(2)
    LANES = tl.num_programs(2)
    n, k = tl.arange(0, COUT), tl.arange(0, BK)
    images = ROWS // (HO * WO)
    x += lane.to(tl.int64) * images * HX * WX * CIN + first * WX * CIN
    dy += lane.to(tl.int64) * images * (HO + 2) * (WO + 2) * COUT
    above = tl.zeros((BK, COUT), dtype=tl.float32)
    middle = tl.zeros((BK, COUT), dtype=tl.float32)
    below = tl.zeros((BK, COUT), dtype=tl.float32)
    for step in range(0, PER):
        m = (split * PER + step) * BM + tl.arange(0, BM)
        row = tl.minimum(m, ROWS - 1)
        wo, ho, b = row % WO, (row // WO) % HO, row // (WO * HO)
        at = ((b * (HO + 2) + ho + 1) * (WO + 2) + wo + 1) * COUT
        d = tl.load(dy + at[:, None] + n[None, :], mask=(m < ROWS)[:, None], other=0.0)
        corner = x + (((b * HX + ho * STRIDE) * WX + wo * STRIDE) * CIN)[:, None] + k[None, :]
        above += tl.dot(tl.trans(tl.load(corner)), d)
        if EACH == 3:
            middle += tl.dot(tl.trans(tl.load(corner + WX * CIN)), d)
            below += tl.dot(tl.trans(tl.load(corner + 2 * WX * CIN)), d)
    part += ((split * LANES + lane) * 9 + first * 3) * CIN * COUT + k[:, None] * COUT + n[None, :]
    own = (k < 3 * CIN)[:, None]
    tl.store(part, above, mask=own)
    if EACH == 3:
        tl.store(part + 3 * CIN * COUT, middle, mask=own)
        tl.store(part + 6 * CIN * COUT, below, mask=own)


@jit
def _stem_weights(
    x, dy, part, ROWS, H, W,
    PER: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradient of the first convolution's weights; dy has a frame, x has none."""
    split, lane = tl.program_id(0), tl.program_id(1)
    LANES = tl.num_programs(1)
    n, k = tl.arange(0, COUT), tl.arange(0, BK)
    tap, c = k // CIN, k % CIN
    x += lane.to(tl.int64) * ROWS * CIN
    dy += lane.to(tl.int64) * (ROWS // (H * W)) * (H + 2) * (W + 2) * COUT
    acc = tl.zeros((BK, COUT), dtype=tl.float32)
    for step in range(0, PER):
        m = (split * PER + step) * BM + tl.arange(0, BM)
        wo, ho, b = m % W, (m // W) % H, m // (W * H)
        hi, wi = ho[:, None] + (tap // 3)[None, :] - 1, wo[:, None] + (tap % 3)[None, :] - 1
        inside = (m < ROWS)[:, None] & (k < 9 * CIN)[None, :] & (hi >= 0) & (hi < H) & (wi >= 0) & (wi < W)
        a = tl.load(x + ((b[:, None] * H + hi) * W + wi) * CIN + c[None, :], mask=inside, other=0.0)
        at = ((b * (H + 2) + ho + 1) * (W + 2) + wo + 1) * COUT
        d = tl.load(dy + at[:, None] + n[None, :], mask=(m < ROWS)[:, None], other=0.0)
        acc += tl.dot(tl.trans(a), d)
    part += (split * LANES + lane) * 9 * CIN * COUT
    tl.store(part + k[:, None] * COUT + n[None, :], acc, mask=(k < 9 * CIN)[:, None])


@jit
def _images(
    pool, plan, draws, place, offset, mean, std, out, scale, WINDOW, BATCH, ALL, FIRST, PAD, H, W,
    C: tl.constexpr, AUGMENTS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """A batch of one stream from the pool of uint8 images: gathered, cropped, flipped, normalised, channels last."""
    b, lane = tl.program_id(0), tl.program_id(1)
    step = lane * WINDOW + tl.load(place + lane)
    row = tl.load(plan + step * BATCH + b) + tl.load(offset + lane)
    p = tl.program_id(2) * BP + tl.arange(0, BP)
    h, w = p // W, p % W
    if AUGMENTS:
        draws += (step * BATCH + b) * 3
        w = tl.where(tl.load(draws + 2) > 0, W - 1 - w, w) + tl.load(draws + 1).to(tl.int32) - PAD
        h += tl.load(draws).to(tl.int32) - PAD
    inside = (p < H * W) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    pool += row.to(tl.int64) * C * H * W
    out += (lane * ALL + FIRST + b).to(tl.int64) * H * W * C
    for c in tl.static_range(C):
        value = tl.load(pool + c * H * W + h * W + w, mask=inside, other=0).to(tl.float32) * scale
        value = (value - tl.load(mean + c)) / tl.load(std + c)
        tl.store(out + p * C + c, value.to(out.dtype.element_ty), mask=p < H * W)


@jit
def _tick(
    loss, total, age, at, place, lr, length, cosine, size, root, LANES,
    LOG1: tl.constexpr, LOG2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step more for every lane: its loss is added up, and Adam's step size and bias correction found, in float64."""
    i = tl.arange(0, BLOCK)
    there = i < LANES
    tl.store(total + i, tl.load(total + i, mask=there) + tl.load(loss + i, mask=there), mask=there)
    steps, done = tl.load(age + i, mask=there, other=0.0) + 1, tl.load(at + i, mask=there, other=0)
    tl.store(age + i, steps, mask=there)
    whole = tl.maximum(tl.load(length + i, mask=there, other=1.0), 1.0)
    slower = 0.5 * (1 - tl.cos(3.141592653589793 * done.to(tl.float64) / whole))
    rate = tl.load(lr + i, mask=there, other=0.0) * (1 - tl.load(cosine + i, mask=there, other=0.0) * slower)
    tl.store(size + i, (rate / (1 - tl.exp(steps * LOG1))).to(tl.float32), mask=there)
    tl.store(root + i, (1 / tl.sqrt(1 - tl.exp(steps * LOG2))).to(tl.float32), mask=there)
    tl.store(at + i, done + 1, mask=there)
    tl.store(place + i, tl.load(place + i, mask=there) + 1, mask=there)


@jit
def _adam(p, m, v, g, lane, size, root, N, beta1, beta2, eps, BLOCK: tl.constexpr):
    """Adam on a flat tensor of all lanes' parameters; step size and bias correction per lane."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < N
    own = tl.load(lane + i, mask=there, other=0)
    grad = tl.load(g + i, mask=there, other=0.0)
    mean = tl.load(m + i, mask=there, other=0.0)
    mean += (grad - mean) * (1 - beta1)
    square = tl.load(v + i, mask=there, other=0.0) * beta2 + grad * grad * (1 - beta2)
    move = tl.load(size + own, mask=there, other=0.0) * mean
    move /= tl.sqrt(square) * tl.load(root + own, mask=there, other=0.0) + eps
    tl.store(m + i, mean, mask=there)
    tl.store(v + i, square, mask=there)
    tl.store(p + i, tl.load(p + i, mask=there, other=0.0) - move, mask=there)


# ------------------------------------------------------------------------------------------- launching


# By the wider channel count, as measured. Convolutions, and gradients of their inputs: pixels per program, taps per
# product, warps. Gradients of weights: pixels per step, shares, rows of taps per program, warps. Other passes: pixels.
CONV = {16: (128, 1, 2), 32: (128, 1, 4), 64: (128, 1, 4)}
BACK = {16: (128, 1, 2), 32: (128, 1, 4), 64: (128, 1, 8)}
SHARES = {16: (64, 16, 3, 4), 32: (32, 16, 3, 4), 64: (32, 8, 1, 4)}
FLAT = {16: 128, 32: 64, 64: 64}
WARPS = 4


def _tiles(rows: int, size: int) -> int:
    return -(-rows // size)


def framed(lanes: int, batch: int, h: int, w: int, c: int, like: Tensor) -> Tensor:
    """Room for images with a frame, and for one pixel more, which a product of three taps reads (times zero)."""
    shape = (lanes, batch, h + 2, w + 2, c)
    room = torch.empty(math.prod(shape) + c, dtype=like.dtype, device=like.device)
    return room[:-c].view(shape)


@dataclass(frozen=True)
class Layer:
    """A convolution and the BatchNorm behind it: weights as :func:`packed` gives them, tensors [lanes, C] each."""

    weight: Tensor
    gamma: Tensor
    beta: Tensor
    mean: Tensor
    var: Tensor
    momentum: float
    eps: float

    @property
    def norm(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.gamma, self.beta, self.mean, self.var


def _room(y: Tensor, rows: int, tile: int, numbers: int) -> tuple[int, Tensor, Tensor]:
    """The number of tiles, and room for their sums and for what comes out of these."""
    lanes, c, tiles = len(y), y.shape[-1], _tiles(rows, tile)
    part = torch.empty(lanes, tiles, 2, c, dtype=torch.float32, device=y.device)
    return tiles, part, torch.empty(numbers, lanes, c, dtype=torch.float32, device=y.device)


def conv(x: Tensor, layer: Layer, stride: int, track: bool, counter: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution of framed images, without a frame, and its statistics: mean, 1/std, scale, shift."""
    lanes, batch, hx, wx, cin = x.shape
    cout, ho, wo = layer.weight.shape[-1], -(-(hx - 2) // stride), -(-(wx - 2) // stride)
    tile, span, warps = CONV[max(cin, cout)]
    rows = batch * ho * wo
    y = torch.empty(lanes, batch, ho, wo, cout, dtype=x.dtype, device=x.device)
    tiles, part, stats = _room(y, rows, tile, 4)
    _conv[(tiles, lanes)](
        x, layer.weight, y, part, counter, *layer.norm, stats,
        rows, hx, wx, ho, wo, tiles, lanes, layer.momentum, layer.eps,
        CIN=cin, COUT=cout, STRIDE=stride, TRACK=track, BM=tile,
        SPAN=span, BK=triton.next_power_of_2(span * cin), num_warps=warps,
    )  # fmt: skip
    return y, stats


def stem(x: Tensor, layer: Layer, track: bool, counter: Tensor) -> tuple[Tensor, Tensor]:
    """The same for the first layer, whose images have no frame."""
    lanes, batch, h, width, cin = x.shape
    cout, rows, tile = layer.weight.shape[-1], batch * h * width, 128
    y = torch.empty(lanes, batch, h, width, cout, dtype=x.dtype, device=x.device)
    tiles, part, stats = _room(y, rows, tile, 4)
    _stem[(tiles, lanes)](
        x, layer.weight, y, part, counter, *layer.norm, stats,
        rows, h, width, tiles, lanes, layer.momentum, layer.eps,
        CIN=cin, COUT=cout, TRACK=track, BM=tile, BK=32 if cin == 3 else 16, num_warps=WARPS,
    )  # fmt: skip
    return y, stats


def finish(y: Tensor, stats: Tensor, x: Tensor | None, stride: int) -> Tensor:
    """relu(bn(y)), or relu(bn(y) + shortcut(x)), framed."""
    lanes, batch, h, w, c = y.shape
    out, rows, tile = framed(lanes, batch, h, w, c, y), batch * (h + 2) * (w + 2), FLAT[c]
    source = x if x is not None else out
    _finish[(_tiles(rows + 1, tile), lanes)](
        y, stats, source, out, rows, h, w, source.shape[2], source.shape[3], lanes,
        C=c, CX=source.shape[-1], STRIDE=stride, SHORTCUT=x is not None, BM=tile, num_warps=WARPS,
    )  # fmt: skip
    return out


def pooled(
    df: Tensor, out: Tensor, y: Tensor, gamma: Tensor, stats: Tensor, counter: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient behind the last ReLU from that of the features, and its coefficients (see :func:`conv_back`)."""
    lanes, batch, h, w, c = y.shape
    g, rows, tile = torch.empty_like(y), batch * h * w, FLAT[c]
    tiles, part, grads = _room(y, rows, tile, 5)
    _pooled[(tiles, lanes)](
        df, out, y, gamma, stats, g, part, counter, grads, rows, h, w, tiles, lanes, C=c, BM=tile, num_warps=WARPS
    )  # fmt: skip
    return g, grads


def through(g: Tensor, y: Tensor, stats: Tensor, grads: Tensor) -> Tensor:
    """The gradient of y, framed."""
    lanes, batch, h, w, c = y.shape
    dy, rows, tile = framed(lanes, batch, h, w, c, y), batch * (h + 2) * (w + 2), FLAT[c]
    _through[(_tiles(rows + 1, tile), lanes)](
        g, y, stats, grads, dy, rows, h, w, lanes, C=c, BM=tile, num_warps=WARPS
    )  # fmt: skip
    return dy


def conv_back(
    dy: Tensor,
    weight: Tensor,
    stride: int,
    before: tuple[Tensor, Tensor, Tensor],
    outer: tuple[Tensor, Tensor] | None,
    counter: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradient of a convolution's input, behind the ReLU before it, from dy, framed.

    ``before``: y, gamma and stats of the BatchNorm before; ``outer``: the framed input and the gradient of the
    shortcut that it went into too. Behind it [5, lanes, C]: the gradients of gamma and beta, and three numbers for
    :func:`through`.
    """
    y, gamma, stats = before
    lanes, batch, h, width, cin = y.shape
    _, _, ho, wo, cout = dy.shape
    tile, span, warps = BACK[max(cin, cout)]
    span = span if stride == 1 else 1
    rows, g = batch * h * width, torch.empty_like(y)
    tiles, part, grads = _room(y, rows, tile, 5)
    x, shortcut = outer or (y, y)
    _conv_back[(tiles, lanes)](
        dy, weight, y, gamma, stats, x, shortcut, g, part, counter, grads,
        rows, h, width, ho - 2, wo - 2, tiles, lanes,
        CIN=cin, COUT=cout, STRIDE=stride, INNER=outer is None, BM=tile,
        SPAN=span, BK=triton.next_power_of_2(span * cout), num_warps=warps,
    )  # fmt: skip
    return g, grads


def weights(x: Tensor, dy: Tensor, stride: int) -> Tensor:
    """The gradient of a convolution's weights, [lanes, 9, cin, cout], in fp32; both are framed."""
    lanes, batch, hx, wx, cin = x.shape
    _, _, ho, wo, cout = dy.shape
    tile, shares, each, warps = SHARES[max(cin, cout)]
    rows = batch * (ho - 2) * (wo - 2)
    per = max(1, _tiles(rows, tile) // shares)
    splits = _tiles(rows, tile * per)
    part = torch.empty(splits, lanes, 9, cin, cout, dtype=torch.float32, device=x.device)
    _weights[(splits, 3 // each, lanes)](
        x, dy, part, rows, hx, wx, ho - 2, wo - 2, PER=per, CIN=cin, COUT=cout, STRIDE=stride, BM=tile,
        BK=triton.next_power_of_2(3 * cin), EACH=each, num_warps=warps,
    )  # fmt: skip
    return part.sum(0)


def stem_weights(x: Tensor, dy: Tensor) -> Tensor:
    lanes, batch, h, width, cin = x.shape
    cout, rows, tile = dy.shape[-1], batch * h * width, 128
    per = max(1, _tiles(rows, tile) // 64)
    splits = _tiles(rows, tile * per)
    part = torch.empty(splits, lanes, 9, cin, cout, dtype=torch.float32, device=x.device)
    block = 32 if cin == 3 else 16
    _stem_weights[(splits, lanes)](
        x, dy, part, rows, h, width, PER=per, CIN=cin, COUT=cout, BM=tile, BK=block, num_warps=WARPS
    )  # fmt: skip
    return part.sum(0)


def images(
    pool: Tensor, plan: Tensor, draws: Tensor, place: Tensor, offset: Tensor, view: View, out: Tensor, first: int
) -> None:  # fmt: skip
    """Write this step's batch of a stream into ``out`` [lanes, images, H, W, channels], from image ``first`` on."""
    lanes, window, batch = plan.shape
    _, channels, height, width = pool.shape
    block = 512
    _images[(batch, lanes, _tiles(height * width, block))](
        pool, plan, draws, place, offset, *view.numbers(channels, out.device), out, view.scale,
        window, batch, out.shape[1], first, view.pad, height, width,
        C=channels, AUGMENTS=view.augments, BP=block, num_warps=WARPS,
    )  # fmt: skip


def tick(losses: Tensor, numbers: dict[str, Tensor], betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """A step more for every lane, in ``numbers``; Adam's step sizes and bias corrections, [lanes] each."""
    lanes = len(losses)
    size, root = torch.empty(2, lanes, dtype=torch.float32, device=losses.device)
    state = [numbers[name] for name in ("loss", "age", "at", "place", "lr", "length", "cosine")]
    block = triton.next_power_of_2(lanes)
    _tick[(1,)](losses.double(), *state, size, root, lanes, *map(math.log, betas), BLOCK=block, num_warps=1)
    return size, root


def adam(
    p: Tensor, m: Tensor, v: Tensor, g: Tensor, lane: Tensor, size: Tensor, root: Tensor, betas: Any, eps: float
) -> None:
    """One step of Adam on flat tensors, in place."""
    block = 1024
    _adam[(_tiles(len(p), block),)](p, m, v, g, lane, size, root, len(p), *betas, eps, BLOCK=block, num_warps=WARPS)


# ------------------------------------------------------------------------------------------- functions with gradients


def packed(w: Tensor) -> Tensor:
    """Weights [lanes, out, in, 3, 3] in the order in which the kernels read them: [lanes, 9, in, out]; a view."""
    return w.detach().flatten(3).permute(0, 3, 2, 1)


def unpacked(dw: Tensor) -> Tensor:
    """A gradient [lanes, 9, in, out] in the layout of the weights; a view."""
    return dw.view(dw.shape[0], 3, 3, *dw.shape[2:]).permute(0, 4, 3, 1, 2)


class Beside:
    """What a trunk keeps from step to step: a second stream, for the gradients of weights, and counts for kernels.

    Nothing but Adam waits for the gradients of weights, so they are found beside the way back through the layers.
    """

    def __init__(self, device: torch.device):
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.held: list[Any] = []  # in use over there: freed here, their memory would be taken at once
        self.counters = torch.zeros(0, dtype=torch.int32, device=device)

    def counter(self, lanes: int) -> Tensor:
        """A count for each lane, zero between two kernels."""
        if len(self.counters) < lanes:
            self.counters = torch.zeros(lanes, dtype=torch.int32, device=self.counters.device)
        return self.counters

    def weights(self, *given: Any) -> Tensor:
        if self.stream is None:
            return unpacked(weights(*given))
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            made = unpacked(weights(*given))
        self.held += [*given, made]
        return made

    def join(self) -> None:
        """What comes next waits for all that was begun beside."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        self.held.clear()


class Trunk(torch.autograd.Function):
    """Features [lanes, batch, C] of images [lanes, batch, H, W, channels] by a stem and residual blocks.

    ``trained``: the weights, scales and shifts of ``layers`` as autograd knows them, for their gradients alone.
    """

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, layers: list[Layer], strides: list[int], track: bool, beside: Beside, *trained: Tensor
    ) -> Tensor:  # fmt: skip
        counter = beside.counter(len(images))
        y, stats = stem(images, layers[0], track, counter)
        x = finish(y, stats, None, 1)
        tape: list[Any] = [(y, layers[0].gamma, stats)]
        for stride, first, second in zip(strides, layers[1::2], layers[2::2], strict=True):
            y1, stats1 = conv(x, first, stride, track, counter)
            a1 = finish(y1, stats1, None, 1)
            y2, stats2 = conv(a1, second, 1, track, counter)
            tape.append((x, (y1, first.gamma, stats1), a1, stride, first.weight, second.weight))
            tape.append((y2, second.gamma, stats2))
            x = finish(y2, stats2, x, stride)
        ctx.images, ctx.tape, ctx.last, ctx.beside = images, tape, x, beside
        return x[:, :, 1:-1, 1:-1].float().mean((2, 3))

    @staticmethod
    def backward(ctx: Any, df: Tensor) -> tuple[Any, ...]:
        tape, beside = ctx.tape, ctx.beside
        counter = beside.counter(len(df))
        made: list[Tensor] = []
        y, gamma, stats = tape.pop()
        g, grads = pooled(df.contiguous(), ctx.last, y, gamma, stats, counter)
        while tape:
            x, (y1, gamma1, stats1), a1, stride, w1, w2 = tape.pop()
            dy2 = through(g, y, stats, grads)
            dw2 = beside.weights(a1, dy2, 1)
            g1, grads1 = conv_back(dy2, w2, 1, (y1, gamma1, stats1), None, counter)
            dy1 = through(g1, y1, stats1, grads1)
            dw1 = beside.weights(x, dy1, stride)
            made = [dw1, grads1[0], grads1[1], dw2, grads[0], grads[1], *made]
            y, gamma, stats = tape.pop()
            g, grads = conv_back(dy1, w1, stride, (y, gamma, stats), (x, g), counter)
        dw = unpacked(stem_weights(ctx.images, through(g, y, stats, grads)))
        beside.join()
        return *([None] * 5), dw, grads[0], grads[1], *made
