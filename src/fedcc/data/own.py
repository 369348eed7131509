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
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedcc.code import import_installed, import_reference, installed, is_reference
from fedcc.core.options import check_value
from fedcc.core.samples import IDENTITY, View
from fedcc.data import huggingface
from fedcc.data.arrays import usual_network
from fedcc.data.dataset import Dataset, Defaults, Description, Inputs, Labels
from fedcc.data.huggingface import is_dictionary
from fedcc.data.objects import Pair, read_object
from fedcc.errors import InputError
from fedcc.inputs.images import common_form, decode_all, list_images, list_parts
from fedcc.inputs.maps import MappedRows, is_mapped, open_map
from fedcc.inputs.tables import Table, numbered_labels, read_csv, read_parquet

ARRAYS = {"x": "x_train", "y": "y_train"}  # names in an .npz: x_train, y_train, x_test, y_test, x_public
TEST_SEED = 5  # of the test samples that are split off: the same whatever a run's seed
IMAGE_VIEW = {"scale": 1 / 255, "mean": 0.5, "std": 0.25}

Parts = dict[str, Pair]
"""Inputs and labels of ``train`` and, where there are any, of ``test`` and ``public``."""


def is_own(source: str) -> bool:
    """Whether a data set's name is a path or ``module:function``."""
    return is_reference(source) or "/" in source or os.sep in source or Path(source).suffix.lower() in READERS


def is_installed(source: str) -> bool:
    """Whether an installed package brings a data set of this name (entry point ``fedcc.data``)."""
    return source.lower() in installed("fedcc.data")


def describe(source: str, *, label: str = "", resize: int = 0, test: float = 0.2) -> Description:
    """What a source holds; everything is read, so that whatever is wrong with it is known now."""
    path = _resolved(source)
    is_path = not (is_reference(source) or is_installed(source)) and path.exists()
    place = str(path) if is_path else source  # a path is read once, however it is written
    dataset = _read_once(place, label, resize, test, _signature(place))
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
        if label or resize:
            given = f"label={label}" if label else f"resize={resize}"
            raise ValueError(f"{given} is for files; {source} is a function, which makes its samples itself")
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
    return assemble(str(_resolved(source)), read_path(source, label, resize), test)


def build(
    data: Any, *, test: Any, public: Any, label: str, view: View | None, resize: int, name: str = "own data"
) -> Dataset:
    """A data set of anything that :meth:`Dataset.of` takes."""
    if isinstance(data, str | Path):
        name = str(_resolved(data))
    parts = _read(name, data, label, resize)
    share = 0.0 if test is None else test
    if isinstance(share, int | float):
        check_value("test", share, float, 0, below=1)
    else:
        share, parts["test"] = 0.0, _read("the test set", test, label, resize)["train"]
    if public is not None:
        parts["public"] = _read("the public set", public, label, resize, labelled=False)["train"]
    return assemble(name, parts, share, view)


def _read(who: str, data: Any, label: str, resize: int, labelled: bool = True) -> Parts:
    """The parts of a path or an object; one that has no parts is ``train``."""
    if isinstance(data, str | Path):
        return read_path(data, label, resize, labelled)
    if is_dictionary(data):
        return huggingface.read_parts(who, data, label, resize)
    pair = read_object(who, data, label, labelled=labelled, resize=resize)
    if pair is not None:
        return {"train": pair}
    if label:
        raise ValueError(f"label names a column of a table, got label={label} for arrays")
    if not labelled:
        return {"train": (_array(data), None)}
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise InputError(f"{who} must be a pair (inputs, labels), a data frame, a torch or Hugging Face data set or a "
                         f"path, got {type(data).__name__}")  # fmt: skip
    return {"train": (_array(data[0]), _array(data[1]))}


def _array(values: Any) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def _resolved(source: str | Path) -> Path:
    return Path(source).expanduser().resolve()


