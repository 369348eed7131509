"""Code of the user's own, named ``module:object``: imported only when the user names it.

A name counts as the user's if it is on the command line, in a file that the command line names, or an argument of a
function of this package. Files that a run has written (records, ``experiment.toml``, saved models) never import
anything: what they name must be named again.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
from functools import reduce
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from fedcc.errors import InputError

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_allowed: set[str] = set()


def is_reference(name: str) -> bool:
    """Whether a name is ``module:object``.

    >>> is_reference("mynet:Net"), is_reference("timm:resnet18"), is_reference("classes:2"), is_reference("./a.csv")
    (True, True, False, False)
    """
    return _REFERENCE.fullmatch(name) is not None


def allow(*names: str) -> None:
    """The user has named these: those that are ``module:object`` may be imported."""
    _allowed.update(name for name in names if is_reference(name))


def import_reference(name: str) -> Any:
    """The object that ``module:object`` names; the current folder is the last place that is searched."""
    if name not in _allowed:
        raise InputError(f"{name} is code of yours and is imported only if you name it: pass --code {name}")
    module_name, _, path = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise InputError(f"{name}: module {module_name} cannot be imported: {type(error).__name__}: {error}") from error
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError:
        raise InputError(f"{name}: module {module_name} has no {path}") from None


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of other packages in ``fedcc.methods``, ``fedcc.networks`` or ``fedcc.data``, by name."""
    return {point.name.lower(): point for point in entry_points(group=group)}


def import_installed(group: str, name: str) -> Any:
    """The object of an installed package's entry point; None if none has this name."""
    point = installed(group).get(name.lower())
    if point is None:
        return None
    try:
        return point.load()
    except Exception as error:
        raise InputError(f"{name} of {group} cannot be imported: {type(error).__name__}: {error}") from error


def file_digest(name: str) -> str | None:
    """The sha256 of the file of an imported ``module:object``; None where there is no such file."""
    module = sys.modules.get(name.partition(":")[0])
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None
