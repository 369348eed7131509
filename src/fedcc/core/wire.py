"""How one tensor crosses the wire: unchanged, in half precision, or in eight bits.

Rounding is done by numpy in double precision on the CPU, hence the same on every machine; docs/protocol.md has the
reasons for each coding.

- ``raw``: the tensor's own numbers. All integers; floats under ``fp32``, and vectors under ``int8``.
- ``half``: IEEE half precision.
- ``rows``: a signed byte per number and one scale per row, the row's largest magnitude divided by 127.
- ``simplex``: rows of probabilities, an unsigned byte each: 255 times the root of the probability divided by the row's
  largest. Dividing by the row's sum restores them.
"""

from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcc.core.rng import Key

WIRE = ("fp32", "fp16", "int8", "int8-stochastic")
"""Number formats in which floating arrays may cross the wire."""

TOLERANCE = {"fp32": 1e-4, "fp16": 1e-3, "int8": 1e-4, "int8-stochastic": 1e-4}
"""How far from one a row of probabilities may sum after crossing the wire."""

HALF = 65504.0  # the largest number in half precision

Part = NDArray[Any]
Shape = tuple[int, ...]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in numpy.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def draws_for(wire: str, key: Key | None) -> np.random.Generator | None:
    """The generator for stochastic rounding; None if the wire has none."""
    if not wire.endswith("-stochastic"):
        return None
    if key is None:
        raise ValueError(f"wire {wire} rounds randomly and needs a key for its draws")
    return key.generator()


def coding_of(value: Tensor, wire: str) -> str:
    """How this tensor crosses the wire."""
    if wire == "fp32" or not value.is_floating_point():
        return "raw"
    if wire == "fp16":
        return "half"
    if value.ndim == 2 and is_probabilities(value):
        return "simplex"
    return "rows" if value.ndim > 1 and value.shape[0] and prod(value.shape[1:]) > 1 else "raw"


def is_probabilities(value: Tensor, tolerance: float = TOLERANCE["fp32"]) -> bool:
    """Whether the last dimension holds probabilities of two or more outcomes."""
    if not value.is_floating_point() or value.ndim == 0 or value.shape[-1] < 2 or not value.numel():
        return False
    return bool((value >= 0).all() and ((value.double().sum(-1) - 1).abs() <= tolerance).all())


def parts_of(coding: str, shape: Shape, dtype: str) -> tuple[tuple[str, int], ...]:
    """The (dtype, length) of each array that a tensor is packed into.

    >>> parts_of("rows", (16, 3, 3, 3), "float32")
    (('int8', 432), ('float32', 16))
    """
    n = prod(shape)
    if coding == "rows":
        return ("int8", n), ("float32", shape[0])
    return (({"raw": dtype, "half": "float16", "simplex": "uint8"}[coding], n),)


def packed(value: Tensor, wire: str, draws: np.random.Generator | None = None) -> tuple[str, tuple[Part, ...]]:
    """The tensor's coding and its parts, each one-dimensional; ``draws`` is for stochastic rounding."""
    coding, array = coding_of(value, wire), value.detach().cpu().contiguous().numpy()
    if coding == "raw":
        return coding, (array.reshape(-1),)
    wide = array.astype(np.float64)
    largest = float(np.abs(wide).max(initial=0.0))
    if not np.isfinite(largest):
        raise ValueError(f"{wire} carries finite numbers only, got {largest} in a tensor of shape {array.shape}")
    if coding == "half":
        if largest > HALF:
            raise ValueError(f"fp16 carries magnitudes up to {HALF:g}, got {largest:g}; use fp32")
        return coding, (array.astype(np.float16).reshape(-1),)
    if coding == "simplex":
        return coding, (_roots(wide, draws).reshape(-1),)
    rows = wide.reshape(len(wide), -1)
    scale = (np.abs(rows).max(1, initial=0.0) / 127).astype(np.float32)
    steps = rows / np.where(scale > 0, scale, 1).astype(np.float64)[:, None]
    steps = np.rint(steps) if draws is None else np.floor(steps + draws.random(steps.shape))
    return coding, (steps.clip(-127, 127).astype(np.int8).reshape(-1), scale)


def _roots(p: Part, draws: np.random.Generator | None) -> Part:
    """255 sqrt(p / max p), rounded; with draws randomly, so that its square is right on average."""
    steps = 255 * np.sqrt(p / p.max(1, keepdims=True))
    if draws is None:
        return np.asarray(np.rint(steps), np.uint8)
    low = np.floor(steps)
    up = draws.random(steps.shape) < (steps**2 - low**2) / (2 * low + 1)
    return np.asarray((low + up).clip(0, 255), np.uint8)


def restored(coding: str, parts: tuple[Part, ...], shape: Shape, dtype: str) -> Tensor:
    """The tensor, in its own type, from its parts."""
    array = parts[0].reshape(shape)
    if coding == "rows":
        scale = parts[1].reshape(-1, *(1,) * (len(shape) - 1))
        array = array.astype(np.float32) * scale
    elif coding == "simplex":
        squares = array.astype(np.int64) ** 2
        array = squares / squares.sum(1, keepdims=True)
    return torch.from_numpy(np.array(array, dtype=dtype, copy=True))
