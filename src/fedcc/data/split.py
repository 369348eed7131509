"""Positions of samples dealt to clients by label skew."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcc.data.skew import Classes, Dirichlet, Iid, Skew

Indices = NDArray[np.int64]

REDRAWS = 100  # of the Dirichlet proportions, before the repair; redrawing alone may never end


@dataclass(frozen=True, eq=False)
class LabelSplit:
    """The positions of each client's samples, ascending."""

    parts: list[Indices]
    moved: int = 0  # samples moved to clients below the minimum
    retries: int = 0  # redraws of the proportions


def split(labels: ArrayLike, clients: int, skew: Skew, classes: int, rng: np.random.Generator) -> LabelSplit:
    """Deal the positions ``0 .. len(labels) - 1`` to the clients: disjoint, covering, no client empty."""
    y = checked_labels(labels, classes)
    if clients < 1:
        raise ValueError(f"clients must be >= 1, got {clients}")
    if clients > len(y):
        raise ValueError(f"{clients} clients cannot share {len(y)} samples: every client needs at least one")
    if isinstance(skew, Iid):
        result = LabelSplit(list(np.array_split(rng.permutation(len(y)), clients)))
    elif isinstance(skew, Dirichlet):
        result = _dirichlet(y, clients, skew, classes, rng)
    else:
        result = _by_classes(y, clients, skew, classes, rng)
    return LabelSplit([np.sort(part).astype(np.int64) for part in result.parts], result.moved, result.retries)


def checked_labels(labels: ArrayLike, classes: int) -> Indices:
    y = np.asarray(labels)
    if classes < 1:
        raise ValueError(f"classes must be >= 1, got {classes}")
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise ValueError(f"labels must be one row of integers, got shape {y.shape} of {y.dtype}")
    if len(y) and not (y.min() >= 0 and y.max() < classes):
        raise ValueError(f"labels must lie in 0 .. {classes - 1}, got {y.min()} .. {y.max()}")
    return y.astype(np.int64)


def _dirichlet(y: Indices, clients: int, skew: Dirichlet, classes: int, rng: np.random.Generator) -> LabelSplit:
    if len(y) < skew.minimum * clients:
        raise ValueError(
            f"{skew} needs at least minimum x clients = {skew.minimum} x {clients} = {skew.minimum * clients} samples,"
            f" got {len(y)}; use fewer clients or a smaller minimum"
        )
    per_class = np.bincount(y, minlength=classes)
    cuts, retries = _cuts(per_class, clients, skew, rng), 0  # [C, K + 1]
    while np.diff(cuts).sum(axis=0).min() < skew.minimum and retries < REDRAWS:  # nothing is shuffled until sizes fit
        cuts, retries = _cuts(per_class, clients, skew, rng), retries + 1
    pieces: list[list[Indices]] = [[] for _ in range(clients)]
    for c in np.flatnonzero(per_class):
        shuffled = rng.permutation(np.flatnonzero(y == c))
        for k, piece in enumerate(np.split(shuffled, cuts[c, 1:-1])):
            pieces[k].append(piece)
    parts = [np.concatenate(p) for p in pieces]
    return LabelSplit(parts, _repair(parts, skew.minimum, rng), retries)


def _cuts(per_class: Indices, clients: int, skew: Dirichlet, rng: np.random.Generator) -> Indices:
    """Where the shuffled samples of every class are cut, [C, K + 1]: from 0 to the size of the class."""
    shares = rng.dirichlet(np.full(clients, skew.eta), size=len(per_class))  # [C, K]
    if skew.balance:
        sizes = np.zeros(clients)
        for share, n in zip(shares, per_class, strict=True):
            open_ = sizes < per_class.sum() / clients
            share *= open_
            total = share.sum()
            share[:] = share / total if total > 0 else open_ / max(open_.sum(), 1)
            sizes += share * n
    inner = np.floor(np.cumsum(shares, axis=1)[:, :-1] * per_class[:, None]).astype(np.int64)
    inner = np.minimum(inner, per_class[:, None])  # a sum of shares may exceed 1 by a rounding
    return np.hstack([np.zeros((len(per_class), 1), np.int64), inner, per_class[:, None]])


