"""What crosses the wire: frozen dataclasses of arrays and numbers. The codec and the byte counts walk their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedcc.core.model import Model, State

WIRE = {"fp32": torch.float32, "fp16": torch.float16}
"""Number formats in which floating arrays may cross the wire."""


@dataclass(frozen=True, eq=False)
class Weights:
    """A model's weights and running statistics (integer counters stay at home), and the samples behind them."""

    state: State
    samples: int = 0

    @staticmethod
    def of(model: Model, samples: int = 0) -> Weights:
        return Weights(model.floating, samples)


@dataclass(frozen=True, eq=False)
class Predictions:
    """One row per public sample: probabilities or logits [n_u, columns]."""

    values: Tensor


@dataclass(frozen=True, eq=False)
class Labels:
    """One class per public sample [n_u], in the smallest integer type that holds the classes."""

    values: Tensor


@dataclass(frozen=True, eq=False)
class Data:
    """Raw private samples: what only the ``centralized`` bound ever sends."""

    x: Tensor
    y: Tensor


def nbytes(message: Any, wire: str = "fp32") -> int:
    """The bytes of a message's arrays on the wire; numbers ride along for nothing, and no message costs nothing.

    >>> message = Predictions(torch.zeros(5000, 11))
    >>> nbytes(message), nbytes(message, "fp16"), nbytes(None)
    (220000, 110000, 0)
    """
    if message is None or isinstance(message, int | float | str | bool):
        return 0
    if isinstance(message, Tensor):
        return message.numel() * (WIRE[wire] if message.is_floating_point() else message.dtype).itemsize
    if isinstance(message, Mapping):
        return sum(nbytes(value, wire) for value in message.values())
    if is_dataclass(message):
        return sum(nbytes(getattr(message, f.name), wire) for f in fields(message))
    raise TypeError(f"a message holds arrays, numbers and mappings of arrays, got {type(message).__name__}")


def carried(message: Any, wire: str) -> Any:
    """The message as it arrives after crossing the wire: rounded to the wire's format, in its own type again."""
    if wire == "fp32":
        return message
    if isinstance(message, Tensor):
        return message.to(WIRE[wire]).to(message.dtype) if message.is_floating_point() else message
    if isinstance(message, Mapping):
        return {name: carried(value, wire) for name, value in message.items()}
    if is_dataclass(message) and not isinstance(message, type):
        return replace(message, **{f.name: carried(getattr(message, f.name), wire) for f in fields(message)})
    return message
