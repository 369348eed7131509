"""JSON files that others wrote: read with limits, their values checked one by one."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

Schema = Callable[[Any, str], Any] | list[Any] | dict[Any, Any]
"""A function that takes a value and its name, and returns the value or raises; ``[schema]`` for lists of any length,
``{key: schema}`` for objects with these keys, ``{str: schema}`` for objects with any keys."""

LARGEST = 64 * 2**20  # bytes of a file; a record has kilobytes
DEEPEST = 32  # levels of lists and objects; a record has six
NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # a pipe may have no writer
GREATEST = 2**53 - 1  # the largest whole number that every reader of JSON keeps


class InvalidRecord(ValueError):
    """A file, or a part of one, that is not what it should be."""


class Contradiction(InvalidRecord):
    """A record that contradicts itself: none of it can be trusted."""


def read_json(file: Path) -> Any:
    """The content of a regular file of a sensible size."""
    try:
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | NONBLOCK)) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise InvalidRecord("is not a regular file")
            raw = stream.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise InvalidRecord(f"is larger than {LARGEST // 2**20} MB")
        content = json.loads(raw, object_pairs_hook=_distinct)
    except OSError as error:
        raise InvalidRecord(f"cannot be read: {error.strerror or error}") from None
    except InvalidRecord:
        raise
    except RecursionError:
        raise InvalidRecord(f"is not valid JSON: nested deeper than {DEEPEST} levels") from None
    except ValueError as error:
        raise InvalidRecord(f"is not valid JSON: {short(error)}") from None
    _check_content(content)
    return content


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(n for n in names if names.count(n) > 1)
        raise InvalidRecord(f"is not valid JSON: the key {short(twice)!r} appears twice")
    return content


def _check_content(value: Any, depth: int = 0) -> None:
    """Refuse deep nesting, and texts that cannot be written as UTF-8 (a JSON escape may be half a character)."""
    if depth > DEEPEST:
        raise InvalidRecord(f"is nested deeper than {DEEPEST} levels")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRecord(f"holds a text that is not Unicode: {short(ascii(value))}") from None
    elif isinstance(value, dict | list):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_content(inner, depth + 1)


def printable(path: str | Path) -> str:
    r"""A path as one line of text that can be written anywhere: bytes that are not UTF-8 appear as ``\xff``."""
    return _line(os.fsencode(path).decode("utf-8", "backslashreplace"))


def _line(text: str) -> str:
    """Text without line breaks or terminal control characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def relative_link(file: Path, folder: Path) -> str:
    """The address of a file in a page in this folder."""
    return quote(os.fsencode(Path(os.path.relpath(file, folder)).as_posix()))


def natural(text: str) -> list[tuple[int, int, str]]:
    """A key that sorts seed10 after seed9."""
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"(\d+)", text) if p]


def position(name: str, known: Sequence[str]) -> int:
    """The position of a name in a list; unknown names come last."""
    return known.index(name) if name in known else len(known)


def short(value: object) -> str:
    """A value for a message; the size of long lists and objects."""
    if isinstance(value, list | tuple | Mapping) and len(value) > 8:
        return f"{'an object' if isinstance(value, Mapping) else 'a list'} of {len(value)}"
    text = _line(str(value)[:81])
    return text if len(text) <= 80 else text[:77] + "..."


def short_text(value: Any, _what: str = "") -> str:
    """A text for people, empty if it is missing."""
    return short(value) if isinstance(value, str) else ""


def agree(what: str, value: Any, other: str, same: Any) -> None:
    """Refuse two values of a record that differ; for objects, name the key that differs."""
    if isinstance(value, Mapping) and isinstance(same, Mapping):
        for key in {**value, **same}:
            agree(f"{what}.{short(key)}", value.get(key), f"{other}.{short(key)}", same.get(key))
    elif value != same:
        raise Contradiction(f"contradicts itself: {what} is {short(value)}, but {other} is {short(same)}")


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRecord(f"{what} must be an object, got {short(value)}")
    return value


def text(value: Any, what: str, longest: int = 200) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > longest:
        raise InvalidRecord(f"{what} must be a text of at most {longest} characters, got {short(value)}")
    return value


def number(value: Any, what: str, low: float = -math.inf, high: float = math.inf) -> float:
    if type(value) is int and abs(value) > 2**63:
        raise InvalidRecord(f"{what} must be a number below 2^63, got {short(value)}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRecord(f"{what} must be a finite number, got {short(value)}")
    if not low <= value <= high:
        raise InvalidRecord(f"{what} must be from {low:g} to {high:g}, got {short(value)}")
    return value


def whole(value: Any, what: str, low: int = 0, high: int = GREATEST) -> int:
    if type(value) is not int:
        raise InvalidRecord(f"{what} must be a whole number, got {short(value)}")
    if not low <= value <= high:
        raise InvalidRecord(f"{what} must be a whole number from {low} to {high}, got {short(value)}")
    return value


def scalar(value: Any, what: str) -> Any:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and len(value) <= 200):
        return value
    return number(value, what)


def optional(schema: Schema) -> Schema:
    return lambda value, what: None if value is None else check(value, schema, what)


def check(value: Any, schema: Schema, what: str = "") -> Any:
    """The parts of a value that a schema names, checked."""
    if isinstance(schema, list):
        if not isinstance(value, list):
            raise InvalidRecord(f"{what} must be a list, got {short(value)}")
        return [check(item, schema[0], f"{what}.{i}") for i, item in enumerate(value)]
    if isinstance(schema, dict):
        stored = mapping(value, what)
        parts: dict[str, Any] = dict.fromkeys(stored, schema[str]) if str in schema else schema
        name = f"{what}." if what else ""
        return {key: check(stored.get(key), part, f"{name}{short(key)}") for key, part in parts.items()}
    return schema(value, what)
