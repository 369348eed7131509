"""A stacked residual trunk on the project's own kernels: what the generic surgery does, several times as fast."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fedcc.nets.resnet import Block, _ResNet

NORM = ("weight", "bias", "running_mean", "running_var")
STEM = 16  # channels of an image as the kernels see it: zeros beyond its own
MOST_CHANNELS = 4  # that an image may have


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
        self.still = False

    def forward(self, x: Tensor) -> Tensor:
        from fedcc.engine.kernels import Beside, Layer, Trunk, compiled, predicted

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
        features: Tensor = run(images, layers, self.strides, not self.still, self.beside, *trained)
        return features

    def pack(self) -> None:
        """Pack the weights now, for the next forward pass: its images may be on their way still."""
        self.ahead = self.packed()

    def packed(self) -> dict[str, Tensor]:
        """All convolutions' weights as the kernels read them, [lanes, 9, in, out] in bf16, made by one gather."""
        from fedcc.engine.kernels import gathered

        weights = [self.weight(name).detach() for name in self.convs]
        flat, begins = _joined(weights)
        if self.order is None or self.begins != begins:
            places = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
            order = [_order(places[at : at + w.numel()].view(w.shape)) for w, at in zip(weights, begins, strict=True)]
            self.order, self.begins = torch.cat([o.reshape(-1) for o in order]), begins
        shapes = [(len(w), 9, max(w.shape[2], STEM), w.shape[1]) for w in weights]
        parts = torch.split(gathered(flat, self.order), [torch.Size(shape).numel() for shape in shapes])
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
