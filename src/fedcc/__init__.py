"""FedCC: federated learning by distillation, with clients that may answer "unknown".

>>> import fedcc
>>> federation = fedcc.Federation.named("digits", skew="classes:1", clients=10, models="resnet8")
>>> result = fedcc.run(fedcc.FedCC(lam=0.2), federation, rounds=1, epochs=1)
>>> result.predict(federation.test.x[:5]).shape
torch.Size([5])
"""

import fedcc.signals  # noqa: F401  first, before imports that take time

from importlib import import_module  # isort: skip
from typing import TYPE_CHECKING, Any  # isort: skip

if TYPE_CHECKING:
    from fedcc.core.method import Method, option
    from fedcc.core.samples import View
    from fedcc.data.dataset import Dataset
    from fedcc.experiments.result import Result, load
    from fedcc.experiments.rounds import FinishedRound, Observer, Pause, Stop
    from fedcc.experiments.run import run
    from fedcc.federation import Federation
    from fedcc.methods import (
        COMET,
        DSFL,
        FENS,
        LSR,
        METHODS,
        MOON,
        SCAFFOLD,
        SCARLET,
        SSL,
        Centralized,
        FedAUX,
        FedAvg,
        FedCC,
        FedConcat,
        FedCT,
        FedDF,
        FedET,
        FedHKT,
        FedLC,
        FedMD,
        FedMR,
        FedNova,
        FedNTD,
        FedOV,
        FedProto,
        FedProx,
        FedRS,
        FedSAM,
        FedVLS,
        Local,
        SelectiveFD,
        make,
    )

__version__ = "0.2.0"

_HOMES = {
    "fedcc.core.method": ("Method", "option"),
    "fedcc.core.samples": ("View",),
    "fedcc.data.dataset": ("Dataset",),
    "fedcc.federation": ("Federation",),
    "fedcc.methods": (
        "METHODS",
        "make",
        "FedAvg",
        "FedProx",
        "FedNova",
        "FedRS",
        "FedSAM",
        "FedLC",
        "FedMR",
        "FedConcat",
        "FedVLS",
        "FedMD",
        "FedDF",
        "LSR",
        "FedET",
        "FedHKT",
        "FedCT",
        "FedCC",
        "SSL",
        "Local",
        "Centralized",
        "DSFL",
        "SCARLET",
        "SelectiveFD",
        "COMET",
        "FedAUX",
        "FedOV",
        "FENS",
        "FedNTD",
        "FedProto",
        "SCAFFOLD",
        "MOON",
    ),
    "fedcc.experiments.result": ("Result", "load"),
    "fedcc.experiments.rounds": ("FinishedRound", "Observer", "Pause", "Stop"),
    "fedcc.experiments.run": ("run",),
}

__all__ = [
    "COMET",
    "DSFL",
    "FENS",
    "LSR",
    "METHODS",
    "MOON",
    "SCAFFOLD",
    "SCARLET",
    "SSL",
    "Centralized",
    "Dataset",
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
    "Federation",
    "FinishedRound",
    "Local",
    "Method",
    "Observer",
    "Pause",
    "Result",
    "SelectiveFD",
    "Stop",
    "View",
    "load",
    "make",
    "option",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: torch takes seconds."""
    for home, names in _HOMES.items():
        if name in names:
            globals().update({n: getattr(import_module(home), n) for n in names})
            return globals()[name]
    raise AttributeError(f"module 'fedcc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
