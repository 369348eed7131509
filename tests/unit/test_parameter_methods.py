"""What must hold for every parameter-based method: hard clients, missing ones, order, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedcc.core.method import AnyMethod
from fedcc.core.requests import Recipe
from fedcc.methods import FedConcat, FedLC, FedMR, FedNova, FedVLS, make
from tiny import Tiny

NAMES = [
    "fedavg", "fedprox", "fednova", "fedrs", "fedsam", "fedlc", "fedmr", "fedconcat", "fedvls",
    "fedntd", "moon", "scaffold",
]  # fmt: skip
EXTRA: list[AnyMethod] = [
    FedNova(normaliser="momentum", server_momentum=0.5),
    FedMR(mode="paper"),
    FedLC(denominator="exclude"),
    FedVLS(suppress="code", gamma=0.1),
    FedConcat(clusters=2, classifier_rounds=3, head_init="joined"),
]
METHODS = [replace(m, classifier_rounds=5) if isinstance(m, FedConcat) else m for m in map(make, NAMES)] + EXTRA  # type: ignore[type-var]
HARD = ((0,) * 20, (1,), (1, 1, 2), (0, 2) * 6)  # one class; one sample; three; class 3 is nowhere

pytestmark = pytest.mark.parametrize("method", METHODS, ids=str)


def test_hard_clients_stay_finite(method: AnyMethod) -> None:
    tiny = Tiny(method, labels=HARD, classes=4, precision="fp32", options={"participation": 0.5}).run(4)
    assert all(torch.isfinite(v).all() for m in tiny.server.models.values() for v in m.state.values())
    assert torch.isfinite(tiny.scores()).all()
    assert all(set(done.downs) == {0, 1, 2, 3} for done in tiny.rounds)


def test_one_class_each_stays_finite(method: AnyMethod) -> None:
    tiny = Tiny(method, precision="fp32").run(2)
    assert torch.isfinite(tiny.scores()).all()


def test_the_same_seed_gives_the_same_scores(method: AnyMethod) -> None:
    labels = ((0, 1) * 8, (1, 2) * 8)
    assert torch.equal(Tiny(method, labels=labels).run(2).scores(), Tiny(method, labels=labels).run(2).scores())


def test_the_order_of_clients_does_not_matter(method: AnyMethod) -> None:
    states = []
    for order in ((0, 1, 2), (2, 0, 1)):
        tiny = Tiny(method, labels=((0, 1) * 8, (1, 2) * 6, (2,) * 9))
        downs = tiny.ask(method.start(tiny.server))
        tiny.server.rounds = 2
        tiny.server.begin(1)
        ups = tiny.cohort.round(1, downs)
        tiny.ask(method.server(tiny.server, {k: ups[k] for k in order}))
        states.append({f"{n}/{k}": v for n, m in tiny.server.models.items() for k, v in m.state.items()})
    torch.testing.assert_close(states[0], states[1], rtol=1e-9, atol=1e-10)


def test_it_learns(method: AnyMethod) -> None:
    if isinstance(method, FedConcat):
        method = replace(method, classifier_rounds=40)
    labels = ((0,) * 20 + (1,) * 10, (1,) * 20 + (2,) * 10, (2,) * 20 + (0,) * 10)
    assert Tiny(method, labels=labels, recipe=Recipe(lr=1e-2, batch=8, epochs=4)).run(3).accuracy() > 0.8
