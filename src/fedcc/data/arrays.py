"""The caller's arrays and tensors as samples, checked; labels of any kind as the numbers of their classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcc.core.maps import MappedTensor
from fedcc.core.options import check_value
from fedcc.core.samples import IDENTITY, Samples, View
from fedcc.errors import InputError
from fedcc.inputs.maps import MappedRows, is_mapped
from fedcc.inputs.tables import Table, numbered_labels

Array = Any
"""A numpy array, a tensor, or nested lists."""

MAX_CLASSES = 65_536


def as_samples(who: str, x: Array, view: View | None) -> Samples:
    """Inputs as float32, uint8 (images) or int64 (tokens), checked; a memory map is neither copied nor read."""
    inputs = _tensor(who, x)
    if inputs.ndim < 2 or not len(inputs):
        raise ValueError(
            f"{who} needs inputs of shape [samples, ...] with at least one sample, got {tuple(inputs.shape)}"
        )
    if isinstance(inputs, MappedTensor):
        pass
    elif inputs.is_floating_point() or inputs.dtype == torch.bool:
        inputs = inputs.float()
        if not bool(torch.isfinite(inputs).all()):
            raise ValueError(f"{who} has inputs that are not finite")
    elif inputs.dtype != torch.uint8:
        inputs = inputs.long()
    return Samples({"x": inputs}, view or (View(scale=1 / 255) if inputs.dtype == torch.uint8 else IDENTITY))


def stored_tensor(x: NDArray[Any] | MappedRows) -> Tensor:
    """Inputs of a data set as a tensor, without a copy."""
    return MappedTensor(x) if isinstance(x, MappedRows) else torch.from_numpy(x)


def _tensor(who: str, values: Array) -> Tensor:
    """A copy of an array, a table or nested lists of numbers as a tensor; a memory map is not copied."""
    if is_mapped(values):
        return MappedTensor(MappedRows.of(values))
    if np.ma.is_masked(values) or (isinstance(values, Sequence) and any(map(np.ma.is_masked, values))):
        raise ValueError(f"{who}: masked values cannot be trained on; fill them or leave those samples out")
    try:
        if isinstance(values, Tensor) and values.dtype != torch.uint64:
            tensor = values.detach().clone()
        else:
            array = np.array(values.detach().cpu().numpy() if isinstance(values, Tensor) else values)
            if array.dtype.kind == "u" and array.itemsize > 1:
                if array.size and int(array.max()) > np.iinfo(np.int64).max:
                    raise ValueError(f"{array.max()} is above {np.iinfo(np.int64).max}")
                array = array.astype(np.int64)
            tensor = torch.from_numpy(array)
        if tensor.is_complex():
            raise ValueError("complex numbers; pass real and imaginary parts as inputs of their own")
        if tensor.layout != torch.strided:
            raise ValueError(f"layout {tensor.layout}; pass .to_dense()")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{who}: expected an array of numbers, got {type(values).__name__} ({error})") from None
    return tensor


def labels_of(who: str, values: Array, number: int) -> NDArray[Any]:
    """The labels of so many samples: integers as int64, bools and strings as strings."""
    labels = _texts(values)
    if labels is None:
        tensor = _tensor(f"the labels of {who}", values)
        labels = tensor.source.read() if isinstance(tensor, MappedTensor) else tensor.cpu().numpy()
    if labels.ndim != 1 or labels.dtype.kind == "f":
        found = f"{labels.dtype} {labels.shape}"
        raise ValueError(f"{who} needs whole-number labels of shape [samples], bools or texts, got {found}")
    if len(labels) != number:
        raise ValueError(f"{who} has {number} inputs and {len(labels)} labels")
    if labels.dtype == object and (missing := sum(not isinstance(value, str) for value in labels)):
        raise InputError(f"{missing} samples of {who} have no label, or one that is not a text")
    return labels.astype(np.int64) if labels.dtype.kind in "iu" else labels.astype(str)


def _texts(values: Array) -> NDArray[Any] | None:
    """Labels that are texts, or a mixture with texts in it; None if they are something else."""
    try:
        array = None if isinstance(values, Tensor) or np.ma.is_masked(values) else np.asarray(values)
    except ValueError:  # lists of different lengths
        return None
    if array is None or array.dtype.kind not in "OUT" or not any(isinstance(value, str) for value in array.flat):
        return None
    return array


def numbered(labels: list[NDArray[Any]], classes: int | None) -> tuple[list[Tensor], tuple[int, ...], tuple[str, ...]]:
    """The number of each sample's class, the caller's label of each class, and the classes' names.

    Labels that are integers from 0 are kept as such; others (strings, negative numbers) become names.
    """
    if classes is not None:
        check_value("classes", classes, int, 1)
        check_value("classes", classes, int, high=MAX_CLASSES)
    if len({part.dtype.kind for part in labels}) > 1:
        raise ValueError("labels must be of one kind, got integers and strings")
    together, cuts = np.concatenate(labels), np.cumsum([len(part) for part in labels])[:-1]
    if together.dtype.kind == "U" or together.min() < 0:
        if classes is not None:
            raise ValueError(f"classes is for labels from 0 to {classes - 1}, got {together[0].item()!r} among them")
        numbers, names = numbered_labels(together)
        return [torch.from_numpy(part) for part in np.split(numbers, cuts)], tuple(range(len(names))), names
    values, numbers = np.unique(together, return_inverse=True)
    if classes is not None:
        if (highest := int(values[-1])) >= classes:
            raise ValueError(f"labels must lie in 0 .. {classes - 1}, got {highest}")
        return [torch.from_numpy(part.copy()) for part in labels], tuple(range(classes)), ()
    if len(values) > MAX_CLASSES:
        raise ValueError(f"labels must have at most {MAX_CLASSES:,} distinct values, got {len(values):,}")
    parts = np.split(numbers.astype(np.int64), cuts)
    return [torch.from_numpy(part.copy()) for part in parts], tuple(values.tolist()), ()


def whole_labels(names: Sequence[str]) -> tuple[int, ...]:
    """The labels that class names stand for, if they are integers other than 0, 1, 2 and so on.

    >>> whole_labels(["3", "7"]), whole_labels(["0", "1"]), whole_labels(["-1", "1"])
    ((3, 7), (), ())
    """
    numbers = [int(name) for name in names if name.isascii() and name.isdecimal() and str(int(name)) == name]
    if len(numbers) < len(names) or numbers != sorted(numbers) or numbers[-1] == len(names) - 1 or numbers[-1] >> 63:
        return ()
    return tuple(numbers)


def usual_network(x: Samples | NDArray[Any] | MappedRows | Table) -> str:
    """The network for inputs like these: ``bag`` for tokens, ``resnet8`` for square images, else ``mlp``."""
    if isinstance(x, Table):
        return "mlp"
    inputs = x.x if isinstance(x, Samples) else x
    if str(inputs.dtype).endswith("int64"):
        return f"bag{int((inputs.array if isinstance(inputs, MappedRows) else inputs).max()) + 1}"
    shape = tuple(inputs.shape[1:])
    return "resnet8" if len(shape) == 3 and shape[0] in (1, 3) and shape[1] == shape[2] >= 8 else "mlp"
