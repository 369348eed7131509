"""Fashion-MNIST from its four idx files."""

import gzip
import zlib
from collections.abc import Mapping
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
    RemoteFile,
    hexdigest,
    paper_defaults,
    readable,
    same_as_upstream,
)

CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
# Of the unpacked files, as some copies are recompressed or not compressed at all. Computed from Debian's package
# dataset-fashion-mnist, version 0.0~git20200523.55506a9-1. With upstream's gzip headers (name and time of the file) its
# compressed streams have the md5 sums above, so the content is upstream's.
SHA256 = {
    "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
MAX_BYTES = 1 << 27  # of an unpacked file; the largest has 47 million
UPSTREAM = (
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)


def unpacked(path: Path) -> bytes:
    """The content of a .gz file, or of an unpacked one."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content: bytes = file.read(MAX_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: expected a whole gzip file, found: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(content) > MAX_BYTES:
        raise DataError(f"{path}: expected at most {MAX_BYTES:,} bytes, found more")
    return content


def read_idx(path: Path, shape: tuple[int, ...], digest: str = "") -> NDArray[np.uint8]:
    """An array of bytes in the idx format: two zeros, type 8, the rank, big-endian sizes, the values.

    ``path`` is the .gz file; without it, the unpacked one beside it is read. ``digest`` is the sha256 of the content.
    """
    path = readable(path)
    content = unpacked(path)
    rank = len(shape)
    if content[:4] != bytes([0, 0, 8, rank]) or len(content) < 4 + 4 * rank:
        raise DataError(f"{path}: expected idx bytes of rank {rank}, found a file that begins {content[:4].hex(' ')}")
    found = tuple(int(n) for n in np.frombuffer(content, ">u4", count=rank, offset=4))
    if found != shape:
        raise DataError(f"{path}: expected the shape {shape}, found {found}")
    size, expected = len(content) - 4 - 4 * rank, int(np.prod(shape))
    if size != expected:
        raise DataError(f"{path}: expected {expected} bytes of values, found {size}")
    same_as_upstream(path, content, digest)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape).copy()  # bytes cannot be written to


def read_part(folder: Path, part: str, n: int, digests: Mapping[str, str]) -> tuple[Images, Labels]:
    images, labels = f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz"
    x = read_idx(folder / images, (n, 28, 28), digests.get(images, ""))
    y = read_idx(folder / labels, (n,), digests.get(labels, "")).astype(np.int64)
    if y.max() >= len(CLASSES):
        raise DataError(f"{folder / labels}: expected labels 0 .. 9, found {y.min()} .. {y.max()}")
    return x[:, None], y


def read(folder: Path, sizes: tuple[int, int] = (60_000, 10_000), digests: Mapping[str, str] = SHA256) -> Dataset:
    train_x, train_y = read_part(folder, "train", sizes[0], digests)
    test_x, test_y = read_part(folder, "t10k", sizes[1], digests)
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
    defaults=paper_defaults("classes:2", augment=False),  # images are centred and upright
    read=read,
    aliases=("fashionmnist", "fashion", "fmnist"),
    folders=("fashion-mnist", "FashionMNIST/raw"),
    files=SHA256,
    digest=lambda path: hexdigest(unpacked(path), "sha256"),
    remotes=tuple(RemoteFile(file, tuple(base + file for base in UPSTREAM), md5) for file, md5 in MD5.items()),
)
