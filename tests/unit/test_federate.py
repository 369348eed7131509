"""The round loop: who takes part, what they receive, and how many bytes that was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedcc.core.disclosure import OPEN, Disclosure
from fedcc.core.messages import Predictions, Weights, carried
from fedcc.core.method import Family, Method, Trained
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.federate import Simulated, federate
from fedcc.methods import FedAvg, FedCC, FedMD, Local
from recording import record, same
from tiny import Mlp, Tiny

FIVE = [[0, 1, 2] * 3] * 5


@dataclass(frozen=True)
class Echo(Method[Predictions, Predictions]):
    """Clients send their id and round; the server sends back to each its own number of the round, and counts."""

    family: ClassVar[Family] = "bound"
    source: ClassVar[str] = "a test"
    received: list[tuple[int, int, Any]] = field(default_factory=list, compare=False)
    gathered: list[list[int]] = field(default_factory=list, compare=False)
    extra: int = 0

    def rounds(self, rounds: int) -> int:
        return rounds + self.extra

    async def start(self, s: Server) -> Mapping[int, Predictions]:
        return {k: Predictions(torch.tensor([0.0, k])) for k in s.archs}

    async def client(self, c: Client, down: Predictions | None) -> Predictions:
        assert down is not None
        self.received.append((c.round, c.id, down.values.tolist()))
        return Predictions(torch.tensor([float(c.id), c.round, 1 / 3]))

    async def server(self, s: Server, ups: Mapping[int, Predictions]) -> Mapping[int, Predictions]:
        self.gathered.append(list(ups))
        assert all(int(up.values[0]) == k and int(up.values[1]) == s.round for k, up in ups.items())
        return {k: Predictions(torch.tensor([float(s.round), k])) for k in s.archs}

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        raise AssertionError("the round loop never predicts")


def tiny(**options: Any) -> Tiny:
    return Tiny(Echo(), labels=FIVE, options=options)


def test_every_client_receives_what_the_server_sent_it_last() -> None:
    run = tiny().run(3)
    assert isinstance(run.method, Echo)
    assert run.method.received == [(t, k, [t - 1, k]) for t in (1, 2, 3) for k in range(5)]
    assert [r.t for r in run.rounds] == [1, 2, 3]
    assert [list(r.ups) for r in run.rounds] == [list(range(5))] * 3
    assert run.rounds[-1].downs[2].values.tolist() == [3, 2]


def test_a_method_may_need_more_rounds() -> None:
    run = Tiny(Echo(extra=2), labels=FIVE).run(1)
    assert [r.t for r in run.rounds] == [1, 2, 3]


def test_no_rounds() -> None:
    assert tiny().run(0).rounds == []


# -- participation


def test_some_take_part_by_seed_and_round_alone() -> None:
    a, b = tiny(participation=0.4), tiny(participation=0.4)
    chosen = [[c.id for c in a.cohort.participants(t)] for t in range(1, 30)]
    assert chosen == [[c.id for c in b.cohort.participants(t)] for t in range(1, 30)]
    assert chosen[4] == [c.id for c in a.cohort.participants(5)]  # no state: a resumed run draws the same
    assert all(len(ids) == 2 and ids == sorted(set(ids)) for ids in chosen)
    assert {k for ids in chosen for k in ids} == set(range(5))
    assert len({tuple(ids) for ids in chosen}) > 5
    other = Tiny(Echo(), labels=FIVE, seed=1, options={"participation": 0.4})
    assert chosen != [[c.id for c in other.cohort.participants(t)] for t in range(1, 30)]


@pytest.mark.parametrize(("share", "number"), [(0.01, 1), (0.2, 1), (0.5, 2), (0.6, 3), (0.99, 5), (1.0, 5)])
def test_at_least_one_takes_part(share: float, number: int) -> None:
    assert len(tiny(participation=share).cohort.participants(1)) == number


@pytest.mark.parametrize("share", [0, -0.5, 1.5])
def test_a_share_that_is_none(share: float) -> None:
    with pytest.raises(ValueError, match=f"participation must be above 0 and at most 1, got {share}"):
        tiny(participation=share)


def test_a_client_that_was_away_receives_the_latest_downlink_when_it_returns() -> None:
    run = tiny(participation=0.4).run(8)
    assert isinstance(run.method, Echo)
    assert all(down == [t - 1, k] for t, k, down in run.method.received)
    absent = {k for k in range(5) if k not in run.rounds[0].ups}
    assert any(t > 1 and k in absent for t, k, _ in run.method.received)


def test_absent_clients_keep_their_models() -> None:
    run = Tiny(Local(), labels=FIVE, options={"participation": 0.4})
    before = {c.id: c.model for c in run.clients}
    run.run(1)
    present = {c.id for c in run.cohort.present}
    assert len(present) == 2
    for client in run.clients:
        assert same(client.model.state, before[client.id].state) is (client.id not in present)
    assert set(run.rounds[0].ups) == present


# -- clients that do not answer


@dataclass
class Patchy:
    """A cohort whose clients answer in some rounds only, in any order."""

    answers: Mapping[int, Mapping[int, Any]]
    wire: str = "fp32"
    disclosure: Disclosure = OPEN
    received: list[Mapping[int, Any]] = field(default_factory=list)

    def round(self, t: int, downs: Mapping[int, Any]) -> Mapping[int, Any]:
        self.received.append(downs)
        return self.answers[t]


def up(k: int, t: int) -> Predictions:
    return Predictions(torch.tensor([float(k), t, 0.0]))


def test_a_round_without_uplinks_keeps_the_downlinks() -> None:
    run = tiny()
    cohort = Patchy({1: {3: up(3, 1), 0: up(0, 1)}, 2: {}, 3: {1: up(1, 3)}})
    rounds = list(federate(run.method, run.server, cohort, 3, run.executor))
    assert isinstance(run.method, Echo)
    assert run.method.gathered == [[0, 3], [1]]  # sorted, and not called for nothing
    assert rounds[1].downs is rounds[0].downs
    assert cohort.received[2] is rounds[0].downs
    assert (rounds[1].bytes_up, rounds[1].bytes_down) == (0, 0)
    assert [r.bytes_up for r in rounds] == [24, 0, 12]
    assert [r.bytes_down for r in rounds] == [16, 0, 8]
    assert rounds[2].downs[4].values.tolist() == [3, 4]  # the server's round is the loop's


# -- bytes and the wire


def floats(model: Any) -> int:
    return sum(v.numel() for v in model.state.values() if v.is_floating_point())


def test_bytes_of_weights() -> None:
    """Four bytes for every weight and running statistic, both ways, for every client; counters are not sent."""
    run = Tiny(FedAvg(), labels=FIVE).run(2)
    size = 4 * (6 * 8 + 4 * 8 + 9 * 3)
    assert size == 4 * floats(run.clients[0].model)
    assert [(r.bytes_up, r.bytes_down) for r in run.rounds] == [(5 * size, 5 * size)] * 2


def test_bytes_of_predictions() -> None:
    """Up n_u (C + 1) floats, down n_u C; nothing has come down before the first round."""
    run = Tiny(FedCC(), labels=FIVE).run(3)
    assert [r.bytes_up for r in run.rounds] == [5 * 24 * 4 * 4] * 3
    assert [r.bytes_down for r in run.rounds] == [0, 5 * 24 * 3 * 4, 5 * 24 * 3 * 4]


def test_bytes_of_those_who_took_part() -> None:
    run = Tiny(FedAvg(), labels=FIVE, options={"participation": 0.4}).run(1)
    assert run.rounds[0].bytes_up == run.rounds[0].bytes_down == 2 * 4 * floats(run.clients[0].model)


def test_half_precision_on_the_wire_halves_the_bytes_and_rounds_what_arrives() -> None:
    full, half = Tiny(FedCC(), labels=FIVE).run(2), Tiny(FedCC(), labels=FIVE, options={"wire": "fp16"}).run(2)
    for a, b in zip(full.rounds, half.rounds, strict=True):
        assert (a.bytes_up, a.bytes_down) == (2 * b.bytes_up, 2 * b.bytes_down)
    sent, came = full.rounds[0].ups[0].values, half.rounds[0].ups[0].values
    assert torch.equal(came, sent.half().double())
    assert not torch.equal(came, sent)


def test_half_precision_rounds_downlinks_too() -> None:
    run = Tiny(FedAvg(), labels=FIVE, options={"wire": "fp16"})
    asked = record(run)
    run.run(1)
    begun = asked.fits("fit", client=0)[0].model.state
    first = Weights.of(run.ask(_initial(run.server)))
    assert all(torch.equal(begun[n], carried(first, "fp16").state[n]) for n in first.state)
    assert not all(torch.equal(begun[n], v) for n, v in first.state.items())


async def _initial(server: Server) -> Any:
    server.begin(0)
    return await server.init(next(iter(server.archs.values())))


def test_a_wire_nobody_knows() -> None:
    with pytest.raises(ValueError, match="wire must be one of fp32, fp16, int8, int8-stochastic, got 'fp8'"):
        tiny(wire="fp8")


# -- first models


def test_every_client_draws_its_own_first_weights() -> None:
    clients = Tiny(FedCC(), labels=FIVE).clients
    assert not torch.equal(clients[0].model.state["head.weight"], clients[1].model.state["head.weight"])
    again = Tiny(FedCC(), labels=FIVE).clients
    assert all(same(a.model.state, b.model.state) for a, b in zip(clients, again, strict=True))
    other = Tiny(FedCC(), labels=FIVE, seed=1).clients
    assert not torch.equal(clients[0].model.state["head.weight"], other[0].model.state["head.weight"])


def test_what_there_is_to_predict_with() -> None:
    run = Tiny(FedAvg(), labels=FIVE, factories=(Mlp(),)).run(1)
    assert isinstance(run.cohort, Simulated)
    trained = run.cohort.trained_models(run.server)
    assert list(trained.clients) == [0, 1, 2, 3, 4]
    assert trained.clients[3] is run.clients[3].model
    assert trained.server["global"] is run.server.models["global"]
    assert trained.classes == 3


def test_a_client_that_never_took_part_has_no_model_in_memory() -> None:
    """Not even where its first model predicts with the others."""
    run = Tiny(FedMD(), labels=FIVE, options={"participation": 0.4}).run(1)
    assert isinstance(run.cohort, Simulated)
    absent = [c for c in run.clients if c not in run.cohort.present]
    trained, scores = run.cohort.trained_models(run.server), run.scores()
    snapshot = run.cohort.snapshot(run.server, run.rounds[-1])
    assert not any(c.has_model for c in absent)
    assert sorted(snapshot.clients) == [c.id for c in run.cohort.present]
    assert trained.clients[absent[0].id] is trained.clients[absent[0].id]
    first = Tiny(FedMD(), labels=FIVE).clients[absent[0].id].model
    absent[0].model = run.cohort.present[0].model  # it trains later
    assert same(trained.clients[absent[0].id].state, first.state)
    assert same(trained.clients[absent[1].id].state, absent[1].model.state)
    assert torch.equal(run.ask(run.method.predict(trained, run.test.only("x"))), scores)
