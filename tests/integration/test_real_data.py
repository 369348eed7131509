"""A round of FedCC on real CIFAR-10, where its files are."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

from fedcc import FedCC, Federation
from fedcc.core.requests import Fit, Fitted, Recipe
from fedcc.engine.plain import Plain
from fedcc.federate import Simulated, build_roles, federate

here = pytest.mark.skipif(not os.environ.get("FEDCC_DATA"), reason="FEDCC_DATA names no folder")


class Watched(Plain):
    """Remembers the loss of every fit."""

    losses: dict[tuple[int, str], float]

    def fit(self, fit: Fit) -> Fitted:
        fitted = super().fit(fit)
        self.losses[fit.key.client, fit.key.phase] = fitted.loss
        return fitted


@here
@pytest.mark.realdata
@pytest.mark.slow
def test_a_round_on_a_tenth_of_cifar10() -> None:
    federation = Federation.named("cifar10", "classes:2", 10, "resnet8", fraction=0.1)
    assert sum(map(len, federation.private)) + len(federation.public) == 5000
    method, engine = FedCC(), Watched("cpu")
    engine.losses = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        server, clients = build_roles(method, federation, Recipe(epochs=1), 0, "cpu")
        cohort = Simulated(method, clients, engine)
        (done,) = federate(method, server, cohort, 1, engine)
    finally:
        torch.set_num_threads(threads)
    assert engine.losses.keys() == {(k, phase) for k in range(10) for phase in ("fit", "refine")}
    assert all(math.isfinite(loss) and loss > 0 for loss in engine.losses.values())
    assert_valid(next(iter(done.downs.values())).values, len(federation.public), 10)
    for up in done.ups.values():
        assert_valid(up.values, len(federation.public), 11)


def assert_valid(probabilities: Any, rows: int, columns: int) -> None:
    assert probabilities.shape == (rows, columns)
    assert bool(torch.isfinite(probabilities).all())
    assert float(probabilities.min()) >= 0
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(rows), atol=1e-5, rtol=0)
