"""What crosses the wire: frozen dataclasses of arrays and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcc.core.model import Model, State
from fedcc.core.rng import Key
from fedcc.core.wire import coding_of, draws_for, dtype_name, packed, parts_of, restored

LABELS = {"holds": "labels"}
"""Marks a field that holds class numbers, starting at 0."""
ROWS = {"holds": "rows"}
"""Marks a field that holds numbers of public samples, ascending; a client may leave some of them out."""


@dataclass(frozen=True, eq=False)
class Weights:
    """A model's weights and running statistics, without integer counters, and the number of samples behind them."""

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

    values: Tensor = field(metadata=LABELS)

    @staticmethod
    def of(values: Tensor, different: int) -> Labels:
        """Labels in the smallest integer type that holds this many different ones."""
        kinds = ((2**8, torch.uint8), (2**15, torch.int16), (2**31, torch.int32))
        return Labels(values.to(next(kind for limit, kind in kinds if different <= limit)))


@dataclass(frozen=True, eq=False)
class Rows:
    """Some public samples by their numbers [m], ascending, with one row of values for each, [m, columns].

    >>> import torch
    >>> some = Rows(torch.tensor([0, 2], dtype=torch.int32), torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    >>> some.scattered(3).tolist(), some.mask(3).tolist()
    ([[0.5, 0.5], [0.0, 0.0], [1.0, 0.0]], [True, False, True])
    """

    rows: Tensor = field(metadata=ROWS)
    values: Tensor

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.values):
            raise ValueError(f"there must be a row of values for each of {len(self.rows)}, got {len(self.values)}")

    def onto(self, table: Tensor) -> Tensor:
        """A table [n_u, columns] with these rows replaced."""
        return table.to(self.values.dtype).index_copy(0, self.rows.long(), self.values)

    def scattered(self, samples: int) -> Tensor:
        """All public samples [n_u, columns], the others with zeros."""
        return self.onto(self.values.new_zeros(samples, self.values.shape[1]))

    def mask(self, samples: int) -> Tensor:
        """Which of the public samples are among them, [n_u]."""
        return torch.zeros(samples, dtype=torch.bool, device=self.rows.device).index_fill(0, self.rows.long(), True)


@dataclass(frozen=True, eq=False)
class Data:
    """Raw private samples: what only the ``centralized`` bound ever sends."""

    x: Tensor
    y: Tensor = field(metadata=LABELS)


def leaves(message: Any, path: str = "", holds: str = "") -> Iterator[tuple[str, Any, str]]:
    """The tensors and numbers of a message in the order of its fields, each with its path and its field's mark."""
    if isinstance(message, Mapping):
        parts = [(name, value, holds) for name, value in message.items()]
    elif is_dataclass(message):
        parts = [(f.name, getattr(message, f.name), f.metadata.get("holds", "")) for f in fields(message)]
    else:
        yield path, message, holds
        return
    for name, value, mark in parts:
        yield from leaves(value, f"{path}.{name}", mark)


def nbytes(message: Any, wire: str = "fp32") -> int:
    """The bytes of a message's arrays on the wire; numbers are not counted, and None has no bytes.

    ``fp32`` carries doubles, which only ``precision="fp64"`` makes (for tests), unchanged and counts them as floats.

    >>> import torch
    >>> message = Predictions(torch.full((5000, 10), 0.1))
    >>> nbytes(message), nbytes(message, "fp16"), nbytes(message, "int8"), nbytes(None)
    (200000, 100000, 50000, 0)
    """
    total = 0
    for _, leaf, _ in leaves(message):
        if isinstance(leaf, Tensor):
            total += _tensor_bytes(coding_of(leaf, wire), leaf.shape, leaf.dtype)
        elif leaf is not None and not isinstance(leaf, int | float | str):
            raise TypeError(f"a message holds arrays, numbers and mappings of arrays, got {type(leaf).__name__}")
    return total


@lru_cache(maxsize=4096)  # a round with many clients asks about the same few shapes
def _tensor_bytes(coding: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    parts = parts_of(coding, tuple(shape), dtype_name(dtype))
    return sum(length * np.dtype(name.replace("float64", "float32")).itemsize for name, length in parts)


def carried(message: Any, wire: str, key: Key | None = None) -> Any:
    """The message as it arrives: rounded to the wire's format, in its own type; ``key`` is for stochastic rounding."""
    return message if wire == "fp32" else _carried(message, wire, draws_for(wire, key))


def _carried(message: Any, wire: str, draws: np.random.Generator | None) -> Any:
    if isinstance(message, Tensor):
        coding, parts = packed(message, wire, draws)
        return restored(coding, parts, tuple(message.shape), dtype_name(message.dtype)).to(message.device)
    if isinstance(message, Mapping):
        return {name: _carried(value, wire, draws) for name, value in message.items()}
    if is_dataclass(message) and not isinstance(message, type):
        return replace(message, **{f.name: _carried(getattr(message, f.name), wire, draws) for f in fields(message)})
    return message