def read_path(source: str | Path, label: str, resize: int, labelled: bool = True) -> Parts:
    """The parts of a folder or file; samples without labels (``labelled=False``) are those of ``train``."""
    path = _resolved(source)
    if not path.exists():
        raise InputError(f"{source}: no such file or folder")
    if path.is_dir() and huggingface.is_folder(path):
        return huggingface.read_parts(str(path), huggingface.open_folder(path), label, resize)
    reader = READERS.get(path.suffix.lower())
    if label and (path.is_dir() or reader is _read_npz):
        raise ValueError(f"label names a column of a table, got label={label} for {source}")
    if path.is_dir():
        return _read_folder(path, resize, labelled)
    if reader is None:
        raise InputError(f"{source}: data is a folder of images or a file ({', '.join(READERS)})")
    if resize:
        raise ValueError(f"resize is for images, got resize={resize} for {source}")
    return reader(path, label, labelled)


def _read_folder(folder: Path, resize: int, labelled: bool) -> Parts:
    """Images in sub-folders, or arrays in .npy files, which are mapped into memory."""
    if maps := sorted(folder.glob("*.npy")):
        if resize:
            raise ValueError(f"resize is for images, got resize={resize} for {folder}")
        return _named_arrays(folder, {path.stem: open_map(path) for path in maps}, labelled)
    parts = list_parts(folder) if labelled else {"train": list_images(folder)}
    paths = [path for listing in parts.values() for path in listing.paths]
    images = decode_all(paths, common_form(paths, resize))
    ends = np.cumsum([len(listing.paths) for listing in parts.values()])
    return {
        part: (x, None if part == "public" or not labelled else listing.names)
        for (part, listing), x in zip(parts.items(), np.split(images, ends[:-1]), strict=True)
    }


def _read_npz(path: Path, _: str, labelled: bool) -> Parts:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError, BadZipFile) as error:
        raise InputError(f"{path}: expected an .npz of plain arrays, found: {error}") from error
    return _named_arrays(path, arrays, labelled)


