"""Networks by name: ``resnet20``, ``mlp``, ``bag5000``, ``timm:NAME``, or ``module:factory`` of the user's own."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedcc.code import check_allowed, import_installed, import_reference, installed, is_reference
from fedcc.core.model import Factory, Hidden, Linear
from fedcc.core.naming import unknown
from fedcc.core.options import check_value
from fedcc.errors import InputError
from fedcc.nets.resnet import ResNet
from fedcc.nets.small import WIDTH, Bag, Mlp
from fedcc.nets.timm_models import Timm

NETWORKS = (*(f"resnet{depth}" for depth in (8, 14, 20, 32, 56)), "mlp")  # other depths and widths work too

LARGEST = 10_000_000  # width of an mlp, vocabulary of a bag


@dataclass(frozen=True)
class Imported:
    """A factory of the user's own, ``module:factory``; code that was not named is refused."""

    reference: str

    def __post_init__(self) -> None:
        if not callable(factory := self.load()):
            kind = type(factory).__name__
            raise InputError(f"{self.reference} must be a factory (outputs -> nn.Module), got an object of {kind}")

    def load(self) -> Any:
        return import_reference(self.reference)

    def __call__(self, outputs: int) -> nn.Module:
        try:
            module: nn.Module = self.load()(outputs)
            return module
        except Exception as error:
            raise InputError(f"{self.reference}({outputs}) failed: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        return self.reference


@dataclass(frozen=True)
class Installed(Imported):
    """A factory of an installed package, an entry point of ``fedcc.networks``."""

    def load(self) -> Any:
        return import_installed("fedcc.networks", self.reference)


PLAIN = (ResNet, Mlp, Bag)  # of this package: they fit what they are made for
BUILT_IN = (*PLAIN, Imported, Timm, Linear, Hidden)  # found again by their names


def network(name: str, shape: tuple[int, ...]) -> Factory:
    """The factory of a named network for inputs of this shape.

    >>> str(network("resnet14", (1, 8, 8))), str(network("mlp", (30,))), str(network("bag5000", (12,)))
    ('resnet14', 'mlp', 'bag5000')
    """
    check_allowed(name)
    if is_reference(name):
        return Imported(name)
    if name.startswith("timm:"):
        return Timm.named(name, shape)
    if (match := re.fullmatch(r"linear|hidden(\d{1,8})", name)) and len(shape) == 1:  # what methods put on features
        return Hidden(shape[0], int(match[1])) if match[1] else Linear(shape[0])
    match = re.fullmatch(r"(resnet|mlp|bag)(\d{0,18})", name.lower())
    if not match or (match[1] != "mlp" and not match[2]):
        others = installed("fedcc.networks")
        if name.lower() in others:
            return Installed(name.lower())
        raise unknown("network", name, [*NETWORKS, "bag5000", *others])
    kind, number = match[1], int(match[2] or WIDTH)
    if kind != "resnet":
        check_value(f"the number in {name}", number, int, 1, LARGEST)
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
