"""Architectures, models and what a network returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

Factory = Callable[[int], nn.Module]
"""Builds a network with the given number of outputs. Hashable: a function, a class, or a frozen dataclass."""

State = Mapping[str, Tensor]
"""Parameters and buffers by name, as in ``state_dict()``; never changed in place."""

HEAD = ("head.weight", "head.bias")
"""The entries of a network's last linear layer; all others belong to its trunks."""


class Outputs(NamedTuple):
    """What every network returns: logits [N, outputs] and what entered the last linear layer, [N, width]."""

    logits: Tensor
    features: Tensor


@dataclass(frozen=True)
class Arch:
    """A network's description."""

    trunks: tuple[Factory, ...]  # side by side: their features are concatenated and enter one linear head (FedConcat)
    outputs: int
    shape: tuple[int, ...]  # of one input
    tokens: bool = False  # inputs are integers (indices), not floats

    @property
    def name(self) -> str:
        return "+".join(factory_name(trunk) for trunk in self.trunks)

    def times(self, number: int) -> Arch:
        """This many of these networks side by side, under one head."""
        return replace(self, trunks=self.trunks * number)

    def __str__(self) -> str:
        return f"{self.name}({self.outputs} outputs)"


def factory_name(factory: Factory) -> str:
    """A network's name for people: ``resnet14``, or the name of the caller's function or class.

    >>> factory_name(partial(nn.Linear, 8))
    'Linear(8)'
    """
    if isinstance(factory, partial):
        arguments = [repr(a) for a in factory.args] + [f"{n}={v!r}" for n, v in factory.keywords.items()]
        return f"{factory_name(factory.func)}({', '.join(arguments)})"
    return str(getattr(factory, "__qualname__", factory))


@dataclass(frozen=True, eq=False)
class Model:
    """An architecture and its state."""

    arch: Arch
    state: State

    def to(self, device: torch.device | str) -> Model:
        return Model(self.arch, {name: value.to(device) for name, value in self.state.items()})

    def with_(self, state: State) -> Model:
        """The same model with these entries replaced; the others (integer counters) stay."""
        missing = [name for name in state if name not in self.state]
        if missing:
            raise ValueError(f"{self.arch} has no entries named {missing[:3]}")
        for name, value in state.items():
            if value.shape != self.state[name].shape:
                expected = tuple(self.state[name].shape)
                raise ValueError(f"{self.arch}: {name} must have shape {expected}, got {tuple(value.shape)}")
        return Model(self.arch, {**self.state, **state})

    @property
    def floating(self) -> State:
        """Weights and running statistics, without integer counters: what crosses the wire."""
        return {name: value for name, value in self.state.items() if value.is_floating_point()}


def joined_state(models: Sequence[Model]) -> State:
    """Models of one trunk each as the state of one model with all trunks, whose logits are the sum of theirs."""
    trunks = {
        name.replace("trunks.0.", f"trunks.{m}.", 1): value
        for m, model in enumerate(models)
        for name, value in model.floating.items()
        if name not in HEAD
    }
    weight = torch.cat([model.state["head.weight"] for model in models], 1)
    return {**trunks, "head.weight": weight, "head.bias": torch.stack([m.state["head.bias"] for m in models]).sum(0)}


@dataclass(frozen=True)
class Linear:
    """A factory: one linear layer on features [N, width]."""

    width: int

    def __call__(self, outputs: int) -> nn.Module:
        return nn.Linear(self.width, outputs)

    def __str__(self) -> str:
        return "linear"


@dataclass(frozen=True)
class Hidden:
    """A factory: one hidden layer of so many units on features [N, width]."""

    width: int
    units: int

    def __call__(self, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, self.units), nn.ReLU(), nn.Linear(self.units, outputs))

    def __str__(self) -> str:
        return f"hidden{self.units}"


def head_model(model: Model) -> Model:
    """A model's head as a model of its own, for features that are already computed."""
    width = model.state["head.weight"].shape[1]
    arch = Arch((Linear(width),), model.arch.outputs, (width,))
    return Model(arch, {name: model.state[name] for name in HEAD})
