"""A stacked residual trunk on the project's own kernels: what generic layers compute, several times as fast."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fedcc.engine import cuda
from fedcc.engine import trunk_kernels as kernels
from fedcc.engine.trunk_kernels import Input, Layer, Made
from fedcc.nets.resnet import Block, _ResNet

NORM = ("weight", "bias", "running_mean", "running_var")
STEM = 16  # channels of an image as the kernels see it: zeros beyond its own
MOST_CHANNELS = 4  # that an image may have
SIDES = 3  # streams for gradients of weights: one after the other they take longer than the chain of few lanes


class FastTrunk(nn.Module):
    """Features of all lanes, ``[lanes, batch, 64]``, from images ``[lanes, batch, channels, H, W]``.

    Gradients are those of training; what is not trained has none.
    """

    def __init__(self, trunk: _ResNet, name: str, slots: dict[str, Tensor]):
        super().__init__()
        self.name, self.slots = name, slots
        self.norm = cast(float, trunk.bn.momentum), trunk.bn.eps
        self.strides = [cast(Block, block).shortcut.stride for block in trunk.blocks]
        inner = [(f"blocks.{i}.conv{j}", f"blocks.{i}.bn{j}") for i in range(len(self.strides)) for j in (1, 2)]
        self.layers = [("conv", "bn"), *inner]
        self.convs = [conv for conv, _ in self.layers]
        self.order: Tensor | None = None  # where each packed weight stands among the others
        self.begins: list[int] = []
        self.known: set[tuple[Any, ...]] = set()  # what kernels are compiled for
        self.beside: Any = None
        self.ahead: dict[str, Tensor] | None = None
        self.freeze = False

    def forward(self, x: Tensor) -> Tensor:
        images = x.permute(0, 1, 3, 4, 2).contiguous()
        if self.beside is None:
            self.beside = Beside(x.device)
        packed, self.ahead = self.ahead or self.packed(), None
        layers, trained = [], []
        for conv, norm in self.layers:
            tensors = [self.slots[f"{self.name}.{norm}.{part}"] for part in NORM]
            gamma, beta, mean, var = (t.detach() for t in tensors)
            layers.append(Layer(packed[conv], gamma, beta, mean, var, *self.norm))
            trained += [self.weight(conv), *tensors[:2]]
        if (self.training, images.shape) not in self.known:
            compiled(images, layers, self.strides, self.training)
            self.known.add((self.training, images.shape))
        if not self.training:
            return predicted(images, layers, self.strides)
        run: Any = Trunk.apply
        features: Tensor = run(images, layers, self.strides, not self.freeze, self.beside, *trained)
        return features

    def pack(self) -> None:
        """Pack the weights now, for the next forward pass: its images may be on their way still."""
        self.ahead = self.packed()

    def packed(self) -> dict[str, Tensor]:
        """All convolutions' weights as the kernels read them, [lanes, 9, in, out] in bf16, made by one gather."""
        weights = [self.weight(name).detach() for name in self.convs]
        flat, begins = _joined(weights)
        if self.order is None or self.begins != begins:
            places = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
            order = [_order(places[at : at + w.numel()].view(w.shape)) for w, at in zip(weights, begins, strict=True)]
            self.order, self.begins = torch.cat([o.reshape(-1) for o in order]), begins
        shapes = [(len(w), 9, max(w.shape[2], STEM), w.shape[1]) for w in weights]
        parts = torch.split(kernels.gathered(flat, self.order), [torch.Size(shape).numel() for shape in shapes])
        return {name: part.view(shape) for name, part, shape in zip(self.convs, parts, shapes, strict=True)}

    def weight(self, conv: str) -> Tensor:
        return self.slots[f"{self.name}.{conv}.weight"]


def _order(places: Tensor) -> Tensor:
    """Places of weights [lanes, out, in, 3, 3] in the order [lanes, 9, in, out]; -1 for inputs that there are not."""
    order = places.flatten(3).permute(0, 3, 2, 1)
    return nn.functional.pad(order, (0, 0, 0, max(0, STEM - order.shape[2])), value=-1)


def _joined(tensors: list[Tensor]) -> tuple[Tensor, list[int]]:
    """One flat tensor that holds these, and where each begins: what they are views of already, or a copy."""
    if len({t.untyped_storage().data_ptr() for t in tensors}) == 1 and all(t.is_contiguous() for t in tensors):
        size = tensors[0].untyped_storage().nbytes() // tensors[0].element_size()
        return tensors[0].as_strided((size,), (1,), 0), [int(t.storage_offset()) for t in tensors]
    begins = [0]
    for tensor in tensors[:-1]:
        begins.append(begins[-1] + tensor.numel())
    return torch.cat([t.reshape(-1) for t in tensors]), begins


