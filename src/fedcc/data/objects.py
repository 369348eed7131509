"""Data that is in memory already: data frames, torch data sets and Hugging Face data sets as inputs and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from fedcc.data.huggingface import is_huggingface, read_columns
from fedcc.errors import InputError
from fedcc.inputs.tables import Table, column_labels

Pair = tuple[Any, Any]
"""Inputs (an array, a memory map or a table), and labels of any kind, or None."""


def read_object(who: str, data: Any, label: str = "", *, labelled: bool = True, resize: int = 0) -> Pair | None:
    """Inputs and labels of a data frame, a Hugging Face or a torch data set; None if it is none of them.

    ``label`` is the column of the labels. With ``labelled=False`` there need not be any.
    """
    if isinstance(data, Table):
        return data.without(label), data.column(label) if labelled else None
    if is_huggingface(data):
        return read_columns(who, data, label, labelled=labelled, resize=resize)
    if is_frame(data):
        return _from_frame(who, data, label, labelled)
    if is_torch_dataset(data):
        return _from_items(who, data, labelled)
    return None


def read_pair(who: str, data: Any, label: str) -> Pair:
    """Inputs and labels of a pair of arrays, or of what :func:`read_object` takes."""
    if found := read_object(who, data, label):
        return found
    if not isinstance(data, Sequence) or len(data) != 2:
        raise ValueError(f"{who} must be a pair (inputs, labels), a data frame, a torch or a Hugging Face data set, "
                         f"got {type(data).__name__}")  # fmt: skip
    return data[0], data[1]


def is_frame(data: Any) -> bool:
    """Whether it is a data frame: pandas, polars, or a table of pyarrow."""
    return all(hasattr(data, name) for name in ("columns", "shape", "__getitem__"))


def is_torch_dataset(data: Any) -> bool:
    """Whether it is a torch data set, or has items and a length like one."""
    if isinstance(data, TorchDataset):
        return True
    known = isinstance(data, Sequence | Mapping | Tensor | np.ndarray) or hasattr(data, "dtype")
    return not known and all(hasattr(data, name) for name in ("__getitem__", "__len__"))


def _from_frame(who: str, frame: Any, label: str, labelled: bool) -> Pair:
    names = list(getattr(frame, "column_names", frame.columns))
    texts = [str(name) for name in names]
    known = ", ".join(map(repr, texts))
    if len(set(texts)) < len(texts):
        raise InputError(f"{who}: column names must be different, found {known}")
    if labelled and label not in texts:
        rule = f"has no column {label!r}" if label else "is a data frame: name the column of its labels with label="
        raise InputError(f"{who} {rule}; it has {known}")
    columns = {text: np.asarray(frame[name]) for text, name in zip(texts, names, strict=True)}
    labels = columns.pop(label, None)
    if not len(frame):
        raise InputError(f"{who} has no rows")
    try:
        return Table.of(columns), None if labels is None else column_labels(labels)
    except InputError as error:
        raise InputError(f"{who}: {error}") from None


def _from_items(who: str, data: Any, labelled: bool) -> Pair:
    """A map-style data set; its items are read once, in their order."""
    try:
        number = len(data)
    except TypeError:
        raise InputError(f"{who}: a torch data set needs a length and items by index (map style)") from None
    inputs: list[NDArray[Any]] = []
    labels: list[Any] = []
    for i in range(number):
        item = data[i]
        pair = item if isinstance(item, tuple | list) else (item,)
        if not 1 <= len(pair) <= 2 or isinstance(item, Mapping):
            raise InputError(f"{who}: items must be (input, label) or inputs, got {type(item).__name__} as item {i}")
        x = _input(pair[0])
        if inputs and (x.shape, x.dtype) != (inputs[0].shape, inputs[0].dtype):
            raise InputError(f"{who}: inputs must be alike, item 0 is {inputs[0].dtype} of shape {inputs[0].shape}, "
                             f"item {i} {x.dtype} of shape {x.shape}")  # fmt: skip
        inputs.append(x)
        labels += [_label(y) for y in pair[1:]]
    if not inputs:
        raise InputError(f"{who} has no items")
    if labelled and not labels:
        raise InputError(f"{who}: items must be pairs (input, label), got inputs alone")
    if labels and len(labels) < len(inputs):
        raise InputError(f"{who}: {len(inputs) - len(labels)} of {len(inputs)} items have no label")
    return np.stack(inputs), np.asarray(labels) if labels else None


def _input(x: Any) -> NDArray[Any]:
    """One input: a tensor, an array, a number, or an image of Pillow as [channels, height, width]."""
    if hasattr(x, "convert"):
        image = np.asarray(x.convert("L" if x.mode in ("1", "L") else "RGB"))
        return image[None] if image.ndim == 2 else image.transpose(2, 0, 1)
    return np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x)


def _label(y: Any) -> Any:
    return y.item() if isinstance(y, Tensor | np.generic) or (isinstance(y, np.ndarray) and y.ndim == 0) else y
