"""Memory maps: arrays in files of which only the rows that are used are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcc.errors import InputError

HASHED_WHOLE = 1 << 30  # bytes: the fingerprint of larger maps is that of HASHED_ROWS rows
HASHED_ROWS = 1024
CHUNK = 1 << 24  # bytes


@dataclass(frozen=True, eq=False)
class MappedRows:
    """Rows of a memory map, converted to ``dtype`` when they are read.

    >>> rows = MappedRows.of(np.arange(12, dtype=np.uint8).reshape(6, 2))[[5, 0]]
    >>> rows.shape, rows.read().tolist()
    ((2, 2), [[10, 11], [0, 1]])
    """

    array: NDArray[Any]
    rows: NDArray[np.int64]
    dtype: np.dtype[Any]

    @staticmethod
    def of(array: NDArray[Any]) -> MappedRows:
        """All rows, as images (uint8), tokens (int64) or numbers (float32)."""
        kind = array.dtype.kind
        if kind not in "fbiu" or array.dtype == np.uint64:
            raise InputError(f"a memory map holds floats, integers or bools, found {array.dtype}")
        dtype = array.dtype if array.dtype == np.uint8 else np.float32 if kind in "fb" else np.int64
        return MappedRows(np.asarray(array), np.arange(len(array)), np.dtype(dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.rows), *self.array.shape[1:]

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def row_bytes(self) -> int:
        return max(1, int(np.prod(self.shape[1:])) * self.dtype.itemsize)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Any) -> MappedRows:
        """Some of the rows; nothing is read."""
        return MappedRows(self.array, self.rows[rows], self.dtype)

    def read(self, rows: Any = slice(None)) -> NDArray[Any]:
        """Rows in memory."""
        return np.ascontiguousarray(self.array[self.rows[rows]], self.dtype)

    def flipped(self, axes: tuple[int, ...]) -> MappedRows:
        """The same rows, mirrored along axes other than the first."""
        return MappedRows(np.flip(self.array, axes), self.rows, self.dtype)

    def sample(self, number: int) -> NDArray[Any]:
        """At most so many rows, evenly spaced."""
        return self.read(np.linspace(0, len(self) - 1, min(number, len(self))).astype(np.int64))

    def hashed(self) -> Iterator[NDArray[Any]]:
        """What its fingerprint covers: all rows, or evenly spaced ones if it is large."""
        if len(self) * self.row_bytes > HASHED_WHOLE:
            yield np.frombuffer(b"evenly spaced rows", np.uint8)
            yield self.sample(HASHED_ROWS)
            return
        step = max(1, CHUNK // self.row_bytes)
        for start in range(0, len(self), step):
            yield self.read(slice(start, start + step))


def is_mapped(array: Any) -> bool:
    """Whether an array is a memory map, or a view of one."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and getattr(array, "_mmap", None) is not None:  # else a copy of one
            return True
        array = array.base
    return False


def open_map(path: Path) -> NDArray[Any]:
    """A .npy file as a memory map."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: expected a plain array, found: {error}") from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: expected a plain array, found an archive")
    return array
