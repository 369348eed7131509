"""FENS: training alone, an exchange of models, and an aggregator learned in common (docs/deviations.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedcc
from fedcc.core.messages import Weights
from fedcc.core.method import Trained
from fedcc.core.model import Hidden, Linear
from fedcc.core.requests import Predict
from fedcc.core.rng import Key
from fedcc.core.samples import Samples
from fedcc.federation import Federation
from fedcc.methods import FENS, Local
from fedcc.methods.fens import Aggregator, Ensemble, Finish, OwnClass, improved, sent, split
from private_steps import same
from recording import record
from tiny import Mlp, Tiny

LISTS = ((0,) * 12 + (1,) * 8, (1,) * 10 + (2,) * 30, (2,) * 10 + (0,) * 10)
SMALL = FENS(aggregator_rounds=3)
kinds = pytest.mark.parametrize("aggregator", ["mlp", "weights"])


def ran(method: FENS, rounds: int = 2, **settings: Any) -> Tiny:
    return Tiny(method, **{"labels": LISTS, **settings}).run(rounds)


class Away:
    """These clients do not answer in these rounds."""

    def __init__(self, tiny: Tiny, rounds: dict[int, set[int]]):
        self.round_of, self.rounds = tiny.cohort.round, rounds
        tiny.cohort.round = self.round  # type: ignore[method-assign]

    def round(self, t: int, downs: Any) -> Any:
        return {k: up for k, up in self.round_of(t, downs).items() if k not in self.rounds.get(t, ())}


# -- the first phase


def test_with_nothing_held_out_the_models_are_locals() -> None:
    own, local = ran(FENS(aggregator_rounds=2, holdout=0.0)), Tiny(Local(), labels=LISTS).run(2)
    for k, client in enumerate(local.clients):
        assert same(own.clients[k].model.state, client.model.state)
        assert same(own.server.models[f"client {k}"].floating, client.model.floating)


def test_a_tenth_of_the_samples_is_held_out_of_every_class() -> None:
    tiny = Tiny(SMALL, labels=((0,) * 60 + (1,) * 40, (2,), (0, 1)))
    held_out, rest = split(tiny.clients[0], 0.1)
    assert torch.bincount(held_out["y"]).tolist() == [6, 4]
    assert torch.bincount(rest["y"]).tolist() == [54, 36]
    rows = [tuple(row) for part in (held_out, rest) for row in part.x.tolist()]
    assert sorted(rows) == sorted(map(tuple, tiny.clients[0].private.x.tolist()))
    assert [len(part) for part in split(tiny.clients[1], 0.1)] == [1, 1]  # a single one is used twice
    assert [len(part) for part in split(tiny.clients[2], 0.1)] == [1, 1]
    assert [len(part) for part in split(tiny.clients[2], 0.75)] == [1, 1]  # one is left to train on
    assert [len(part) for part in split(tiny.clients[0], 0.0)] == [100, 100]


def test_what_is_held_out_depends_on_seed_and_client_alone() -> None:
    one = Tiny(SMALL, labels=((0,) * 50,)).clients[0]
    first = split(one, 0.1)[0].x
    one.begin(7)
    assert torch.equal(split(one, 0.1)[0].x, first)
    one.key = Key(1, 7, 0)
    assert not torch.equal(split(one, 0.1)[0].x, first)


def test_what_crosses_the_wire_and_when() -> None:
    tiny = ran(SMALL)
    assert [type(done.ups[0]) for done in tiny.rounds] == [type(None), Weights, Aggregator, Aggregator, Aggregator]
    assert [type(done.downs[0]) for done in tiny.rounds[:-1]] == [Finish, Ensemble, Ensemble, Ensemble]
    assert [sorted(done.downs[0].models) for done in tiny.rounds[1:]] == [["0", "1", "2"], [], [], []]
    assert [type(d) for d in tiny.rounds[0].received.values()] == [type(None)] * 3
    assert isinstance(ran(SMALL, 1).rounds[0].received[0], Finish)  # a single round of training
    longer = [type(done.ups[0]) for done in ran(SMALL, 4).rounds]
    assert longer == [type(None)] * 3 + [Weights] + [Aggregator] * 3
    assert (SMALL.rounds(2), [t for t in range(1, 6) if SMALL.evaluates(t, 2)]) == (5, [2, 5])


# -- the aggregator


@kinds
def test_without_rounds_for_it_the_mean_of_all_logits_predicts(aggregator: Any) -> None:
    tiny = ran(FENS(aggregator_rounds=0, aggregator=aggregator))
    mean = torch.stack([tiny.executor.serve([Predict(c.model, tiny.test)])[0].logits for c in tiny.clients]).mean(0)
    torch.testing.assert_close(tiny.scores(), mean)


def test_equal_weights_are_that_mean() -> None:
    tiny = ran(FENS(aggregator_rounds=1, aggregator="weights", server_lr=0.0))
    assert "aggregator" in tiny.server.models
    mean = torch.stack([tiny.executor.serve([Predict(c.model, tiny.test)])[0].logits for c in tiny.clients]).mean(0)
    torch.testing.assert_close(tiny.scores(), mean, rtol=1e-6, atol=1e-6)


def test_which_aggregator_there_is() -> None:
    for classes, kind in ((3, Hidden(9, 6)), (100, Linear(300))):
        assert ran(FENS(aggregator_rounds=1), classes=classes).server.models["aggregator"].arch.trunks == (kind,)
    arch = ran(FENS(aggregator_rounds=1, units=4)).server.models["aggregator"].arch
    assert arch.trunks == (Hidden(9, 12),)


def pooled_gradient(tiny: Tiny, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of the mean loss over all held-out samples together, with respect to what is sent."""
    leaves = {name: value.double().requires_grad_() for name, value in state.items()}
    held_out = [split(c, 0.1)[0] for c in tiny.clients]
    x, y = torch.cat([s.x for s in held_out]), torch.cat([s["y"] for s in held_out])
    f = torch.stack([tiny.executor.serve([Predict(c.model, Samples({"x": x}))])[0].logits for c in tiny.clients], 1)
    if "weights" in leaves:
        scores = (leaves["weights"].squeeze(-1) * f).sum(1)
    else:
        hidden = F.linear(f.flatten(1), leaves["trunks.0.0.weight"], leaves["trunks.0.0.bias"]).relu()
        scores = F.linear(hidden, leaves["head.weight"], leaves["head.bias"])
    grads = torch.autograd.grad(F.cross_entropy(scores, y), list(leaves.values()))
    return dict(zip(leaves, grads, strict=True))


