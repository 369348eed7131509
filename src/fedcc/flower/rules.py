"""When a round of a federation ends, and who is waited for."""

from __future__ import annotations

from dataclasses import dataclass

from fedcc.core.options import REQUIRED, option
from fedcc.experiments.options import Group


@dataclass(frozen=True, kw_only=True)
class Rules(Group):
    """The rules of all rounds; ``[rounds]`` of ``federation.toml``."""

    quorum: int = option(REQUIRED, "clients whose uploads make a round; two thirds by default", low=1)
    deadline: float = option(3600.0, "seconds after which a round ends if there is a quorum", low=1)
    grace: float = option(60.0, "seconds for the other clients once there is a quorum", low=0)
    patience: int = option(10, "deadlines without a quorum before the run stops", low=1)
    strikes: int = option(3, "failures in a row before a client is set aside", low=1)

    def check(self, clients: int) -> None:
        if self.quorum > clients:
            raise ValueError(f"quorum must be from 1 to the number of clients, {clients}, got {self.quorum}")
