"""The methods: the paper's in the order of its Table I, then those beyond it. A file says what its method changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from fedcc.code import allow, import_installed, import_reference, installed, is_reference, name_of
from fedcc.core.method import LOST, AnyMethod, Method
from fedcc.core.naming import unknown
from fedcc.core.options import check_value
from fedcc.methods.bounds import Centralized, Local
from fedcc.methods.comet import COMET
from fedcc.methods.dsfl import DSFL
from fedcc.methods.fedaux import FedAUX
from fedcc.methods.fedavg import FedAvg
from fedcc.methods.fedcc import FedCC
from fedcc.methods.fedconcat import FedConcat
from fedcc.methods.fedct import FedCT
from fedcc.methods.feddf import FedDF
from fedcc.methods.fedet import FedET
from fedcc.methods.fedhkt import FedHKT
from fedcc.methods.fedlc import FedLC
from fedcc.methods.fedmd import FedMD
from fedcc.methods.fedmr import FedMR
from fedcc.methods.fednova import FedNova
from fedcc.methods.fedntd import FedNTD
from fedcc.methods.fedov import FedOV
from fedcc.methods.fedproto import FedProto
from fedcc.methods.fedprox import FedProx
from fedcc.methods.fedrs import FedRS
from fedcc.methods.fedsam import FedSAM
from fedcc.methods.fedvls import FedVLS
from fedcc.methods.fens import FENS
from fedcc.methods.lsr import LSR
from fedcc.methods.moon import MOON
from fedcc.methods.scaffold import SCAFFOLD
from fedcc.methods.scarlet import SCARLET
from fedcc.methods.selectivefd import SelectiveFD
from fedcc.methods.ssl import SSL
from fedcc.methods.student import Student

PAPER: tuple[type[AnyMethod], ...] = (
    FedAvg, FedProx, FedNova, FedRS, FedSAM, FedLC, FedMR, FedConcat, FedVLS,
    FedMD, FedDF, LSR, FedET, FedHKT, FedCT, FedCC, SSL, Local, Centralized,
)  # fmt: skip
"""The methods of the paper's Table I in its order, then those that share nothing or everything."""
BEYOND: tuple[type[AnyMethod], ...] = (
    DSFL, SCARLET, SelectiveFD, COMET, FedAUX, FedOV, FedNTD, MOON, SCAFFOLD, FedProto, FENS,
)  # fmt: skip
"""Methods that the paper leaves out. Lists and tables have them as a group of their own, "beyond the paper"."""
METHODS: dict[str, type[AnyMethod]] = {kind.__name__.lower(): kind for kind in (*PAPER, *BEYOND)}
"""Every method by its name on the command line."""


def find_method(name: str) -> type[AnyMethod]:
    """The class of a method: by name, of an installed package (entry point ``fedcc.methods``), or ``module:Class``.

    >>> find_method("FedCC").__name__
    'FedCC'
    """
    if name.lower() in METHODS:
        return METHODS[name.lower()]
    if name.lower() == "student":  # predicts only, so no list has it
        return Student
    kind: Any = import_installed("fedcc.methods", name)
    if kind is None and is_reference(name):
        kind = import_reference(name)
    if kind is None:
        raise unknown("method", name, [*METHODS, *installed("fedcc.methods")])
    if not (is_dataclass(kind) and isinstance(kind, type) and issubclass(kind, Method)):
        raise ValueError(f"{name} must be a method: a frozen dataclass derived from fedcc.Method, got {kind!r}")
    method: type[AnyMethod] = kind
    return method


def method_name(name: str) -> str:
    """A method's name as files and folders have it: small letters, but for ``module:Class``."""
    return name if is_reference(name) else name.lower()


def class_name(kind: type[AnyMethod]) -> str:
    """The name that finds a method's class again, where there is one: its own, or that by which it was imported."""
    return name_of(kind) or kind.__name__


def make(name: str, settings: Mapping[str, Any] | None = None, /, **more: Any) -> AnyMethod:
    """Build a method with some hyper-parameters set, by name, or ``module:Class`` for one of your own.

    >>> make("FedCC", {"lam": 0.5}).lam, make("fedprox", mu=0.1).mu
    (0.5, 0.1)
    """
    allow(name)
    return build_method(name, {**(settings or {}), **more})


def build_method(name: str, settings: Mapping[str, Any] | None = None) -> AnyMethod:
    """Build a method by a name that may come from a file: ``module:Class`` is refused unless the user has named it."""
    kind, settings = find_method(name), settings or {}
    known, values = [f.name for f in fields(kind)], dict(settings)  # type: ignore[arg-type]
    for key, value in settings.items():
        if key in kind.retired:
            if values.pop(key) != kind.retired[key]:
                raise ValueError(f"{kind.__name__} no longer has {key}={value}, only {key}={kind.retired[key]}")
        elif not known:
            raise ValueError(f"{kind.__name__} has no settings, got {key!r}")
        elif key not in known:
            raise unknown(f"setting of {kind.__name__}", key, known)
    return kind(**values)


def recorded_settings(
    name: str, settings: Mapping[str, Any], version: int | None = None
) -> tuple[dict[str, Any], str | None]:
    """A recorded run's settings by today's options, and the reason why today's method gives other numbers, if any.

    Files from before versions were recorded have none; which it was is inferred from the options that they lack.

    >>> recorded_settings("fednova", {"normaliser": "steps"})[0]["statistics"]
    'average'
    >>> recorded_settings("fedconcat", {"clusters": 4})[1]
    'version 1 of FedConcat is another algorithm than version 2'
    """
    kind = METHODS.get(name.lower())
    if kind is None:
        return dict(settings), None
    if version is None:
        older = (v for v, values in sorted(kind.earlier.items()) if not values or values.keys() - settings.keys())
        version = next(older, kind.version)
    check_value("version", version, int, 1)
    values = kind.earlier.get(version, {}) if version != kind.version else {}
    reason = None
    if version != kind.version and (not values or LOST in values.values()):
        reason = f"version {version} of {kind.__name__} is another algorithm than version {kind.version}"
    for key, supported in kind.retired.items():
        if settings.get(key, supported) != supported:
            reason = f"{kind.__name__} no longer has {key}={settings[key]}"
    usual = {f.name: f.default for f in fields(kind)}  # type: ignore[arg-type]
    current = {key: value for key, value in settings.items() if key not in kind.retired}
    return usual | {key: value for key, value in values.items() if value is not LOST} | current, reason


__all__ = [
    "BEYOND",
    "COMET",
    "DSFL",
    "FENS",
    "LSR",
    "METHODS",
    "MOON",
    "PAPER",
    "SCAFFOLD",
    "SCARLET",
    "SSL",
    "Centralized",
    "FedAUX",
    "FedAvg",
    "FedCC",
    "FedCT",
    "FedConcat",
    "FedDF",
    "FedET",
    "FedHKT",
    "FedLC",
    "FedMD",
    "FedMR",
    "FedNTD",
    "FedNova",
    "FedOV",
    "FedProto",
    "FedProx",
    "FedRS",
    "FedSAM",
    "FedVLS",
    "Local",
    "SelectiveFD",
    "build_method",
    "class_name",
    "find_method",
    "make",
    "method_name",
    "recorded_settings",
]
