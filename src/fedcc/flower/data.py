"""A site's own samples: arrays, a table or a folder of images; checked before anything is trained on them."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcc.core.naming import shortened
from fedcc.core.samples import Samples
from fedcc.errors import LeftOut
from fedcc.inputs import TABLES, read_inputs
from fedcc.inputs.images import Form, decode_all, list_classes
from fedcc.inputs.tables import Table, numbered_labels

if TYPE_CHECKING:
    from fedcc.flower.folder import Task

ENCODED = "encoded"  # in an NPZ file instead of x: rows of a table that are encoded already
KINDS = {"uint8": "uint8 images", "float32": "numbers", "int64": "integers (tokens)"}


def site_samples(path: Path, task: Task, label: str = "") -> Samples:
    """The samples of ``path`` in the task's form, with the numbers of their classes.

    It is an NPZ file with ``x`` and ``y``, a table whose column ``label`` holds the classes, a folder with ``x.npy``
    and ``y.npy``, or a folder with a sub-folder of images per class. Whole numbers in ``y`` are the classes' numbers;
    all other labels are their names or, if no name is a number, their numbers.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist; --data names an NPZ file with x and y, a table, or a folder")
    if path.suffix.lower() in TABLES:
        x, y = _read_table(path, task, label)
    elif not path.is_dir():
        arrays = read_arrays(path)
        name = ENCODED if ENCODED in arrays else "x"
        _require(path, arrays, name, "y")
        x, y = arrays[name] if name == ENCODED else encoded(path, arrays[name], task), arrays["y"]
    elif (path / "x.npy").exists():
        x, y = encoded(path, _read_array(path / "x.npy"), task), _read_array(path / "y.npy")
    else:
        listing = list_classes(path)
        x, y = decode_all(listing.paths, _form(path, task)), np.array(listing.names, object)
    x = check_inputs(path, x, task)
    numbers = _class_numbers(path, y, task)
    if len(y) != len(x):
        raise ValueError(f"{path}: x has {len(x)} {task.samples_text} and y {len(y)} labels")
    return Samples({"x": torch.from_numpy(x), "y": torch.from_numpy(numbers)}, task.view)


def new_inputs(path: Path, task: Task) -> NDArray[Any]:
    """Inputs to predict, in the task's form: of an NPZ file with ``x``, a table, an image or a folder of images."""
    if path.suffix.lower() == ".npz":
        return check_inputs(path, encoded(path, read_arrays(path, "x")["x"], task), task)
    return check_inputs(path, read_inputs(path, task.shape, task.dtype, task.encoding)[1], task)


