"""Fashion-MNIST from its four idx files.

It is not augmented: its images are centred and upright by construction, and the paper's protocol, which does not
cover it, gives no reason to crop or flip them.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcc.core.samples import View
from fedcc.data.dataset import (
    DataError,
    Dataset,
    Description,
    Images,
    Labels,
    Remote,
    content_of,
    paper_defaults,
    readable,
    same_as_upstream,
)

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
UPSTREAM = (
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)


def read_idx(path: Path, shape: tuple[int, ...], md5: str = "") -> NDArray[np.uint8]:
    """An array of bytes in the idx format: two zeros, type 8, the rank, big-endian sizes, the values.

    ``path`` is the .gz file; the unpacked one beside it serves where there is no .gz.
    """
    path = readable(path)
    stored = content_of(path)
    try:
        content = gzip.decompress(stored) if path.suffix == ".gz" else stored
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: expected a whole gzip file, found: {error}") from error
    rank = len(shape)
    if content[:4] != bytes([0, 0, 8, rank]) or len(content) < 4 + 4 * rank:
        raise DataError(f"{path}: expected idx bytes of rank {rank}, found a file that begins {content[:4].hex(' ')}")
    found = tuple(int(n) for n in np.frombuffer(content, ">u4", count=rank, offset=4))
    if found != shape:
        raise DataError(f"{path}: expected the shape {shape}, found {found}")
    size, expected = len(content) - 4 - 4 * rank, int(np.prod(shape))
    if size != expected:
        raise DataError(f"{path}: expected {expected} bytes of values, found {size}")
    if path.suffix == ".gz":
        same_as_upstream(path, stored, md5)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)


def read_part(folder: Path, part: str, n: int, md5: dict[str, str]) -> tuple[Images, Labels]:
    images, labels = f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz"
    x = read_idx(folder / images, (n, 28, 28), md5.get(images, ""))
    y = read_idx(folder / labels, (n,), md5.get(labels, "")).astype(np.int64)
    if y.max() >= len(CLASSES):
        raise DataError(f"{folder / labels}: expected labels 0 .. 9, found {y.min()} .. {y.max()}")
    return x[:, None], y


def read(folder: Path, sizes: tuple[int, int] = (60_000, 10_000), md5: dict[str, str] = MD5) -> Dataset:
    train_x, train_y = read_part(folder, "train", sizes[0], md5)
    test_x, test_y = read_part(folder, "t10k", sizes[1], md5)
    view = View(1 / 255, (0.2860,), (0.3530,))
    return Dataset(FASHION.name, CLASSES, train_x, train_y, test_x, test_y, view, FASHION.defaults)


FASHION = Description(
    name="fashion-mnist",
    title="Fashion-MNIST",
    train=60_000,
    test=10_000,
    classes=10,
    shape=(1, 28, 28),
    source="https://github.com/zalandoresearch/fashion-mnist",
    defaults=paper_defaults("classes:2", augment=False),
    read=read,
    aliases=("fashionmnist", "fashion", "fmnist"),
    folders=("fashion-mnist", "FashionMNIST/raw"),
    files=MD5,
    remotes=tuple(Remote(file, tuple(base + file for base in UPSTREAM), md5) for file, md5 in MD5.items()),
)
