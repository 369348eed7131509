"""Data sets by name, and data of your own by path. Who holds what is in ``skew``, ``split`` and ``partition``."""

from contextlib import suppress
from pathlib import Path

from fedcc.code import is_reference
from fedcc.core.options import check_value
from fedcc.data.dataset import DataError, Dataset, Defaults, Description
from fedcc.data.fetch import data_folder, ensure
from fedcc.data.registry import DATASETS, find_dataset

__all__ = ["DATASETS", "DataError", "Dataset", "Defaults", "Description", "describe", "find_dataset", "load"]


TEST = 0.2  # share of test samples to split off


def describe(name: str, *, resize: int | None = None, label: str = "", test: float = TEST) -> Description:
    """What is known of a data set by name, path or ``module:function``; the last two are read for it."""
    from fedcc.data import own

    check_value("resize", resize, int | None, 0, 1024)
    check_value("test", test, float, 0, below=1)
    try:
        description = find_dataset(name)
    except ValueError:
        if own.is_own(name) or own.is_installed(name):
            if test != TEST and (is_reference(name) or own.is_installed(name)):
                raise ValueError(
                    f"test={test} is for files; {name} is a function, which makes its samples itself"
                ) from None
            return own.describe(name, label=label, resize=resize or 0, test=test)
        with suppress(OSError):  # no file can have such a name
            if Path(name).exists():
                text = f"unknown data set {name!r}; for your own data give its path, as ./{name}"
                raise ValueError(text) from None
        raise
    if resize is not None and description.name != "tiny-imagenet":
        raise ValueError(f"resize is for images of your own and tiny-imagenet, got resize={resize} for {name}")
    if label:
        raise ValueError(f"label names a column of a table, got label={label} for {name}")
    if test != TEST:
        raise ValueError(f"test is for data of your own, got test={test} for {name}, which has test samples")
    return description


def load(
    name: str,
    folder: Path | None = None,
    download: bool = True,
    resize: int | None = None,
    *,
    label: str = "",
    test: float = TEST,
) -> Dataset:
    """Read a data set: by name from the data folder, downloaded first if it is missing, or your own by its path.

    ``resize`` is the side of images: of Tiny ImageNet's 64 (its own) or 32, of your own any. ``label`` is the column
    of a table's labels, ``test`` the share of test samples to split off where your data has none.

    >>> load("digits").train_x.shape
    (1442, 1, 8, 8)
    """
    description = describe(name, resize=resize, label=label, test=test)
    options = {} if resize is None else {"resize": resize}
    if description.embedded:
        return description.read(data_folder(folder) if folder is not None else Path(), **options)
    return description.read(ensure(description, data_folder(folder), download), **options)
