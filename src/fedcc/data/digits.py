"""Digits: 1,797 handwritten digits of 8x8 pixels that come with scikit-learn, so that nothing has to be downloaded."""

import gzip
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedcc.core.samples import View
from fedcc.data.dataset import Dataset, Defaults, Description, FileCheck, Images, Labels, hexdigest

MD5 = "7696c07daa6d85010f8268703ab8b067"  # of the images followed by the labels, as uint8


def _arrays() -> tuple[Images, Labels]:
    x, y = _from_file()
    if _digest(x, y) != MD5:  # another version keeps the digits elsewhere: scikit-learn knows where
        from sklearn.datasets import load_digits

        bunch = load_digits()
        x, y = bunch.images.astype(np.uint8)[:, None], bunch.target.astype(np.int64)
    return x, y


def _from_file() -> tuple[Images, Labels]:
    """The digits read from scikit-learn's file: importing scikit-learn takes as long as importing torch.

    Each line has 64 pixels, whole numbers from 0 to 16, and the label.
    """
    home = find_spec("sklearn")
    folder = Path(home.origin).parent if home is not None and home.origin else Path()
    try:
        text = gzip.decompress((folder / "datasets" / "data" / "digits.csv.gz").read_bytes()).decode()
        table = np.array(text.replace("\n", ",").strip(",").split(","), np.float64).astype(np.uint8).reshape(-1, 65)
    except (OSError, EOFError, ValueError, zlib.error):
        table = np.empty((0, 65), np.uint8)
    return table[:, :64].reshape(-1, 1, 8, 8), table[:, 64].astype(np.int64)


def _digest(x: Images, y: Labels) -> str:
    return hexdigest(x.tobytes() + y.astype(np.uint8).tobytes(), "md5")


def read(_folder: Path) -> Dataset:
    """Of each class, every fifth sample is a test sample: the same with every version of every library."""
    x, y = _arrays()
    of_class = y[:, None] == np.arange(10)
    number = of_class.cumsum(axis=0)[of_class]  # of each sample in its class, from 1 on
    test = number % 5 == 0
    return Dataset(
        "digits", tuple("0123456789"), x[~test], y[~test], x[test], y[test], View(scale=1 / 16), DIGITS.defaults
    )


def file_checks(_folder: Path) -> list[FileCheck]:
    x, y = _arrays()
    found = _digest(x, y)
    return [FileCheck("digits (in scikit-learn)", MD5, found, found == MD5)]


DIGITS = Description(
    name="digits",
    title="Digits",
    train=1442,
    test=355,
    classes=10,
    shape=(1, 8, 8),
    source="https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
    defaults=Defaults("classes:1", 10, rounds=3, epochs=5, shared_model="resnet8", models="resnet8,resnet14"),
    read=read,
    file_checks=file_checks,
)
