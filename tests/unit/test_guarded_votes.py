"""``guard_votes``: votes that never change say nothing, nobody is too loud (F-32); and the limit of FedMD's logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedcc.core.messages import Predictions, Weights
from fedcc.core.method import Trained
from fedcc.core.model import Model
from fedcc.core.roles import Client
from fedcc.evaluate.example import example
from fedcc.methods import FedAvg, FedCC, FedMD
from fedcc.methods.abstention import aggregate, baseline, guarded, guarded_uploads, loudest, targets, trust
from tiny import Tiny

VOTES = torch.tensor(
    [
        [[0.9, 0.0, 0.1], [0.1, 0.0, 0.9], [0.5, 0.3, 0.2]],
        [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]],
    ],
    dtype=torch.float64,
)


def constant(model: Model, sure: float = 50.0) -> Model:
    """The same network with a head that always answers class 0."""
    bias = torch.zeros_like(model.state["head.bias"])
    bias[0] = sure
    return model.with_({**model.floating, "head.weight": 0 * model.state["head.weight"], "head.bias": bias})


class Constant(FedCC):
    """FedCC whose client 0 has no data and always answers class 0, certain."""

    async def client(self, c: Client, down: Predictions | None) -> Predictions:
        if c.id:
            return await super().client(c, down)
        c.model = constant(c.model)
        return Predictions((await c.predict(c.public)).logits.softmax(-1))


def close(a: Tensor, b: object) -> bool:
    return torch.allclose(a, torch.as_tensor(b, dtype=a.dtype), atol=1e-12)


def test_the_baseline_is_the_mean_vote_for_each_known_class() -> None:
    assert close(baseline(VOTES), [[0.5, 0.1], [1.0, 0.0]])


def test_votes_count_where_they_stand_out_from_the_clients_mean() -> None:
    assert close(guarded_uploads(VOTES)[0], [[0.9, 0.0, 0.1], [0.0, 0.0, 1.0], [0.0, 0.3, 0.7]])  # > 0.625, 0.125
    assert close(guarded_uploads(VOTES)[1], [[0.0, 0.0, 1.0]] * 3)


def test_a_constant_vote_says_nothing() -> None:
    """Targets and trust are those of the others, wherever one of them is left with a vote."""
    votes = guarded_uploads(VOTES)
    assert close(trust(votes)[:, [0, 2]], [[1.0, 1.0], [0.0, 0.0]])
    assert close(targets(votes), [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    assert close(targets(VOTES)[1], [1.0, 0.0])  # without it, the constant client decides


def test_a_vote_just_above_the_mean_does_not_count() -> None:
    nearly = torch.tensor([[[0.999, 0.001], [1.0, 0.0]]], dtype=torch.float64)
    assert close(guarded_uploads(nearly), [[[0.0, 1.0]] * 2])
    enough = torch.tensor([[[0.79, 0.21], [1.0, 0.0], [0.5, 0.5]]], dtype=torch.float64)
    assert close(guarded_uploads(enough), [[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]])  # the mean is 0.7633


def test_nobody_counts_for_more_than_twice_the_median() -> None:
    """Four clients that know 0.1, 0.2, 0.4 and 1 on average: the lower median is 0.2, the limit 0.4."""
    means = torch.tensor([[0.1, 0.0], [0.0, 0.2], [0.2, 0.2], [0.5, 0.5]], dtype=torch.float64)
    assert float(loudest(means)) == pytest.approx(0.4)
    assert float(loudest(means.flip(0)[:3])) == pytest.approx(0.8)  # of 0.2, 0.4 and 1
    votes = torch.tensor([[[1.0, 0.0, 0.0]]] * 4, dtype=torch.float64)
    found = guarded(votes, means, loudest(means))
    assert close(found[:, 0, 0], [1.0, 1.0, 1.0, 0.4])
    assert close(found[:, 0, -1], [0.0, 0.0, 0.0, 0.6])


def test_clients_that_never_claim_to_know_are_no_problem() -> None:
    nobody = torch.tensor([[[0.0, 0.0, 1.0]] * 3] * 2, dtype=torch.float64)
    assert close(guarded_uploads(nobody), nobody)


def ups(values: Tensor) -> dict[int, Predictions]:
    return {k: Predictions(v) for k, v in enumerate(values)}


def means(tiny: Tiny) -> dict[int, list[float]]:
    return {k: [round(v, 12) for v in mean.tolist()] for k, mean in tiny.server.memory["baseline"].items()}


def test_the_server_guards_votes_and_remembers_the_means() -> None:
    tiny = Tiny(FedCC(guard_votes=True), classes=2, labels=[[0], [1]])
    downs = tiny.ask(tiny.method.server(tiny.server, ups(VOTES)))
    assert close(downs[0].values, targets(guarded_uploads(VOTES)))
    assert means(tiny) == {0: [0.5, 0.1], 1: [1.0, 0.0]}
    tiny.ask(tiny.method.server(tiny.server, {1: Predictions(VOTES[0])}))  # client 0 was away: its mean stays
    assert means(tiny) == {0: [0.5, 0.1], 1: [0.5, 0.1]}


def test_the_exponent_of_trust_applies_to_guarded_votes() -> None:
    tiny = Tiny(FedCC(guard_votes=True, trust=2.0), classes=2, labels=[[0], [1]])
    votes = torch.stack([VOTES[0], VOTES[0].flip(0)])
    downs = tiny.ask(tiny.method.server(tiny.server, ups(votes)))
    assert close(downs[1].values, targets(guarded_uploads(votes), 2.0))


def test_off_the_server_remembers_nothing_and_the_numbers_are_the_old_ones() -> None:
    tiny = Tiny(FedCC(), classes=2, labels=[[0], [1]])
    downs = tiny.ask(tiny.method.server(tiny.server, ups(VOTES)))
    assert torch.equal(downs[0].values, targets(VOTES))
    assert tiny.server.memory == {}
    assert not tiny.cohort.trained_models(tiny.server).baseline


def test_prediction_uses_the_means_of_the_uploads() -> None:
    tiny = Tiny(FedCC(guard_votes=True)).run(2)
    trained = tiny.cohort.trained_models(tiny.server)
    uploads = torch.stack([up.values for up in tiny.rounds[-1].ups.values()])
    assert torch.equal(torch.stack([trained.baseline[k] for k in trained.clients]), baseline(uploads))
    raw = tiny.ask(FedCC().all_votes(trained, tiny.test.only("x")))
    expected = guarded(raw, baseline(uploads), loudest(baseline(uploads)))
    assert close(tiny.scores(), aggregate(expected)[:, :-1])
    votes = tiny.ask(tiny.method.votes(trained, tiny.test.only("x")))
    assert close(votes.known, expected[..., :-1])
    assert close(votes.trust, trust(expected))
    answer = tiny.ask(tiny.method.answer(trained, tiny.test.only("x")))
    assert close(answer.confidence, expected[..., :-1].amax((0, 2)))


def test_a_client_that_never_uploaded_has_no_say() -> None:
    tiny = Tiny(FedCC(guard_votes=True)).run(1)
    trained = tiny.cohort.trained_models(tiny.server)
    without = replace(trained, baseline={k: v for k, v in trained.baseline.items() if k != 1})
    votes = tiny.ask(tiny.method.votes(without, tiny.test.only("x")))
    assert not votes.known[1].any()
    assert votes.known[0].any()


def test_without_any_mean_votes_prediction_is_refused() -> None:
    tiny = Tiny(FedCC(guard_votes=True)).run(1)
    trained = replace(tiny.cohort.trained_models(tiny.server), baseline={})
    with pytest.raises(ValueError, match="mean votes"):
        tiny.ask(tiny.method.predict(trained, tiny.test.only("x")))


def test_the_trained_result_has_the_means_of_its_own_clients_only() -> None:
    tiny = Tiny(FedCC(guard_votes=True)).run(1)
    models = {k: m for k, m in tiny.cohort.trained_models(tiny.server).clients.items() if k != 2}
    found = Trained.of(tiny.server, models)
    assert found.baseline.keys() == {0, 1}
    assert (found.classes, found.clients, found.server) == (3, models, tiny.server.models)


def test_one_constant_client_does_not_take_the_others_along() -> None:
    def accuracy(method: FedCC) -> float:
        return Tiny(method, labels=[(0,) * 20, (0,) * 20, (1,) * 20, (2,) * 20]).run(3).accuracy()

    assert accuracy(Constant()) <= 0.5
    assert accuracy(Constant(guard_votes=True)) >= 0.75


def test_the_example_shows_votes_as_they_count() -> None:
    logits = VOTES.clamp(min=1e-30).log()
    plain, shown = example(logits, None, 1), example(logits, None, 0, guard=True)
    assert plain["clients"][1]["weight"] == pytest.approx(1 / 1.1, abs=1e-6)
    assert shown["aggregates"]["unknown"] == pytest.approx([1.0, 0.0], abs=1e-6)
    assert [c["weight"] for c in shown["clients"]] == [1.0, 0.0]


def test_influence_by_method() -> None:
    assert FedMD().influence(ups(VOTES)) == {0: 0.5, 1: 0.5}
    weights = {3: Weights({}, 30), 5: Weights({}, 10)}
    assert FedAvg().influence(weights) == {3: 0.75, 5: 0.25}
    assert FedCC().influence(ups(VOTES)) == pytest.approx(
        {0: (0.9 / 1.9 + 0.1 / 1.1 + 0.8 / 1.8) / 3, 1: (1 / 1.9 + 1 / 1.1 + 1 / 1.8) / 3}
    )
    assert FedCC(trust=0.0).influence(ups(VOTES)) == pytest.approx({0: 0.5, 1: 0.5})
    assert FedCC(guard_votes=True).influence(ups(VOTES)) == pytest.approx({0: 2.5 / 3, 1: 0.5 / 3})


def test_shared_logits_are_cut_at_the_limit() -> None:
    tiny = Tiny(FedMD(loss="l1", average="logits", logit_limit=10.0), classes=2, labels=[[0], [1]])
    sent = torch.tensor([[[1e30, 2.0], [3.0, -1e30]], [[-4.0, 6.0], [10.0, -10.0]]], dtype=torch.float64)
    downs = tiny.ask(tiny.method.server(tiny.server, ups(sent)))
    assert downs[0].values.tolist() == [[3.0, 4.0], [6.5, -10.0]]


def test_honest_logits_and_probabilities_are_not_cut() -> None:
    sent = torch.tensor([[[99.0, -99.0]], [[1.0, 2.0]]], dtype=torch.float64)
    assert torch.equal(FedMD(loss="l1", average="logits").mean(list(sent)), sent.mean(0))
    small = FedMD(logit_limit=0.1)
    assert torch.equal(small.mean(list(VOTES)), VOTES.mean(0))
    with pytest.raises(ValueError, match="logit_limit"):
        FedMD(logit_limit=0)


def test_prediction_by_logits_is_cut_too() -> None:
    tiny = Tiny(FedMD(loss="l1", average="logits"), labels=[(0,) * 20, (1,) * 20, (2,) * 20]).run(1)
    trained = tiny.cohort.trained_models(tiny.server)
    loud = replace(trained, clients={**trained.clients, 0: constant(trained.clients[0], 1e30)})
    assert float(tiny.ask(tiny.method.predict(loud, tiny.test.only("x"))).max()) <= 100.0
