"""CIFAR-10 and CIFAR-100 from their upstream pickles, which are read without running anything they contain."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcc.core.samples import View
from fedcc.data.dataset import DataError, Dataset, Description, Images, Labels, RemoteFile, content_of, paper_defaults
from fedcc.data.unpickle import MAX_BYTES, unpickle

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """The files of one of the two sets and the keys in them."""

    train: tuple[str, ...]
    test: str
    rows: tuple[int, int]  # images in each training file, in the test file
    labels: bytes
    names_file: str
    names: bytes
    classes: int
    md5: dict[str, str]


def unpickled(path: Path, content: bytes) -> dict[bytes, Any]:
    """The dictionary in a pickle of Python 2 or 3; its keys are bytes."""
    try:
        return {key.encode() if isinstance(key, str) else key: value for key, value in unpickle(content).items()}
    except ValueError as error:  # also UnicodeError, for text that cannot be encoded
        raise DataError(f"{path}: expected a pickle of arrays, found: {error}") from error


def entries(path: Path, layout: Layout) -> dict[bytes, Any]:
    """The dictionary of one file, which must have upstream's md5 if it is known."""
    return unpickled(path, content_of(path, MAX_BYTES, layout.md5.get(path.name, "")))


def _value(path: Path, stored: dict[bytes, Any], key: bytes) -> Any:
    if key not in stored:
        found = [str(other[:40]) for other in sorted(stored)[:10]]
        raise DataError(f"{path}: expected the entry '{key.decode()}', found {found}")
    return stored[key]


def read_batch(path: Path, layout: Layout, rows: int) -> tuple[Images, Labels]:
    """The images [rows, 3, 32, 32] and labels of one file."""
    stored = entries(path, layout)
    x = _value(path, stored, b"data")
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.shape != (rows, PIXELS):
        found = f"{x.dtype} {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
        raise DataError(f"{path}: expected 'data' as uint8 ({rows}, {PIXELS}), found {found}")
    labels, name = _value(path, stored, layout.labels), layout.labels.decode()
    if not isinstance(labels, list) or len(labels) != rows or not all(type(label) is int for label in labels):
        found = f"{len(labels)} entries" if isinstance(labels, list) else type(labels).__name__
        raise DataError(f"{path}: expected '{name}' as a list of {rows} whole numbers, found {found}")
    if not 0 <= min(labels) <= max(labels) < layout.classes:
        raise DataError(f"{path}: expected labels 0 .. {layout.classes - 1}, found {min(labels)} .. {max(labels)}")
    return x.reshape(rows, 3, 32, 32), np.array(labels, np.int64)


def read_names(path: Path, layout: Layout) -> tuple[str, ...]:
    names = _value(path, entries(path, layout), layout.names)
    if not isinstance(names, list) or len(names) != layout.classes:
        found = f"{len(names)} entries" if isinstance(names, list) else type(names).__name__
        raise DataError(f"{path}: expected {layout.classes} class names, found {found}")
    try:
        return tuple((name if isinstance(name, bytes) else name.encode()).decode() for name in names)
    except (AttributeError, UnicodeError) as error:
        raise DataError(f"{path}: expected class names in UTF-8, found: {error}") from error


def read_layout(folder: Path, layout: Layout, name: str, view: View) -> Dataset:
    classes = read_names(folder / layout.names_file, layout)
    batches = [read_batch(folder / file, layout, layout.rows[0]) for file in layout.train]
    test_x, test_y = read_batch(folder / layout.test, layout, layout.rows[1])
    train_x, train_y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    defaults = (CIFAR10 if name == "cifar10" else CIFAR100).defaults
    return Dataset(name, classes, train_x, train_y, test_x, test_y, view, defaults)


LAYOUT10 = Layout(
    train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test="test_batch",
    rows=(10_000, 10_000),
    labels=b"labels",
    names_file="batches.meta",
    names=b"label_names",
    classes=10,
    md5={
        "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
)
LAYOUT100 = Layout(
    train=("train",),
    test="test",
    rows=(50_000, 10_000),
    labels=b"fine_labels",
    names_file="meta",
    names=b"fine_label_names",
    classes=100,
    md5={
        "meta": "7973b15100ade9c7d40fb424638fde48",
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    },
)
VIEW10 = View(1 / 255, (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616), pad=4, flip=True)
VIEW100 = View(1 / 255, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), pad=4, flip=True)


def _description(number: int, layout: Layout, view: View, skew: str, folder: str, md5: str) -> Description:
    name, archive = f"cifar{number}", f"cifar-{number}-python.tar.gz"
    return Description(
        name=name,
        title=f"CIFAR-{number}",
        train=50_000,
        test=10_000,
        classes=number,
        shape=(3, 32, 32),
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
        defaults=paper_defaults(skew),
        read=lambda folder: read_layout(folder, layout, name, view),
        aliases=(f"cifar-{number}",),
        folders=(folder,),
        files=layout.md5,
        remotes=(RemoteFile(archive, (f"https://www.cs.toronto.edu/~kriz/{archive}",), md5),),
    )


CIFAR10 = _description(10, LAYOUT10, VIEW10, "classes:2", "cifar-10-batches-py", "c58f30108f718f92721af3b95e74349a")
CIFAR100 = _description(100, LAYOUT100, VIEW100, "classes:20", "cifar-100-python", "eb9058c3a382ffc7106e4002c42a8d85")