@kinds
def test_it_is_adam_at_the_server_on_all_held_out_samples(aggregator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one step of rate 1 on all of a client's samples, the mean move is the pooled gradient: no client drifts."""
    monkeypatch.setattr("fedcc.methods.fens.BATCH", 4)  # of 2, 4 and 2 held-out samples
    tiny = ran(FENS(aggregator_rounds=3, aggregator=aggregator, server_lr=0.01))
    before, m, v = tiny.rounds[1].downs[0].aggregator, 0.0, 0.0
    for done in tiny.rounds[2:]:
        assert [up.samples for up in done.ups.values()] == [2, 4, 2]
        grads, after = pooled_gradient(tiny, before), done.downs[0].aggregator
        for name, grad in grads.items():
            move = sum(up.samples / 8 * (up.state[name] - before[name]) for up in done.ups.values())
            torch.testing.assert_close(move, -grad, rtol=1e-6, atol=1e-6)
        down = torch.cat([grad.flatten() for grad in grads.values()])
        m, v = 0.9 * m - 0.1 * down, 0.99 * v + 0.01 * down.square()
        found = torch.cat([(after[name] - before[name]).double().flatten() for name in grads])
        torch.testing.assert_close(found, 0.01 * m / (v.sqrt() + 1e-3), rtol=1e-5, atol=1e-6)
        before = after
    assert len(tiny.rounds) == 5


def test_the_servers_adam_by_hand() -> None:
    server, theta, m, v = Tiny(SMALL).server, 1.0, 0.0, 0.0
    state = {"x": torch.tensor([theta], dtype=torch.float64)}
    for moves in ((0.5, -0.1), (0.2, 0.4)):
        answers = {
            k: Aggregator({"x": state["x"] + move}, samples, 3)
            for k, (move, samples) in enumerate(zip(moves, (1, 3), strict=True))
        }
        state = dict(improved(server, state, answers, 0.01))
        delta = 0.25 * moves[0] + 0.75 * moves[1]
        m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
        theta += 0.01 * m / (v**0.5 + 1e-3)
        assert float(state["x"]) == pytest.approx(theta, abs=1e-12)


def test_only_weights_of_a_class_to_itself_learn() -> None:
    rule = OwnClass().transform({"head.weight": torch.ones(2, 6), "head.bias": torch.ones(2)})
    assert rule["head.weight"].tolist() == [[1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1]]
    assert not rule["head.bias"].any()
    model = ran(FENS(aggregator_rounds=3, aggregator="weights", server_lr=0.1)).server.models["aggregator"]
    dense = model.state["head.weight"]
    off = dense.unflatten(1, (3, 3)) * (1 - torch.eye(3))[:, None]
    assert not off.any()
    assert not model.state["head.bias"].any()
    assert float((sent(model)["weights"] - 1 / 3).abs().min()) > 0.01
    rebuilt = SMALL.built(sent(model), 3)
    assert same(rebuilt.state, model.state)


@kinds
def test_it_learns_who_to_trust(aggregator: Any) -> None:
    """Clients of one class each are useless in the mean; the aggregator learns what their logits say."""
    tiny = Tiny(FENS(aggregator_rounds=150, aggregator=aggregator, server_lr=0.02, holdout=0.3))
    assert tiny.run(2).accuracy() > 0.9


def test_the_order_of_clients_is_that_of_the_columns() -> None:
    tiny = ran(FENS(aggregator_rounds=3, aggregator="weights", server_lr=0.1))
    models, order = dict(tiny.server.models), [2, 0, 1]
    weights = sent(models.pop("aggregator"))["weights"]
    permuted = {f"client {new}": models[f"client {old}"] for new, old in enumerate(order)}
    permuted["aggregator"] = SMALL.built({"weights": weights[order]}, 3)
    scores = tiny.ask(tiny.method.predict(Trained(3, {}, permuted), tiny.test.only("x")))
    torch.testing.assert_close(scores, tiny.scores())


def test_models_do_not_change_in_the_second_phase_and_logits_are_computed_once() -> None:
    short, tiny = ran(replace(SMALL, aggregator_rounds=0)), Tiny(SMALL, labels=LISTS)
    asked = record(tiny)
    tiny.run(2)
    for k, client in enumerate(tiny.clients):
        assert same(client.model.state, short.clients[k].model.state)
        assert same(tiny.server.models[f"client {k}"].floating, client.model.floating)
        fresh = [tiny.executor.serve([Predict(c.model, split(client, 0.1)[0])])[0].logits for c in tiny.clients]
        torch.testing.assert_close(client.memory["logits"], torch.stack(fresh, 1))
    steps = asked.fits("aggregate")
    assert len(steps) == 9
    assert {(f.steps, f.recipe.batch, f.recipe.lr, f.recipe.momentum) for f in steps} == {(1, 128, 1.0, 0.0)}
    for fit in steps:
        received = tiny.rounds[fit.key.round - 2].downs[fit.key.client].aggregator
        assert same(fit.model.state, received)
        assert torch.equal(fit.streams["private"].x, tiny.clients[fit.key.client].memory["logits"].flatten(1))


def test_networks_may_differ() -> None:
    tiny = ran(SMALL, factories=(Mlp(), Mlp(12), Mlp(norm=False)))
    assert tiny.scores().shape == (24, 3)
    assert tiny.server.models["client 1"].arch.trunks == (Mlp(12),)


# -- clients that are away


def test_a_client_away_when_models_are_collected_brings_its_own_later() -> None:
    tiny = Tiny(SMALL, labels=LISTS)
    Away(tiny, {2: {1}})
    tiny.run(2)
    second, third, fourth = (done.downs for done in tiny.rounds[1:4])
    assert isinstance(second[1], Finish)
    assert sorted(second[0].models) == ["0", "2"]
    assert isinstance(tiny.rounds[2].ups[1], Weights)
    assert list(third[0].models) == ["1"]
    assert list(third[1].models) == ["0", "2", "1"]
    assert not fourth[0].models
    assert not fourth[1].models
    assert [up.models for up in tiny.rounds[2].ups.values() if isinstance(up, Aggregator)] == [2, 2]
    assert [up.models for up in tiny.rounds[3].ups.values()] == [3, 3, 3]
    expected = tiny.executor.serve([Predict(tiny.clients[1].model, split(tiny.clients[0], 0.1)[0])])[0].logits
    torch.testing.assert_close(tiny.clients[0].memory["logits"][:, 1], expected)


def test_a_column_without_a_model_is_zero() -> None:
    tiny = Tiny(replace(SMALL, aggregator_rounds=2), labels=LISTS)
    Away(tiny, {t: {1} for t in range(1, 9)})
    tiny.run(2)
    assert not tiny.clients[0].memory["logits"][:, 1].any()
    columns = torch.zeros(24, 3, 3, dtype=torch.float64)
    for k in (0, 2):
        columns[:, k] = tiny.executor.serve([Predict(tiny.clients[k].model, tiny.test)])[0].logits
    inputs = Samples({"x": columns.flatten(1)})
    expected = tiny.executor.serve([Predict(tiny.server.models["aggregator"], inputs)])[0].logits
    torch.testing.assert_close(tiny.scores(), expected)


def test_models_are_sent_until_they_have_arrived() -> None:
    tiny = Tiny(SMALL, labels=LISTS)
    Away(tiny, {3: {0}, 4: {1}})
    tiny.run(2)
    assert [len(done.downs[0].models) for done in tiny.rounds[1:]] == [3, 3, 0, 0]
    assert [len(done.downs[1].models) for done in tiny.rounds[1:]] == [3, 0, 0, 0]  # what it has shown to have


def test_a_saved_result_predicts_the_same(tmp_path: Path) -> None:
    digits = Federation.named("digits", skew="classes:3", fraction=0.3)
    result = fedcc.run(FENS(aggregator_rounds=3), digits, rounds=1, epochs=1)
    again = fedcc.load(result.save(tmp_path))
    assert torch.equal(again.predict(digits.test.x[:50]), result.predict(digits.test.x[:50]))
    assert [r["accuracy"] is not None for r in result.rounds] == [True, False, False, True]
