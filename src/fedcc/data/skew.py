"""Who holds what: the public split, and label skew among the clients.

A skew is a small frozen value with a text form, so that it can be typed, stored and compared:

    dirichlet:0.05    dirichlet:0.05,balance    dirichlet:0.5,minimum=1
    classes:2         classes:2,assignment=niid_bench
    iid

NIID-Bench's names are understood as well: ``noniid-labeldir[:BETA]`` is ``dirichlet:BETA`` (0.5 when not given),
``noniid-#label2`` is ``classes:2`` and ``homo`` is ``iid``. They name the *kind* of skew; what NIID-Bench does
differently inside (balanced sizes, classes without a holder) stays an option that has to be asked for.

Randomness: :func:`partition` draws the public split from ``default_rng([seed, 0])`` and the clients' split from
``default_rng([seed, 1])``, so that what one of them consumes never shifts the other.
"""

from __future__ import annotations

import hashlib
import math
import re
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcc.core.files import written_whole
from fedcc.core.naming import unknown
from fedcc.data.dataset import DataError

Indices = NDArray[np.int64]
T = TypeVar("T")

REDRAWS = 100  # of the Dirichlet proportions, before the repair; redrawing alone need never end
PUBLIC_STREAM, CLIENT_STREAM = 0, 1


# ---------------------------------------------------------------------------------------------- skews and their text


@dataclass(frozen=True)
class Dirichlet:
    """Each class is cut among the clients in proportions drawn from Dir(eta); small eta is strong skew.

    ``balance`` stops giving to clients that already hold n/K samples, as NIID-Bench does.
    """

    eta: float
    minimum: int = 10
    balance: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eta) and self.eta > 0):
            raise ValueError(f"the eta of dirichlet:ETA must be a number > 0, got {self.eta}")
        if self.minimum < 1:
            raise ValueError(f"the minimum of a dirichlet skew must be >= 1 (no client is empty), got {self.minimum}")

    def __str__(self) -> str:
        minimum = "" if self.minimum == 10 else f",minimum={self.minimum}"
        return f"dirichlet:{repr(float(self.eta)).removesuffix('.0')}{minimum}{',balance' if self.balance else ''}"


@dataclass(frozen=True)
class Classes:
    """Every client holds exactly ``n`` classes.

    ``even`` gives every class floor(nK/C) or ceil(nK/C) holders. ``niid_bench`` gives client i the class i mod C and
    random others, which may leave a class without any holder; :func:`split` then refuses.
    """

    n: int
    assignment: Literal["even", "niid_bench"] = "even"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"the N of classes:N must be >= 1, got {self.n}")
        if self.assignment not in ("even", "niid_bench"):
            raise unknown("assignment", self.assignment, ["even", "niid_bench"])

    def __str__(self) -> str:
        return f"classes:{self.n}{'' if self.assignment == 'even' else f',assignment={self.assignment}'}"


@dataclass(frozen=True)
class Iid:
    """A random split into equal parts."""

    def __str__(self) -> str:
        return "iid"


Skew = Dirichlet | Classes | Iid

FORMS = ("dirichlet:ETA", "classes:N", "iid", "noniid-labeldir", "noniid-#labelN", "homo")


def parse(text: str) -> Skew:
    """The skew a text names.

    >>> parse("dirichlet:0.05"), str(parse("noniid-#label2"))
    (Dirichlet(eta=0.05, minimum=10, balance=False), 'classes:2')
    """
    head, *options = (part.strip() for part in text.strip().lower().split(","))
    kind, colon, value = head.partition(":")
    if label := re.fullmatch(r"noniid-#label(\d+)", head):
        kind, colon, value = "classes", ":", label[1]
    elif kind == "noniid-labeldir":
        kind, colon, value = "dirichlet", ":", value if colon else "0.5"
    elif head == "homo":
        kind = "iid"

    if kind == "dirichlet":
        found = _options(text, options, {"minimum": int, "balance": _switch})
        return Dirichlet(_number(text, value, float, "dirichlet:ETA needs a number > 0 for ETA"), **found)
    if kind == "classes":
        found = _options(text, options, {"assignment": str})
        return Classes(_number(text, value, int, "classes:N needs a whole number >= 1 for N"), **found)
    if kind == "iid" and not colon:
        _options(text, options, {})
        return Iid()
    if kind == "iid":
        raise ValueError(f"iid takes no number, got '{text}'")
    raise unknown("skew", text, FORMS)


def _number(text: str, value: str, cast: Callable[[str], T], rule: str) -> T:
    try:
        return cast(value)
    except ValueError:
        raise ValueError(f"{rule}, got '{text}'") from None


