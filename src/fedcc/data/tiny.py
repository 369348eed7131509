"""Tiny ImageNet from its upstream folder of JPEGs; tested on its validation set, as its test set has no labels.

Decoding 110,000 JPEGs takes half a minute, so the arrays are cached beside them as one .npz, which is valid as long as
the names and sizes of the images do not change. A copy with fewer images or classes is read in the same way.
"""

import hashlib
import math
import os
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcc.core.files import open_whole
from fedcc.core.samples import View
from fedcc.data.dataset import (
    DataError,
    Dataset,
    Description,
    FileCheck,
    Images,
    RemoteFile,
    content_of,
    paper_defaults,
)

SIDE = 64


@dataclass(frozen=True)
class Listing:
    """The images in the order they are read, with their labels."""

    wnids: list[str]
    train: list[tuple[Path, int]]
    test: list[tuple[Path, int]]

    def fingerprint(self, folder: Path) -> str:
        """Changes when an image is added, removed, renamed or changes its size."""
        digest = hashlib.sha256("\n".join(self.wnids).encode())
        for path, label in self.train + self.test:
            digest.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size} {label}\n".encode())
        return digest.hexdigest()


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in content_of(path).decode().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected text, found {error}") from error


def _jpegs(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"{folder}: expected a folder of images (wnids.txt names its class), found none")
    names = sorted(entry.name for entry in os.scandir(folder) if entry.name.upper().endswith((".JPEG", ".JPG")))
    if not names:
        raise DataError(f"{folder}: expected images, found none")
    return [folder / name for name in names]


def listing(folder: Path) -> Listing:
    wnids = [line.strip() for line in _lines(folder / "wnids.txt")]
    label = {wnid: c for c, wnid in enumerate(wnids)}
    if not wnids or len(label) < len(wnids):
        found = f"{len(label)} in {len(wnids)} lines"
        raise DataError(f"{folder / 'wnids.txt'}: expected different class names, found {found}")
    train = [(path, c) for c, wnid in enumerate(wnids) for path in _jpegs(folder / "train" / wnid / "images")]
    annotations, test = folder / "val" / "val_annotations.txt", []
    for number, line in enumerate(_lines(annotations), start=1):
        name, wnid = [*line.split("\t"), ""][:2]
        if wnid not in label or Path(name).name != name:
            raise DataError(f"{annotations}, line {number}: expected an image and a class of wnids.txt, found {line!r}")
        test.append((folder / "val" / "images" / name, label[wnid]))
    if not test:
        raise DataError(f"{annotations}: expected images and their classes, found no line")
    if absent := [path for path, _ in test if not path.is_file()]:
        raise DataError(f"{absent[0]}: listed in {annotations.name} but missing ({len(absent)} such images)")
    return Listing(wnids, train, test)


