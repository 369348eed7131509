"""Oracles hidden in the paper's tables (algorithms.md, section 8), on real digits."""

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
from fedcc.federate import Round, Simulated, federate
from fedcc.federation import Federation
from fedcc.methods import FedAvg, FedLC, FedNova
from fedcc.run import parties


@pytest.fixture(scope="module")
def digits() -> Federation:
    return Federation.named("digits", skew="classes:1", clients=10, models="resnet8")


def one_round(method: AnyMethod, federation: Federation) -> tuple[Server, Round]:
    executor = Plain("cpu")
    server, clients = parties(method, federation, Recipe(epochs=1), 0, "cpu")
    (done,) = federate(method, server, Simulated(method, clients, executor), 1, executor)
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