def _switch(value: str) -> bool:
    if value not in ("", "true", "false"):
        raise ValueError(value)
    return value != "false"


def _options(text: str, options: Sequence[str], casts: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for option in options:
        name, _, value = (part.strip() for part in option.partition("="))
        if name not in casts:
            raise unknown(f"option in skew '{text}':", name, casts)
        if name in found:
            raise ValueError(f"option '{name}' is given twice in '{text}'")
        found[name] = _number(text, value, casts[name], f"'{value}' is no value for the option '{name}'")
    return found


# ------------------------------------------------------------------------------------------------ splitting by label


@dataclass(frozen=True, eq=False)
class Split:
    """The positions each client holds, ascending; how many the repair moved, and how often shares were redrawn."""

    parts: list[Indices]
    moved: int = 0
    retries: int = 0


def split(labels: ArrayLike, clients: int, skew: Skew, classes: int, rng: np.random.Generator) -> Split:
    """Deal the positions ``0 .. len(labels) - 1`` to the clients: disjoint, covering, no client empty."""
    y = _labels(labels, classes)
    if clients < 1:
        raise ValueError(f"clients must be >= 1, got {clients}")
    if clients > len(y):
        raise ValueError(f"{clients} clients cannot share {len(y)} samples: every client needs at least one")
    if isinstance(skew, Iid):
        result = Split(list(np.array_split(rng.permutation(len(y)), clients)))
    elif isinstance(skew, Dirichlet):
        result = _dirichlet(y, clients, skew, classes, rng)
    else:
        result = _by_classes(y, clients, skew, classes, rng)
    return Split([np.sort(part).astype(np.int64) for part in result.parts], result.moved, result.retries)


def _labels(labels: ArrayLike, classes: int) -> Indices:
    y = np.asarray(labels)
    if classes < 1:
        raise ValueError(f"classes must be >= 1, got {classes}")
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise ValueError(f"labels must be one row of integers, got shape {y.shape} of {y.dtype}")
    if len(y) and not (y.min() >= 0 and y.max() < classes):
        raise ValueError(f"labels must lie in 0 .. {classes - 1}, got {y.min()} .. {y.max()}")
    return y.astype(np.int64)


def _dirichlet(y: Indices, clients: int, skew: Dirichlet, classes: int, rng: np.random.Generator) -> Split:
    if len(y) < skew.minimum * clients:
        raise ValueError(
            f"{skew} needs at least minimum x clients = {skew.minimum} x {clients} = {skew.minimum * clients} samples,"
            f" got {len(y)}; use fewer clients or a smaller minimum"
        )
    per_class = np.bincount(y, minlength=classes)
    cuts, retries = _cuts(per_class, clients, skew, rng), 0  # [C, K + 1]
    while np.diff(cuts).sum(axis=0).min() < skew.minimum and retries < REDRAWS:  # nothing is shuffled until sizes fit
        cuts, retries = _cuts(per_class, clients, skew, rng), retries + 1
    held: list[list[Indices]] = [[] for _ in range(clients)]
    for c in np.flatnonzero(per_class):
        shuffled = rng.permutation(np.flatnonzero(y == c))
        for k, piece in enumerate(np.split(shuffled, cuts[c, 1:-1])):
            held[k].append(piece)
    parts = [np.concatenate(pieces) for pieces in held]
    return Split(parts, _repair(parts, skew.minimum, rng), retries)


def _cuts(per_class: Indices, clients: int, skew: Dirichlet, rng: np.random.Generator) -> Indices:
    """Where the shuffled samples of every class are cut, [C, K + 1]: from 0 to the size of the class."""
    shares = rng.dirichlet(np.full(clients, skew.eta), size=len(per_class))  # [C, K]
    if skew.balance:
        held = np.zeros(clients)
        for share, n in zip(shares, per_class, strict=True):
            open_ = held < per_class.sum() / clients
            share *= open_
            total = share.sum()
            share[:] = share / total if total > 0 else open_ / max(open_.sum(), 1)
            held += share * n
    inner = np.floor(np.cumsum(shares, axis=1)[:, :-1] * per_class[:, None]).astype(np.int64)
    inner = np.minimum(inner, per_class[:, None])  # a sum of shares may exceed 1 by a rounding
    return np.hstack([np.zeros((len(per_class), 1), np.int64), inner, per_class[:, None]])


def _repair(parts: list[Indices], minimum: int, rng: np.random.Generator) -> int:
    """Clients below the minimum take random samples of the largest client, in place; the number moved.

    It ends: as n >= minimum x K, someone is above the minimum while anyone is below, and each turn either satisfies
    the poor client or leaves the rich one at exactly the minimum, where it is asked no more.
    """
    sizes = np.array([len(part) for part in parts])
    moved = 0
    for poor in np.flatnonzero(sizes < minimum):
        while sizes[poor] < minimum:
            rich = int(sizes.argmax())
            count = min(minimum - sizes[poor], sizes[rich] - minimum)
            shuffled = rng.permutation(parts[rich])
            parts[poor] = np.concatenate([parts[poor], shuffled[:count]])
            parts[rich] = shuffled[count:]
            sizes[poor] += count
            sizes[rich] -= count
            moved += int(count)
    return moved


def _by_classes(y: Indices, clients: int, skew: Classes, classes: int, rng: np.random.Generator) -> Split:
    if skew.n > classes:
        raise ValueError(f"{skew}: a client cannot hold {skew.n} of {classes} classes")
    if skew.n * clients < classes:
        raise ValueError(
            f"{skew} with {clients} clients has {skew.n} x {clients} = {skew.n * clients} places for {classes} classes:"
            f" some classes would have no holder; use more clients or classes:{-(-classes // clients)}"
        )
    per_class = np.bincount(y, minlength=classes)
    if (absent := np.flatnonzero(per_class == 0)).size:
        raise ValueError(f"{skew} deals out every class, but there is no sample of {_named(absent)}")
    held = (_even if skew.assignment == "even" else _niid_bench)(clients, skew.n, classes, rng)  # [K, C]
    holders = held.sum(axis=0)
    if (orphans := np.flatnonzero(holders == 0)).size:
        raise ValueError(f"{skew} drew no holder for {_named(orphans)}; use assignment=even or another seed")
    if (scarce := np.flatnonzero(per_class < holders)).size:
        c = scarce[0]
        raise ValueError(f"{skew}: class {c} has {per_class[c]} samples for {holders[c]} holders; use fewer clients")
    pieces: list[list[Indices]] = [[] for _ in range(clients)]
    for c in range(classes):
        who = rng.permutation(np.flatnonzero(held[:, c]))  # so that no client gets all the samples left over
        shuffled = rng.permutation(np.flatnonzero(y == c))
        for k, piece in zip(who, np.array_split(shuffled, len(who)), strict=True):
            pieces[k].append(piece)
    return Split([np.concatenate(p) for p in pieces])


def _named(classes: Indices) -> str:
    shown = ", ".join(map(str, classes[:10]))
    return f"class{'es' if len(classes) > 1 else ''} {shown}{', ...' if len(classes) > 10 else ''}"


def _even(clients: int, n: int, classes: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which client holds which class, [K, C]: n classes a client, floor or ceil of nK/C holders a class.

    Random permutations of the classes, one after the other (the last one cut off), are dealt round and round, so
    each client gets C/K classes of each permutation. Where it gets a class twice, that slot is swapped with a random
    one such that neither client then holds anything twice. Each swap leaves one double less and changes no class's
    number of holders. Should no swap be left, the same slots are dealt in order of class, which always fits.
    Of many classes, those that a client lacks are dealt in the same way: they are fewer, and meet less often.
    """
    if n == classes:
        return np.ones((clients, classes), bool)
    if 2 * n > classes:
        return ~_even(clients, classes - n, classes, rng)
    slots = clients * n
    permutations = [rng.permutation(classes) for _ in range(-(-slots // classes))]
    dealt = np.concatenate(permutations)[:slots]  # slot -> class
    client = np.arange(slots) % clients  # slot -> client
    count = np.zeros((clients, classes), np.int64)
    np.add.at(count, (client, dealt), 1)
    for slot in range(slots):
        j, c = int(client[slot]), int(dealt[slot])
        if count[j, c] < 2:
            continue
        other = _partner(j, c, client, dealt, count, rng)
        if other is None:
            return _in_order(dealt, client, clients, classes, rng)
        k, d = int(client[other]), int(dealt[other])
        dealt[slot], dealt[other] = d, c
        for who, lost, won in ((j, c, d), (k, d, c)):
            count[who, lost] -= 1
            count[who, won] += 1
    return count > 0


def _partner(j: int, c: int, client: Indices, dealt: Indices, count: Indices, rng: np.random.Generator) -> int | None:
    """A random slot to swap client j's second c with: its class is new to j, and c is new to its client."""
    for size in (64, None):  # a few at random mostly do; only when none of them fits is it worth looking at all
        slots = rng.integers(len(dealt), size=size) if size else rng.permutation(len(dealt))
        fits = (count[j, dealt[slots]] == 0) & (count[client[slots], c] == 0)
        if fits.any():
            return int(slots[fits.argmax()])
    return None


def _in_order(
    dealt: Indices, client: Indices, clients: int, classes: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """The same slots sorted by class: equal ones are neighbours, at most K of them, so no client gets two."""
    held = np.zeros((clients, classes), bool)
    held[rng.permutation(clients)[client], np.sort(rng.permutation(classes)[dealt])] = True
    return held


def _niid_bench(clients: int, n: int, classes: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Client i holds class i mod C and n - 1 random others, [K, C]; a class may be left without a holder."""
    held = np.zeros((clients, classes), bool)
    for i in range(clients):
        others = np.delete(np.arange(classes), i % classes)
        held[i, i % classes] = True
        held[i, rng.choice(others, n - 1, replace=False)] = True
    return held


# -------------------------------------------------------------------------------------- the public part, and the whole


def public_split(
    n: int, fraction: float, rng: np.random.Generator, stratified: bool = False, labels: ArrayLike | None = None
) -> tuple[Indices, Indices]:
    """A random ``fraction`` of ``0 .. n - 1`` for the public set, and the rest; both ascending.

    ``stratified`` takes the fraction of every class of ``labels`` (largest remainders first), else labels play no part.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"the public fraction must be at least 0 and below 1, got {fraction}")
    size = round(n * fraction)
    if fraction > 0 and size == 0:
        raise ValueError(f"a public fraction of {fraction} of {n} samples is no sample at all")
    if not stratified:
        public = rng.permutation(n)[:size]
    else:
        if labels is None or len(y := np.asarray(labels)) != n:
            raise ValueError(f"a stratified public split needs the labels of all {n} samples")
        _, inverse, per_class = np.unique(y, return_inverse=True, return_counts=True)
        wanted = per_class * (size / n) if n else per_class * 0.0
        take = np.floor(wanted).astype(np.int64)
        take[np.argsort(take - wanted, kind="stable")[: size - take.sum()]] += 1
        chosen = [rng.permutation(np.flatnonzero(inverse == c))[:count] for c, count in enumerate(take)]
        public = np.concatenate(chosen) if chosen else np.zeros(0, np.int64)
    mask = np.zeros(n, bool)
    mask[public] = True
    return np.flatnonzero(mask).astype(np.int64), np.flatnonzero(~mask).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Partition:
    """The whole deal of one training set: positions of the public samples and of each client's, and how it came about.

    It holds positions and the private counts, no labels: the public labels are not in it.
    """

    public: Indices
    clients: list[Indices]
    table: Indices  # [K, C]
    skew: str
    seed: int
    moved: int = 0
    retries: int = 0

    def counts(self) -> Indices:
        """Samples per client and class, [K, C]."""
        return self.table

    @property
    def sha256(self) -> str:
        """A fingerprint of who holds what, the same on every machine."""
        digest = hashlib.sha256()
        for positions in (self.public, *self.clients):
            digest.update(len(positions).to_bytes(8, "little"))
            digest.update(positions.astype("<i8").tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write it as one .npz, whole, without pickles."""
        arrays: dict[str, NDArray[Any]] = {
            "public": self.public,
            "private": np.concatenate(self.clients),
            "sizes": np.array([len(c) for c in self.clients], np.int64),
            "table": self.table,
            "skew": np.array(self.skew),
            "numbers": np.array([self.seed, self.moved, self.retries], np.int64),
        }
        with written_whole(Path(path)) as file:
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
            raise DataError(f"{path}: expected a saved partition, found another or a damaged file ({error})") from error
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
    >>> len(p.public), (p.counts() > 0).sum(axis=1).tolist()
    (10, [1, 1])
    """
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    skew = parse(skew) if isinstance(skew, str) else skew
    y = _labels(labels, classes)
    shared, private = public_split(len(y), public, np.random.default_rng([seed, PUBLIC_STREAM]), stratified, y)
    dealt = split(y[private], clients, skew, classes, np.random.default_rng([seed, CLIENT_STREAM]))
    parts = [private[part] for part in dealt.parts]
    owners = np.bincount(np.concatenate([shared, *parts]), minlength=len(y))
    assert len(owners) == len(y), "a position outside the data was dealt"
    assert (owners == 1).all(), "the parts of a partition must be disjoint and cover the data"
    table = np.stack([np.bincount(y[part], minlength=classes) for part in parts])
    return Partition(shared, parts, table, str(skew), seed, dealt.moved, dealt.retries)
