"""Data of your own: a folder of images, arrays or a table in a file, or a function that returns a Dataset.

What a source lacks is split off: test samples here (a fixed draw from each class), public samples when the clients'
samples are dealt.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcc.code import import_installed, import_reference, installed, is_reference
from fedcc.core.samples import IDENTITY, View
from fedcc.data.dataset import Dataset, Defaults, Description, Inputs, Labels
from fedcc.errors import InputError
from fedcc.inputs.images import Listing, common_form, decode_all, list_parts
from fedcc.inputs.tables import Table, numbered_labels, read_csv, read_parquet

ARRAYS = {"x": "x_train", "y": "y_train"}  # names in an .npz: x_train, y_train, x_test, y_test, x_public
TEST_SEED = 5  # of the test samples that are split off: the same whatever a run's seed
IMAGE_VIEW = {"scale": 1 / 255, "mean": 0.5, "std": 0.25}

Parts = Mapping[str, Any]


def is_own(source: str) -> bool:
    """Whether a data set's name is a path or ``module:function``."""
    return is_reference(source) or "/" in source or os.sep in source or Path(source).suffix.lower() in READERS


def is_installed(source: str) -> bool:
    """Whether an installed package brings a data set of this name (entry point ``fedcc.data``)."""
    return source.lower() in installed("fedcc.data")


def describe(source: str, *, label: str = "", resize: int = 0, test: float = 0.2) -> Description:
    """What a source holds; everything is read, so that whatever is wrong with it is known now."""
    dataset = _read_once(source, label, resize, test, _signature(source))
    return Description(
        name=dataset.name,
        title=Path(source).stem if not is_reference(source) else source,
        train=len(dataset.train_y),
        test=len(dataset.test_y),
        classes=len(dataset.classes),
        shape=dataset.shape,
        source=source,
        defaults=dataset.defaults,
        read=lambda *_, **__: dataset,
    )


def _signature(source: str) -> str:
    """Changes with the files of a source."""
    path, digest = Path(source).expanduser(), hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path] if path.exists() else []:
        status = file.stat()
        digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


@lru_cache(maxsize=2)
def _read_once(source: str, label: str, resize: int, test: float, _signature: str) -> Dataset:
    return read(source, label=label, resize=resize, test=test)


def read(source: str, *, label: str = "", resize: int = 0, test: float = 0.2) -> Dataset:
    """The data set of a path or ``module:function``; test samples are split off where it has none."""
    if is_reference(source) or is_installed(source):
        function = import_installed("fedcc.data", source) or import_reference(source)
        if not callable(function):
            raise InputError(f"{source} must be a function that returns a fedcc Dataset, got {function!r}")
        try:
            dataset = function()
        except Exception as error:
            raise InputError(f"{source}() failed: {type(error).__name__}: {error}") from error
        if not isinstance(dataset, Dataset):
            raise InputError(f"{source}() must return a fedcc Dataset, got {type(dataset).__name__}")
        return replace(dataset, name=source if is_reference(source) else source.lower())  # by which it is found again
    path = Path(source).expanduser().resolve()
    if path.is_dir():
        if label:
            raise ValueError(f"label names a column of a table, got label={label} for the folder {source}")
        return _from_images(path, resize, test)
    if not path.exists():
        raise InputError(f"{source}: no such file or folder")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{source}: data is a folder of images or a file ({', '.join(READERS)})")
    if resize:
        raise ValueError(f"resize is for images, got resize={resize} for {source}")
    return reader(path, label, test)


def _from_images(folder: Path, resize: int, test: float) -> Dataset:
    parts = list_parts(folder)
    form = common_form([path for listing in parts.values() for path in listing.paths], resize)
    decoded = {part: decode_all(listing.paths, form) for part, listing in parts.items()}
    return assemble(folder, {part: (decoded[part], _names(part, parts[part])) for part in parts}, test)


def _names(part: str, listing: Listing) -> list[str] | None:
    return None if part == "public" else listing.names


