"""The kernels for residual trunks, on a GPU or emulated on a CPU (the fixture `device`).

One by one they get whole numbers and a few halves, so that nothing is rounded but where bf16 is stored: what they give
must be what torch gives in float64, to the bit. Then a whole trunk, against layers of torch that round where it rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedcc.core.model import Arch
from fedcc.core.requests import Fit, Frozen, Init, Predict, Recipe
from fedcc.core.rng import Key
from fedcc.core.samples import Samples, View
from fedcc.core.step import Loss, Step
from fedcc.engine import cuda
from fedcc.engine import trunk_kernels as kernels
from fedcc.engine.fused import Fused
from fedcc.engine.jobs import Job
from fedcc.engine.plain import Plain
from fedcc.engine.stack import Stacked, stacked_state
from fedcc.engine.trunk import FastTrunk, SideStreams, Tape, backward, forward
from fedcc.engine.trunk_kernels import (
    IMAGE,
    NORM,
    PLAIN,
    RESIDUAL,
    ConvInput,
    ConvOutput,
    Layer,
    NormGrad,
    Tiles,
    Tuning,
)
from fedcc.gradients import Ascent, Clip
from fedcc.losses import CrossEntropy, Proximal, SoftCrossEntropy
from fedcc.nets import ResNet, build

LANES, EPS, MOMENTUM = 2, 0.25, 0.5
on_gpu = pytest.mark.skipif(not cuda.available(torch.device("cuda")), reason="no GPU with NVRTC")
sizes = st.integers(1, 40)


@given(sizes, sizes, sizes, st.integers(2, 600), st.floats(0, 64), st.booleans(), st.floats(0.1, 600))
def test_tiles_and_programs_cover_every_row_of_every_image_once(
    batch: int, high: int, wide: int, target: int, least: float, even: bool, wanted: float
) -> None:
    tiles = Tiles.divide(batch, high, wide, target, least, even)
    per, bands = tiles.per_program(wanted), -(-high // tiles.rows)
    assert -(-tiles.per_lane // per) <= max(1, wanted)
    seen = []
    for program in range(-(-tiles.per_lane // per)):
        own = range(program * per, min(tiles.per_lane, (program + 1) * per))
        assert own
        for tile in own:  # as the kernels read a tile's number
            image, row = tile // bands * tiles.images, tile % bands * tiles.rows
            seen += [(image + i, row + r) for i in range(tiles.images) for r in range(tiles.rows)]
    inside = [(image, row) for image, row in seen if image < batch and row < high]
    assert sorted(inside) == [(image, row) for image in range(batch) for row in range(high)]
    assert tiles.pixels == tiles.images * tiles.rows * wide
    assert tiles.images == 1 or tiles.rows == high  # so that a tile's pixels lie in a row
    assert not (even and bands > 1 and tiles.rows % 2)


# ------------------------------------------------------------------------------------------------------ whole numbers


class Draw:
    """Whole numbers on a device."""

    def __init__(self, device: torch.device):
        self.device, self.generator = device, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, least: int = -2, most: int = 2) -> Tensor:
        return torch.randint(least, most + 1, shape, generator=self.generator).to(self.device, torch.float32)

    def low(self, *shape: int, least: int = -3, most: int = 3) -> Tensor:
        return self(*shape, least=least, most=most).bfloat16()

    def rows(self, means: list[Tensor], pixels: int) -> Tensor:
        """Sums of programs, [lanes, programs, 2, C], for two means [lanes, C] over pixels."""
        totals = torch.stack(means, 1) * pixels
        rows = self(LANES, 37, 2, totals.shape[-1], least=-50, most=50)
        rows[:, -1] += totals - rows.sum(1)
        return rows

    def made(self, batch: int, high: int, wide: int, cin: int, cout: int) -> ConvOutput:
        """A convolution with sums and statistics: means are whole numbers, 1/std is 1 or 1/2."""
        weight = self.low(LANES, 9, cin, cout, least=-1, most=1)
        gamma, beta, mean, running, var = (self(LANES, cout) for _ in range(5))
        rstd = 0.5 ** self(LANES, cout, least=0, most=1)
        sums = self.rows([mean, rstd**-2 - EPS + mean**2], batch * high * wide)
        stats = torch.stack([mean, rstd, gamma * rstd, beta - mean * gamma * rstd])
        y = self.low(LANES, batch, high, wide, cout)
        return ConvOutput(y, sums, Layer(weight, gamma, beta, running, var, MOMENTUM, EPS), stats)

    def back(self, made: ConvOutput) -> tuple[NormGrad, Tensor]:
        """A gradient behind a BatchNorm, and that before it: what the convolution's gradients are made of."""
        first, second = (self(LANES, made.y.shape[-1], least=-1, most=1) for _ in range(2))
        back = NormGrad(self.low(*made.y.shape), self.rows([first, second], made.y[0, ..., 0].numel()))
        mean, rstd, scale, _ = (wide(t) for t in made.stats)
        dy = scale * (exact(back.g) - wide(first) - (exact(made.y) - mean) * rstd * wide(second))
        return back, rounded(dy)


