"""The accuracies of a round, from logits that are given: every number here is counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fedcc
from fedcc.core.messages import Predictions, Rows
from fedcc.core.method import Trained
from fedcc.core.model import Arch, Model, Outputs
from fedcc.core.requests import Predict, Request
from fedcc.core.samples import Samples
from fedcc.evaluate import evaluate
from fedcc.evaluate.accuracy import choice_accuracy, class_means, valid
from fedcc.experiments.record import logs, table2
from fedcc.federation import Federation
from fedcc.methods import FedAvg, FedCC, FedMD, Local, SelectiveFD
from tiny import Mlp, Tiny

LABELS = torch.tensor([0, 0, 1, 1, 2, 2])


class Given:
    """An engine that answers with the outputs it was given for each model, in order."""

    def __init__(self, answers: Sequence[Sequence[int]], outputs: int):
        self.models = [Model(Arch((Mlp(),), outputs, (6,)), {}) for _ in answers]
        self.logits = {
            id(model): torch.nn.functional.one_hot(torch.tensor(row), outputs).double()
            for model, row in zip(self.models, answers, strict=True)
        }
        self.trained = Trained(3, dict(enumerate(self.models)))

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        assert all(isinstance(r, Predict) for r in requests)
        return [Outputs(self.logits[id(r.model)], self.logits[id(r.model)]) for r in requests]  # type: ignore[attr-defined]


def samples() -> Samples:
    return Samples({"x": torch.zeros(6, 6), "y": LABELS})


def test_unknown_is_right_where_the_label_is_no_majority_class() -> None:
    answers, labels = torch.tensor([0, 1, 2, 3, 3, 3]), torch.tensor([0, 0, 2, 0, 1, 2])
    right = valid(answers, labels, torch.tensor([True, False, True]))
    assert right.tolist() == [True, False, True, False, True, False]


def test_table_2_counted_by_hand() -> None:
    """A client that holds 3 samples of class 0 and 1 of class 1, and whose probe names the classes 0 and 2."""
    engine = Given([[0, 3, 1, 3, 3, 2]], 4)
    counts, majority = {0: torch.tensor([3, 1, 0])}, {0: torch.tensor([True, False, True])}
    found = evaluate(FedCC(), engine.trained, samples(), engine, counts=counts, majority=majority)
    # over the known classes a row that says "unknown" alone is a tie, which class 0 wins: 0 0 | 1 0 | 0 2
    assert found.clients == {0: pytest.approx(100 * 4 / 6, abs=1e-3)}
    assert found.local == {0: pytest.approx(100 * (0.75 * 1 + 0.25 * 0.5), abs=1e-3)}
    assert found.local_full == {0: pytest.approx(100 * (0.75 * 0.5 + 0.25 * 0.5), abs=1e-3)}
    # 0 right, u at 0 wrong, 1 right, u at 1 valid, u at 2 wrong, 2 right
    assert found.valid == {0: pytest.approx(100 * 4 / 6, abs=1e-3)}
    # it holds 0 and 1: u at 1 is wrong, u at 2 valid
    assert found.valid_labels == {0: pytest.approx(100 * 4 / 6, abs=1e-3)}


def test_the_two_sets_of_majority_classes_are_told_apart() -> None:
    engine = Given([[3] * 6, [3] * 6], 4)
    counts = {0: torch.tensor([1, 1, 0]), 1: torch.tensor([1, 1, 1])}
    majority = {0: torch.tensor([False, False, False]), 1: torch.tensor([True, False, False])}
    found = evaluate(FedCC(), engine.trained, samples(), engine, counts=counts, majority=majority)
    assert found.valid == {0: 100.0, 1: pytest.approx(66.6667)}
    assert found.valid_labels == {0: pytest.approx(33.3333), 1: 0.0}
    assert found.local_full == {0: 0.0, 1: 0.0}


def test_without_a_probe_only_the_labels_decide() -> None:
    engine = Given([[3] * 6], 4)
    found = evaluate(FedCC(), engine.trained, samples(), engine, counts={0: torch.tensor([2, 0, 0])})
    assert (found.valid, found.valid_labels) == ({}, {0: pytest.approx(66.6667)})


def test_networks_without_unknown_have_two_accuracies() -> None:
    engine = Given([[0, 0, 0, 1, 0, 2]], 3)
    found = evaluate(FedMD(), engine.trained, samples(), engine, counts={0: torch.tensor([1, 1, 0])})
    assert found.clients == {0: pytest.approx(66.6667)}
    assert found.local == {0: 75.0}
    assert found.valid == found.valid_labels == found.local_full == {}


def test_a_detailed_evaluation_counts_answers_by_label() -> None:
    engine = Given([[0, 0, 0, 1, 0, 2]], 3)  # labels 0, 0, 1, 1, 2, 2
    found = evaluate(FedMD(), engine.trained, samples(), engine, detailed=True)
    assert found.confusion == [[2, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert evaluate(FedMD(), engine.trained, samples(), engine).confusion == []
    assert found.known == {}
    alone = Given([[0] * 6, [1] * 6], 3)
    assert evaluate(Local(), alone.trained, samples(), alone, detailed=True).confusion == [[2, 2, 0]] * 3


def test_a_detailed_evaluation_has_what_a_client_knows_by_label() -> None:
    engine = Given([[0, 3, 1, 3, 3, 3]], 4)
    held = {0: torch.tensor([1, 1, 0])}
    found = evaluate(FedCC(), engine.trained, samples(), engine, counts=held, detailed=True)
    logits = engine.serve([Predict(engine.trained.clients[0], samples())])[0].logits
    known = (1 - logits.softmax(-1)[:, -1]).view(3, 2).mean(1)
    assert found.known == {0: [pytest.approx(float(v), abs=6e-5) for v in known]}
    assert found.known[0][0] == found.known[0][1] > found.known[0][2]
    assert class_means(torch.tensor([0.25]), torch.tensor([1]), 3) == [None, 0.25, None]


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_fedcc_tells_its_majority_classes_and_forgets_them(participation: float) -> None:
    tiny = Tiny(FedCC(), labels=[[0, 1] * 6, [1] * 9, [2] * 9, [0, 1, 2] * 4], options={"participation": participation})
    tiny.run(1)
    present = {c.id for c in tiny.cohort.present}
    for client in tiny.clients:
        if client.id not in present:
            assert client.majority is None
            continue
        mask = client.majority
        assert isinstance(mask, Tensor)
        assert int(mask.sum()) == client.log["majority"]
        client.begin(2)
        assert client.majority is None


def test_a_clients_model_is_the_one_after_training_and_before_aggregation() -> None:
    tiny = Tiny(FedAvg()).run(2)
    average = tiny.server.models["global"].state["head.weight"]
    for client in tiny.clients:
        own = client.model.state["head.weight"]
        assert own.equal(tiny.rounds[-1].ups[client.id].state["head.weight"])
        assert not own.equal(average)
    counts = {c.id: c.counts() for c in tiny.clients}
    found = evaluate(tiny.method, tiny.cohort.trained_models(tiny.server), tiny.test, tiny.executor, counts=counts)
    for client in tiny.clients:
        own = tiny.executor.serve([Predict(client.model, tiny.test)])[0].logits
        share = float((own.argmax(-1) == tiny.test["y"]).double().mean())
        assert found.clients[client.id] == pytest.approx(100 * share, abs=1e-3)


def test_table2_of_a_record() -> None:
    last = {"clients": {"0": 10.0}, "local": {"0": 90.0}, "valid": {"0": 70.0}, "valid_labels": {}, "local_full": {}}
    assert table2(last) == {"table2": {"local": {"0": 90.0}, "global": {"0": 10.0}, "valid": {"0": 70.0}}}
    assert table2({"clients": {"0": 10.0}, "local": {"0": 90.0}}).keys() == {"table2"}  # of an earlier version
    assert table2({"clients": {}, "local": {}}) == {}


def test_logs_have_an_entry_a_round() -> None:
    rounds = [{"log": {"0": {"a": 1.0}}}, {"log": {}}, {"log": {"0": {"a": 2.0, "b": 3.0}, "1": {"a": 4.0}}}]
    assert logs(rounds) == {"a": {"0": [1.0, None, 2.0], "1": [None, None, 4.0]}, "b": {"0": [None, None, 3.0]}}
    assert logs([{"log": {}}]) == {}


def test_a_choice_is_right_where_the_hidden_label_is_one_of_the_clients_own() -> None:
    hidden, own = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 0, 2])
    up = Rows(torch.tensor([0, 1, 2, 4], dtype=torch.int32), torch.zeros(4, 3))
    assert choice_accuracy(up, hidden, own) == 50.0
    assert choice_accuracy(up, None, own) is None
    assert choice_accuracy(Rows(torch.zeros(0, dtype=torch.int32), torch.zeros(0, 3)), hidden, own) is None
    assert choice_accuracy(Predictions(torch.zeros(5, 3)), hidden, own) is None


@pytest.mark.parametrize("method", [SelectiveFD(), FedMD()])
def test_the_record_says_how_often_clients_chose_right(method: Any) -> None:
    federation = Federation.named("digits", skew="classes:2", clients=5, models="resnet8", fraction=0.1)
    (record,) = fedcc.run(method, federation, rounds=1, epochs=1, readings=False).rounds
    assert len(federation.hidden) == len(federation.public)
    names = {name for log in record["log"].values() for name in log}
    assert names == ({"chosen", "chosen, of own classes"} if method == SelectiveFD() else set())
    assert all(0 <= log["chosen, of own classes"] <= 100 for log in record["log"].values())
