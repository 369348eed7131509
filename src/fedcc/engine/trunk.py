"""A stacked residual trunk on the project's own kernels: what generic layers compute, several times as fast."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fedcc.engine import cuda
from fedcc.engine import trunk_kernels as kernels
from fedcc.engine.trunk_kernels import ConvInput, ConvOutput, Layer
from fedcc.nets.resnet import Block, _ResNet

NORM = ("weight", "bias", "running_mean", "running_var")
STEM = 16  # channels of an image in the kernels: padded with zeros
MOST_CHANNELS = 4  # that an image may have
SIDES = 3  # streams for weight gradients: on one stream they take longer than the chain of layers of few lanes


class FastTrunk(nn.Module):
    """Features of all lanes, ``[lanes, batch, 64]``, from images ``[lanes, batch, channels, H, W]``.

    Gradients are those of training mode; what is not trained has none.
    """

    def __init__(self, trunk: _ResNet, name: str, slots: dict[str, Tensor]):
        super().__init__()
        self.name, self.slots = name, slots
        self.norm = cast(float, trunk.bn.momentum), trunk.bn.eps
        self.strides = [cast(Block, block).shortcut.stride for block in trunk.blocks]
        inner = [(f"blocks.{i}.conv{j}", f"blocks.{i}.bn{j}") for i in range(len(self.strides)) for j in (1, 2)]
        self.layers = [("conv", "bn"), *inner]
        self.convs = [conv for conv, _ in self.layers]
        self.order: Tensor | None = None  # the index of each packed weight among the others
        self.begins: list[int] = []
        self.compiled: set[tuple[Any, ...]] = set()  # modes and shapes
        self.sides: Any = None
        self.packed: dict[str, Tensor] | None = None
        self.freeze = False  # the running statistics

    def forward(self, x: Tensor) -> Tensor:
        images = x.permute(0, 1, 3, 4, 2).contiguous()
        if self.sides is None:
            self.sides = SideStreams(x.device)
        packed, self.packed = self.packed or self._pack(), None
        layers, trained = [], []
        for conv, norm in self.layers:
            tensors = [self.slots[f"{self.name}.{norm}.{part}"] for part in NORM]
            gamma, beta, mean, var = (t.detach() for t in tensors)
            layers.append(Layer(packed[conv], gamma, beta, mean, var, *self.norm))
            trained += [self.weight(conv), *tensors[:2]]
        if (self.training, images.shape) not in self.compiled:
            compile_kernels(images, layers, self.strides, self.training)
            self.compiled.add((self.training, images.shape))
        if not self.training:
            return forward(images, layers, self.strides, track=False, fixed=True)[0]
        run: Any = TrunkFunction.apply
        features: Tensor = run(images, layers, self.strides, not self.freeze, self.sides, *trained)
        return features

    def pack(self) -> None:
        """Pack the weights for the next forward pass now, while its images are still being made."""
        self.packed = self._pack()

    def _pack(self) -> dict[str, Tensor]:
        """All convolutions' weights as the kernels read them, [lanes, 9, in, out] in bf16, by one gather."""
        weights = [self.weight(name).detach() for name in self.convs]
        flat, begins = _joined(weights)
        if self.order is None or self.begins != begins:
            indices = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
            order = [_order(indices[at : at + w.numel()].view(w.shape)) for w, at in zip(weights, begins, strict=True)]
            self.order, self.begins = torch.cat([o.reshape(-1) for o in order]), begins
        shapes = [(len(w), 9, max(w.shape[2], STEM), w.shape[1]) for w in weights]
        parts = torch.split(kernels.gather(flat, self.order), [torch.Size(shape).numel() for shape in shapes])
        return {name: part.view(shape) for name, part, shape in zip(self.convs, parts, shapes, strict=True)}

    def weight(self, conv: str) -> Tensor:
        return self.slots[f"{self.name}.{conv}.weight"]


def _order(indices: Tensor) -> Tensor:
    """Indices of weights [lanes, out, in, 3, 3] in the order [lanes, 9, in, out]; -1 for channels of padding."""
    order = indices.flatten(3).permute(0, 3, 2, 1)
    return nn.functional.pad(order, (0, 0, 0, max(0, STEM - order.shape[2])), value=-1)


def _joined(tensors: list[Tensor]) -> tuple[Tensor, list[int]]:
    """One flat tensor that holds these, and where each begins: the one that they are views of, or a copy."""
    if len({t.untyped_storage().data_ptr() for t in tensors}) == 1 and all(t.is_contiguous() for t in tensors):
        size = tensors[0].untyped_storage().nbytes() // tensors[0].element_size()
        return tensors[0].as_strided((size,), (1,), 0), [int(t.storage_offset()) for t in tensors]
    begins = [0]
    for tensor in tensors[:-1]:
        begins.append(begins[-1] + tensor.numel())
    return torch.cat([t.reshape(-1) for t in tensors]), begins