def _read_table(path: Path, task: Task, label: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """The encoded rows of a table, and the names of their classes."""
    table = TABLES[path.suffix.lower()](path)
    if not label:
        raise ValueError(
            f"{path} is a table: name the column of its labels with --label; "
            f"it has {', '.join(map(repr, table.columns))}"
        )
    with errors_named(str(path)):
        numbers, names = numbered_labels(table.column(label))
    return encoded(path, table.without(label), task), np.array(names, object)[numbers]


def encoded(path: Path, x: Table | NDArray[Any], task: Task) -> NDArray[Any]:
    """The inputs of a table's rows, or of a matrix if the task has columns; other arrays as they are."""
    if task.encoding is None:
        if isinstance(x, Table):
            raise ValueError(f"{path} is a table, but the federation's inputs are {_wanted(task)}")
        return x
    if not isinstance(x, Table):
        if x.ndim != 2 or x.dtype.kind not in "fiub":
            raise ValueError(f"{path}: x must be numbers of shape [samples, columns], got {x.dtype} {list(x.shape)}")
        x = Table.of({str(i): column for i, column in enumerate(x.T)})
    known = {column.name for column in task.encoding.columns}
    if extra := [name for name in x.columns if name not in known]:
        text = f"{path}: columns that the federation does not have are left out: {shortened(extra)}"
        warnings.warn(text, LeftOut, stacklevel=2)
    with errors_named(str(path)):
        return task.encoding.encode(x)


def check_inputs(path: Path, x: NDArray[Any], task: Task) -> NDArray[Any]:
    """The inputs in the task's number type; anything but inputs of its kind and shape is refused."""
    right = {"uint8": x.dtype == np.uint8, "float32": x.dtype.kind == "f", "int64": x.dtype.kind in "iu"}
    if not right[task.dtype] or x.shape[1:] != task.shape or not x.ndim:
        raise ValueError(f"{path}: x must be {_wanted(task)}, got {x.dtype} {list(x.shape)}")
    if not len(x):
        raise ValueError(f"{path} holds no samples")
    if task.dtype == "float32" and not np.isfinite(x).all():
        raise ValueError(f"{path}: x has values that are not finite")
    if task.dtype == "int64" and int(x.min()) < 0:
        raise ValueError(f"{path}: tokens must not be negative, got {x.min()}")
    return np.ascontiguousarray(x, task.dtype)


def _wanted(task: Task) -> str:
    return f"{KINDS[task.dtype]} of shape [samples, {'x'.join(map(str, task.shape))}]"


def _form(path: Path, task: Task) -> Form:
    """What a site's images become."""
    if task.dtype != "uint8" or len(task.shape) != 3 or task.shape[1] != task.shape[2]:
        raise ValueError(f"{path} is a folder of images, but the federation's inputs are {_wanted(task)}")
    return Form(task.shape[1], task.shape[0])


def _class_numbers(path: Path, y: NDArray[Any], task: Task) -> NDArray[np.int64]:
    """The number of each sample's class."""
    if y.ndim == 1 and y.dtype.kind in "OUb":
        numbers, names = numbered_labels(y)
        known = {name: c for c, name in enumerate(task.names)}
        if not any(name.lstrip("-").isdecimal() for name in task.names):
            known |= {str(c): c for c in range(task.classes)}
        if strangers := [name for name in names if name not in known]:
            raise ValueError(
                f"{path}: no class of the federation is named {strangers[0]!r}; "
                f"its classes are {shortened(list(task.names))}"
            )
        return np.array([known[name] for name in names], np.int64)[numbers]
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise ValueError(f"{path}: y must be whole-number labels of shape [samples], got {y.dtype} {y.shape}")
    if len(y) and (int(y.min()) < 0 or int(y.max()) >= task.classes):
        raise ValueError(f"{path}: labels must lie in 0 .. {task.classes - 1}, got {y.min()} .. {y.max()}")
    return y.astype(np.int64)


def _read_array(path: Path) -> Any:
    with errors_named(f"{path} is not a readable array"):
        return np.load(path, allow_pickle=False)


def read_arrays(path: Path, *names: str) -> dict[str, Any]:
    """The arrays of an NPZ file, with at least these names; objects are refused, since reading would unpickle them."""
    with errors_named(f"{path} is not a readable NPZ file"), np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
        if odd := [name for name, value in arrays.items() if not isinstance(value, np.ndarray)]:
            raise ValueError(f"{odd[0]} is not an array")
    _require(path, arrays, *names)
    return arrays


def _require(path: Path, arrays: Mapping[str, Any], *names: str) -> None:
    if not set(names) <= arrays.keys():
        raise ValueError(f"{path} must hold the arrays {', '.join(names)}, got {', '.join(arrays) or 'none'}")


def inputs_sha256(x: np.ndarray) -> str:
    digest = hashlib.sha256(repr((x.shape, x.dtype.str)).encode())
    digest.update(np.ascontiguousarray(x).data)
    return digest.hexdigest()


@contextmanager
def errors_named(problem: str) -> Iterator[None]:
    """Errors in the block become a ValueError that begins so: reading damaged files raises nearly anything."""
    try:
        yield
    except Exception as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        text = text.partition(" If you trust")[0]  # numpy's advice to unpickle it, for whatever it does not know
        reason = f"{text} is missing" if type(error) is KeyError else " ".join(text.split()) or type(error).__name__
        raise ValueError(f"{problem}: {reason[:500]}") from None
