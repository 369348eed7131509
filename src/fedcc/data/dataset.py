"""A data set: its arrays, its view, its defaults, and its files upstream."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcc.core.digests import file_digest
from fedcc.core.naming import listed
from fedcc.core.samples import View
from fedcc.errors import UserError
from fedcc.inputs.maps import MappedRows, is_mapped
from fedcc.inputs.tables import Table

Images = NDArray[np.uint8]
Inputs = NDArray[Any] | MappedRows | Table
"""Images (uint8), tokens (int64) or numbers (float32), one input per row; or a table, not yet encoded."""

Labels = NDArray[np.int64]


class DataError(UserError):
    """Files that are missing, truncated or altered, or have no room. A wrong argument is a ValueError."""


@dataclass(frozen=True)
class Defaults:
    """Defaults of a run on a data set."""

    skew: str
    clients: int
    rounds: int
    epochs: int
    shared_model: str  # for methods with one network for all clients
    models: str  # for other methods: dealt to the clients in turn
    augment: bool = False  # crop and flip while training

    def options(self, one_network: bool) -> dict[str, Any]:
        """The defaults as options of a run."""
        return {
            "skew": self.skew,
            "clients": self.clients,
            "rounds": self.rounds,
            "epochs": self.epochs,
            "models": self.shared_model if one_network else self.models,
            "augment": "standard" if self.augment else "none",
        }


PAPER_ROUNDS, PAPER_EPOCHS = 15, 20


def paper_defaults(skew: str, augment: bool = True) -> Defaults:
    """The paper's protocol with this skew."""
    return Defaults(skew, 10, PAPER_ROUNDS, PAPER_EPOCHS, "resnet20", "resnet14,resnet20", augment)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs as stored (images in uint8, [N, channels, H, W]), their labels, and the view that a network has of them.

    A table is encoded when the public samples are known, on which its encoding is fitted. A memory map is not copied.
    :meth:`of` makes a data set of what you have.
    """

    name: str
    classes: tuple[str, ...]
    train_x: Inputs
    train_y: Labels
    test_x: Inputs  # may be empty
    test_y: Labels
    view: View | None  # None for numbers [N, width]: scaled by mean and standard deviation of the public samples
    defaults: Defaults
    public_x: Inputs | None = None  # public samples of its own; otherwise a share of the training samples is public

    @staticmethod
    def of(
        data: Any,
        test: Any = 0.2,
        public: Any = None,
        *,
        label: str = "",
        view: View | None = None,
        resize: int = 0,
        name: str = "own data",
    ) -> "Dataset":
        """A data set of a pair (inputs, labels), a data frame, a torch or Hugging Face data set, or a path.

        ``test`` is the share of test samples to split off where the data has none (0: no test samples), or test data
        of the same kind; ``public`` is public data. ``label`` is the column of the labels in a table.

        >>> Dataset.of((np.eye(6, 4), list("aabbcc")), test=0.5)
        Dataset('own data': 3 training and 3 test samples, float32 [4], 3 classes: a, b, c)
        """
        from fedcc.data.own import build

        return build(data, test=test, public=public, label=label, view=view, resize=resize, name=name)

    def __post_init__(self) -> None:
        for name in ("train_x", "test_x", "public_x"):
            if is_mapped(x := getattr(self, name)):
                object.__setattr__(self, name, MappedRows.of(x))
        for part, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            self._check_inputs(f"{part}_x", x)
            if y.shape != (len(x),) or y.dtype != np.int64:
                raise ValueError(f"{part}_y must be int64 [{len(x)}], got {y.dtype} {y.shape}")
            if len(y) and not (y.min() >= 0 and y.max() < len(self.classes)):
                raise ValueError(f"{part}_y must lie in 0 .. {len(self.classes) - 1}, got {y.min()} .. {y.max()}")

        if self.public_x is not None:
            self._check_inputs("public_x", self.public_x)

    def _check_inputs(self, name: str, x: Inputs) -> None:
        if isinstance(x, Table) or isinstance(self.train_x, Table):
            if type(x) is not type(self.train_x):
                known = "a table" if isinstance(self.train_x, Table) else "an array"
                raise ValueError(f"{name} must be {known} like train_x, got {type(x).__name__}")
            return
        if x.dtype not in (np.uint8, np.int64, np.float32) or (x.dtype == np.uint8 and x.ndim != 4):
            raise ValueError(
                f"{name} must be uint8 [N, channels, H, W], int64 (tokens) or float32, got {x.dtype} {x.shape}"
            )
        if x.shape[1:] != self.train_x.shape[1:] or x.dtype != self.train_x.dtype:
            raise ValueError(f"{name} must be like train_x, {self.train_x.dtype} of shape {self.train_x.shape[1:]}, "
                             f"got {x.dtype} of shape {x.shape[1:]}")  # fmt: skip

    def __repr__(self) -> str:
        kind = "a table of columns" if isinstance(self.train_x, Table) else str(self.train_x.dtype)
        public = "" if self.public_x is None else f"{len(self.public_x):,} public, "
        return (
            f"Dataset({self.name!r}: {public}{len(self.train_y):,} training and {len(self.test_y):,} test samples, "
            f"{kind} {list(self.shape)}, {len(self.classes):,} classes: {listed(self.classes)})"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input; the number of columns for a table."""
        return (len(self.train_x.columns),) if isinstance(self.train_x, Table) else self.train_x.shape[1:]

    @cached_property
    def sha256(self) -> str:
        """A fingerprint of the arrays, for the record of a run.

        Of a memory map above 1 GiB it covers the shape and 1,024 evenly spaced rows, so that not all of it is read.
        """
        digest = hashlib.sha256()
        for inputs in (self.train_x, self.train_y, self.test_x, self.test_y, self.public_x):
            if isinstance(inputs, Table):
                digest.update(inputs.sha256.encode())
            elif inputs is not None:
                digest.update(repr((inputs.shape, inputs.dtype.str)).encode())
                for part in inputs.hashed() if isinstance(inputs, MappedRows) else [inputs]:
                    digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


