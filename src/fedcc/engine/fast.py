"""A stacked residual trunk on the project's own kernels: what the generic surgery does, about twice as fast."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fedcc.nets.resnet import Block, _ResNet


class FastTrunk(nn.Module):
    """Features of all lanes, ``[lanes, batch, 64]``, from images ``[lanes, batch, channels, H, W]``, while training."""

    def __init__(self, trunk: _ResNet, name: str, slots: dict[str, Tensor]):
        super().__init__()
        self.name, self.slots = name, slots
        self.norm = trunk.bn.momentum, trunk.bn.eps
        self.strides = [cast(Block, block).shortcut.stride for block in trunk.blocks]
        self.convs = ["conv", *(f"blocks.{i}.conv{j}" for i in range(len(self.strides)) for j in (1, 2))]
        self.order: Tensor | None = None  # where each packed weight stands among the others
        self.begins: list[int] = []
        self.beside: Any = None
        self.still = False

    def forward(self, x: Tensor) -> Tensor:
        from fedcc.engine.kernels import Beside, Residual, Stem

        images = x.permute(0, 1, 3, 4, 2).contiguous()
        packed = self.packed(x.dtype)
        if self.beside is None:
            self.beside = Beside(x.device)
        track = not self.still
        stem: Any = Stem.apply
        block: Any = Residual.apply
        out: Tensor = stem(
            images, self.weight("conv"), *self.affine("bn"), packed["conv"], self.norms("bn"), track, self.beside
        )
        for i, stride in enumerate(self.strides):
            at = f"blocks.{i}"
            out = block(
                out,
                self.weight(f"{at}.conv1"),
                *self.affine(f"{at}.bn1"),
                self.weight(f"{at}.conv2"),
                *self.affine(f"{at}.bn2"),
                packed[f"{at}.conv1"],
                packed[f"{at}.conv2"],
                self.norms(f"{at}.bn1"),
                self.norms(f"{at}.bn2"),
                stride,
                track,
                self.beside,
            )
        return out[:, :, 1:-1, 1:-1].float().mean((2, 3))

    def packed(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All convolutions' weights as the kernels read them, made by one gather and one cast."""
        from fedcc.engine.kernels import packed

        weights = [self.weight(name).detach() for name in self.convs]
        flat, begins = _joined(weights)
        if self.order is None or self.begins != begins:
            places = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
            order = [packed(places[at : at + w.numel()].view(w.shape)) for w, at in zip(weights, begins, strict=True)]
            self.order, self.begins = torch.cat([o.reshape(-1) for o in order]), begins
        parts = torch.split(flat.index_select(0, self.order).to(dtype), [w.numel() for w in weights])
        shapes = [(len(w), 9, w.shape[2], w.shape[1]) for w in weights]
        return {name: part.view(shape) for name, part, shape in zip(self.convs, parts, shapes, strict=True)}

    def weight(self, conv: str) -> Tensor:
        return self.slots[f"{self.name}.{conv}.weight"]

    def affine(self, norm: str) -> tuple[Tensor, Tensor]:
        return self.slots[f"{self.name}.{norm}.weight"], self.slots[f"{self.name}.{norm}.bias"]

    def norms(self, norm: str) -> object:
        from fedcc.engine.kernels import Norms

        tensors = (
            self.slots[f"{self.name}.{norm}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
        )
        return Norms(*(t.detach() for t in tensors), *self.norm)  # type: ignore[call-arg, arg-type]


def _joined(tensors: list[Tensor]) -> tuple[Tensor, list[int]]:
    """One flat tensor that holds these, and where each begins: what they are views of already, or a copy."""
    if len({t.untyped_storage().data_ptr() for t in tensors}) == 1 and all(t.is_contiguous() for t in tensors):
        size = tensors[0].untyped_storage().nbytes() // tensors[0].element_size()
        return tensors[0].as_strided((size,), (1,), 0), [int(t.storage_offset()) for t in tensors]
    begins = [0]
    for tensor in tensors[:-1]:
        begins.append(begins[-1] + tensor.numel())
    return torch.cat([t.reshape(-1) for t in tensors]), begins
