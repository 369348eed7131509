"""Tables: columns of numbers and of categories, and their encoding as a network's inputs."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcc.errors import InputError

CATEGORIES = 1_000  # of one column
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
"""Texts that stand for a missing value, in small letters."""

CONTAINERS = (list, tuple, dict, set, bytes, np.ndarray)  # what a cell must not be


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length: float64 for numbers (NaN is missing), else texts (None is missing)."""

    columns: Mapping[str, NDArray[Any]]
    texts: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # numbers as they were written: "007"

    @staticmethod
    def of(columns: Mapping[str, Iterable[Any]]) -> Table:
        """A table of any values; a column whose values are all numbers, or texts of numbers, is one of numbers."""
        read = {str(name): _column(str(name), values) for name, values in columns.items()}
        texts = {name: text for name, (_, text) in read.items() if text is not None}
        return Table({name: values for name, (values, _) in read.items()}, texts)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, rows: Any) -> Table:
        parts = ({name: values[rows] for name, values in part.items()} for part in (self.columns, self.texts))
        return Table(*parts)

    def without(self, name: str) -> Table:
        return Table(*({n: v for n, v in part.items() if n != name} for part in (self.columns, self.texts)))

    def as_texts(self, name: str) -> NDArray[Any]:
        """A column as texts; None is missing."""
        values = self.column(name)
        if values.dtype == object:
            return values
        return self.texts[name] if name in self.texts else _as_texts(values)

    def column(self, name: str) -> NDArray[Any]:
        """A column by name, or an error that names the known ones."""
        if name not in self.columns:
            raise InputError(f"the table has no column {name!r}; it has {', '.join(map(repr, self.columns))}")
        return self.columns[name]

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for name, values in self.columns.items():
            content = values.tobytes() if values.dtype != object else "\0".join(map(str, values)).encode()
            digest.update(f"{name}\0{values.dtype.str}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()


def _column(name: str, values: Iterable[Any]) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """A column's values, and how numbers were written if that is not how Python writes them; bools are texts."""
    written = None
    if isinstance(values, np.ndarray) and values.dtype.kind in "fiu":
        numbers = values.astype(np.float64)
    else:
        texts = [None if _is_missing(value) else value for value in values]
        if odd := [value for value in texts if isinstance(value, CONTAINERS)]:
            raise InputError(f"column {name!r} must hold numbers or texts, found {type(odd[0]).__name__}")
        written = np.array([None if value is None else str(value) for value in texts], object)
        if any(isinstance(value, bool | np.bool_) for value in texts):
            return written, None
        try:
            numbers = np.array([math.nan if value is None else float(value) for value in texts], np.float64)
        except (TypeError, ValueError, OverflowError):
            return written, None
    if np.isinf(numbers).any():
        raise InputError(f"column {name!r} has infinite values")
    return numbers, None if written is None or np.array_equal(written, _as_texts(numbers)) else written


def _as_texts(numbers: NDArray[Any]) -> NDArray[Any]:
    """Numbers as Python writes them, whole ones without a point; None is missing."""
    return np.array(
        [None if math.isnan(v) else str(int(v)) if v.is_integer() else repr(v) for v in numbers.tolist()], object
    )


def _is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in MISSING
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # of pandas
        return True
    return isinstance(value, float | np.floating | np.datetime64) and bool(value != value)


def read_csv(path: Path) -> Table:
    """A table with a line of column names; columns are separated by commas, semicolons or tabs."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            separator = max(",;\t", key=first.count)
            return _from_lines(path, list(csv.reader(file, delimiter=separator, strict=True)))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: expected text in UTF-8, found {error}") from error
    except csv.Error as error:
        raise InputError(f"{path}: expected a table, found: {error}") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


def _from_lines(path: Path, lines: list[list[str]]) -> Table:
    rows = [(number, line) for number, line in enumerate(lines, start=1) if line]
    if len(rows) < 2:
        raise InputError(f"{path}: expected a line of column names and at least one row, found {len(rows)} lines")
    names = [name.strip() for name in rows[0][1]]
    if len(set(names)) < len(names) or not all(names):
        raise InputError(f"{path}: column names must be different and not empty, found {', '.join(map(repr, names))}")
    for number, line in rows[1:]:
        if len(line) != len(names):
            raise InputError(f"{path}, line {number}: expected {len(names)} columns, found {len(line)}")
    columns = zip(*(line for _, line in rows[1:]), strict=True)
    return Table.of(dict(zip(names, columns, strict=True)))


def read_parquet(path: Path) -> Table:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError:
        raise InputError(f"{path}: parquet files need pyarrow: pip install '.[parquet]' in fedcc's checkout") from None
    try:
        return Table.of(read_table(path).to_pydict())
    except (ArrowException, OSError) as error:
        raise InputError(f"{path}: expected a parquet file, found: {error}") from error


@dataclass(frozen=True)
class Column:
    """A column as inputs: a number, shifted and scaled, or one input per category.

    A missing number becomes the mean (0 after scaling); a missing or unseen category sets none of its inputs.
    """

    name: str
    mean: float = 0.0
    std: float = 1.0
    categories: tuple[str, ...] | None = None  # None for numbers

    @property
    def width(self) -> int:
        return 1 if self.categories is None else len(self.categories)

    @staticmethod
    def fit(name: str, values: NDArray[Any]) -> Column:
        if values.dtype != object:
            present = values[~np.isnan(values)]
            std = float(present.std()) if len(present) else 0.0
            return Column(name, float(present.mean()) if len(present) else 0.0, std or 1.0)
        categories = sorted({str(value) for value in values if value is not None})
        if len(categories) > CATEGORIES:
            raise InputError(
                f"column {name!r} has {len(categories):,} categories, at most {CATEGORIES:,} are allowed; "
                "leave it out of the table, or write it as numbers"
            )
        return Column(name, categories=tuple(categories))

    def encode(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """The inputs [N, width]."""
        if self.categories is None:
            if values.dtype == object:
                text = next(v for v in values if v is not None and not _is_number(v))
                raise InputError(f"column {self.name!r} holds numbers, found {text!r}")
            with np.errstate(over="ignore"):
                scaled = ((np.where(np.isnan(values), self.mean, values) - self.mean) / self.std).astype(np.float32)
            if not np.isfinite(scaled).all():
                raise InputError(f"column {self.name!r} has numbers too large for float32, as {np.abs(values).max():g}")
            return scaled[:, None]
        return np.stack([values == category for category in self.categories], 1).astype(np.float32)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Encoding:
    """How the rows of a table become inputs [N, width], fitted on the public samples only."""

    columns: tuple[Column, ...]

    @staticmethod
    def fit(public: Table) -> Encoding:
        encoding = Encoding(tuple(Column.fit(name, values) for name, values in public.columns.items()))
        if not encoding.width:
            raise InputError("the table has no column to learn from beside the labels")
        return encoding

    @property
    def width(self) -> int:
        return sum(column.width for column in self.columns)

    def encode(self, table: Table) -> NDArray[np.float32]:
        """The inputs of a table that has these columns, in any order; others are left out."""
        return np.concatenate([
            column.encode(table.column(column.name) if column.categories is None else table.as_texts(column.name))
            for column in self.columns
        ], 1)  # fmt: skip

    def values(self) -> list[dict[str, Any]]:
        """As plain values, for a file."""
        return [
            {"name": c.name, "mean": c.mean, "std": c.std}
            if c.categories is None
            else {"name": c.name, "categories": list(c.categories)}
            for c in self.columns
        ]

    @staticmethod
    def of(values: Iterable[Mapping[str, Any]]) -> Encoding:
        """What :meth:`values` gave."""
        return Encoding(
            tuple(
                Column(str(v["name"]), categories=tuple(map(str, v["categories"])))
                if "categories" in v
                else Column(str(v["name"]), float(v["mean"]), float(v["std"]))
                for v in values
            )
        )


def column_labels(values: NDArray[Any]) -> NDArray[Any]:
    """A column's values as labels: integers, which may be stored as floats, bools or strings; none is missing."""
    if values.dtype == object:
        if missing := sum(not isinstance(value, str) and _is_missing(value) for value in values):
            raise InputError(f"{missing} samples have no label")
        values = np.array(values.tolist())
    if values.dtype.kind != "f":
        return values
    if missing := int((~np.isfinite(values)).sum()):
        raise InputError(f"{missing} samples have no label")
    if (odd := values[values != np.round(values)]).size:
        raise InputError(f"labels must be integers, bools or strings, found {odd[0]}")
    return values.astype(np.int64)


def numbered_labels(values: ArrayLike) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Labels of any kind as numbers from 0, and the name of each class: sorted, numbers by value.

    >>> numbered_labels(["cat", "ant", "cat"])
    (array([1, 0, 1]), ('ant', 'cat'))
    """
    labels = np.asarray(values)
    if labels.ndim != 1:
        raise InputError(f"labels must be one value per sample, found an array of shape {labels.shape}")
    labels = column_labels(labels)
    distinct, numbers = np.unique(labels, return_inverse=True)
    if len(distinct) > 65_536:
        raise InputError(f"labels must have at most 65,536 distinct values, found {len(distinct):,}")
    return numbers.astype(np.int64), tuple(str(value) for value in distinct.tolist())
