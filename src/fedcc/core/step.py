"""Losses, what they see of a training step, and gradient rules."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fedcc.core.model import Outputs

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Batch:
    """One stream's part of a step: the network's outputs and the batch's columns."""

    outputs: Outputs
    columns: Tensors

    @property
    def logits(self) -> Tensor:
        return self.outputs.logits

    @property
    def features(self) -> Tensor:
        return self.outputs.features

    def __getitem__(self, column: str) -> Tensor:
        return self.columns[column]


@dataclass(frozen=True, eq=False)
class Step:
    """One step of **one** client, as a loss sees it."""

    streams: Mapping[str, Batch]
    params: Tensors = field(default_factory=dict)  # what is being trained
    constants: Mapping[str, Any] = field(default_factory=dict)  # the request's own tensors
    seen: Mapping[str, Outputs] = field(default_factory=dict)  # frozen teachers' outputs on the same inputs

    def __getitem__(self, stream: str) -> Batch:
        return self.streams[stream]


class Loss(ABC):
    """A frozen dataclass that turns a step into a scalar; composable with ``+`` and ``number *``.

    No ``.item()``, no boolean indexing, no branch on a tensor's value: it is batched over clients and captured in a
    graph. ``0 * loss`` is no term at all, so it costs nothing and adds no gradient.
    """

    @abstractmethod
    def __call__(self, step: Step) -> Tensor:
        """The mean of this loss over the step's batch."""

    def __add__(self, other: Loss) -> Loss:
        mine, theirs = _terms(self), _terms(other)
        return Sum(mine + theirs) if mine and theirs else other if theirs else self

    def __rmul__(self, weight: float) -> Loss:
        return Sum(tuple((weight * own, loss) for own, loss in _terms(self) if weight * own != 0))


@dataclass(frozen=True)
class Sum(Loss):
    """A weighted sum of losses; the empty one is zero."""

    terms: tuple[tuple[float, Loss], ...]

    def __call__(self, step: Step) -> Tensor:
        if not self.terms:
            return next(iter(step.streams.values())).logits.sum() * 0.0
        values = (loss(step) if weight == 1 else weight * loss(step) for weight, loss in self.terms)
        return reduce(operator.add, values)


def _terms(loss: Loss) -> tuple[tuple[float, Loss], ...]:
    return loss.terms if isinstance(loss, Sum) else ((1.0, loss),)


class Gradient:
    """Changes one client's gradients before the optimizer uses them: a frozen dataclass of pure functions."""

    def ascent(self, grads: Tensors) -> Tensors | None:
        """Offsets to the parameters for a second pass of the gradient (SAM), or None for one pass."""
        return None

    def transform(self, grads: Tensors) -> Tensors:
        """The gradients that the optimizer uses (clipping)."""
        return grads


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """All entries as one tensor, so that what follows is one operation and not one per tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def norm(tensors: Tensors) -> Tensor:
    """The Euclidean norm over all tensors together."""
    return joined(tensors.values()).square().sum().sqrt()
