"""Hugging Face data sets: in memory, or in a folder that ``save_to_disk`` wrote. No code of theirs is run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcc.errors import InputError
from fedcc.inputs.images import PARTS, Encoded, common_form, decode_all
from fedcc.inputs.tables import Table, column_labels

MARKS = ("dataset_info.json", "dataset_dict.json")  # one of them is in a folder of save_to_disk


def is_folder(path: Path) -> bool:
    """Whether ``save_to_disk`` wrote this folder."""
    return any((path / mark).is_file() for mark in MARKS)


def is_huggingface(data: Any) -> bool:
    """Whether it is a data set of the package ``datasets``, which is imported then."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(data, datasets.Dataset)


def is_dictionary(data: Any) -> bool:
    """Whether it is several data sets by name."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(data, datasets.DatasetDict)


def open_folder(path: Path) -> Any:
    """The data set, or the data sets by name, of a folder."""
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"{path}: Hugging Face data sets need datasets: pip install '.[huggingface]' in fedcc's checkout"
        ) from None
    try:
        data = datasets.load_from_disk(str(path))
        for one in data.values() if isinstance(data, datasets.DatasetDict) else [data]:
            one.data.table.validate(full=True)  # damaged offsets would end the process
    except Exception as error:  # whatever a damaged file leads to
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: expected a Hugging Face data set, found: {type(error).__name__} {reason}") from error
    return data


def read_parts(who: str, data: Any, label: str, resize: int) -> dict[str, tuple[Any, Any]]:
    """Inputs and labels by part, of one data set or of ``train``, ``test`` and ``public``."""
    if not isinstance(data, Mapping):
        return {"train": read_columns(who, data, label, resize=resize)}
    if "train" not in data:
        raise InputError(f"{who}: expected a part train, found {', '.join(map(repr, data)) or 'none'}")
    if others := [name for name in data if name not in PARTS]:
        warnings.warn(f"{who}: {', '.join(map(repr, others))} is left out; the parts are {', '.join(PARTS)}",
                      stacklevel=2)  # fmt: skip
    return {
        part: read_columns(f"{who}, {part}", data[part], label, labelled=part != "public", resize=resize)
        for part in PARTS
        if part in data
    }


def read_columns(who: str, data: Any, label: str = "", *, labelled: bool = True, resize: int = 0) -> tuple[Any, Any]:
    """Inputs and labels of one data set: its only column of images, its only column of lists, or a table."""
    kinds = {name: type(feature).__name__ for name, feature in data.features.items()}
    if not len(data):
        raise InputError(f"{who} has no rows")
    label = label or _label_column(who, kinds, labelled)
    if labelled and label not in kinds:
        raise InputError(f"{who} has no column {label!r}; it has {', '.join(map(repr, kinds))}")
    inputs = {name: kind for name, kind in kinds.items() if name != label}
    images, plain = ([n for n, kind in inputs.items() if kind in wanted] for wanted in (["Image"], PLAIN))
    lists = [name for name, kind in inputs.items() if kind in LISTS]
    try:
        labels = column_labels(_values(data, label)) if label in kinds else None
        if len(images) == 1:
            if len(inputs) > 1:
                others = ", ".join(repr(name) for name in inputs if name not in images)
                warnings.warn(f"{who}: the inputs are the images {images[0]!r}; {others} is left out", stacklevel=2)
            return _images(who, data, images[0], resize), labels
        if len(lists) == len(inputs) == 1:
            return _array(who, data, lists[0]), labels
        if inputs and len(plain) == len(inputs):
            return Table.of({name: _values(data, name) for name in plain}), labels
    except InputError as error:
        raise error if str(error).startswith(who) else InputError(f"{who}: {error}") from None
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{who}: cannot be read: {type(error).__name__} {reason}") from error
    found = ", ".join(f"{name!r} ({kind})" for name, kind in inputs.items()) or "none"
    raise InputError(
        f"{who}: inputs are one column of images, one of lists, or columns of numbers and texts, found {found}; "
        "keep what you need with select_columns"
    )


PLAIN = ("Value", "ClassLabel")
LISTS = ("List", "LargeList", "Sequence", "Array2D", "Array3D", "Array4D", "Array5D")


def _label_column(who: str, kinds: Mapping[str, str], labelled: bool) -> str:
    found = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    if len(found) == 1 or not labelled:
        return found[0] if len(found) == 1 else ""
    raise InputError(
        f"{who}: name the column of the labels with label; {len(found) or 'none'} of its columns "
        f"{', '.join(map(repr, kinds))} {'are' if len(found) > 1 else 'is'} of class labels"
    )


def _values(data: Any, name: str) -> NDArray[Any]:
    """A plain column; class labels by their names."""
    column = data.select_columns([name]).with_format("arrow")[:].column(0)
    feature = data.features[name]
    if hasattr(feature, "names"):
        numbers = [None if number is None or number < 0 else number for number in column.to_pylist()]
        if missing := numbers.count(None):
            raise InputError(f"{missing} samples have no label in {name!r}")
        return np.array([feature.int2str(number) for number in numbers])
    return np.array(column.to_pylist(), None if column.null_count == 0 else object)


def _array(who: str, data: Any, name: str) -> NDArray[Any]:
    """A column of lists as one array."""
    array = data.select_columns([name]).with_format("numpy")[:][name]
    if not isinstance(array, np.ndarray) or array.dtype == object:
        raise InputError(f"{who}: the lists in {name!r} must have one length")
    return array


def _images(who: str, data: Any, name: str, resize: int) -> NDArray[np.uint8]:
    """A column of images, decoded here: within the limits on pixels, and nothing is fetched."""
    cells = data.select_columns([name]).with_format("arrow")[:].column(0).to_pylist()
    files = [_file(f"{who}, image {i}", cell) for i, cell in enumerate(cells)]
    return decode_all(files, common_form(files, resize))


def _file(who: str, cell: Any) -> Path | Encoded:
    if cell and cell["bytes"]:
        return Encoded(cell["bytes"], who)
    path = Path(cell["path"]) if cell and cell["path"] else None
    if path is None or not path.is_file():
        raise InputError(f"{who}: expected the bytes of an image or a file that is here, found {path or 'none'}")
    return path