def _decoded(path: Path, side: int) -> Images:
    """One image as [3, side, side]; a greyscale one, of which there are a few, becomes three equal channels."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.size != (SIDE, SIDE):
                raise DataError(f"{path}: expected {SIDE}x{SIDE} pixels, found {image.size[0]}x{image.size[1]}")
            rgb = image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for damaged files
        raise DataError(f"{path}: expected a JPEG image, found: {error}") from error
    if side != SIDE:
        rgb = rgb.resize((side, side), Image.Resampling.BOX)  # the mean of each block of pixels
    return np.asarray(rgb).transpose(2, 0, 1)


def _all_decoded(listed: list[tuple[Path, int]], side: int) -> Images:
    images = np.empty((len(listed), 3, side, side), np.uint8)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes outside the interpreter's lock
        for i, image in enumerate(pool.map(partial(_decoded, side=side), (path for path, _ in listed))):
            images[i] = image
    return images


def _histogram(images: Images) -> NDArray[np.int64]:
    """How often each channel has each value, [3, 256]; gives mean and deviation exactly, for any number of images."""
    counts = np.zeros((3, 256), np.int64)
    for start in range(0, len(images), 1000):  # bincount widens its input: a block at a time
        for channel in range(3):
            counts[channel] += np.bincount(images[start : start + 1000, channel].ravel(), minlength=256)
    return counts


def _mean_and_std(histogram: NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    value = np.arange(256) / 255
    share = histogram / histogram.sum(axis=1, keepdims=True)
    mean = share @ value
    variance = share @ value**2 - mean**2
    return tuple(mean.tolist()), tuple(math.sqrt(max(v, 1e-12)) for v in variance)


def _cached(cache: Path, fingerprint: str) -> dict[str, NDArray[Any]] | None:
    try:
        with np.load(cache, allow_pickle=False) as stored:
            if str(stored["fingerprint"]) == fingerprint:
                return {name: stored[name] for name in ("train_x", "test_x", "histogram")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        pass  # absent or damaged: the images are decoded again
    return None


def _names(folder: Path, wnids: list[str]) -> tuple[str, ...]:
    """The first name of each class in words.txt; without that file, its identifier."""
    path = folder / "words.txt"
    words = dict(line.split("\t", 1) for line in _lines(path) if "\t" in line) if path.is_file() else {}
    return tuple(words.get(wnid, wnid).split(",")[0].strip() for wnid in wnids)


def read(folder: Path, resize: int = SIDE) -> Dataset:
    """The data set at 64x64, or at 32x32 with ``resize=32``."""
    if resize not in (32, SIDE):
        raise ValueError(f"Tiny ImageNet can be resized to 32 or left at 64, got {resize}")
    images = listing(folder)
    fingerprint = images.fingerprint(folder)
    cache = folder / f"fedcc-{resize}.npz"
    arrays = _cached(cache, fingerprint)
    if arrays is None:
        arrays = {"train_x": _all_decoded(images.train, resize), "test_x": _all_decoded(images.test, resize)}
        arrays["histogram"] = _histogram(arrays["train_x"])
        with suppress(OSError), open_whole(cache) as file:  # a read-only folder, or no room: it costs only time
            np.savez(file, allow_pickle=False, fingerprint=np.array(fingerprint), **arrays)
    mean, std = _mean_and_std(arrays["histogram"])
    view, names = View(1 / 255, mean, std, pad=4, flip=True), _names(folder, images.wnids)
    y, test_y = (np.array([label for _, label in part], np.int64) for part in (images.train, images.test))
    return Dataset(TINY.name, names, arrays["train_x"], y, arrays["test_x"], test_y, view, TINY.defaults)


def file_checks(folder: Path) -> list[FileCheck]:
    """Upstream's md5 is that of the archive; in the unpacked folder, the numbers of images are checked."""
    try:
        images = listing(folder)
    except DataError as error:
        return [FileCheck(folder.name, "upstream's layout", str(error), False)]
    numbers = {"wnids.txt": (200, len(images.wnids), "classes"), "train": (100_000, len(images.train), "images")}
    numbers["val"] = (10_000, len(images.test), "images")
    return [
        FileCheck(f"{folder.name}/{name}", f"{expected} {what}", f"{number} {what}", expected == number)
        for name, (expected, number, what) in numbers.items()
    ]


TINY = Description(
    name="tiny-imagenet",
    title="Tiny ImageNet",
    train=100_000,
    test=10_000,
    classes=200,
    shape=(3, SIDE, SIDE),
    source="https://cs231n.stanford.edu/tiny-imagenet-200.zip",
    defaults=paper_defaults("classes:40"),
    read=read,
    aliases=("tiny", "tinyimagenet", "tiny-imagenet-200"),
    folders=("tiny-imagenet-200",),
    files={"wnids.txt": "", "val/val_annotations.txt": ""},
    remotes=(
        RemoteFile(
            "tiny-imagenet-200.zip",
            ("https://cs231n.stanford.edu/tiny-imagenet-200.zip", "http://cs231n.stanford.edu/tiny-imagenet-200.zip"),
            "90528d7ca1a48142e341f4ef8d21d0de",
        ),
    ),
    file_checks=file_checks,
)
