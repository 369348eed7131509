"""Flat tables as TOML. Python reads TOML but does not write it; what is written here is read back by ``tomllib``."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEEPEST = 32  # levels of a table that is read
LARGEST = 16 * 2**20  # bytes of a file that is read


def load(path: Path) -> dict[str, Any]:
    """Read a file; what is wrong with it is a ValueError that names it."""
    try:
        if (size := path.stat().st_size) > LARGEST:
            raise ValueError(f"it has {size:,} bytes, at most {LARGEST:,} are read")
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None


def parse(text: str) -> dict[str, Any]:
    """The table that a text holds, else a ValueError; one that is nested too deep is refused."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from None
    level: list[Any] = [table]
    for _ in range(DEEPEST):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    if level:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    return table


def dumps(table: Mapping[str, Any]) -> str:
    """A table of scalars, lists (of scalars or small tables), and tables of these; None is left out.

    >>> print(dumps({"method": "fedcc", "lr": 0.001, "settings": {"lam": 0.2}}), end="")
    method = "fedcc"
    lr = 0.001
    <BLANKLINE>
    [settings]
    lam = 0.2
    """
    scalars = {k: v for k, v in table.items() if not isinstance(v, Mapping) and v is not None}
    lines = [f"{_key(name)} = {_value(value)}" for name, value in scalars.items()]
    for name, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_key(name)}]"]
            lines += [f"{_key(n)} = {_value(v)}" for n, v in value.items() if v is not None]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)  # TOML writes inf and nan as Python does
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {_value(v)}" for name, v in value.items()) + "}"
    raise TypeError(f"TOML here holds numbers, texts, switches, lists and tables, got {type(value).__name__}")