def _repair(parts: list[Indices], minimum: int, rng: np.random.Generator) -> int:
    """Move random samples from the largest clients to those below the minimum, in place; returns how many.

    It ends: as n >= minimum x K, someone is above the minimum while anyone is below, and each turn either satisfies
    the poor client or leaves the rich one at exactly the minimum.
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


def _by_classes(y: Indices, clients: int, skew: Classes, classes: int, rng: np.random.Generator) -> LabelSplit:
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
    holds = (_even if skew.assignment == "even" else _niid_bench)(clients, skew.n, classes, rng)  # [K, C]
    holders = holds.sum(axis=0)
    if (orphans := np.flatnonzero(holders == 0)).size:
        raise ValueError(f"{skew} drew no holder for {_named(orphans)}; use assignment=even or another seed")
    if (scarce := np.flatnonzero(per_class < holders)).size:
        c = scarce[0]
        raise ValueError(f"{skew}: class {c} has {per_class[c]} samples for {holders[c]} holders; use fewer clients")
    pieces: list[list[Indices]] = [[] for _ in range(clients)]
    for c in range(classes):
        who = rng.permutation(np.flatnonzero(holds[:, c]))  # so that no client gets all the samples left over
        shuffled = rng.permutation(np.flatnonzero(y == c))
        for k, piece in zip(who, np.array_split(shuffled, len(who)), strict=True):
            pieces[k].append(piece)
    return LabelSplit([np.concatenate(p) for p in pieces])


def _named(classes: Indices) -> str:
    numbers = ", ".join(map(str, classes[:10]))
    return f"class{'es' if len(classes) > 1 else ''} {numbers}{', ...' if len(classes) > 10 else ''}"


def _even(clients: int, n: int, classes: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which client holds which class, [K, C]: n classes a client, floor or ceil of nK/C holders a class.

    Random permutations of the classes, one after the other (the last one cut off), are dealt in turn, so each client
    gets C/K classes of each permutation. If it gets a class twice, that slot is swapped with a random one such that
    neither client then has a double. Each swap leaves one double less and changes no class's number of holders. If no
    swap is left, the same slots are dealt in order of class, which always fits. If a client holds most classes, those
    that it lacks are dealt in the same way: they are fewer.
    """
    if n == classes:
        return np.ones((clients, classes), bool)
    if 2 * n > classes:
        return ~_even(clients, classes - n, classes, rng)
    slots = clients * n
    permutations = [rng.permutation(classes) for _ in range(-(-slots // classes))]
    class_of = np.concatenate(permutations)[:slots]  # slot -> class
    client_of = np.arange(slots) % clients  # slot -> client
    count = np.zeros((clients, classes), np.int64)
    np.add.at(count, (client_of, class_of), 1)
    for slot in range(slots):
        j, c = int(client_of[slot]), int(class_of[slot])
        if count[j, c] < 2:
            continue
        other = _partner(j, c, client_of, class_of, count, rng)
        if other is None:
            return _in_order(class_of, client_of, clients, classes, rng)
        k, d = int(client_of[other]), int(class_of[other])
        class_of[slot], class_of[other] = d, c
        for who, lost, won in ((j, c, d), (k, d, c)):
            count[who, lost] -= 1
            count[who, won] += 1
    return count > 0


def _partner(
    j: int, c: int, client_of: Indices, class_of: Indices, count: Indices, rng: np.random.Generator
) -> int | None:
    """A random slot to swap client j's second c with: its class is new to j, and c is new to its client."""
    for size in (64, None):  # a few random slots mostly suffice; if none of them fits, look at all
        slots = rng.integers(len(class_of), size=size) if size else rng.permutation(len(class_of))
        fits = (count[j, class_of[slots]] == 0) & (count[client_of[slots], c] == 0)
        if fits.any():
            return int(slots[fits.argmax()])
    return None


def _in_order(
    class_of: Indices, client_of: Indices, clients: int, classes: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """The same slots sorted by class: equal ones are neighbours, at most K of them, so no client gets two."""
    holds = np.zeros((clients, classes), bool)
    holds[rng.permutation(clients)[client_of], np.sort(rng.permutation(classes)[class_of])] = True
    return holds


def _niid_bench(clients: int, n: int, classes: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Client i holds class i mod C and n - 1 random others, [K, C]; a class may be left without a holder."""
    holds = np.zeros((clients, classes), bool)
    for i in range(clients):
        others = np.delete(np.arange(classes), i % classes)
        holds[i, i % classes] = True
        holds[i, rng.choice(others, n - 1, replace=False)] = True
    return holds
