"""One public sample as clients see it."""

from __future__ import annotations

import pytest
import torch

from fedcc.evaluate.example import example, telling
from fedcc.experiments.analyse import data_address
from fedcc.report.analysis_figures import decoded

# two clients, two samples, two classes and "unknown"
VOTES = torch.tensor(
    [
        [[0.8, 0.1, 0.1], [0.45, 0.45, 0.1]],
        [[0.02, 0.08, 0.9], [0.3, 0.6, 0.1]],
    ],
    dtype=torch.float64,
)


def test_by_hand() -> None:
    found = example(VOTES.log(), torch.tensor([0, 1]), 0)
    assert (found["row"], found["label"]) == (0, 0)
    first, second = found["clients"]
    assert first["unknown"] == pytest.approx([0.8, 0.1, 0.1])
    assert second["plain"] == pytest.approx([0.2, 0.8])
    assert (first["weight"], second["weight"]) == (pytest.approx(0.9), pytest.approx(0.1))  # 0.9 and 0.1 of 1.0
    known = [0.9 * 0.8 + 0.1 * 0.02, 0.9 * 0.1 + 0.1 * 0.08]  # Eq. (11) without "unknown"
    assert found["aggregates"]["unknown"] == pytest.approx([k / sum(known) for k in known], abs=1e-6)
    assert found["aggregates"]["plain"] == pytest.approx([(8 / 9 + 0.2) / 2, (1 / 9 + 0.8) / 2], abs=1e-6)
    assert found["accuracy"] == {"unknown": 100.0, "plain": 100.0}


def test_without_labels() -> None:
    found = example(VOTES.log(), None)
    assert found["label"] is None
    assert found["accuracy"] is None


OURS = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.5, 0.5]])
MEAN = torch.tensor([[0.4, 0.6], [0.4, 0.6], [0.9, 0.1], [0.5, 0.5]])


@pytest.mark.parametrize(
    ("hidden", "row"),
    [
        (None, 0),  # the strongest contradiction
        ([0, 0, 0, 0], 0),
        ([1, 0, 0, 0], 1),  # the strongest on which ours is right
        ([1, 1, 0, 0], 0),  # none on which ours is right
    ],
)
def test_the_most_telling_sample(hidden: list[int] | None, row: int) -> None:
    assert telling(OURS, MEAN, None if hidden is None else torch.tensor(hidden)) == row


def test_where_both_always_agree_the_largest_difference() -> None:
    assert telling(OURS[2:], MEAN[2:], torch.tensor([0, 0])) == 0
    assert telling(OURS[[3, 2]], MEAN[[3, 2]], None) == 1


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_survives_its_address(channels: int) -> None:
    """White is the largest value that the data set stores, whatever that is."""
    image = torch.arange(channels * 4 * 4, dtype=torch.uint8).reshape(channels, 4, 4) % 17
    pixels = torch.from_numpy(decoded(data_address(image, 1 / 16)).copy())
    shown = pixels[None] if channels == 1 else pixels.permute(2, 0, 1)
    assert shown.equal((image * (255 / 16)).round().to(torch.uint8))
    assert int(shown.max()) == (255 if channels == 3 else round(15 * 255 / 16))
