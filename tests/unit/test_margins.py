"""Decision margins, counted by hand."""

from __future__ import annotations

import pytest
import torch

from fedcc.evaluate.margins import EDGES, histogram, histograms, margins

PROBABILITIES = torch.tensor([[0.7, 0.2, 0.1], [0.7, 0.2, 0.1], [0.4, 0.4, 0.2], [0.0, 0.0, 1.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 2, 1, 0])  # margins 0.5, -0.6, 0 and -1


def test_margins_by_hand() -> None:
    assert margins(PROBABILITIES, LABELS).tolist() == pytest.approx([0.5, -0.6, 0.0, -1.0])


def test_forty_bins_from_minus_one_to_one() -> None:
    assert (len(EDGES), EDGES[0], EDGES[20], EDGES[-1]) == (41, -1.0, 0.0, 1.0)
    assert tuple(sorted(EDGES)) == EDGES


def test_a_bin_holds_its_lower_edge_and_the_last_one_both() -> None:
    values = torch.tensor([-1.0, -0.95, -0.01, 0.0, 0.049, 0.05, 1.0], dtype=torch.float64)
    found = histogram(values)
    assert {i: n for i, n in enumerate(found["counts"]) if n} == {0: 1, 1: 1, 19: 1, 20: 2, 21: 1, 39: 1}
    assert found["mean"] == pytest.approx(float(values.mean()), abs=1e-6)


def test_rounding_beyond_the_ends_is_counted() -> None:
    assert sum(histogram(torch.tensor([-1.0000001, 1.0000001]))["counts"]) == 2


def test_models_and_all_clients_together() -> None:
    other = PROBABILITIES.flip(1)  # margins -0.6, 0.5, 0 and 1
    found = histograms(PROBABILITIES, {0: PROBABILITIES, 3: other}, LABELS)
    assert [m["name"] for m in found["models"]] == ["global", "client 0", "client 3", "clients"]
    whole, zero, three, clients = found["models"]
    assert {**whole, "name": ""} == {**zero, "name": ""}
    assert clients["counts"] == [a + b for a, b in zip(zero["counts"], three["counts"], strict=True)]
    assert clients["mean"] == pytest.approx((zero["mean"] + three["mean"]) / 2, abs=1e-6)
    assert zero["mean"] == pytest.approx(-1.1 / 4)


def test_what_is_not_there_is_left_out() -> None:
    assert [m["name"] for m in histograms(None, {1: PROBABILITIES}, LABELS)["models"]] == ["client 1", "clients"]
    assert [m["name"] for m in histograms(PROBABILITIES, {}, LABELS)["models"]] == ["global"]
