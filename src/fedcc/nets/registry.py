"""Networks by name: ``resnet20``, ``mlp``, ``bag5000``, or ``module:factory`` of the user's own."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from torch import nn

from fedcc.code import import_installed, import_reference, installed, is_reference
from fedcc.core.model import Factory
from fedcc.core.naming import unknown
from fedcc.nets.resnet import ResNet
from fedcc.nets.small import WIDTH, Bag, Mlp

NETWORKS = (*(f"resnet{depth}" for depth in (8, 14, 20, 32, 56)), "mlp", "bag")  # other depths and widths work too


@dataclass(frozen=True)
class Imported:
    """A factory of the user's own, ``module:factory``; code that was not named is refused."""

    reference: str

    def __post_init__(self) -> None:
        if not callable(factory := import_reference(self.reference)):
            kind = type(factory).__name__
            raise ValueError(f"{self.reference} must be a factory (outputs -> nn.Module), got an object of {kind}")

    def __call__(self, outputs: int) -> nn.Module:
        module: nn.Module = import_reference(self.reference)(outputs)
        return module

    def __str__(self) -> str:
        return self.reference


@dataclass(frozen=True)
class Installed(Imported):
    """A factory of an installed package, an entry point of ``fedcc.networks``."""

    def __post_init__(self) -> None:
        pass

    def __call__(self, outputs: int) -> nn.Module:
        module: nn.Module = import_installed("fedcc.networks", self.reference)(outputs)
        return module


BUILT_IN = (ResNet, Mlp, Bag, Imported)


def network(name: str, shape: tuple[int, ...]) -> Factory:
    """The factory of a named network for inputs of this shape.

    >>> str(network("resnet14", (1, 8, 8))), str(network("mlp", (30,))), str(network("bag5000", (12,)))
    ('resnet14', 'mlp', 'bag5000')
    """
    if is_reference(name):
        return Imported(name)
    if name.lower() in installed("fedcc.networks"):
        return Installed(name.lower())
    match = re.fullmatch(r"(resnet|mlp|bag)(\d{0,9})", name.lower())
    if not match or (match[1] != "mlp" and not match[2]):
        raise unknown("network", name, NETWORKS)
    kind, number = match[1], int(match[2] or WIDTH)
    if kind == "mlp":
        return Mlp(math.prod(shape), number)
    if kind == "bag":
        if len(shape) != 1:
            raise ValueError(f"{name} takes tokens [samples, length], got inputs of shape {shape}")
        return Bag(number)
    if len(shape) != 3 or shape[0] not in (1, 3) or shape[1] != shape[2] or shape[1] < 8:
        raise ValueError(
            f"resnet{number} takes square images from 8x8 up with 1 or 3 channels, got inputs of shape {shape}; "
            "give models= a factory of your own (outputs -> nn.Module)"
        )
    return ResNet(number, shape[0])
