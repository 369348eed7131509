"""Images and tables from files as arrays. Imports neither torch nor the rest of the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedcc.errors import InputError
from fedcc.inputs.images import SUFFIXES, Form, decode_all, list_images
from fedcc.inputs.tables import Encoding, Table, read_csv, read_parquet

TABLES = {".csv": read_csv, ".tsv": read_csv, ".parquet": read_parquet}


def read_inputs(
    path: Path, shape: Sequence[int], dtype: str, encoding: Encoding | None
) -> tuple[list[str], NDArray[Any]]:
    """New inputs for a model, and a name for each: of a file of images, a folder of them, a table or an .npz."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    suffix = path.suffix.lower()
    if suffix in TABLES:
        if encoding is None:
            raise InputError(f"{path} is a table, but the model was trained on inputs of shape {tuple(shape)}")
        table: Table = TABLES[suffix](path)
        return [str(i) for i in range(1, len(table) + 1)], encoding.encode(table)
    if path.is_dir() or suffix in SUFFIXES:
        if dtype != "uint8" or len(shape) != 3:
            raise InputError(f"{path}: the model was not trained on images, but on {dtype} of shape {tuple(shape)}")
        paths = list_images(path).paths if path.is_dir() else [path]
        root = path if path.is_dir() else path.parent
        return [p.relative_to(root).as_posix() for p in paths], decode_all(paths, Form(shape[1], shape[0]))
    if suffix != ".npz":
        known = ", ".join((".npz", *TABLES, *SUFFIXES))
        raise InputError(f"{path}: expected a folder of images or a file ({known})")
    try:
        with np.load(path, allow_pickle=False) as file:
            name = next((n for n in ("x", "x_test") if n in file.files), None)
            if name is None:
                raise InputError(f"{path}: expected an array x, found {', '.join(file.files) or 'none'}")
            x = file[name]
    except (OSError, EOFError, KeyError, ValueError, BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: expected an .npz of plain arrays, found: {error}") from error
    if encoding is not None:
        raise InputError(f"{path}: the model was trained on a table: give one ({', '.join(TABLES)})")
    if not x.ndim or not len(x):
        raise InputError(f"{path}: expected at least one input, found an array of shape {x.shape}")
    return [str(i) for i in range(len(x))], _in_form(path, x, tuple(shape), dtype)


def _in_form(path: Path, x: NDArray[Any], shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """An array in the form that the model was trained on, where that is only a matter of layout or number type."""
    if dtype == "uint8" and x.dtype == np.uint8:
        if x.ndim == 3 and len(shape) == 3:
            x = x[:, None]
        if x.ndim == 4 and x.shape[1:] != shape and (x.shape[3], *x.shape[1:3]) == shape:
            x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if dtype == "float32" and x.dtype.kind in "fb":
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise InputError(f"{path}: inputs must be finite")
    if dtype == "int64" and x.dtype.kind in "iu":
        if x.min() < 0:
            raise InputError(f"{path}: tokens must not be negative, found {x.min()}")
        x = x.astype(np.int64)
    return x
