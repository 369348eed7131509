"""Methods that become FedAvg when their own term is switched off, bit for bit (docs/properties.md)."""

from __future__ import annotations

import pytest

from fedcc.core.method import AnyMethod
from fedcc.methods import FedAvg, make
from private_steps import same
from tiny import Tiny

LABELS = ((0,) * 20 + (1,) * 3, (1,) * 13 + (2,) * 2, (2,) * 20)
OFF = [
    ("fedprox", {"mu": 0.0}),
    ("fedrs", {"alpha": 1.0}),
    ("fedrs", {"alpha": 1.0, "rule": "continuous"}),
    ("fedlc", {"tau": 0.0}),
    ("fedsam", {"rho": 0.0}),
    ("fedmr", {"mu": 0.0}),
    ("fedmr", {"mu": 0.0, "mu2": 0.0, "mode": "paper"}),
    ("fedntd", {"beta": 0.0}),
    ("moon", {"mu": 0.0}),
]


def final(method: AnyMethod) -> Tiny:
    return Tiny(method, labels=LABELS).run(2)


@pytest.fixture(scope="module")
def fedavg() -> Tiny:
    return final(FedAvg())


@pytest.mark.parametrize(("name", "settings"), OFF, ids=str)
def test_switched_off_it_is_fedavg(name: str, settings: dict[str, object], fedavg: Tiny) -> None:
    assert same(final(make(name, settings)).server.models["global"].state, fedavg.server.models["global"].state)


@pytest.mark.parametrize(
    "name", ["fedprox", "fednova", "fedrs", "fedsam", "fedlc", "fedmr", "fedvls", "fedntd", "moon", "scaffold"]
)
def test_switched_on_it_is_not(name: str, fedavg: Tiny) -> None:
    assert not same(final(make(name)).server.models["global"].state, fedavg.server.models["global"].state)
