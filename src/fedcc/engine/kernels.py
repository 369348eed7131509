"""Triton kernels for residual blocks of 16 to 64 channels, all lanes at once; images are ``[lanes, batch, H, W, C]``.

What libraries do in separate passes happens here where the data is at hand: BatchNorm's sums are taken as a
convolution's results leave it, normalise and ReLU are applied as the next one reads them, and the masks, sums and
shortcuts of the backward pass ride along with the gradients' convolutions. Sums go through partial results in a fixed
order, so the same step gives the same bits.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedcc.core.samples import View

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,index,arg-type"
# ruff: noqa: ARG004


def jit(kernel: Any) -> Any:
    """Compiled once for all sizes: whole numbers are not specialised on (a multiple of 16, one)."""
    sizes = {
        "ROWS",
        "H",
        "W",
        "HO",
        "WO",
        "HX",
        "WX",
        "TILES",
        "LANES",
        "COUNT",
        "N",
        "WINDOW",
        "BATCH",
        "ALL",
        "FIRST",
        "PAD",
    }
    names = inspect.signature(kernel).parameters
    fixed = {name for name, about in names.items() if about.annotation not in (inspect.Parameter.empty,)}
    return triton.jit(kernel, do_not_specialize=[name for name in names if name in sizes - fixed])


@jit
def _conv(
    x, w, y, part, pre_scale, pre_shift,
    ROWS, H, W, HO, WO, TILES,
    CIN: tl.constexpr, COUT: tl.constexpr, STRIDE: tl.constexpr, PRE: tl.constexpr, BM: tl.constexpr,
    SPAN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Y = conv3x3(x), or of relu(scale x + shift) with PRE, and per-tile sums of y and y^2 per channel.

    With SPAN 3 the three taps of a row, which lie side by side in memory, make one product.
    """
    tile, lane = tl.program_id(0), tl.program_id(1)
    m = tile * BM + tl.arange(0, BM)
    n, k = tl.arange(0, COUT), tl.arange(0, BK)
    j, own = k // CIN, (k < SPAN * CIN)[None, :]
    wo, ho, b = m % WO, (m // WO) % HO, m // (WO * HO)
    rows_in = (ROWS // (HO * WO)) * H * W
    x += lane.to(tl.int64) * rows_in * CIN
    w += lane * 9 * CIN * COUT
    if PRE:
        scale = tl.load(pre_scale + lane * CIN + k % CIN)[None, :]
        shift = tl.load(pre_shift + lane * CIN + k % CIN)[None, :]
    acc = tl.zeros((BM, COUT), dtype=tl.float32)
    for tap in tl.static_range(0, 9, SPAN):
        hi, wi = ho * STRIDE + tap // 3 - 1, wo * STRIDE + tap % 3 - 1
        column = wi[:, None] + j[None, :]
        inside = ((m < ROWS) & (hi >= 0) & (hi < H))[:, None] & (column >= 0) & (column < W) & own
        at = ((b * H + hi) * W + wi) * CIN
        a = tl.load(x + at[:, None] + k[None, :], mask=inside, other=0.0)
        if PRE:
            a = tl.where(inside, tl.maximum(a.to(tl.float32) * scale + shift, 0.0), 0.0).to(x.dtype.element_ty)
        taps = w + tap * CIN * COUT + k[:, None] * COUT + n[None, :]
        acc += tl.dot(a, tl.load(taps, mask=(k < SPAN * CIN)[:, None], other=0.0))
    kept = acc.to(y.dtype.element_ty)
    y += lane.to(tl.int64) * ROWS * COUT
    tl.store(y + m[:, None] * COUT + n[None, :], kept, mask=(m < ROWS)[:, None])
    value = tl.where((m < ROWS)[:, None], kept.to(tl.float32), 0.0)
    part += (lane * TILES + tile) * 2 * COUT
    tl.store(part + n, tl.sum(value, 0))
    tl.store(part + COUT + n, tl.sum(value * value, 0))


@jit
def _stem(x, w, y, part, ROWS, H, W, TILES, CIN: tl.constexpr, COUT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """The first convolution: 9 x CIN inputs in one product."""
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
    part += (lane * TILES + tile) * 2 * COUT
    tl.store(part + n, tl.sum(value, 0))
    tl.store(part + COUT + n, tl.sum(value * value, 0))


@jit
def _statistics(
    part, gamma, beta, running_mean, running_var, out, COUNT, momentum, eps, LANES,
    TILES: tl.constexpr, C: tl.constexpr, TRACK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Mean, 1/std, scale and shift of each channel from the tiles' sums; running statistics move on."""
    lane = tl.program_id(0)
    c, t = tl.arange(0, C), tl.arange(0, BT)
    first = tl.zeros((C,), dtype=tl.float32)
    second = tl.zeros((C,), dtype=tl.float32)
    part += lane * TILES * 2 * C
    for start in range(0, TILES, BT):
        rows = (start + t)[:, None]
        first += tl.sum(tl.load(part + rows * 2 * C + c[None, :], mask=rows < TILES, other=0.0), 0)
        second += tl.sum(tl.load(part + rows * 2 * C + C + c[None, :], mask=rows < TILES, other=0.0), 0)
    mean = first / COUNT
    var = tl.maximum(second / COUNT - mean * mean, 0.0)
    rstd = 1.0 / tl.sqrt(var + eps)
    at = lane * C + c
    scale = tl.load(gamma + at) * rstd
    tl.store(out + at, mean)
    tl.store(out + LANES * C + at, rstd)
    tl.store(out + 2 * LANES * C + at, scale)
    tl.store(out + 3 * LANES * C + at, tl.load(beta + at) - mean * scale)
    if TRACK:
        old_mean, old_var = tl.load(running_mean + at), tl.load(running_var + at)
        tl.store(running_mean + at, old_mean + momentum * (mean - old_mean))
        tl.store(running_var + at, old_var + momentum * (var * (COUNT / (COUNT - 1)) - old_var))


@jit
def _finish(
    y, stats, x, out, ROWS, H, W, HX, WX, LANES, C: tl.constexpr, CX: tl.constexpr, STRIDE: tl.constexpr,
    SHORTCUT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Out = relu(scale y + shift + shortcut(x)); the shortcut takes every STRIDE-th pixel and pads channels with 0."""
    tile, lane = tl.program_id(0), tl.program_id(1)
    m, c = tile * BM + tl.arange(0, BM), tl.arange(0, C)
    there = (m < ROWS)[:, None]
    base = lane.to(tl.int64) * ROWS * C
    at = m[:, None] * C + c[None, :]
    scale = tl.load(stats + 2 * LANES * C + lane * C + c)[None, :]
    shift = tl.load(stats + 3 * LANES * C + lane * C + c)[None, :]
    value = tl.load(y + base + at, mask=there, other=0.0).to(tl.float32) * scale + shift
    if SHORTCUT:
        w, h, b = m % W, (m // W) % H, m // (W * H)
        extra = (C - CX) // 2
        source = ((b * HX + h * STRIDE) * WX + w * STRIDE)[:, None] * CX + (c - extra)[None, :]
        own = there & ((c >= extra) & (c < extra + CX))[None, :]
        x += lane.to(tl.int64) * (ROWS // (H * W)) * HX * WX * CX
        value += tl.load(x + source, mask=own, other=0.0).to(tl.float32)
    tl.store(out + base + at, tl.maximum(value, 0.0).to(out.dtype.element_ty), mask=there)


@jit
def _sums(dout, out, y, stats, part, ROWS, TILES, LANES, C: tl.constexpr, BM: tl.constexpr):
    """Per-tile sums of g and g xhat, g the gradient behind the last ReLU."""
    tile, lane = tl.program_id(0), tl.program_id(1)
    m, c = tile * BM + tl.arange(0, BM), tl.arange(0, C)
    there = (m < ROWS)[:, None]
    at = lane.to(tl.int64) * ROWS * C + m[:, None] * C + c[None, :]
    g = tl.load(dout + at, mask=there, other=0.0).to(tl.float32)
    g = tl.where(tl.load(out + at, mask=there, other=0.0).to(tl.float32) > 0, g, 0.0)
    mean = tl.load(stats + lane * C + c)[None, :]
    rstd = tl.load(stats + LANES * C + lane * C + c)[None, :]
    xhat = (tl.load(y + at, mask=there, other=0.0).to(tl.float32) - mean) * rstd
    part += (lane * TILES + tile) * 2 * C
    tl.store(part + c, tl.sum(g, 0))
    tl.store(part + C + c, tl.sum(g * xhat, 0))


@jit
def _coefficients(
    part, gamma, stats, grads, COUNT, LANES, TILES: tl.constexpr, C: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """Gradients of shift and scale, and the numbers that BatchNorm's backward pass needs, from the tiles' sums."""
    lane = tl.program_id(0)
    c, t = tl.arange(0, C), tl.arange(0, BT)
    first = tl.zeros((C,), dtype=tl.float32)
    second = tl.zeros((C,), dtype=tl.float32)
    part += lane * TILES * 2 * C
    for start in range(0, TILES, BT):
        rows = (start + t)[:, None]
        first += tl.sum(tl.load(part + rows * 2 * C + c[None, :], mask=rows < TILES, other=0.0), 0)
        second += tl.sum(tl.load(part + rows * 2 * C + C + c[None, :], mask=rows < TILES, other=0.0), 0)
    at = lane * C + c
    tl.store(grads + at, second)  # of gamma
    tl.store(grads + LANES * C + at, first)  # of beta
    tl.store(grads + 2 * LANES * C + at, tl.load(gamma + at) * tl.load(stats + LANES * C + at))
    tl.store(grads + 3 * LANES * C + at, first / COUNT)
    tl.store(grads + 4 * LANES * C + at, second / COUNT)


@jit
def _through(
    g, out, y, stats, grads, dy, ROWS, LANES, C: tl.constexpr, MASKED: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """BatchNorm's backward pass: dy = c (g - mean g - xhat mean(g xhat)); MASKED: g still lies behind a ReLU."""
    tile, lane = tl.program_id(0), tl.program_id(1)
    m, c = tile * BM + tl.arange(0, BM), tl.arange(0, C)
    there = (m < ROWS)[:, None]
    at = lane.to(tl.int64) * ROWS * C + m[:, None] * C + c[None, :]
    value = tl.load(g + at, mask=there, other=0.0).to(tl.float32)
    if MASKED:
        value = tl.where(tl.load(out + at, mask=there, other=0.0).to(tl.float32) > 0, value, 0.0)
    own = lane * C + c
    mean, rstd = tl.load(stats + own)[None, :], tl.load(stats + LANES * C + own)[None, :]
    factor = tl.load(grads + 2 * LANES * C + own)[None, :]
    k1, k2 = tl.load(grads + 3 * LANES * C + own)[None, :], tl.load(grads + 4 * LANES * C + own)[None, :]
    xhat = (tl.load(y + at, mask=there, other=0.0).to(tl.float32) - mean) * rstd
    tl.store(dy + at, (factor * (value - k1 - xhat * k2)).to(dy.dtype.element_ty), mask=there)


@jit
def _conv_back(
    dy, w, dx, y, stats, part, dout, out,
    ROWS, H, W, HO, WO, TILES, LANES,
    CIN: tl.constexpr, COUT: tl.constexpr, STRIDE: tl.constexpr, MODE: tl.constexpr, BM: tl.constexpr,
    SPAN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradient of a convolution's input; SPAN 3 (stride 1 only) as in :func:`_conv`.

    MODE 0: the input was relu(scale y + shift); the gradient is masked and its sums with xhat are taken. MODE 1: the
    input went into the block's shortcut too, whose gradient (dout behind the last ReLU) is added.
    """
    tile, lane = tl.program_id(0), tl.program_id(1)
    m = tile * BM + tl.arange(0, BM)
    n, k = tl.arange(0, CIN), tl.arange(0, BK)
    j, own = k // COUT, k < SPAN * COUT
    wi, hi, b = m % W, (m // W) % H, m // (W * H)
    rows_out = (ROWS // (H * W)) * HO * WO
    dy += lane.to(tl.int64) * rows_out * COUT
    w += lane * 9 * CIN * COUT
    acc = tl.zeros((BM, CIN), dtype=tl.float32)
    for tap in tl.static_range(0, 9, SPAN):
        # from left to right in dy is from right to left in the taps
        h, v = hi + 1 - tap // 3, wi + 1 - tap % 3 - (SPAN - 1)
        inside = (m < ROWS) & (h >= 0) & (h % STRIDE == 0)
        if STRIDE > 1:
            inside = inside & (v >= 0) & (v % STRIDE == 0)
        h, v = h // STRIDE, v // STRIDE
        column = v[:, None] + j[None, :]
        there = (inside & (h < HO))[:, None] & (column >= 0) & (column < WO) & own[None, :]
        at = ((b * HO + h) * WO + v) * COUT
        a = tl.load(dy + at[:, None] + k[None, :], mask=there, other=0.0)
        source = (((tap + SPAN - 1 - j) * CIN) * COUT + k % COUT)[:, None] + n[None, :] * COUT
        acc += tl.dot(a, tl.load(w + source, mask=own[:, None], other=0.0))
    there = (m < ROWS)[:, None]
    at = lane.to(tl.int64) * ROWS * CIN + m[:, None] * CIN + n[None, :]
    if MODE == 0:
        own = lane * CIN + n
        value = tl.load(y + at, mask=there, other=0.0).to(tl.float32)
        scale = tl.load(stats + 2 * LANES * CIN + own)[None, :]
        shift = tl.load(stats + 3 * LANES * CIN + own)[None, :]
        g = tl.where((value * scale + shift > 0) & there, acc, 0.0).to(dx.dtype.element_ty)
        tl.store(dx + at, g, mask=there)
        g = g.to(tl.float32)
        xhat = (value - tl.load(stats + own)[None, :]) * tl.load(stats + LANES * CIN + own)[None, :]
        part += (lane * TILES + tile) * 2 * CIN
        tl.store(part + n, tl.sum(g, 0))
        tl.store(part + CIN + n, tl.sum(g * xhat, 0))
    else:
        extra = (COUT - CIN) // 2
        source = ((b * HO + hi // STRIDE) * WO + wi // STRIDE)[:, None] * COUT + (n + extra)[None, :]
        own = there & ((hi % STRIDE == 0) & (wi % STRIDE == 0))[:, None]
        where = lane.to(tl.int64) * rows_out * COUT + source
        g = tl.load(dout + where, mask=own, other=0.0).to(tl.float32)
        acc += tl.where(tl.load(out + where, mask=own, other=0.0).to(tl.float32) > 0, g, 0.0)
        tl.store(dx + at, acc.to(dx.dtype.element_ty), mask=there)


@jit
def _weights(
    x, dy, part, pre_scale, pre_shift, ROWS, H, W, HO, WO,
    PER: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, STRIDE: tl.constexpr, PRE: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The gradient of a convolution's weights: EACH rows of three taps and one share of the pixels per program."""
    split, row, lane = tl.program_id(0), tl.program_id(1) * EACH, tl.program_id(2)
    LANES = tl.num_programs(2)
    n, k = tl.arange(0, COUT), tl.arange(0, BK)
    j, own = k // CIN, (k < 3 * CIN)[None, :]
    rows_in = (ROWS // (HO * WO)) * H * W
    x += lane.to(tl.int64) * rows_in * CIN
    dy += lane.to(tl.int64) * ROWS * COUT
    if PRE:
        scale = tl.load(pre_scale + lane * CIN + k % CIN)[None, :]
        shift = tl.load(pre_shift + lane * CIN + k % CIN)[None, :]
    first = tl.zeros((BK, COUT), dtype=tl.float32)
    second = tl.zeros((BK, COUT), dtype=tl.float32)
    third = tl.zeros((BK, COUT), dtype=tl.float32)
    for step in range(0, PER):
        m = (split * PER + step) * BM + tl.arange(0, BM)
        wo, ho, b = m % WO, (m // WO) % HO, m // (WO * HO)
        wi = wo * STRIDE - 1
        column = wi[:, None] + j[None, :]
        beside = (m < ROWS)[:, None] & (column >= 0) & (column < W) & own
        d = tl.load(dy + m[:, None] * COUT + n[None, :], mask=(m < ROWS)[:, None], other=0.0)
        for i in tl.static_range(EACH):
            hi = ho * STRIDE + row + i - 1
            inside = ((hi >= 0) & (hi < H))[:, None] & beside
            at = ((b * H + hi) * W + wi) * CIN
            a = tl.load(x + at[:, None] + k[None, :], mask=inside, other=0.0)
            if PRE:
                a = tl.where(inside, tl.maximum(a.to(tl.float32) * scale + shift, 0.0), 0.0).to(x.dtype.element_ty)
            product = tl.dot(tl.trans(a), d)
            if i == 0:
                first += product
            elif i == 1:
                second += product
            else:
                third += product
    part += ((split * LANES + lane) * 9 + row * 3) * CIN * COUT + k[:, None] * COUT + n[None, :]
    tl.store(part, first, mask=(k < 3 * CIN)[:, None])
    if EACH == 3:
        tl.store(part + 3 * CIN * COUT, second, mask=(k < 3 * CIN)[:, None])
        tl.store(part + 6 * CIN * COUT, third, mask=(k < 3 * CIN)[:, None])


@jit
def _stem_weights(
    x, dy, part, ROWS, H, W,
    PER: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradient of the first convolution's weights."""
    split, lane = tl.program_id(0), tl.program_id(1)
    LANES = tl.num_programs(1)
    n, k = tl.arange(0, COUT), tl.arange(0, BK)
    tap, c = k // CIN, k % CIN
    x += lane.to(tl.int64) * ROWS * CIN
    dy += lane.to(tl.int64) * ROWS * COUT
    acc = tl.zeros((BK, COUT), dtype=tl.float32)
    for step in range(0, PER):
        m = (split * PER + step) * BM + tl.arange(0, BM)
        wo, ho, b = m % W, (m // W) % H, m // (W * H)
        hi, wi = ho[:, None] + (tap // 3)[None, :] - 1, wo[:, None] + (tap % 3)[None, :] - 1
        inside = (m < ROWS)[:, None] & (k < 9 * CIN)[None, :] & (hi >= 0) & (hi < H) & (wi >= 0) & (wi < W)
        a = tl.load(x + ((b[:, None] * H + hi) * W + wi) * CIN + c[None, :], mask=inside, other=0.0)
        d = tl.load(dy + m[:, None] * COUT + n[None, :], mask=(m < ROWS)[:, None], other=0.0)
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
CONV = {16: (128, 3, 4), 32: (64, 3, 4), 64: (64, 1, 4)}
BACK = {16: (128, 3, 4), 32: (64, 3, 4), 64: (64, 1, 4)}
SHARES = {16: (128, 16, 1, 2), 32: (64, 16, 1, 2), 64: (64, 16, 1, 4)}
FLAT = {16: 128, 32: 64, 64: 32}
WARPS = 4


def _tiles(rows: int, size: int) -> int:
    return -(-rows // size)


class Sizes:
    """Shapes of one convolution: images [lanes, batch, H, W, cin] to [lanes, batch, H / stride, W / stride, cout]."""

    def __init__(self, x: Tensor, cout: int, stride: int):
        self.lanes, self.batch, self.h, self.w, self.cin = x.shape
        self.cout, self.stride = cout, stride
        self.ho, self.wo = -(-self.h // stride), -(-self.w // stride)
        self.rows = self.batch * self.ho * self.wo
        self.wider = max(self.cin, cout)


def conv(x: Tensor, w: Tensor, cout: int, stride: int, pre: Tensor | None) -> tuple[Tensor, Tensor]:
    """The convolution of x, or of relu(scale x + shift) with ``pre`` (statistics of x), and its tiles' sums."""
    s = Sizes(x, cout, stride)
    tile, span, warps = CONV[s.wider]
    tiles = _tiles(s.rows, tile)
    y = torch.empty(s.lanes, s.batch, s.ho, s.wo, cout, dtype=x.dtype, device=x.device)
    part = torch.empty(s.lanes, tiles, 2, cout, dtype=torch.float32, device=x.device)
    scale, shift = (pre[2], pre[3]) if pre is not None else (part, part)
    _conv[(tiles, s.lanes)](
        x, w, y, part, scale, shift, s.rows, s.h, s.w, s.ho, s.wo, tiles,
        CIN=s.cin, COUT=cout, STRIDE=stride, PRE=pre is not None, BM=tile,
        SPAN=span, BK=triton.next_power_of_2(span * s.cin), num_warps=warps,
    )  # fmt: skip
    return y, part


def stem(x: Tensor, w: Tensor, cout: int) -> tuple[Tensor, Tensor]:
    lanes, batch, h, width, cin = x.shape
    rows, tile = batch * h * width, 128
    tiles = _tiles(rows, tile)
    y = torch.empty(lanes, batch, h, width, cout, dtype=x.dtype, device=x.device)
    part = torch.empty(lanes, tiles, 2, cout, dtype=torch.float32, device=x.device)
    block = 32 if cin == 3 else 16
    _stem[(tiles, lanes)](x, w, y, part, rows, h, width, tiles, CIN=cin, COUT=cout, BM=tile, BK=block, num_warps=WARPS)
    return y, part


def statistics(part: Tensor, count: int, norm: Norms, track: bool) -> Tensor:
    """[4, lanes, C]: mean, 1/std, scale, shift."""
    lanes, tiles, _, c = part.shape
    out = torch.empty(4, lanes, c, dtype=torch.float32, device=part.device)
    _statistics[(lanes,)](
        part, norm.gamma, norm.beta, norm.mean, norm.var, out, count, norm.momentum, norm.eps, lanes,
        TILES=tiles, C=c, TRACK=track, BT=64, num_warps=WARPS,
    )  # fmt: skip
    return out


class Norms:
    """A BatchNorm's tensors, [lanes, C] each."""

    def __init__(self, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float):
        self.gamma, self.beta, self.mean, self.var = gamma, beta, mean, var
        self.momentum, self.eps = momentum, eps


def finish(y: Tensor, stats: Tensor, x: Tensor | None, stride: int) -> Tensor:
    lanes, batch, h, w, c = y.shape
    rows, out, tile = batch * h * w, torch.empty_like(y), FLAT[c]
    source = x if x is not None else y
    _finish[(_tiles(rows, tile), lanes)](
        y, stats, source, out, rows, h, w, source.shape[2], source.shape[3], lanes,
        C=c, CX=source.shape[-1], STRIDE=stride, SHORTCUT=x is not None, BM=tile, num_warps=WARPS,
    )  # fmt: skip
    return out


def sums(dout: Tensor, out: Tensor, y: Tensor, stats: Tensor) -> Tensor:
    lanes, batch, h, w, c = y.shape
    rows, tile = batch * h * w, FLAT[c]
    tiles = _tiles(rows, tile)
    part = torch.empty(lanes, tiles, 2, c, dtype=torch.float32, device=y.device)
    _sums[(tiles, lanes)](dout, out, y, stats, part, rows, tiles, lanes, C=c, BM=tile, num_warps=WARPS)
    return part


def coefficients(part: Tensor, gamma: Tensor, stats: Tensor, count: int) -> Tensor:
    """[5, lanes, C]: the gradients of gamma and beta, and three numbers for :func:`through`."""
    lanes, tiles, _, c = part.shape
    grads = torch.empty(5, lanes, c, dtype=torch.float32, device=part.device)
    _coefficients[(lanes,)](part, gamma, stats, grads, count, lanes, TILES=tiles, C=c, BT=64, num_warps=WARPS)
    return grads


def through(g: Tensor, out: Tensor | None, y: Tensor, stats: Tensor, grads: Tensor) -> Tensor:
    lanes, batch, h, w, c = y.shape
    rows, dy, tile = batch * h * w, torch.empty_like(y), FLAT[c]
    _through[(_tiles(rows, tile), lanes)](
        g, out if out is not None else g, y, stats, grads, dy, rows, lanes,
        C=c, MASKED=out is not None, BM=tile, num_warps=WARPS,
    )  # fmt: skip
    return dy


def conv_back(
    dy: Tensor,
    w: Tensor,
    like: Tensor,
    stride: int,
    inner: tuple[Tensor, Tensor] | None,
    outer: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """The gradient of a convolution's input: ``inner`` (y, stats) before it, or ``outer`` (dout, out) around it."""
    lanes, batch, h, width, cin = like.shape
    _, _, ho, wo, cout = dy.shape
    tile, span, warps = BACK[max(cin, cout)]
    span = span if stride == 1 else 1
    rows = batch * h * width
    tiles = _tiles(rows, tile)
    dx = torch.empty_like(like)
    part = torch.empty(lanes, tiles, 2, cin, dtype=torch.float32, device=dy.device)
    y, stats = inner or (dy, part)
    dout, out = outer or (dy, dy)
    _conv_back[(tiles, lanes)](
        dy, w, dx, y, stats, part, dout, out, rows, h, width, ho, wo, tiles, lanes,
        CIN=cin, COUT=cout, STRIDE=stride, MODE=0 if inner else 1, BM=tile,
        SPAN=span, BK=triton.next_power_of_2(span * cout), num_warps=warps,
    )  # fmt: skip
    return dx, part


def weights(x: Tensor, dy: Tensor, stride: int, pre: Tensor | None) -> Tensor:
    """The gradient of a convolution's weights, [lanes, 9, cin, cout], in fp32."""
    s = Sizes(x, dy.shape[-1], stride)
    tile, shares, each, warps = SHARES[s.wider]
    per = max(1, _tiles(s.rows, tile) // shares)
    splits = _tiles(s.rows, tile * per)
    part = torch.empty(splits, s.lanes, 9, s.cin, s.cout, dtype=torch.float32, device=x.device)
    scale, shift = (pre[2], pre[3]) if pre is not None else (part, part)
    _weights[(splits, 3 // each, s.lanes)](
        x, dy, part, scale, shift, s.rows, s.h, s.w, s.ho, s.wo,
        PER=per, CIN=s.cin, COUT=s.cout, STRIDE=stride, PRE=pre is not None, BM=tile,
        BK=triton.next_power_of_2(3 * s.cin), EACH=each, num_warps=warps,
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
    """A second stream for the gradients of weights, which nothing but Adam waits for."""

    def __init__(self, device: torch.device):
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.held: list[Any] = []  # in use over there: freed here, their memory would be taken at once

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


class Stem(torch.autograd.Function):
    """relu(bn(conv(x))) for images [lanes, batch, H, W, channels]; x needs no gradient.

    ``w`` is there for its gradient alone; the kernels read ``w_``, the same weights as :func:`packed` gives them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, gamma: Tensor, beta: Tensor, w_: Tensor,
        norm: Norms, track: bool, beside: Beside,
    ) -> Tensor:  # fmt: skip
        y, part = stem(x, w_, w.shape[1])
        stats = statistics(part, y[0, ..., 0].numel(), norm, track)
        out = finish(y, stats, None, 1)
        ctx.save_for_backward(x, y, out, stats, gamma)
        ctx.beside = beside
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        x, y, out, stats, gamma = ctx.saved_tensors
        dout = dout.contiguous()
        grads = coefficients(sums(dout, out, y, stats), gamma, stats, y[0, ..., 0].numel())
        dy = through(dout, out, y, stats, grads)
        dw = unpacked(stem_weights(x, dy))
        ctx.beside.join()  # the stem is the last to be asked for gradients
        return None, dw, grads[0], grads[1], None, None, None, None


class Residual(torch.autograd.Function):
    """A residual block: relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x)); weights as in :class:`Stem`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, gamma1: Tensor, beta1: Tensor, w2: Tensor, gamma2: Tensor, beta2: Tensor,
        w1_: Tensor, w2_: Tensor, norm1: Norms, norm2: Norms, stride: int, track: bool, beside: Beside,
    ) -> Tensor:  # fmt: skip
        cout = w1.shape[1]
        y1, part1 = conv(x, w1_, cout, stride, None)
        count = y1[0, ..., 0].numel()
        stats1 = statistics(part1, count, norm1, track)
        y2, part2 = conv(y1, w2_, cout, 1, stats1)
        stats2 = statistics(part2, count, norm2, track)
        out = finish(y2, stats2, x, stride)
        ctx.save_for_backward(x, y1, y2, out, stats1, stats2, w1_, w2_, gamma1, gamma2)
        ctx.stride, ctx.beside = stride, beside
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        x, y1, y2, out, stats1, stats2, w1, w2, gamma1, gamma2 = ctx.saved_tensors
        count, dout = y1[0, ..., 0].numel(), dout.contiguous()
        grads2 = coefficients(sums(dout, out, y2, stats2), gamma2, stats2, count)
        dy2 = through(dout, out, y2, stats2, grads2)
        dw2 = ctx.beside.weights(y1, dy2, 1, stats1)
        g1, part1 = conv_back(dy2, w2, y1, 1, (y1, stats1), None)
        grads1 = coefficients(part1, gamma1, stats1, count)
        dy1 = through(g1, None, y1, stats1, grads1)
        dw1 = ctx.beside.weights(x, dy1, ctx.stride, None)
        dx, _ = conv_back(dy1, w1, x, ctx.stride, None, (dout, out))
        return dx, dw1, grads1[0], grads1[1], dw2, grads2[0], grads2[1], *([None] * 7)
