"""Data sets by name, and who holds what of them (``fedcc.data.skew``); downloads are in ``fedcc.data.fetch``."""

from __future__ import annotations

from pathlib import Path

from fedcc.data.dataset import DataError, Dataset, Defaults, Description
from fedcc.data.fetch import data_folder, ensure
from fedcc.data.registry import DATASETS, find

__all__ = ["DATASETS", "DataError", "Dataset", "Defaults", "Description", "find", "load"]


def load(name: str, folder: Path | None = None, download: bool = True) -> Dataset:
    """The data set of this name, read from the data folder, downloaded first where it is absent.

    >>> load("digits").train_x.shape
    (1442, 1, 8, 8)
    """
    description = find(name)
    if description.embedded:
        return description.read(data_folder(folder) if folder is not None else Path())
    return description.read(ensure(description, data_folder(folder), download))
