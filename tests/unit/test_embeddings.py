"""Whitening, t-SNE and the purity of clusters."""

from __future__ import annotations

import numpy as np
import pytest

from fedcc.evaluate.embeddings import embed, panel, purity, whiten


def clusters(spread: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Four clusters of 15 in five dimensions."""
    labels = np.repeat(np.arange(4), 15)
    draws = np.random.default_rng(0)
    return 3 * draws.normal(size=(4, 5))[labels] + spread * draws.normal(size=(60, 5)), labels


def test_purity_by_hand() -> None:
    """Two groups of 11 far apart: all ten neighbours are of the own group."""
    labels = np.array([0] * 11 + [1] * 11)
    points = np.stack([np.arange(22) + 1000 * labels, np.zeros(22)], 1)
    assert purity(points, labels) == 1.0
    labels[0] = 1  # ten points have one wrong neighbour, the changed one has ten
    assert purity(points, labels) == pytest.approx(1 - (10 * 0.1 + 1) / 22)


def test_purity_with_few_points_takes_all_the_others() -> None:
    labels = np.array([0, 0, 1, 1])
    assert purity(np.random.default_rng(0).normal(size=(4, 2)), labels) == pytest.approx(1 / 3)


def test_a_point_is_no_neighbour_of_its_own() -> None:
    assert purity(np.zeros((12, 2)), np.arange(12)) == 0.0


def test_whitened_components_are_uncorrelated_with_variance_one() -> None:
    features, _ = clusters(0.5)
    for variance in (0.5, 0.9, 1.0):
        found = whiten(features * np.array([100, 10, 1, 1, 1]), variance)
        assert found.shape[1] >= 2
        np.testing.assert_allclose(np.cov(found.T), np.eye(found.shape[1]), atol=1e-9)


def test_as_many_components_as_explain_the_variance() -> None:
    draws = np.random.default_rng(0).normal(size=(2000, 4))
    draws = np.linalg.qr(draws - draws.mean(0))[0] * np.sqrt([60.0, 20.0, 15.0, 5.0])  # shares of the variance
    draws -= draws.mean(0)
    assert [whiten(draws, v).shape[1] for v in (0.1, 0.7, 0.9, 0.97)] == [2, 2, 3, 4]


@pytest.mark.parametrize("rank", [0, 1])
def test_features_that_hardly_vary(rank: int) -> None:
    """A collapsed network: nothing is divided by nothing."""
    features = np.ones((30, 5)) + (np.arange(30.0)[:, None] if rank else 0)
    found = panel(features, np.arange(30) % 3, 0.9)
    assert np.isfinite(found["points"]).all()
    assert 0 <= found["purity"] <= 1


def test_clusters_stay_clusters_and_the_same_features_give_the_same_points() -> None:
    features, labels = clusters()
    one, two = embed(features, 0.95), embed(features, 0.95)
    assert one.shape == (60, 2)
    np.testing.assert_array_equal(one, two)
    assert purity(one, labels) == 1.0
    assert purity(one, np.random.default_rng(1).permutation(labels)) < 0.5