class Beside:
    """Streams of their own for the gradients of weights, in turn: nothing but Adam waits for these."""

    def __init__(self, device: torch.device):
        self.sides, self.begun = [cuda.Side(device) for _ in range(SIDES)], 0
        self.held: list[Any] = []  # in use over there: freed here, their memory would be taken at once

    def weights(self, *given: Any) -> list[Tensor]:
        side = self.sides[self.begun % SIDES]
        self.begun += 1
        self.held += given
        with side.stretch():
            made = kernels.weights(*given)
        self.held += made
        return made

    def join(self) -> None:
        """What comes next waits for all that was begun beside."""
        for side in self.sides:
            side.join()
        self.begun = 0
        self.held.clear()


class Tape(NamedTuple):
    """What the way back needs."""

    images: Tensor
    stem: Made
    blocks: list[tuple[Made, Tensor, Made, Made, int]]  # the layer before, the block's input, its layers, its stride
    last: Tensor


def forward(images: Tensor, layers: list[Layer], strides: list[int], track: bool) -> tuple[Tensor, Tape]:
    """Features [lanes, batch, C] of images [lanes, batch, H, W, channels], by a stem and residual blocks."""
    stem, _ = kernels.conv(Input(images), layers[0], 1, track, False)
    made, x = stem, None
    blocks: list[Any] = []
    for stride, first, second in zip(strides, layers[1::2], layers[2::2], strict=True):
        inner, kept = kernels.conv(Input(made=made, x=x), first, stride, track, True)
        outer, _ = kernels.conv(Input(made=inner), second, 1, track, False)
        blocks.append((made, kept, inner, outer, stride))
        made, x = outer, kept
    features, last = kernels.tail(Input(made=made, x=x), track)
    return features, Tape(images, stem, blocks, last)


def predicted(images: Tensor, layers: list[Layer], strides: list[int]) -> Tensor:
    """Features by running statistics; nothing is kept for a way back."""
    made, _ = kernels.conv(Input(images), layers[0], 1, False, False, fixed=True)
    x: Tensor | None = None
    for stride, first, second in zip(strides, layers[1::2], layers[2::2], strict=True):
        inner, x = kernels.conv(Input(made=made, x=x), first, stride, False, True, fixed=True)
        made, _ = kernels.conv(Input(made=inner), second, 1, False, False, fixed=True)
    return kernels.tail(Input(made=made, x=x), False, fixed=True)[0]


def backward(df: Tensor, tape: Tape, beside: Beside) -> list[Tensor]:
    """The gradients of all layers' weights, scales and shifts, one behind another in memory."""
    lanes, real = tape.images.shape[0], tape.images.shape[-1]
    made = [tape.stem, *(layer for block in tape.blocks for layer in block[2:4])]
    inputs = [real, *(layer.norm.weight.shape[2] for layer in made[1:])]
    sizes = [lanes * layer.y.shape[-1] * (9 * n + 2) for layer, n in zip(made, inputs, strict=True)]
    outs = list(torch.split(kernels.floats(df, sum(sizes)), sizes))
    grads: list[Tensor] = []
    back = kernels.pool(df.contiguous(), tape.last, tape.blocks[-1][3])
    try:
        while tape.blocks:
            before, x, inner, outer, stride = tape.blocks.pop()
            second = beside.weights(inner.y, inner, back, outer, 1, inner.y.shape[-1], outs.pop())
            between = kernels.conv_back(back, outer, 1, inner, None)
            first = beside.weights(x, None, between, inner, stride, x.shape[-1], outs.pop())
            grads = [*first, *second, *grads]
            back = kernels.conv_back(between, inner, stride, before, (x, back.g))
        return [*kernels.weights(tape.images, None, back, tape.stem, 1, real, outs.pop(), alone=True), *grads]
    finally:  # a capture that fails, for want of memory, has to end too
        beside.join()


def compiled(images: Tensor, layers: list[Layer], strides: list[int], trains: bool) -> None:
    """Compile what a step or a prediction will launch, on all cores."""
    if images.device.type == "cuda":
        with kernels.listed() as found:
            if trains:
                features, tape = forward(images, layers, strides, False)
                backward(features, tape, Beside(images.device))
            else:
                predicted(images, layers, strides)
        cuda.compile_all(found, images.device)


class Trunk(torch.autograd.Function):
    """Features with gradients for ``trained``: the weights, scales and shifts of ``layers`` as autograd knows them."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, layers: list[Layer], strides: list[int], track: bool, beside: Beside, *_: Tensor
    ) -> Tensor:  # fmt: skip
        features, ctx.tape = forward(images, layers, strides, track)
        ctx.beside = beside
        return features

    @staticmethod
    def backward(ctx: Any, df: Tensor) -> tuple[Any, ...]:
        return *([None] * 5), *backward(df, ctx.tape, ctx.beside)