def _from_npz(path: Path, label: str, test: float) -> Dataset:
    if label:
        raise ValueError(f"label names a column of a table, got label={label} for {path}")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {ARRAYS.get(name, name): file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise InputError(f"{path}: expected an .npz of plain arrays, found: {error}") from error
    known = [f"{kind}_{part}" for part in ("train", "test") for kind in "xy"] + ["x_public"]
    if extra := [name for name in arrays if name not in known]:
        raise InputError(f"{path}: unknown array {extra[0]!r}; known: x, y, {', '.join(known)}")
    for part in ("train", "test"):
        pair = [name for name in (f"x_{part}", f"y_{part}") if name in arrays]
        if len(pair) == 1 or (part == "train" and not pair):
            raise InputError(
                f"{path}: expected x_{part} and y_{part} (or x and y), found {', '.join(arrays) or 'none'}"
            )
    parts = {part: (arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test") if f"x_{part}" in arrays}
    if "x_public" in arrays:
        parts["public"] = (arrays["x_public"], None)
    return assemble(path, parts, test)


def _from_table(read_table: Callable[[Path], Table], path: Path, label: str, test: float) -> Dataset:
    table = read_table(path)
    if not label:
        raise ValueError(f"{path} is a table: name the column of its labels with --label; "
                         f"it has {', '.join(map(repr, table.columns))}")  # fmt: skip
    return assemble(path, {"train": (table.without(label), table.column(label))}, test)


READERS: dict[str, Callable[[Path, str, float], Dataset]] = {
    ".npz": _from_npz,
    ".csv": partial(_from_table, read_csv),
    ".tsv": partial(_from_table, read_csv),
    ".parquet": partial(_from_table, read_parquet),
}


def assemble(source: Path, parts: Parts, test: float) -> Dataset:
    """A data set of pairs (inputs, labels of any kind) by part; public samples have no labels."""
    inputs = {part: _inputs(f"{source}, {part}", x) for part, (x, _) in parts.items()}
    for part, (x, y) in parts.items():
        if y is not None and len(y) != len(x):
            raise InputError(f"{source}: {part} has {len(x)} inputs and {len(y)} labels")
    numbers, classes = numbered_labels(parts["train"][1])
    train_x, train_y = inputs["train"], numbers
    if "test" in parts:
        test_x, test_y = inputs["test"], _known_labels(source, parts["test"][1], classes)
    else:
        held_out = _test_rows(source, train_y, classes, test)
        test_x, test_y, train_x, train_y = (
            train_x[held_out], train_y[held_out], train_x[~held_out], train_y[~held_out]
        )  # fmt: skip
    view, network = _usual(train_x)
    defaults = Defaults("dirichlet:0.5", min(10, len(train_y)), rounds=5, epochs=10, shared_model=network,
                        models=network)  # fmt: skip
    return Dataset(str(source), classes, train_x, train_y, test_x, test_y, view, defaults, inputs.get("public"))


def _inputs(who: str, x: Any) -> Inputs:
    """Inputs in one of the three forms: uint8 images [N, channels, H, W], tokens [N, L], or a table."""
    if isinstance(x, Table):
        return x
    array = np.asarray(x)
    if array.dtype == np.uint8 and array.ndim == 3:
        array = array[:, None]
    if array.dtype == np.uint8 and array.ndim == 4:
        return array if array.shape[1] in (1, 3) else np.ascontiguousarray(array.transpose(0, 3, 1, 2))
    if array.dtype.kind in "iu" and array.ndim == 2:
        if array.size and array.min() < 0:
            raise InputError(f"{who}: whole numbers [samples, length] are tokens and must not be negative, "
                            f"found {array.min()}; write a table of numbers as floats")  # fmt: skip
        return array.astype(np.int64)
    if array.dtype.kind in "fb" and array.ndim == 2:
        return Table.of({str(i): column for i, column in enumerate(array.T)})
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise InputError(f"{who}: inputs must be finite")
        return array.astype(np.float32)
    raise InputError(
        f"{who}: inputs are uint8 images, whole numbers [samples, length] (tokens) or floats, "
        f"found {array.dtype} of shape {array.shape}"
    )


def _known_labels(source: Path, values: Any, classes: tuple[str, ...]) -> Labels:
    numbers, names = numbered_labels(values)
    if strangers := [name for name in names if name not in classes]:
        raise InputError(f"{source}: the test set has class {strangers[0]!r}, which no training sample has")
    return np.array([classes.index(name) for name in names], np.int64)[numbers]


def _test_rows(source: Path, labels: Labels, classes: tuple[str, ...], share: float) -> NDArray[np.bool_]:
    """The samples that are split off: of each class this share, at least one and never all."""
    rng, held_out = np.random.default_rng(TEST_SEED), np.zeros(len(labels), bool)
    for c, name in enumerate(classes):
        rows = rng.permutation(np.flatnonzero(labels == c))
        if len(rows) < 2:
            raise InputError(
                f"{source}: class {name!r} has one sample; a class needs two, one of them for the test set"
            )
        held_out[rows[: min(max(1, round(share * len(rows))), len(rows) - 1)]] = True
    return held_out


def _usual(x: Inputs) -> tuple[View, str]:
    """The view and the network for inputs of this form."""
    if isinstance(x, Table) or x.dtype == np.float32:
        return IDENTITY, "mlp"
    if x.dtype == np.uint8:
        channels, side = x.shape[1], x.shape[2]
        mean, std = (IMAGE_VIEW["mean"],) * channels, (IMAGE_VIEW["std"],) * channels
        return View(IMAGE_VIEW["scale"], mean, std, pad=max(1, side // 8), flip=True), "resnet8"
    return IDENTITY, f"bag{int(x.max()) + 1}"
