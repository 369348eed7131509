"""Errors for names nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for an unknown name, with the nearest known one.

    >>> str(unknown("network", "resnt14", ["resnet8", "resnet14"]))
    "unknown network 'resnt14'; did you mean 'resnet14'? Known: resnet8, resnet14"
    """
    names = list(known)
    folded = {candidate.lower(): candidate for candidate in names}
    near = difflib.get_close_matches(name.lower(), list(folded), 1, 0.5)
    hint = f"; did you mean {folded[near[0]]!r}?" if near else "."
    return ValueError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}")