class FileCheck(NamedTuple):
    """One line of a check: a file, what upstream has, what is here."""

    file: str
    expected: str
    found: str
    ok: bool


@dataclass(frozen=True)
class RemoteFile:
    """A file upstream: its addresses, in the order they are tried, and its md5."""

    file: str
    urls: tuple[str, ...]
    md5: str


@dataclass(frozen=True)
class Description:
    """An entry of the registry: what is known of a data set before it is read."""

    name: str
    title: str
    train: int
    test: int
    classes: int
    shape: tuple[int, ...]
    source: str  # where its makers describe it
    defaults: Defaults
    read: Callable[..., Dataset]  # from the data set's own folder; some take options
    aliases: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()  # its possible folders below the data folder; none for an embedded one
    files: Mapping[str, str] = field(default_factory=dict)  # what its folder must hold, and the digest of each
    digest: Callable[[Path], str] = partial(file_digest, name="md5")
    remotes: tuple[RemoteFile, ...] = ()
    file_checks: Callable[[Path], list[FileCheck]] | None = None  # if digests do not suffice

    @property
    def embedded(self) -> bool:
        return not self.folders

    def locate(self, root: Path) -> Path:
        """Its folder below the data folder: the first that exists, else that of a download."""
        return next((root / f for f in self.folders if (root / f).is_dir()), root / self.folders[0])

    def missing(self, root: Path) -> list[Path]:
        """The files that are missing."""
        folder = self.locate(root)
        return [folder / file for file in self.files if not readable(folder / file).is_file()]


def readable(path: Path) -> Path:
    """The file itself or, if ``x.gz`` has been unpacked, ``x``."""
    return path.with_suffix("") if path.suffix == ".gz" and not path.is_file() else path


def hexdigest(content: bytes, name: str) -> str:
    return hashlib.new(name, content, usedforsecurity=False).hexdigest()


def content_of(path: Path, limit: int | None = None, expected: str = "") -> bytes:
    """The bytes of a file, of at most ``limit`` and with this digest, or a DataError that names it."""
    try:
        if limit is not None and (size := path.stat().st_size) > limit:
            raise DataError(f"{path}: expected at most {limit:,} bytes, found {size:,}")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    same_as_upstream(path, content, expected)
    return content


def same_as_upstream(path: Path, content: bytes, expected: str) -> None:
    """Refuse content without upstream's md5 or sha256; hashing CIFAR takes a third of a second."""
    name = "sha256" if len(expected) == 64 else "md5"
    if expected and (found := hexdigest(content, name)) != expected:
        raise DataError(
            f"{path}: truncated or altered: expected {name} {expected}, found {found} ({len(content)} bytes)"
        )