def exact(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


def wide(tensor: Tensor) -> Tensor:
    """A number per channel, [lanes, C], for images."""
    return exact(tensor)[:, None, None, None]


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().double()


def same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.equal(found.cpu(), expected.to(found.dtype))


def over_pixels(*images: Tensor) -> Tensor:
    """[lanes, 2, C]"""
    return torch.stack([image.sum((1, 2, 3)) for image in images], 1)


def shortcut(x: Tensor, like: Tensor) -> Tensor:
    stride, extra = 1 if x.shape[2] == like.shape[2] else 2, (like.shape[-1] - x.shape[-1]) // 2
    return F.pad(exact(x)[:, :, ::stride, ::stride], (extra, extra))


def activations(read: ConvInput) -> Tensor:
    if read.layer is None:
        return exact(read.tensor)
    z = wide(read.layer.stats[2]) * exact(read.layer.y) + wide(read.layer.stats[3])
    return rounded(F.relu(z if read.shortcut is None else z + shortcut(read.shortcut, z)))


def convolved(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Images [lanes, batch, H, W, in] with weights [lanes, 9, in, out]."""
    filters = weight.unflatten(1, (3, 3)).permute(0, 4, 3, 1, 2)[:, :, : x.shape[-1]]
    each = zip(x.permute(0, 1, 4, 2, 3), filters, strict=True)
    out = [F.conv2d(images, own, stride=stride, padding=1) for images, own in each]
    return torch.stack(out).permute(0, 1, 3, 4, 2)


def read_by(draw: Draw, source: int, batch: int, high: int, across: int, channels: int) -> ConvInput:
    """What a convolution reads: images, a layer, or a layer with a shortcut (from a larger image but for 16)."""
    if source == IMAGE:
        return ConvInput(draw.low(LANES, batch, high, across, channels))
    made = draw.made(batch, high, across, 16, channels)
    if source == NORM:
        return ConvInput(layer=made)
    x = (high, across, 16) if channels == 16 else (2 * high - 1, 2 * across, channels // 2)
    return ConvInput(layer=made, shortcut=draw.low(LANES, batch, *x, least=0))


def yet_to_be(read: ConvInput) -> ConvInput:
    """The same, its statistics not known, running ones in copies."""
    if read.layer is None:
        return read
    norm = replace(read.layer.norm, mean=read.layer.norm.mean.clone(), var=read.layer.norm.var.clone())
    return read._replace(layer=replace(read.layer, norm=norm, stats=torch.full_like(read.layer.stats, torch.nan)))


def check_statistics(read: ConvInput, found: ConvInput, track: bool) -> None:
    """Those that the way back needs, and the running ones."""
    if read.layer is None or found.layer is None:
        return
    same(found.layer.stats, exact(read.layer.stats))
    old, new = read.layer.norm, found.layer.norm
    if not track:
        same(new.mean, old.mean.cpu())
        same(new.var, old.var.cpu())
        return
    pixels = read.tensor[0, ..., 0].numel()
    mean, rstd = exact(read.layer.stats[:2])
    same(new.mean, exact(old.mean).lerp(mean, MOMENTUM))
    var = (rstd**-2 - EPS) * pixels / (pixels - 1)
    torch.testing.assert_close(exact(new.var), exact(old.var).lerp(var, MOMENTUM), rtol=1e-6, atol=1e-6)


def shared_out(monkeypatch: pytest.MonkeyPatch, pixels: int, depth: int, programs: int) -> None:
    """Have every kernel work so: tiles of about so many pixels, about so many programs a lane; several loads: ahead."""
    tuning = Tuning(pixels, 1, depth, programs * LANES, prefetch=depth > 1, min_tiles=0)
    monkeypatch.setattr(kernels, "TUNING", dict.fromkeys(kernels.TUNING, tuning))
    monkeypatch.setattr(kernels, "FEW", 0)


# ------------------------------------------------------------------------------------------------------ one by one

CONVS = [  # source, channels in and out, size, stride, batch; pixels of a tile, loads under way; tiles, programs
    (IMAGE, 3, 16, (9, 7), 1, 3, (20, 1), (9, 5)),  # bands of 3 rows
    (IMAGE, 4, 16, (6, 6), 1, 5, (80, 4), (3, 2)),  # two images a tile
    (NORM, 32, 32, (10, 13), 1, 3, (130, 2), (3, 2)),  # more than 16 pixels a warp
    (RESIDUAL, 16, 32, (9, 12), 2, 3, (12, 4), (9, 3)),  # an odd number of rows: the last one is half a stride
    (RESIDUAL, 32, 64, (8, 6), 2, 5, (24, 2), (3, 2)),
    (NORM, 64, 64, (5, 7), 1, 3, (70, 4), (2, 2)),
]


@pytest.mark.parametrize(("source", "cin", "cout", "size", "stride", "batch", "how", "shares"), CONVS)
def test_a_convolution(
    source: int, cin: int, cout: int, size: tuple[int, int], stride: int, batch: int, how: tuple[int, int],
    shares: tuple[int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Results, their sums, what is kept, and statistics, running ones too."""
    draw, keeps, track = Draw(device), source != IMAGE and stride == 2, cin != 32
    shared_out(monkeypatch, *how, shares[1])
    read = read_by(draw, source, batch, *size, cin)
    layer = draw.made(1, 1, 1, max(cin, 16), cout).norm
    if cin < 16:
        layer.weight[:, :, cin:] = 0  # as the trunk packs them
    given = yet_to_be(read)
    made, kept = kernels.conv(given, layer, stride, track, keeps)
    expected = rounded(convolved(activations(read), exact(layer.weight), stride))
    assert (Tiles.divide(batch, *expected.shape[2:4], how[0], 0).per_lane, made.sums.shape[1]) == shares
    same(made.y, expected)
    same(made.sums.sum(1), over_pixels(expected, expected**2))
    assert (kept is not None) == keeps
    if kept is not None:
        same(kept, activations(read))
    check_statistics(read, given, track)


def test_what_is_not_a_number_passes_a_relu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a loss tells of it."""
    draw = Draw(device)
    shared_out(monkeypatch, 130, 2, 2)
    read = read_by(draw, NORM, 3, 10, 13, 32)
    read.tensor[0, 1, 4, 6, 7] = torch.nan
    made, _ = kernels.conv(yet_to_be(read), draw.made(1, 1, 1, 32, 32).norm, 1, False, False)
    expected = torch.zeros(made.y.shape, dtype=torch.bool)
    expected[0, 1, 3:6, 5:8] = True
    assert torch.equal(made.y.isnan().cpu(), expected)


BACKS = [  # channels in and out, size, stride, whether the input went into a shortcut too, batch; as above
    (16, 16, (9, 7), 1, False, 3, (20, 1), (9, 5)),
    (16, 32, (9, 11), 2, True, 3, (30, 2), (9, 3)),  # bands of 4 rows, and one of a single row
    (32, 32, (7, 6), 1, True, 5, (90, 4), (3, 2)),
    (32, 64, (8, 6), 2, True, 5, (140, 2), (3, 2)),  # two images a tile, more than 16 pixels a warp
    (64, 64, (5, 5), 1, False, 5, (70, 2), (3, 2)),
]


@pytest.mark.parametrize(("cin", "cout", "size", "stride", "outer", "batch", "how", "shares"), BACKS)
def test_the_way_back_through_a_convolution(
    cin: int, cout: int, size: tuple[int, int], stride: int, outer: bool, batch: int, how: tuple[int, int],
    shares: tuple[int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    draw = Draw(device)
    shared_out(monkeypatch, *how, shares[1])
    before = draw.made(batch, *size, 16, cin)
    made = draw.made(batch, *(-(-n // stride) for n in size), cin, cout)
    back, dy = draw.back(made)
    x, other = draw.low(*before.y.shape, least=0), draw.low(*made.y.shape)
    found = kernels.conv_grad(back, made, stride, before, (x, other) if outer else None)
    zero = torch.zeros(before.y.shape, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(convolved(zero, exact(made.norm.weight), stride), zero, dy)
    g, positive = rounded(g), activations(ConvInput(layer=before)) > 0
    if outer:
        extra = (cout - cin) // 2
        g[:, :, ::stride, ::stride] += exact(other)[..., extra : extra + cin]
        positive = exact(x) > 0
    expected = rounded(g * positive)
    mean, rstd = wide(before.stats[0]), wide(before.stats[1])
    assert (Tiles.divide(batch, *size, how[0], 0, even=stride == 2).per_lane, found.sums.shape[1]) == shares
    same(found.g, expected)
    same(found.sums.sum(1), over_pixels(expected, expected * (exact(before.y) - mean) * rstd))


WEIGHTS = [  # source, channels in and out, size, stride, batch; as above
    (IMAGE, 3, 16, (9, 7), 1, 3, (20, 1), (9, 5)),
    (NORM, 16, 32, (6, 7), 1, 5, (90, 4), (3, 2)),
    (PLAIN, 32, 32, (9, 12), 2, 3, (12, 2), (9, 3)),
    (PLAIN, 32, 64, (8, 6), 2, 5, (24, 2), (3, 2)),
    (NORM, 64, 64, (5, 5), 1, 5, (70, 2), (3, 2)),
]


@pytest.mark.parametrize(("source", "cin", "cout", "size", "stride", "batch", "how", "shares"), WEIGHTS)
def test_the_gradients_of_a_layer(
    source: int, cin: int, cout: int, size: tuple[int, int], stride: int, batch: int, how: tuple[int, int],
    shares: tuple[int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Those of its weights, scales and shifts."""
    draw, blocks = Draw(device), max(1, cin // 32) * max(1, cout // 32)
    shared_out(monkeypatch, *how, shares[1] * blocks)
    read = read_by(draw, NORM if source == NORM else IMAGE, batch, *size, cin)
    made = draw.made(batch, *(-(-n // stride) for n in size), max(cin, 16), cout)
    back, dy = draw.back(made)
    weight, gamma, beta = kernels.weight_grads(read.tensor, read.layer, back, made, stride, cin)
    zero = torch.zeros(made.norm.weight.shape, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(convolved(activations(read), zero, stride), zero, dy)
    tiles = Tiles.divide(batch, *made.y.shape[2:4], how[0], 0)
    assert (tiles.per_lane, -(-tiles.per_lane // tiles.per_program(shares[1]))) == shares
    same(weight, expected[:, :, :cin].permute(0, 3, 2, 1).unflatten(3, (3, 3)))
    same(torch.stack([beta, gamma], 1), exact(back.sums).sum(1))


@pytest.mark.parametrize(("narrow", "before", "track"), [(64, (4, 2), True), (32, (7, 3), False)])
def test_the_ends_of_a_trunk(
    narrow: int, before: tuple[int, int], track: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features and their way back, with a shortcut that is the identity and one that is not."""
    draw, batch, high, across = Draw(device), 5, 4, 2
    shared_out(monkeypatch, 20, 1, 1)  # two images a program
    x = draw.low(LANES, batch, *before, narrow, least=0)
    read = ConvInput(layer=draw.made(batch, high, across, 16, 64), shortcut=x)
    given, expected = yet_to_be(read), activations(read)
    features, kept = kernels.features(given, track)
    same(kept, expected)
    same(features, expected.mean((2, 3)))
    check_statistics(read, given, track)
    made, df = read.layer, high * across * draw(LANES, batch, 64)
    assert made is not None
    back = kernels.features_grad(df, kept, made)
    g = (expected > 0) * exact(df)[:, :, None, None] / (high * across)
    assert back.sums.shape[1] == 3
    same(back.g, g)
    same(back.sums.sum(1), over_pixels(g, g * (exact(made.y) - wide(made.stats[0])) * wide(made.stats[1])))


def test_numbers_are_gathered_in_bf16(device: torch.device) -> None:
    flat = torch.randn(1500, generator=torch.Generator().manual_seed(0)).to(device)
    order = torch.randint(-1, len(flat), (1002,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    order[7] = -1
    same(kernels.gather(flat, order.to(device)), torch.where(order < 0, 0, flat.cpu()[order.long()]))


# ------------------------------------------------------------------------------------------------------ a whole trunk


class Stored(torch.autograd.Function):
    """What a kernel stored, which must be the given in bf16 but for the order of a sum; its gradient is in bf16 too.

    So the layers that follow start from the same numbers as the kernels that follow: no ReLU decides otherwise.
    """

    @staticmethod
    def forward(_: object, x: Tensor, stored: Tensor) -> Tensor:
        stored = stored.detach().cpu().permute(0, 3, 1, 2)
        near(stored, in_bf16(x), 1e-3)
        return stored.float()

    @staticmethod
    def backward(_: object, g: Tensor) -> tuple[Tensor, None]:
        return in_bf16(g), None


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return in_bf16(x)

    @staticmethod
    def backward(_: object, g: Tensor) -> Tensor:
        return in_bf16(g)


def in_bf16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()


def trunk(x: Tensor, tensors: dict[str, Tensor], tape: Tape, lane: int) -> Tensor:
    """The features of one network by torch's layers, rounded where the kernels round; running statistics move."""

    def layer(x: Tensor, conv: str, norm: str, stride: int, made: ConvOutput) -> Tensor:
        weight = tensors[f"{conv}.weight"]
        weight = weight + (in_bf16(weight) - weight).detach()
        y = Stored.apply(F.conv2d(Rounded.apply(x), weight, stride=stride, padding=1), made.y[lane])
        names = [f"{norm}.{part}" for part in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(y, *(tensors[name] for name in names), True, 0.1, 1e-5)

    a = F.relu(layer(x, "conv", "bn", 1, tape.blocks[0].before))
    for i, (_, kept, inner, outer, stride) in enumerate(tape.blocks):
        a = Stored.apply(a, kept[lane])
        own = Rounded.apply(F.relu(layer(a, f"blocks.{i}.conv1", f"blocks.{i}.bn1", stride, inner)))
        z = layer(own, f"blocks.{i}.conv2", f"blocks.{i}.bn2", 1, outer)
        extra = (z.shape[1] - a.shape[1]) // 2
        a = F.relu(z + F.pad(a[:, :, ::stride, ::stride], (0, 0, 0, 0, extra, extra)))
    return Stored.apply(a, tape.last[lane]).mean((2, 3))


def near(found: Tensor, expected: Tensor, error: float) -> None:
    """The error is that of all numbers together, relative to all of them."""
    assert float((found.detach().cpu() - expected.detach()).norm() / expected.detach().norm()) < error


@pytest.mark.parametrize(("shape", "depth", "batch"), [((3, 16, 16), 8, 5), ((1, 10, 10), 14, 7)])
def test_a_stacked_resnet_on_kernels(shape: tuple[int, int, int], depth: int, batch: int, device: torch.device) -> None:
    """Features, gradients and running statistics, for sizes that halve evenly and that do not."""
    arch, generator = Arch((ResNet(depth, shape[0]),), 5, shape), torch.Generator().manual_seed(0)
    stack = Stacked(arch, True).train()
    tensors = stacked_state([build(arch, Key(0, client=k)).state_dict() for k in range(LANES)], stack.template)
    for name in tensors:  # scales and shifts are not one and zero, as a new network has them
        if ".bn" in name and name.endswith(("weight", "bias")):
            tensors[name] += torch.linspace(-0.3, 0.3, tensors[name].numel()).view_as(tensors[name])
    trained = [n for n in stack.parameter_names if not n.startswith("head.")]
    running = [n for n in tensors if "running" in n]
    x = torch.randn(LANES, batch, *shape, generator=generator).bfloat16()
    upstream = torch.randn(LANES, batch, 64, generator=generator)

    own = {n: t.to(device, copy=True).requires_grad_(n in trained) for n, t in tensors.items()}
    stack.use(own)
    stack.freeze_statistics(True)
    still = stack(x.to(device)).features
    assert all(torch.equal(own[n].cpu(), tensors[n]) for n in running)
    stack.freeze_statistics(False)
    features = stack(x.to(device)).features
    assert torch.equal(still, features)
    tape = features.grad_fn.tape
    tape = tape._replace(blocks=list(tape.blocks))  # the way back empties it
    grads = torch.autograd.grad(features, [own[n] for n in trained], upstream.to(device))

    for name in trained:
        tensors[name].requires_grad_()
    one = [{n.removeprefix("trunks.0."): t[k] for n, t in tensors.items()} for k in range(LANES)]
    expected = torch.stack([trunk(x[k].float(), one[k], tape, k) for k in range(LANES)])
    near(features, expected, 1e-5)
    right = torch.autograd.grad(expected, [tensors[n] for n in trained], upstream)
    for found, gradient in zip(grads, right, strict=True):
        near(found, gradient, 0.01)
    for name in running:
        near(own[name], tensors[name], 1e-5)


@pytest.mark.parametrize(("shape", "depth", "batch"), [((3, 16, 16), 8, 5), ((1, 2, 12), 8, 3)])
def test_a_stacked_resnet_that_predicts(
    shape: tuple[int, int, int], depth: int, batch: int, device: torch.device
) -> None:  # fmt: skip
    """By running statistics, which stay; as near to fp32 as rounding to bf16 in every layer allows."""
    arch, generator = Arch((ResNet(depth, shape[0]),), 5, shape), torch.Generator().manual_seed(0)
    networks = [build(arch, Key(0, client=k)).eval() for k in range(LANES)]
    for network in networks:
        for name, buffer in network.named_buffers():
            if "running" in name:
                buffer += 0.3 * torch.rand(buffer.shape, generator=generator)
    x = torch.randn(LANES, batch, *shape, generator=generator).bfloat16()
    stack = Stacked(arch, True).eval()
    tensors = stacked_state([n.state_dict() for n in networks], stack.template)
    own = {n: t.to(device, copy=True) for n, t in tensors.items()}
    stack.use(own)
    found = stack(x.to(device))
    with torch.no_grad():
        expected = [network(image.float()) for network, image in zip(networks, x, strict=True)]
    for k in range(LANES):
        near(found.features[k], expected[k].features, 0.02)
        near(found.logits[k], expected[k].logits, 0.02)
    assert all(torch.equal(own[n].cpu(), tensors[n]) for n in tensors)


def test_batchnorm_needs_more_than_one_value(device: torch.device) -> None:
    """As the library's says, instead of a variance of nothing."""
    arch = Arch((ResNet(8, 1),), 5, (1, 4, 4))
    stack = Stacked(arch, True).train()
    stack.use({n: t.to(device) for n, t in stacked_state([build(arch, Key(0)).state_dict()], stack.template).items()})
    with pytest.raises(ValueError, match="more than one value per channel"):
        stack(torch.zeros(1, 1, 1, 4, 4, dtype=torch.bfloat16, device=device))


def on_paper(lanes: int, batch: int, side: int, trains: bool) -> None:
    """A ResNet8's kernels, with tensors that have shapes alone."""
    with torch.device("meta"):
        convs = [(16, 16), (16, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64)]
        layers = [
            Layer(torch.empty(lanes, 9, *conv, dtype=torch.bfloat16), *torch.empty(4, lanes, conv[1]), MOMENTUM, EPS)
            for conv in convs
        ]
        images = torch.empty(lanes, batch, side, side, 3, dtype=torch.bfloat16)
        if not trains:
            forward(images, layers, [1, 2, 2], track=False, fixed=True)
            return
        backward(*forward(images, layers, [1, 2, 2], True), SideStreams(torch.device("meta")))


@pytest.mark.parametrize("side", [4, 5, 8, 9, 28, 32, 50, 64, 96, 100, 224, 448])
def test_kernels_take_no_more_shared_memory_than_a_gpu_must_have(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(kernels, "launch", lambda *given, **_: taken.append(given[2]))
    for lanes in (1, 3, 10, 64):
        for batch in (2, 20, 64, 500):
            on_paper(lanes, batch, side, True)
            on_paper(lanes, batch, side, False)
    assert max(taken) <= cuda.LEAST_SHARED


def test_kernels_refuse_more_numbers_than_they_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "launch", lambda *_, **__: None)
    on_paper(1, 2047, 256, True)
    with pytest.raises(ValueError, match="32 bits: 2048 images of 256x256 are too many"):
        on_paper(1, 2048, 256, True)


def test_networks_and_precisions_that_the_kernels_do_not_know() -> None:
    assert not Stacked(Arch((ResNet(8, 5),), 5, (5, 8, 8)), True).fast  # they would read four of the five channels
    with pytest.raises(ValueError, match="in bf16, not in fp32"):
        Fused("cpu", "fp32", kernels=True)


def test_kernels_are_refused_where_they_cannot_be_launched() -> None:
    """When the engine is made, not when it first trains."""
    with pytest.raises(ValueError, match=r"need NVRTC and a GPU of compute capability 8\.0 .*, got cpu"):
        Fused("cpu", "bf16", kernels=True)
    assert not Fused("cpu", "bf16").kernels


def test_the_way_back_waits_for_what_runs_beside_it_also_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture with a stream that nobody waits for could not end, and would hide that memory ran out."""
    log: list[str] = []

    class Recorded(SideStreams):
        def weight_grads(self, *given: Any) -> list[Tensor]:
            log.append("weights")
            return super().weight_grads(*given)

        def join(self) -> None:
            log.append("join")
            super().join()

    def full(*_: Any) -> NormGrad:
        raise torch.cuda.OutOfMemoryError("full")

    trunk = listed_trunk()
    trunk.sides = Recorded(torch.device("cpu"))
    monkeypatch.setattr(kernels, "conv_grad", full)
    with kernels.collect_launches():
        features = trunk(torch.zeros(1, 2, 3, 8, 8, dtype=torch.bfloat16))
        with pytest.raises(torch.cuda.OutOfMemoryError):
            features.sum().backward()
    assert log == ["weights", "join"]


@pytest.mark.parametrize("trains", [True, False])
def test_a_kernel_begins_early_only_behind_one_that_waited_itself(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it reads before it waits, packed weights, is there then: `conv` and `back` waited, or began behind all."""
    launched: list[tuple[str, bool]] = []
    monkeypatch.setattr(kernels, "launch", lambda name, *_, early=False: launched.append((name, early)))
    trunk = listed_trunk().train(trains)
    for _ in range(2):
        features = trunk(torch.zeros(1, 2, 3, 8, 8, dtype=torch.bfloat16))
        if trains:
            features.sum().backward()
    chain = [(name, early) for name, early in launched if name not in ("grad", "collect")]  # those run beside it
    before = {(last, name) for (last, _), (name, early) in pairwise(chain) if early}
    expected = {("conv", "conv"), ("conv", "tail")} | ({("pool", "back"), ("back", "back")} if trains else set())
    assert before == expected


def listed_trunk() -> FastTrunk:
    """A ResNet8 on kernels that are not run."""
    arch = Arch((ResNet(8),), 5, (3, 8, 8))
    stack = Stacked(arch, True).train()
    state = stacked_state([build(arch, Key(0)).state_dict()], stack.template)
    stack.use({name: value.requires_grad_(name in stack.parameter_names) for name, value in state.items()})
    trunk = stack.fast[0]
    assert isinstance(trunk, FastTrunk)
    return trunk


def ragged(device: torch.device, clients: int, steps: int) -> list[Fit]:
    """Fits of clients with other numbers of samples and steps, on two streams, cropped and flipped."""
    arch, plain, fits = Arch((ResNet(8, 1),), 5, (1, 10, 10)), Plain(device), []
    for k in range(clients):
        generator = torch.Generator().manual_seed(k)
        x = torch.randint(0, 256, (20 + k, 1, 10, 10), dtype=torch.uint8, generator=generator)
        y = torch.randint(0, 5, (20 + k,), generator=generator)
        private = Samples({"x": x, "y": y}, View(1 / 255, (0.5,), (0.2,), pad=2, flip=True)).to(device)
        public = private.only("x").with_(target=torch.rand(len(x), 5, generator=generator).to(device))
        loss = CrossEntropy("private") + 0.2 * SoftCrossEntropy("public")
        model, recipe = plain.init(Init(arch, Key(0, 0, k))), Recipe(steps=steps - k % 2, batch=7)
        fits.append(Fit(model, loss, {"private": private, "public": public}, Key(0, 1, k, "fit"), recipe))
    return fits


def losses(engine: Fused, fits: list[Fit]) -> list[float]:
    return [fitted.loss for fitted in engine.serve(fits)]


@pytest.mark.parametrize("asked", [{}, {"gradient": Ascent(0.05)}, {"joint": False}], ids=["plain", "rule", "apart"])
def test_a_fit_on_kernels_is_the_one_on_library_layers(asked: dict[str, Any], device: torch.device) -> None:
    """Also where gradients are taken twice, and where every stream passes the network by itself."""
    fits = [replace(fit, **asked) for fit in ragged(device, 2, 2)]
    ours, library = (Fused(device, "bf16", kernels=kernels, graphs=False) for kernels in (True, False))
    assert losses(ours, fits) == pytest.approx(losses(library, fits), rel=0.02)


def test_gradients_lie_in_few_parts_and_can_be_added_to(device: torch.device) -> None:
    """Those of the trunk in one, the head's in another; a term that pulls on every weight adds its own gradient."""
    fits = ragged(device, 2, 2)
    w = {n: torch.full_like(fits[0].model.state[n], 0.01) for n in dict(fits[0].model.state)}
    fits = [replace(fit, constants={"w": w}) for fit in fits]
    pulled = [replace(fit, loss=fit.loss + 0.5 * Proximal()) for fit in fits]
    found = []
    for own, kernels_ in ((fits, True), (pulled, True), (fits, False)):
        engine = Fused(device, "bf16", kernels=kernels_, graphs=False)
        jobs = [Job(fit) for fit in own]
        step = engine._group(jobs).step(LANES)
        lanes = step.lanes
        lanes.load(dict(enumerate(jobs)))
        found.append(step.gradients(*step.losses(lanes.params, step.batches())))
    ours, more, library = (torch.cat(parts) for parts in found)
    head = LANES * 5 * 64 + LANES * 5
    assert [len(part) for part in found[0]] == [len(part) for part in found[1]] == [len(lanes.params) - head, head]
    torch.testing.assert_close(more, ours + lanes.params - 0.01)
    for name, block in lanes.blocks(library).items():
        error = (lanes.blocks(ours)[name] - block).norm() / block.norm()
        assert error < 0.3, name  # other layers, in bf16; another gradient would be 1 away


@pytest.mark.parametrize("asked", [{"loss": CrossEntropy("private") + Proximal()}, {"gradient": Clip(1.0)}], ids=str)
def test_a_term_or_rule_over_all_weights_is_about_one_operation_per_tensor(
    asked: dict[str, Any], device: torch.device
) -> None:
    """In a captured step each is a launch, which takes as long as its neighbours take to finish."""
    counts = []
    fits = [replace(f, loss=CrossEntropy("private"), constants={"w": f.model.state}) for f in ragged(device, 2, 2)]
    for own in (fits, [replace(fit, **asked) for fit in fits]):
        engine = Fused(device, "bf16", kernels=True, graphs=False)
        jobs = [Job(fit) for fit in own]
        step = engine._group(jobs).step(LANES)
        lanes = step.lanes
        lanes.load(dict(enumerate(jobs)))
        with Counting() as counting:
            step.once()
        counts.append(counting.count)
    assert 0 < counts[1] - counts[0] < len(lanes.trained) + 20


class Counting(TorchDispatchMode):
    """Counts operations that are no views; one over a list of tensors as one each."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.namespace == "aten":
            self.count += len(args[0]) if "_foreach_" in func.name() else 1
        return func(*args, **kwargs or {})


@dataclass(frozen=True)
class Imitate(Loss):
    """A loss that reads a frozen network."""

    def __call__(self, step: Step) -> Tensor:
        return (step["private"].logits - step.seen["teacher"].logits).square().mean()


def test_networks_that_are_not_trained_run_on_kernels_too(device: torch.device) -> None:
    """A teacher, the trunk beneath a head that is trained alone, and predictions."""
    ours, library = (Fused(device, "bf16", kernels=kernels, graphs=False) for kernels in (True, False))
    fits = ragged(device, 2, 2)
    teachers = [Frozen(fit.model, "private") for fit in reversed(fits)]
    asked = {"loss": Imitate(), "only": "head"}
    fits = [replace(fit, frozen={"teacher": t}, **asked) for fit, t in zip(fits, teachers, strict=True)]
    assert losses(ours, fits) == pytest.approx(losses(library, fits), rel=0.02)
    for fitted, fit in zip(ours.serve(fits), fits, strict=True):
        changed = {n for n, value in fitted.model.state.items() if not torch.equal(value, fit.model.state[n])}
        assert changed == {"head.weight", "head.bias"}
    wanted = [Predict(fit.model, fits[0].streams["public"]) for fit in fits]
    for found, expected in zip(ours.serve(wanted), library.serve(wanted), strict=True):
        near(found.logits, expected.logits.cpu(), 0.02)


@on_gpu
def test_a_fit_on_kernels_in_a_graph_is_the_one_on_library_layers() -> None:
    fits = ragged(torch.device("cuda"), 3, 3)
    ours, library = Fused("cuda", "bf16"), Fused("cuda", "bf16", kernels=False)
    assert ours.kernels
    assert losses(ours, fits) == pytest.approx(losses(library, fits), rel=0.02)
