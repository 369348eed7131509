"""The numbers of Eqs. (8)-(10): every row of a table computed by hand, to five decimals."""

from __future__ import annotations

import math

import pytest
import torch

from fedcc.methods import FedCC
from fedcc.methods.abstention import alpha, entropy, pseudo_labels, smoothed, unknown_weight
from tiny import Tiny

DELTA = 1e-3


def spread(over: int, classes: int) -> torch.Tensor:
    """A probe that is uniform over the first classes."""
    p = torch.zeros(classes, dtype=torch.float64)
    p[:over] = 1 / over
    return p


@pytest.mark.parametrize(
    ("over", "classes", "empty", "size", "w_l", "w_u", "base"),
    [
        (1, 10, "argmax", 1, 0.00919, 2.30259, 0.00397),
        (1, 100, "argmax", 1, 0.01239, 4.60517, 0.00268),
        (1, 200, "argmax", 1, 0.01314, 5.29832, 0.00247),
        (2, 10, "argmax", 2, 0.70076, 2.19722, 0.24181),
        (20, 100, "argmax", 20, 3.00335, 4.39445, 0.40598),
        (10, 100, "argmax", 10, 2.31177, 4.51086, 0.33884),
        (10, 10, "argmax", 10, 2.30259, 0.0, 1.0),
        (100, 100, "alpha_zero", 0, 4.60517, 4.61512, 0.49946),
        (100, 100, "argmax", 1, 4.60517, 4.60517, 0.5),
    ],
)
def test_table_2_9(over: int, classes: int, empty: str, size: int, w_l: float, w_u: float, base: float) -> None:
    p = spread(over, classes)
    client = Tiny(FedCC(), classes=classes).clients[0]
    majority = FedCC(majority_empty=empty).majority(client, p)
    assert int(majority.sum()) == size
    found_l = float(entropy(smoothed(p, DELTA)))
    found_u = unknown_weight(classes, int(majority.sum()))
    assert found_l == pytest.approx(w_l, abs=5e-6)
    assert found_u == pytest.approx(w_u, abs=5e-6)
    sure = entropy(spread(1, classes))[None]  # h(x) = 0: the most that a sample can get
    assert float(alpha(found_l, found_u, sure)) == pytest.approx(base, abs=5e-6)


def test_the_majority_is_above_the_threshold_strictly() -> None:
    client = Tiny(FedCC(), classes=4).clients[0]
    p = torch.tensor([0.02, 0.0200001, 0.01, 0.9499999], dtype=torch.float64)
    assert FedCC().majority(client, p).tolist() == [False, True, False, True]


def test_the_threshold_is_on_p_not_on_its_smoothed_version() -> None:
    """0.0199 is below 0.02, though smoothed with delta = 0.9 over two classes it would be above."""
    client = Tiny(FedCC(), labels=[[0]], classes=2).clients[0]
    logits = torch.tensor([[0.0199, 0.9801]], dtype=torch.float64).log()
    bias = torch.cat([logits, torch.full((1, 1), -9.0, dtype=torch.float64)], -1)
    FedCC(delta=0.9).pseudo_labels(client, bias, torch.zeros(1, 3, dtype=torch.float64))
    assert client.log["majority"] == 1


def test_the_fallback_takes_the_most_probable_class_and_says_so() -> None:
    client = Tiny(FedCC(), classes=60).clients[0]
    p = torch.full((60,), 1 / 60, dtype=torch.float64)
    p[17] += 1e-4
    assert FedCC().majority(client, p).nonzero().flatten().tolist() == [17]
    assert client.log["majority_empty"] == 1


def test_one_sample_by_hand() -> None:
    """Eq. (8)-(10) of one sample, computed with the math module alone."""
    client = Tiny(FedCC(), classes=3).clients[0]
    probe, x = [0.7, 0.29, 0.01], [0.05, 0.9, 0.05]
    u = 2.5  # the unknown logit must not enter any of it
    bias = torch.tensor([[*map(math.log, probe), u]], dtype=torch.float64)
    logits = torch.tensor([[*map(math.log, x), u]], dtype=torch.float64)
    soft = [(1 - DELTA) * p + DELTA / 3 for p in probe]
    w_l, h = (-sum(p * math.log(p) for p in q) for q in (soft, x))
    w_u = math.log(3 - 2 + 1)
    a = (w_l - min(w_l, h)) / (w_l + w_u)
    found = FedCC().pseudo_labels(client, bias, logits)
    assert found.tolist() == [[0, pytest.approx(a, abs=1e-12), 0, pytest.approx(1 - a, abs=1e-12)]]
    assert client.log == {
        "majority": 2,
        "w_l": pytest.approx(w_l),
        "w_u": pytest.approx(w_u),
        "alpha": pytest.approx(a),
    }


def test_several_probe_inputs_are_averaged_after_the_softmax() -> None:
    client = Tiny(FedCC(), labels=[[0]], classes=2).clients[0]
    bias = torch.tensor([[9.0, -9.0, 0.0], [-9.0, 9.0, 0.0]], dtype=torch.float64)
    FedCC(delta=0.0).pseudo_labels(client, bias, torch.zeros(1, 3, dtype=torch.float64))
    assert client.log["w_l"] == pytest.approx(math.log(2))


def test_a_minority_class_is_never_a_pseudo_label() -> None:
    logits = torch.tensor([[5.0, 1.0, 2.0]], dtype=torch.float64)
    majority = torch.tensor([False, True, True])
    assert pseudo_labels(torch.tensor([0.25], dtype=torch.float64), logits, majority).tolist() == [[0, 0, 0.25, 0.75]]


def test_nothing_is_known_where_the_probe_is_certain_and_unsmoothed() -> None:
    assert alpha(0.0, 0.0, torch.zeros(3)).tolist() == [0, 0, 0]
