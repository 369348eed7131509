"""Every method carries on when a client is revoked and another is added between two rounds, as in a federation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from test_methods import federation

from fedcc.federate import federate
from fedcc.methods import METHODS

SEVERAL = [name for name, kind in METHODS.items() if kind.family != "bound" and not kind.knows_networks]


class Changing:
    """The clients of a simulation: the last one comes after round 1, and the first one leaves then."""

    def __init__(self, simulated: Any, server: Any):
        self.simulated, self.server = simulated, server
        self.wire, self.disclosure = simulated.wire, simulated.disclosure
        self.everyone, self.archs = simulated.clients, server.archs
        self.server.archs = {k: arch for k, arch in self.archs.items() if k != max(self.archs)}
        self.asked: list[list[int]] = []

    def round(self, t: int, downs: Mapping[int, Any]) -> Mapping[int, Any]:
        last = max(self.archs)
        self.simulated.clients = [c for c in self.everyone if c.id in downs and not (t > 1 and c.id == 0)]
        self.asked.append([c.id for c in self.simulated.clients])
        ups: Mapping[int, Any] = self.simulated.round(t, downs)
        self.server.archs = {**self.server.archs, last: self.archs[last]}
        return ups


@pytest.mark.parametrize("name", SEVERAL)
def test_a_client_comes_and_another_leaves_after_round_1(name: str) -> None:
    tiny = federation(name)
    cohort = Changing(tiny.cohort, tiny.server)
    rounds = list(federate(tiny.method, tiny.server, cohort, 2, tiny.executor))
    assert cohort.asked[:2] == [[0, 1, 2], [1, 2, 3]]
    assert all(set(messages.downs) == {0, 1, 2, 3} for messages in rounds)
    tiny.cohort.clients = cohort.everyone[1:]
    assert tiny.scores().isfinite().all()
