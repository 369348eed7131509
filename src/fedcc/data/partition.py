"""A training set divided into the public part and the clients' parts.

Randomness: the public split draws from ``default_rng([seed, 0])`` and the clients' split from
``default_rng([seed, 1])``, so that what one of them consumes never shifts the other.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcc.core.files import open_whole
from fedcc.data.dataset import DataError
from fedcc.data.skew import Skew, parse
from fedcc.data.split import Indices, checked_labels, split

PUBLIC_STREAM, CLIENT_STREAM = 0, 1


def public_split(
    labels: Indices, fraction: float, rng: np.random.Generator, stratified: bool = False
) -> tuple[Indices, Indices]:
    """A random ``fraction`` of the positions for the public set, and the rest; both ascending.

    ``stratified`` takes the fraction of every class, largest remainders first.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"the public fraction must be at least 0 and below 1, got {fraction}")
    n = len(labels)
    size = round(n * fraction)
    if fraction > 0 and size == 0:
        raise ValueError(f"a public fraction of {fraction} selects none of the {n} samples")
    if not stratified:
        public = rng.permutation(n)[:size]
    else:
        _, inverse, per_class = np.unique(labels, return_inverse=True, return_counts=True)
        quotas = per_class * (size / n) if n else per_class * 0.0
        take = np.floor(quotas).astype(np.int64)
        take[np.argsort(take - quotas, kind="stable")[: size - take.sum()]] += 1
        parts = [rng.permutation(np.flatnonzero(inverse == c))[:count] for c, count in enumerate(take)]
        public = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    mask = np.zeros(n, bool)
    mask[public] = True
    return np.flatnonzero(mask).astype(np.int64), np.flatnonzero(~mask).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Partition:
    """Positions of the public samples and of each client's in a training set, and the private counts; no labels."""

    public: Indices
    clients: list[Indices]
    counts: Indices  # private samples per client and class, [K, C]
    skew: str
    seed: int
    moved: int = 0
    retries: int = 0

    @property
    def sha256(self) -> str:
        """A fingerprint of who holds what, the same on every machine."""
        digest = hashlib.sha256()
        for positions in (self.public, *self.clients):
            digest.update(len(positions).to_bytes(8, "little"))
            digest.update(positions.astype("<i8").tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write it as one .npz without pickles."""
        arrays: dict[str, NDArray[Any]] = {
            "public": self.public,
            "private": np.concatenate(self.clients),
            "sizes": np.array([len(c) for c in self.clients], np.int64),
            "table": self.counts,
            "skew": np.array(self.skew),
            "numbers": np.array([self.seed, self.moved, self.retries], np.int64),
        }
        with open_whole(Path(path)) as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)

    @staticmethod
    def load(path: Path) -> Partition:
        try:
            with np.load(path, allow_pickle=False) as stored:
                a = {name: stored[name] for name in ("public", "private", "sizes", "table", "skew", "numbers")}
            seed, moved, retries = map(int, a["numbers"])
            if a["sizes"].sum() != len(a["private"]) or a["table"].sum(axis=1).tolist() != a["sizes"].tolist():
                raise ValueError("sizes do not add up")
            clients = np.split(a["private"], np.cumsum(a["sizes"])[:-1])
        except FileNotFoundError:
            raise DataError(f"{path}: no partition here") from None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(
                f"{path}: expected a saved partition, found a different or damaged file ({error})"
            ) from error
        return Partition(a["public"], clients, a["table"], str(a["skew"]), seed, moved, retries)


def partition(
    labels: ArrayLike,
    clients: int,
    skew: Skew | str,
    classes: int,
    seed: int,
    public: float = 0.1,
    stratified: bool = False,
) -> Partition:
    """Split a training set into the public part and the clients' parts; positions refer to ``labels``.

    >>> p = partition([0, 1] * 50, clients=2, skew="classes:1", classes=2, seed=0)
    >>> len(p.public), (p.counts > 0).sum(axis=1).tolist()
    (10, [1, 1])
    """
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    skew = parse(skew) if isinstance(skew, str) else skew
    y = checked_labels(labels, classes)
    public_rows, private = public_split(y, public, np.random.default_rng([seed, PUBLIC_STREAM]), stratified)
    dealt = split(y[private], clients, skew, classes, np.random.default_rng([seed, CLIENT_STREAM]))
    parts = [private[part] for part in dealt.parts]
    owners = np.bincount(np.concatenate([public_rows, *parts]), minlength=len(y))
    assert len(owners) == len(y), "a position outside the data was dealt"
    assert (owners == 1).all(), "the parts of a partition must be disjoint and cover the data"
    table = np.stack([np.bincount(y[part], minlength=classes) for part in parts])
    return Partition(public_rows, parts, table, str(skew), seed, dealt.moved, dealt.retries)
