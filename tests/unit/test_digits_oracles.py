"""Oracles hidden in the paper's tables (docs/properties.md), on real digits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedcc.core.method import AnyMethod
from fedcc.core.requests import Init, Recipe
from fedcc.core.rng import Key
from fedcc.core.roles import Server
from fedcc.core.samples import Samples
from fedcc.engine import Plain
from fedcc.federate import RoundMessages, Simulated, build_roles, federate
from fedcc.federation import Federation
from fedcc.methods import FedAvg, FedCT, FedLC, FedNova


@pytest.fixture(scope="module")
def digits() -> Federation:
    return Federation.named("digits", skew="classes:1", clients=10, models="resnet8")


def ran(
    method: AnyMethod, federation: Federation, recipe: Recipe, rounds: int = 1
) -> tuple[Server, list[RoundMessages]]:
    executor = Plain("cpu")
    server, clients = build_roles(method, federation, recipe, 0, "cpu")
    return server, list(federate(method, server, Simulated(method, clients, executor), rounds, executor))


def one_round(method: AnyMethod, federation: Federation) -> tuple[Server, RoundMessages]:
    server, (done,) = ran(method, federation, Recipe(epochs=1))
    return server, done


def test_fedlc_returns_the_received_parameters(digits: Federation) -> None:
    server, done = one_round(FedLC(), digits)
    received = Plain("cpu").init(Init(server.archs[0], Key(0, phase="init"))).floating
    for up in done.ups.values():
        moved = [name for name in received if not torch.equal(up.state[name], received[name])]
        assert moved
        assert all("running" in name for name in moved)


def test_fednova_is_fedavg_on_sizes_made_equal(digits: Federation) -> None:
    size = min(len(private) for private in digits.private)
    cut = tuple(Samples({n: c[:size] for n, c in p.columns.items()}, p.view) for p in digits.private)
    nova, plain = (one_round(method, replace(digits, private=cut))[0] for method in (FedNova(), FedAvg()))
    torch.testing.assert_close(nova.models["global"].state, plain.models["global"].state)


def test_fedct_agrees_on_class_0_everywhere(digits: Federation) -> None:
    """Ten clients vote for the one class each of them knows: a tie of ten, and the lowest class wins."""
    _, rounds = ran(FedCT(), digits, Recipe(lr=1e-2, epochs=8), rounds=2)
    for k, up in rounds[0].ups.items():
        assert (up.values == int(digits.private[k]["y"][0])).all()
    assert {int(private["y"][0]) for private in digits.private} == set(range(10))
    for done in rounds:
        assert all((down.values == 0).all() for down in done.downs.values())
