"""Code of the user's own: ``module:object``, and what installed packages bring by entry points.

``module:object`` is imported only if the user names it: on the command line, in a file that the command line names, or
as an argument of a function of this package. Files that a run has written (records, ``experiment.toml``, saved models)
never import it: what they name must be named again. An installed entry point needs no such permission.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from functools import reduce
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from fedcc.errors import InputError

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
OWN = "own:"  # begins the name of an object that only Python had
_allowed: set[str] = set()
_imported: dict[str, tuple[Any, str | None]] = {}  # by name: the object, and the digest of its module's file


class ChangedCode(UserWarning):
    """Code that a run used is not the code that is here now."""


def is_reference(name: str) -> bool:
    """Whether a name is ``module:object``; ``timm:NAME`` is not one, as timm is a package that we know.

    >>> is_reference("mynet:Net"), is_reference("timm:resnet18"), is_reference("classes:2"), is_reference("./a.csv")
    (True, False, False, False)
    """
    return _REFERENCE.fullmatch(name) is not None and not name.startswith("timm:")


def allow(*names: Any) -> None:
    """The user has named these: texts, perhaps with commas, or lists; ``module:object`` in them may be imported."""
    for name in names:
        if isinstance(name, str):
            _allowed.update(part for part in map(str.strip, name.split(",")) if is_reference(part))
        elif isinstance(name, list | tuple):
            allow(*name)


def allow_code(names: Iterable[str] | None) -> None:
    """The values of ``--code`` may be imported; refuses what is not ``module:object``."""
    for name in names or ():
        if not is_reference(name):
            raise ValueError(f"--code takes module:name, got {name!r}")
        allow(name)


def check_allowed(*names: str) -> None:
    """Refuse ``module:object`` that the user has not named, and ``own:NAME``, an object that only Python had."""
    for name in names:
        if name.startswith(OWN) and name in _allowed:
            raise InputError(f"{name}: {OWN} is reserved for objects in Python; rename the module")
        if name.startswith(OWN):
            raise InputError(
                f"{name.removeprefix(OWN)} was an object in Python, which no file describes: "
                "call fedcc.run(..., out=FOLDER, resume=True) with the same objects"
            )
        if is_reference(name) and name not in _allowed:
            raise InputError(f"{name} is code of yours and is imported only if you name it: pass --code {name}")


def import_reference(name: str) -> Any:
    """The object that ``module:object`` names; the current folder is the last place that is searched."""
    check_allowed(name)
    module_name, _, path = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise InputError(f"{name}: module {module_name} cannot be imported: {type(error).__name__}: {error}") from error
    try:
        return _remember(name, reduce(getattr, path.split("."), module), module_name)
    except AttributeError:
        raise InputError(f"{name}: module {module_name} has no {path}") from None


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of other packages in ``fedcc.methods``, ``fedcc.networks`` or ``fedcc.data``, by name."""
    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        other = points.setdefault(point.name.lower(), point)
        if other.value != point.value:
            raise InputError(f"two packages bring {point.name} of {group}: {other.value} and {point.value}")
    return points


def import_installed(group: str, name: str) -> Any:
    """The object of an installed package's entry point; None if none has this name."""
    point = installed(group).get(name.lower())
    if point is None:
        return None
    try:
        return _remember(name.lower(), point.load(), point.module)
    except (Exception, SystemExit) as error:
        raise InputError(f"{name} of {group} cannot be imported: {type(error).__name__}: {error}") from error


def _remember(name: str, value: Any, module: str) -> Any:
    if name not in _imported or _imported[name][0] is not value:
        file = getattr(sys.modules.get(module), "__file__", None)
        _imported[name] = value, hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None
    return value


def remember(kind: type) -> str:
    """The name ``module:Class`` by which a class can be imported again; its file belongs to the record of a run."""
    name = name_of(kind) or f"{kind.__module__}:{kind.__qualname__}"
    if is_reference(name):
        _remember(name, kind, kind.__module__)
    return name


def name_of(value: Any) -> str | None:
    """The name by which an object was imported here, if it was."""
    return next((name for name, (known, _) in _imported.items() if known is value), None)


def code_digests(names: Iterable[str]) -> dict[str, str]:
    """The sha256 of the module's file of each of these names that was imported here, for the record of a run."""
    return {name: digest for name in names if (digest := _imported.get(name, (None, None))[1])}


def code_changes(recorded: Mapping[str, Any], where: Path | str) -> list[str]:
    """What is to be said of code whose file is no longer the one that a run used."""
    changed = [name for name, digest in code_digests(recorded).items() if digest != recorded[name]]
    return [f"the file of {name} has changed since {where} was written" for name in changed]


def warn_of_changes(recorded: Mapping[str, Any], where: Path | str) -> None:
    for text in code_changes(recorded, where):
        warnings.warn(text, ChangedCode, stacklevel=3)
