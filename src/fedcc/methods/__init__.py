"""The methods, in the order of the paper's Table I. Each file says only what its method does differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedcc.core.method import AnyMethod
from fedcc.core.naming import unknown
from fedcc.methods.bounds import Centralized, Local
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
from fedcc.methods.fedprox import FedProx
from fedcc.methods.fedrs import FedRS
from fedcc.methods.fedsam import FedSAM
from fedcc.methods.fedvls import FedVLS
from fedcc.methods.lsr import LSR
from fedcc.methods.ssl import SSL

METHODS: dict[str, type[AnyMethod]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fednova": FedNova,
    "fedrs": FedRS,
    "fedsam": FedSAM,
    "fedlc": FedLC,
    "fedmr": FedMR,
    "fedconcat": FedConcat,
    "fedvls": FedVLS,
    "fedmd": FedMD,
    "feddf": FedDF,
    "lsr": LSR,
    "fedet": FedET,
    "fedhkt": FedHKT,
    "fedct": FedCT,
    "fedcc": FedCC,
    "ssl": SSL,
    "local": Local,
    "centralized": Centralized,
}
"""Every method by its name on the command line, in Table I's order; then those that share nothing or everything."""


def make(name: str, settings: Mapping[str, Any] | None = None) -> AnyMethod:
    """A method by name with some hyper-parameters set.

    >>> make("FedCC", {"lam": 0.5}).lam
    0.5
    """
    kind = METHODS.get(name.lower())
    if kind is None:
        raise unknown("method", name, METHODS)
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for key in settings or {}:
        if key not in known:
            raise (
                unknown(f"setting of {kind.__name__}", key, known)
                if known
                else ValueError(f"{kind.__name__} has no settings, got {key!r}")
            )
    return kind(**(settings or {}))


def outdated(name: str, settings: Mapping[str, Any]) -> str:
    """Why a run with exactly these settings was made by the method before it was mended; empty if it was not.

    >>> outdated("fedconcat", {"clusters": 4})
    'it was made before FedConcat had classifier_lr, by another algorithm'
    """
    kind = METHODS.get(name.lower())
    if kind is None:
        return ""
    for f in fields(kind):  # type: ignore[arg-type]
        if f.metadata.get("mended") and f.name not in settings:
            return f"it was made before {kind.__name__} had {f.name}, by another algorithm"
    return ""


def completed(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that may be older than some of its method's options: these as the method was then.

    >>> completed("fednova", {"normaliser": "steps"})["statistics"]
    'average'
    """
    kind = METHODS.get(name.lower())
    then = {f.name: f.metadata.get("before", f.default) for f in fields(kind)} if kind else {}  # type: ignore[arg-type]
    return then | dict(settings)


__all__ = [
    "LSR",
    "METHODS",
    "SSL",
    "Centralized",
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
    "FedNova",
    "FedProx",
    "FedRS",
    "FedSAM",
    "FedVLS",
    "Local",
    "completed",
    "make",
    "outdated",
]
