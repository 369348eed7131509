"""When a round of a federation ends, and who is waited for."""

from __future__ import annotations

from dataclasses import dataclass

from fedcc.core.options import REQUIRED, option
from fedcc.experiments.options import Group


@dataclass(frozen=True, kw_only=True)
class Rules(Group):
    """The rules of all rounds; ``[rounds]`` of ``federation.toml``."""

    quorum: int = option(
        REQUIRED, "Require uploads of this many clients for a round. The default is two thirds.", low=1
    )
    deadline: float = option(3600.0, "End a round after this many seconds if there is a quorum.", low=1)
    grace: float = option(60.0, "Give the other clients this many seconds once there is a quorum.", low=0)
    patience: int = option(10, "Stop the run after this many deadlines without a quorum.", low=1)
    strikes: int = option(3, "Set a client aside after this many failures in a row.", low=1)

    def check(self, clients: int) -> None:
        if self.quorum > clients:
            raise ValueError(f"quorum must be from 1 to the number of clients, {clients}, got {self.quorum}")
