"""Dropout whose masks follow from a seed: the same whether a network trains alone or together with others."""

import math

import torch
from torch import Tensor, nn

KINDS = {nn.Dropout: False, nn.Dropout1d: True, nn.Dropout2d: True, nn.Dropout3d: True}  # True: drops whole channels
BITS = 24  # of the number that decides about one entry
# SplitMix64: the increment and the two factors, as signed 64-bit integers.
INCREMENT, FACTORS = 0x9E3779B97F4A7C15 - 2**64, (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


class SeededDropout(nn.Module):
    """Like ``nn.Dropout``, but the mask is a function of the seed, the layer, and its calls since the seed was set."""

    seed: Tensor

    def __init__(self, p: float, whole_channels: bool, layer: int):
        super().__init__()
        self.p, self.whole_channels, self.layer, self.calls = p, whole_channels, layer, 0
        self.register_buffer("seed", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = x.shape[:2] + (1,) * (x.ndim - 2) if self.whole_channels else x.shape
        own = mixed(self.seed + (1024 * self.layer + self.calls + 1))
        self.calls += 1
        draws = mixed(own + torch.arange(math.prod(shape), device=x.device) * INCREMENT)
        kept = (draws >> (64 - BITS) & 2**BITS - 1) >= round(self.p * 2**BITS)
        scale: Tensor = kept.to(x.dtype) / max(1 - self.p, 2.0**-BITS)
        return x * scale.view(shape)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def use_seeded_dropout(module: nn.Module) -> None:
    """Replace torch's dropout layers in a module, at any depth."""
    layer = 0
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) in KINDS:
                assert isinstance(child, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d)
                seeded = SeededDropout(child.p, KINDS[type(child)], layer)
                setattr(parent, name, seeded.train(child.training))
                layer += 1


def dropout_layers(module: nn.Module) -> dict[str, SeededDropout]:
    return {name: part for name, part in module.named_modules() if isinstance(part, SeededDropout)}


def step_seed(seed: Tensor, step: Tensor | int) -> Tensor:
    """The seed of one training step of a fit."""
    return mixed(seed + torch.as_tensor(step, device=seed.device) * INCREMENT)


def mixed(numbers: Tensor) -> Tensor:
    """Integers whose bits look random, of integers that differ (the last part of SplitMix64).

    >>> mixed(torch.tensor([0, 1, 2])).tolist()
    [0, 6238072747940578789, -2606959012126976886]
    """
    h = (numbers ^ (numbers >> 30 & 2**34 - 1)) * FACTORS[0]  # >> repeats the sign; the mask removes it
    h = (h ^ (h >> 27 & 2**37 - 1)) * FACTORS[1]
    return h ^ (h >> 31 & 2**33 - 1)
