"""What a loss sees of one training step, what a loss is, and what may be done to a gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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

    Static, so that it can be batched over clients and captured in a graph: no ``.item()``, no boolean indexing,
    no branch on a tensor's value. ``0 * loss`` is no term at all, so it costs nothing and adds no gradient.
    """

    @abstractmethod
    def __call__(self, step: Step) -> Tensor:
        """The mean of this loss over the step's batch."""

    def __add__(self, other: Loss) -> Loss:
        return (
            Sum(_terms(self) + _terms(other)) if _terms(self) and _terms(other) else (other if _terms(other) else self)
        )

    def __rmul__(self, weight: float) -> Loss:
        return Sum(tuple((weight * own, loss) for own, loss in _terms(self) if weight * own != 0))


@dataclass(frozen=True)
class Sum(Loss):
    """A weighted sum of losses; the empty one is zero."""

    terms: tuple[tuple[float, Loss], ...]

    def __call__(self, step: Step) -> Tensor:
        if not self.terms:
            first = next(iter(step.streams.values())).logits
            return first.sum() * 0.0
        total: Tensor | None = None
        for weight, loss in self.terms:
            value = loss(step) if weight == 1 else weight * loss(step)
            total = value if total is None else total + value
        assert total is not None
        return total


def _terms(loss: Loss) -> tuple[tuple[float, Loss], ...]:
    return loss.terms if isinstance(loss, Sum) else ((1.0, loss),)


class Gradient:
    """What is done to one client's gradients before the optimiser sees them: a frozen dataclass of pure functions.

    The engine makes the passes.
    """

    def ascent(self, grads: Tensors) -> Tensors | None:
        """Offsets to the parameters at which the gradient is taken a second time (SAM), or None for one pass."""
        return None

    def transform(self, grads: Tensors) -> Tensors:
        """The gradients that the optimiser takes (clipping)."""
        return grads


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """All entries one after another: what follows is one operation, for many clients too, and not one per tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def norm(tensors: Tensors) -> Tensor:
    """The Euclidean norm over all tensors together."""
    return joined(tensors.values()).square().sum().sqrt()