class SideStreams:
    """Streams for weight gradients, used in turn: only Adam waits for these."""

    def __init__(self, device: torch.device):
        self.sides, self.launches = [cuda.Side(device) for _ in range(SIDES)], 0
        # Tensors in use on these streams: if they were freed on the main stream, their memory could be reused at once.
        self.in_use: list[Any] = []

    def weight_grads(self, *args: Any) -> list[Tensor]:
        side = self.sides[self.launches % SIDES]
        self.launches += 1
        self.in_use += args
        with side.stretch():
            grads = kernels.weight_grads(*args)
        self.in_use += grads
        return grads

    def join(self) -> None:
        """What is launched next waits for everything on these streams."""
        for side in self.sides:
            side.join()
        self.launches = 0
        self.in_use.clear()


class BlockTape(NamedTuple):
    """What the backward pass needs of a residual block."""

    before: ConvOutput  # the layer before
    x: Tensor  # the block's input
    inner: ConvOutput
    outer: ConvOutput
    stride: int


class Tape(NamedTuple):
    """What the backward pass needs."""

    images: Tensor
    blocks: list[BlockTape]
    last: Tensor  # activations


def forward(
    images: Tensor, layers: list[Layer], strides: list[int], track: bool, fixed: bool = False
) -> tuple[Tensor, Tape]:
    """Features [lanes, batch, C] of images [lanes, batch, H, W, channels]; the tape stays empty if ``fixed``."""
    output, _ = kernels.conv(ConvInput(images), layers[0], 1, track, False, fixed)
    x: Tensor | None = None
    blocks: list[BlockTape] = []
    for stride, first, second in zip(strides, layers[1::2], layers[2::2], strict=True):
        inner, activations = kernels.conv(ConvInput(layer=output, shortcut=x), first, stride, track, True, fixed)
        outer, _ = kernels.conv(ConvInput(layer=inner), second, 1, track, False, fixed)
        if not fixed:
            blocks.append(BlockTape(output, cast(Tensor, activations), inner, outer, stride))
        output, x = outer, activations
    features, last = kernels.features(ConvInput(layer=output, shortcut=x), track, fixed)
    return features, Tape(images, blocks, last)


def backward(df: Tensor, tape: Tape, sides: SideStreams) -> list[Tensor]:
    """The gradients of all layers' weights, scales and shifts, one after another in memory."""
    lanes, real, stem = tape.images.shape[0], tape.images.shape[-1], tape.blocks[0].before
    convs = [stem, *(conv for block in tape.blocks for conv in (block.inner, block.outer))]
    inputs = [real, *(conv.norm.weight.shape[2] for conv in convs[1:])]
    sizes = [lanes * conv.y.shape[-1] * (9 * n + 2) for conv, n in zip(convs, inputs, strict=True)]
    outs = list(torch.split(kernels.floats(df, sum(sizes)), sizes))
    grads: list[Tensor] = []
    grad = kernels.features_grad(df.contiguous(), tape.last, tape.blocks[-1].outer)
    try:
        while tape.blocks:
            before, x, inner, outer, stride = tape.blocks.pop()
            second = sides.weight_grads(inner.y, inner, grad, outer, 1, inner.y.shape[-1], outs.pop())
            between = kernels.conv_grad(grad, outer, 1, inner, None)
            first = sides.weight_grads(x, None, between, inner, stride, x.shape[-1], outs.pop())
            grads = [*first, *second, *grads]
            grad = kernels.conv_grad(between, inner, stride, before, (x, grad.g))
        return [*kernels.weight_grads(tape.images, None, grad, stem, 1, real, outs.pop(), alone=True), *grads]
    finally:  # a capture that fails for lack of memory must end too
        sides.join()


def compile_kernels(images: Tensor, layers: list[Layer], strides: list[int], trains: bool) -> None:
    """Compile what a step or a prediction will launch, on all cores."""
    if images.device.type == "cuda":
        with kernels.collect_launches() as launches:
            features, tape = forward(images, layers, strides, track=False, fixed=not trains)
            if trains:
                backward(features, tape, SideStreams(images.device))
        cuda.compile_all(launches, images.device)


class TrunkFunction(torch.autograd.Function):
    """Features with gradients for ``trained``: the weights, scales and shifts of ``layers`` as autograd knows them."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, layers: list[Layer], strides: list[int], track: bool, sides: SideStreams, *_: Tensor
    ) -> Tensor:  # fmt: skip
        features, ctx.tape = forward(images, layers, strides, track)
        ctx.sides = sides
        return features

    @staticmethod
    def backward(ctx: Any, df: Tensor) -> tuple[Any, ...]:
        return *([None] * 5), *backward(df, ctx.tape, ctx.sides)
