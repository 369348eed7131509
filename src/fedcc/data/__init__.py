"""Data sets by name. Who holds what is in ``skew``, ``split`` and ``partition``; downloads are in ``fetch``."""

from pathlib import Path

from fedcc.data.dataset import DataError, Dataset, Defaults, Description
from fedcc.data.fetch import data_folder, ensure
from fedcc.data.registry import DATASETS, find_dataset

__all__ = ["DATASETS", "DataError", "Dataset", "Defaults", "Description", "find_dataset", "load"]


def load(name: str, folder: Path | None = None, download: bool = True, resize: int | None = None) -> Dataset:
    """Read a data set from the data folder, downloaded first if it is missing.

    ``resize`` is the side of Tiny ImageNet's images, 64 (its own) or 32.

    >>> load("digits").train_x.shape
    (1442, 1, 8, 8)
    """
    description = find_dataset(name)
    if resize is not None and description.name != "tiny-imagenet":
        raise ValueError(f"resize is only for tiny-imagenet, got resize={resize} for {description.name}")
    options = {} if resize is None else {"resize": resize}
    if description.embedded:
        return description.read(data_folder(folder) if folder is not None else Path())
    return description.read(ensure(description, data_folder(folder), download), **options)
