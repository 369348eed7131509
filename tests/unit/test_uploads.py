"""What the server can tell of clients from their uploads, and whom it names."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcc.core.messages import Labels, Predictions, Weights
from fedcc.evaluate.uploads import (
    agreement,
    answers,
    known,
    relation,
    size_and_direction,
    u_centred,
    upload_signs,
    upload_warnings,
)
from fedcc.methods import FedAvg, FedCC, FedCT, FedMD
from fedcc.methods.fednova import Update

N, CLASSES = 60, 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def honest(k: int, unknown: bool = True) -> Tensor:
    """Probabilities that depend on the sample: client k knows class k and little else."""
    labels = torch.arange(N) % CLASSES
    logits = 0.3 * normal(N, CLASSES + unknown, seed=k)
    logits[:, k % CLASSES] += 3.0 * (labels == k % CLASSES)
    logits[:, -1] += 1.0
    return logits.softmax(-1)


def signs_of(values: list[Tensor], method: Any = None) -> dict[str, dict[str, float]]:
    return upload_signs(method or FedCC(), CLASSES, {k: Predictions(v) for k, v in enumerate(values)}, {})


def constant(columns: int = CLASSES + 1) -> Tensor:
    return torch.eye(columns, dtype=torch.float64)[0].expand(N, columns)


def test_known_and_agreement_by_hand() -> None:
    votes = torch.tensor([[[0.5, 0.1], [0.0, 0.0]], [[0.2, 0.6], [1.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]]])
    assert known(votes).tolist() == pytest.approx([0.3, 0.9, 0.5])
    first = (0.5 * 0.2 + 0.1 * 0.6 + 0.1 * 1.0) / (0.6 * 0.8 + 0.6 * 1.0)
    second = (0.5 * 0.2 + 0.1 * 0.6 + 0.6 * 1.0) / (0.8 * 1.6)
    third = (0.1 + 0.6) / (0.6 + 0.8)
    assert agreement(votes).tolist() == pytest.approx([first, second, third])
    assert agreement(torch.zeros(2, 3, 2)).tolist() == [0.0, 0.0]


def test_u_centred_rows_add_up_to_nothing() -> None:
    x = normal(7, 3)
    found = u_centred(x @ x.T)
    assert torch.allclose(found.sum(0), torch.zeros(7, dtype=torch.float64), atol=1e-12)
    assert not found.diagonal().any()
    assert torch.allclose(u_centred(x @ x.T + 5), found, atol=1e-12)


def test_answers_that_ignore_the_samples_have_a_standard_normal_relation() -> None:
    others = [honest(k) for k in range(4)]
    found = torch.stack([relation(torch.stack([*others, normal(N, 5, seed=s).softmax(-1)]))[-1] for s in range(60)])
    assert abs(float(found.mean())) < 0.4
    assert 0.7 < float(found.std()) < 1.4


def test_one_class_clients_without_a_common_class_are_related() -> None:
    found = relation(torch.stack([honest(k) for k in range(4)]))
    assert float(found.min()) > 4.0


def test_names_of_classes_do_not_matter_to_the_relation() -> None:
    votes = torch.stack([honest(k) for k in range(4)])
    other = votes.clone()
    other[1] = votes[1][:, [2, 3, 1, 0, 4]]
    assert torch.allclose(relation(votes), relation(other), atol=1e-9)


def test_a_constant_and_a_random_client_are_named_and_nobody_else() -> None:
    random = (5 * normal(N, CLASSES + 1, seed=9)).softmax(-1)
    for liar in (constant(), random):
        found = signs_of([*(honest(k) for k in range(4)), liar])
        assert upload_warnings(found).keys() == {"4"}
        assert "nothing to do with the samples" in upload_warnings(found)["4"]
    assert found["0"].keys() == {"known", "agreement", "relation", "trust"}


def test_nobody_is_named_among_the_honest() -> None:
    assert upload_warnings(signs_of([honest(k) for k in range(5)])) == {}
    assert upload_warnings(signs_of([honest(k, False) for k in range(5)], FedMD())) == {}


def test_where_half_look_alike_nothing_is_said() -> None:
    assert upload_warnings(signs_of([honest(0), honest(1), constant(), constant()])) == {}
    assert upload_warnings(signs_of([honest(0), honest(1), honest(2), constant(), constant()])).keys() == {"3", "4"}
    assert upload_warnings({}) == {}


def test_few_samples_have_no_relation_and_one_client_no_signs() -> None:
    few = signs_of([honest(k)[:19] for k in range(3)])
    assert few["0"].keys() == {"known", "agreement", "trust"}
    assert "relation" in signs_of([honest(k)[:20] for k in range(3)])["0"]
    assert signs_of([honest(0)]) == {}


def test_many_samples_are_looked_at_in_part() -> None:
    votes = torch.stack([honest(k).repeat(20, 1) for k in range(3)])
    assert votes.shape[1] == 1200
    assert float(relation(votes).max()) <= 500 / math.sqrt(2) + 1e-6


def test_logits_and_labels_become_probabilities() -> None:
    logits = normal(N, CLASSES)
    assert torch.allclose(answers(Predictions(logits), CLASSES), logits.softmax(-1))
    assert torch.equal(answers(Predictions(honest(0)), CLASSES), honest(0))
    assert answers(Labels(torch.tensor([2, 0])), 3).tolist() == [[0, 0, 1], [1, 0, 0]]
    labels = {k: Labels(torch.tensor([(i + k) % 3 for i in range(N)])) for k in range(3)}
    found = upload_signs(FedCT(), 3, labels, {})
    assert (found["0"]["known"], found["0"]["agreement"], found["0"]["trust"]) == (1.0, 0.0, 0.3333)


def weights(*values: float, statistics: float = 0.0, samples: int = 1) -> Weights:
    return Weights({"w": torch.tensor(values), "running_mean": torch.tensor([statistics])}, samples)


def test_size_and_direction_by_hand() -> None:
    received = [weights(1.0, 1.0)] * 3
    ups = [weights(4.0, 1.0), weights(1.0, 3.0, statistics=99.0), weights(2.0, 2.0)]  # (3, 0), (0, 2), (1, 1)
    sizes, directions = size_and_direction(ups, received)
    assert sizes.tolist() == pytest.approx([3 / 2, 1.0, math.sqrt(2) / 2])
    half = math.sqrt(0.5)
    expected = [half / math.hypot(half, 1 + half), half / math.hypot(1 + half, half), 1.0]
    assert directions.tolist() == pytest.approx(expected)


def test_an_update_far_from_the_median_size_is_named() -> None:
    received = dict.fromkeys(range(5), weights(0.0, 0.0))
    ups = {k: weights(1.0 + 0.1 * k, 1.0) for k in range(4)} | {4: weights(30.0, 30.0, samples=6)}
    found = upload_signs(FedAvg(), 3, ups, received)
    assert found["4"].keys() == {"size", "direction", "trust"}
    assert found["4"]["trust"] == 0.6
    assert upload_warnings(found).keys() == {"4"}
    lazy = upload_signs(FedAvg(), 3, {**ups, 4: weights(0.0, 0.0)}, received)
    assert upload_warnings(lazy) == {"4": "its update is 0 times as large as the median"}
    assert upload_warnings(upload_signs(FedAvg(), 3, {k: ups[k] for k in range(4)}, received)) == {}


def test_clients_are_compared_with_those_of_the_same_network() -> None:
    small = {k: weights(1.0, 1.0) for k in range(2)}
    large = {k: Weights({"w": torch.full((3,), 9.0)}, 1) for k in (2, 3)}
    received = {**dict.fromkeys(small, weights(0.0, 0.0)), **dict.fromkeys(large, Weights({"w": torch.zeros(3)}))}
    found = upload_signs(FedAvg(), 3, {**small, **large}, received)
    assert [found[str(k)]["size"] for k in range(4)] == [1.0] * 4


def test_updates_of_fednova_are_compared_too_and_others_have_no_signs() -> None:
    ups: dict[int, Any] = {k: Update({"w": torch.tensor([1.0, k])}, {}, 1, 1) for k in range(2)}
    found = upload_signs(FedMD(), 3, ups, dict.fromkeys(ups, weights(0.0, 0.0)))
    assert found["1"]["size"] == pytest.approx(math.sqrt(2), abs=1e-4)
    assert upload_signs(FedMD(), 3, {0: None, 1: None}, {}) == {}
    assert upload_signs(FedAvg(), 3, {0: weights(1.0), 1: weights(2.0)}, {}) == {}  # nothing was received
