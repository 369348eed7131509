"""Names a user types: an unknown one is answered with the nearest known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is not known; the caller raises it.

    >>> unknown("data set", "cifr10", ["digits", "cifar10"])
    ValueError("unknown data set 'cifr10'; did you mean 'cifar10'? Known: digits, cifar10")
    """
    names = {str(k).lower(): str(k) for k in known}
    near = get_close_matches(name.lower(), names, n=1, cutoff=0.4)
    hint = f"; did you mean '{names[near[0]]}'?" if near else "."
    return ValueError(f"unknown {kind} '{name}'{hint} Known: {', '.join(names.values()) or 'none'}")
