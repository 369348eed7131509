"""JSON files that others wrote: read with limits, their values checked one by one."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

LARGEST = 64 * 2**20  # bytes of a file; a record has kilobytes
DEEPEST = 32  # levels of lists and objects; a record has six
GREATEST = 2**53 - 1  # the largest whole number that every reader of JSON keeps


class Odd(ValueError):
    """A file, or a part of one, that is not what it should be."""


class Disagreement(Odd):
    """A record that says one thing in two ways: nothing of it can be trusted."""


def read_json(file: Path) -> Any:
    """The content of a regular file of a sensible size; whatever else it is, the reason why it cannot be used."""
    try:
        with open(file, "rb", opener=_open) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise Odd("is not a regular file")
            raw = stream.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise Odd(f"is larger than {LARGEST // 2**20} MB")
        content = json.loads(raw, object_pairs_hook=_distinct)
    except OSError as error:
        raise Odd(f"cannot be read: {error.strerror or error}") from None
    except Odd:
        raise
    except RecursionError:
        raise Odd(f"is not valid JSON: nested deeper than {DEEPEST} levels") from None
    except ValueError as error:
        raise Odd(f"is not valid JSON: {short(error)}") from None
    _check_texts(content)
    return content


def _open(path: str, flags: int) -> int:
    """Open at once, also a pipe that nobody writes to."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise Odd(f"is not valid JSON: the key {short(next(n for n in names if names.count(n) > 1))!r} appears twice")
    return made


def _check_texts(content: Any) -> None:
    """Nesting has its limit, and every text can be written as UTF-8 (a JSON escape may be half a character)."""
    level, depth = [content], 0
    while level:
        if depth > DEEPEST:
            raise Odd(f"is nested deeper than {DEEPEST} levels")
        for text in (t for value in level for t in _texts(value)):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise Odd(f"holds a text that is not Unicode: {short(ascii(text))}") from None
        level, depth = [inner for value in level for inner in _inside(value)], depth + 1


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def printable(path: str | Path) -> str:
    r"""A path as one line of text that can be written anywhere: bytes that are not UTF-8 stand as ``\xff``."""
    return _line(os.fsencode(path).decode("utf-8", "backslashreplace"))


def relative_link(file: Path, folder: Path) -> str:
    """The address of a file in a page that lies in this folder."""
    return quote(os.fsencode(Path(os.path.relpath(file, folder)).as_posix()))


def _line(words: str) -> str:
    """Text without line breaks or controls of a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)


def natural(text: str) -> list[tuple[int, int, str]]:
    """A key that sorts seed10 after seed9."""
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"(\d+)", text) if p]


# ------------------------------------------------------------------------------------------------------ single values


def short(value: object) -> str:
    """A value for a message; of lists and objects the size, as they may be large."""
    if isinstance(value, list | tuple) and len(value) > 8:
        return f"a list of {len(value)}"
    if isinstance(value, Mapping) and len(value) > 8:
        return f"an object of {len(value)}"
    words = _line(str(value)[:81])
    return words if len(words) <= 80 else words[:77] + "..."


def agree(what: str, value: Any, other: str, same: Any) -> None:
    """Two values of a record that have to be the same; of objects, the key that is not is named."""
    if isinstance(value, Mapping) and isinstance(same, Mapping):
        for key in {**value, **same}:
            agree(f"{what}.{short(key)}", value.get(key), f"{other}.{short(key)}", same.get(key))
    elif value != same:
        raise Disagreement(f"contradicts itself: {what} is {short(value)}, but {other} is {short(same)}")


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Odd(f"{what} must be an object, got {short(value)}")
    return value


def items(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise Odd(f"{what} must be a list, got {short(value)}")
    return value


def text(value: Any, what: str, longest: int = 200) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > longest:
        raise Odd(f"{what} must be a text of at most {longest} characters, got {short(value)}")
    return value


def word(value: Any) -> str:
    """A text for people that may be missing."""
    return short(value) if isinstance(value, str) else ""


def number(value: Any, what: str, low: float = -math.inf, high: float = math.inf) -> float:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**63:
        raise Odd(f"{what} must be a number below 2^63, got {short(value)}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Odd(f"{what} must be a finite number, got {short(value)}")
    if not low <= value <= high:
        raise Odd(f"{what} must be from {low:g} to {high:g}, got {short(value)}")
    return value


def whole(value: Any, what: str, low: int = 0, high: int = GREATEST) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Odd(f"{what} must be a whole number, got {short(value)}")
    if not low <= value <= high:
        raise Odd(f"{what} must be a whole number from {low} to {high}, got {short(value)}")
    return value


def plain(value: Any, what: str) -> Any:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and len(value) <= 200):
        return value
    return number(value, what)


def series(value: Any, what: str, low: float = -math.inf, high: float = math.inf) -> tuple[float | None, ...]:
    return tuple(None if v is None else number(v, what, low, high) for v in items(value, what))
