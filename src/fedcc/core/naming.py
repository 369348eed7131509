"""Names and values as people read them: the nearest known name, values cut to a readable length, times."""

import reprlib
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxlong = _SHORT.maxstring = _SHORT.maxother = 80


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for an unknown name, with the nearest known one; the caller raises it.

    >>> unknown("data set", "cifr10", ["digits", "cifar10"])
    ValueError("unknown data set 'cifr10'; did you mean 'cifar10'? Known: digits, cifar10")
    """
    names = {str(k).lower(): str(k) for k in known}
    near = nearest_name(name.lower(), names)
    hint = f"; did you mean '{names[near]}'?" if near is not None else "."
    return ValueError(f"unknown {kind} '{name}'{hint} Known: {', '.join(names.values()) or 'none'}")


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one, if any is; of equals, that with the longest common beginning.

    >>> nearest_name("fedcx", ["fedlc", "fedct", "fedcc", "fedprox"])
    'fedcc'
    """

    def unlikeness(other: str) -> tuple[float, int, str]:
        common = next((i for i, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), len(name))
        return -SequenceMatcher(None, other, name).ratio(), -common, other

    return min(get_close_matches(name, known, n=10, cutoff=0.4), key=unlikeness, default=None)


def shortened(value: Any) -> str:
    """``repr(value)`` for a message: at most about 80 characters, a few levels deep.

    >>> shortened("text"), shortened(0.5), shortened(10**100)
    ("'text'", '0.5', '10000000000000000000000000000000000000...000000000000000000000000000000000000000')
    """
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"an integer of {value.bit_length():,} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first of some names.

    >>> listed("abcd", 2)
    'a, b, ...'
    """
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def clock(seconds: float | None) -> str:
    """Seconds as people say them.

    >>> clock(75), clock(4000)
    ('1:15', '1:06:40')
    """
    whole = round(seconds or 0)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def printable(text: str) -> str:
    """A text for one line of a terminal: spaces for line breaks, escapes for control characters and the like.

    >>> printable("ok\\n\\x1b[2Jgone\\u202e")
    'ok \\\\x1b[2Jgone\\\\u202e'
    """
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in words)