def _named_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], labelled: bool) -> Parts:
    """Arrays of the names in an .npz, or of the .npy files in a folder, as parts."""
    arrays = {ARRAYS.get(name, name): array for name, array in arrays.items()}
    known = [f"{kind}_{part}" for part in ("train", "test") for kind in "xy"] + ["x_public"]
    if extra := [name for name in arrays if name not in known]:
        raise InputError(f"{path}: unknown array {extra[0]!r}; known: x, y, {', '.join(known)}")
    if not labelled:
        if "x_train" not in arrays:
            raise InputError(f"{path}: expected an array x, found {', '.join(arrays) or 'none'}")
        return {"train": (arrays["x_train"], None)}
    for part in ("train", "test"):
        pair = [name for name in (f"x_{part}", f"y_{part}") if name in arrays]
        if len(pair) == 1 or (part == "train" and not pair):
            raise InputError(
                f"{path}: expected x_{part} and y_{part} (or x and y), found {', '.join(arrays) or 'none'}"
            )
    parts = {part: (arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test") if f"x_{part}" in arrays}
    return parts | ({"public": (arrays["x_public"], None)} if "x_public" in arrays else {})


def _read_table(read_file: Callable[[Path], Table], path: Path, label: str, labelled: bool) -> Parts:
    table = read_file(path)
    if not labelled:
        return {"train": (table.without(label), None)}
    if not label:
        raise ValueError(f"{path} is a table: name the column of its labels with --label or label=; "
                         f"it has {', '.join(map(repr, table.columns))}")  # fmt: skip
    return {"train": (table.without(label), table.column(label))}


READERS: dict[str, Callable[[Path, str, bool], Parts]] = {
    ".npz": _read_npz,
    ".csv": partial(_read_table, read_csv),
    ".tsv": partial(_read_table, read_csv),
    ".parquet": partial(_read_table, read_parquet),
}


def assemble(source: str, parts: Parts, test: float, view: View | None = None) -> Dataset:
    """A data set of pairs (inputs, labels of any kind) by part; public samples have no labels.

    Without a part ``test`` a share ``test`` of each class is split off; 0 for none.
    """
    inputs = {part: as_inputs(f"{source}, {part}", x) for part, (x, _) in parts.items()}
    for part, (_, y) in parts.items():
        if y is not None and len(y) != len(inputs[part]):
            raise InputError(f"{source}: {part} has {len(inputs[part])} inputs and {len(y)} labels")
        if not len(inputs[part]):
            raise InputError(f"{source}: {part} has no samples")
    try:
        numbers, classes = numbered_labels(parts["train"][1])
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    train_x, train_y = inputs["train"], numbers
    if "test" in parts:
        test_x, test_y = inputs["test"], _known_labels(source, parts["test"][1], classes)
    else:
        held_out = _test_rows(source, train_y, classes, test) if test else np.zeros(len(train_y), bool)
        test_x, test_y, train_x, train_y = (
            train_x[held_out], train_y[held_out], train_x[~held_out], train_y[~held_out]
        )  # fmt: skip
    network = usual_network(train_x)
    defaults = Defaults("dirichlet:0.5", min(10, len(train_y)), rounds=5, epochs=5, shared_model=network,
                        models=network, augment=view is not None and view.augments)  # fmt: skip
    return Dataset(source, classes, train_x, train_y, test_x, test_y, view or _usual_view(train_x), defaults,
                   inputs.get("public"))  # fmt: skip


def as_inputs(who: str, x: Any) -> Inputs:
    """Inputs in one of four forms: uint8 images [N, channels, H, W], tokens [N, L], numbers, or a table."""
    if isinstance(x, Table):
        return x
    try:
        array = x if isinstance(x, np.ndarray) else np.asarray(x)
    except ValueError as error:
        raise InputError(f"{who}: expected an array, found: {error}") from None
    if array.dtype == np.uint8 and array.ndim == 3:
        array = array[:, None]
    if array.dtype == np.uint8 and array.ndim == 4:
        array = array if array.shape[1] in (1, 3) else array.transpose(0, 3, 1, 2)
        return MappedRows.of(array) if is_mapped(array) else np.ascontiguousarray(array)
    if array.dtype.kind in "iu" and array.ndim == 2:
        if array.size and array.min() < 0:
            raise InputError(f"{who}: integers [samples, length] are tokens and must not be negative, "
                            f"found {array.min()}; write a table of numbers as floats")  # fmt: skip
        return MappedRows.of(array) if is_mapped(array) else array.astype(np.int64)
    if (array.dtype.kind == "f" and array.ndim >= 2) or (array.dtype == bool and array.ndim == 2):
        if is_mapped(array):
            return MappedRows.of(array)
        with np.errstate(over="ignore"):
            numbers = array.astype(np.float32)
        if not np.isfinite(numbers).all():
            raise InputError(f"{who}: inputs must be finite; missing values are for tables (.csv, data frames)")
        return numbers
    raise InputError(
        f"{who}: inputs are uint8 images, integers [samples, length] (tokens) or floats [samples, ...], "
        f"found {array.dtype} of shape {array.shape}"
    )


def _known_labels(source: str, values: Any, classes: tuple[str, ...]) -> Labels:
    numbers, names = numbered_labels(values)
    if strangers := [name for name in names if name not in classes]:
        raise InputError(f"{source}: the test set has class {strangers[0]!r}, which no training sample has")
    return np.array([classes.index(name) for name in names], np.int64)[numbers]


def _test_rows(source: str, labels: Labels, classes: tuple[str, ...], share: float) -> NDArray[np.bool_]:
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


def _usual_view(x: Inputs) -> View | None:
    """The view of inputs of this form; None scales numbers by the public samples."""
    if isinstance(x, Table) or x.dtype == np.int64:
        return IDENTITY
    if x.dtype == np.float32:
        return None if x.ndim == 2 else IDENTITY
    mean, std = (IMAGE_VIEW["mean"],) * x.shape[1], (IMAGE_VIEW["std"],) * x.shape[1]
    return View(IMAGE_VIEW["scale"], mean, std, pad=max(1, x.shape[2] // 8), flip=True)
