from __future__ import annotations

from typing import Any

import pytest
import sklearn.cluster
import torch

from fedcc.methods.clusters import _with_room, join
from fedcc.methods.clusters import k_means as clusters
from private_steps import draw

ONE_HOT = torch.eye(6)


def parts(labels: list[int]) -> set[frozenset[int]]:
    """A clustering whatever its numbers."""
    return {frozenset(i for i, label in enumerate(labels) if label == m) for m in set(labels)}


def test_similar_histograms_share_a_cluster() -> None:
    rows = torch.tensor([[0.9, 0.1, 0], [0, 0.1, 0.9], [0.85, 0.15, 0], [0, 0, 1.0], [0, 1.0, 0]])
    assert parts(clusters(rows, 3, seed=0)) == {frozenset({0, 2}), frozenset({1, 3}), frozenset({4})}


def test_equal_histograms_share_a_cluster_even_where_fewer_differ_than_clusters_are_asked_for() -> None:
    labels = clusters(ONE_HOT[[0, 1, 0, 1, 0]], 4, seed=0)
    assert parts(labels) == {frozenset({0, 2, 4}), frozenset({1, 3})}
    assert set(labels) == {0, 1}  # numbered without gaps


def test_the_order_of_clients_does_not_matter_and_the_seed_decides() -> None:
    order = [3, 1, 5, 0, 2, 4]
    labels, shuffled = clusters(ONE_HOT, 4, seed=7), clusters(ONE_HOT[order], 4, seed=7)
    assert shuffled == [labels[i] for i in order]
    assert clusters(ONE_HOT, 4, seed=7) == labels
    assert len({tuple(clusters(ONE_HOT, 4, seed=seed)) for seed in range(8)}) > 1  # equal distances: arbitrary


def test_what_is_asked_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten starts, and the low 32 bits of the seed, which is all that it takes."""
    asked: list[dict[str, Any]] = []

    class Noting(sklearn.cluster.KMeans):  # type: ignore[misc]
        def __init__(self, n_clusters: int, **options: Any):
            asked.append({"n_clusters": n_clusters, **options})
            super().__init__(n_clusters, **options)

    monkeypatch.setattr(sklearn.cluster, "KMeans", Noting)
    clusters(ONE_HOT, 4, seed=5 * 2**32 + 2**31 + 7)
    assert asked == [{"n_clusters": 4, "n_init": 10, "random_state": 2**31 + 7}]


def test_no_cluster_is_empty() -> None:
    for seed in range(5):
        assert set(clusters(ONE_HOT, 4, seed)) == {0, 1, 2, 3}


def test_a_cap_moves_the_farthest_to_the_next() -> None:
    rows = torch.tensor([[1.0, 0], [0.99, 0.01], [0.8, 0.2], [0, 1.0]])
    assert parts(clusters(rows, 2, seed=0)) == {frozenset({0, 1, 2}), frozenset({3})}
    assert parts(clusters(rows, 2, seed=0, largest=2)) == {frozenset({0, 1}), frozenset({2, 3})}
    tight = parts(clusters(rows, 2, seed=0, largest=1))
    assert sorted(map(len, tight)) == [2, 2]  # all must find room


def test_a_cap_that_is_large_enough_changes_nothing() -> None:
    rows = torch.tensor([[0.9, 0.1, 0], [0, 0.1, 0.9], [0.85, 0.15, 0], [0, 0, 1.0], [0, 1.0, 0]])
    assert parts(clusters(rows, 3, seed=0, largest=2)) == parts(clusters(rows, 3, seed=0))


def test_who_comes_later_joins_the_nearest_centre() -> None:
    memory: dict[str, Any] = {}
    join(memory, {0: torch.tensor([1.0, 0.0]), 1: torch.tensor([0.0, 1.0]), 4: torch.tensor([0.8, 0.2])}, 2, 0, None)
    assert {frozenset(group) for group in memory["clusters"]} == {frozenset({0, 4}), frozenset({1})}
    centre = next(c for c, g in zip(memory["centres"], memory["clusters"], strict=True) if 0 in g)
    torch.testing.assert_close(centre, torch.tensor([0.9, 0.1], dtype=torch.float64), rtol=1e-6, atol=1e-6)
    join(memory, {2: torch.tensor([0.3, 0.7]), 3: torch.tensor([0.7, 0.3])}, 2, 0, None)
    assert {frozenset(group) for group in memory["clusters"]} == {frozenset({0, 3, 4}), frozenset({1, 2})}


def test_clients_may_be_named_in_any_order() -> None:
    rows = {4: [0.8, 0.2], 1: [0.0, 1.0], 0: [1.0, 0.0], 3: [0.1, 0.9]}
    memories: list[dict[str, Any]] = [{}, {}]
    for memory, order in zip(memories, ((4, 1, 0, 3), (0, 1, 3, 4)), strict=True):
        join(memory, {k: torch.tensor(rows[k]) for k in order}, 2, 0, None)
    assert memories[0]["clusters"] == memories[1]["clusters"]
    assert {tuple(group) for group in memories[0]["clusters"]} == {(0, 4), (1, 3)}


def test_random_histograms_all_get_a_cluster() -> None:
    rows = draw(12, 10).softmax(-1)
    for number in (1, 3, 12, 20):
        labels = clusters(rows, number, seed=1)
        assert len(labels) == 12
        assert len(set(labels)) == min(number, 12)


def test_a_row_stays_in_the_nearest_cluster_that_had_room() -> None:
    assert _with_room(torch.tensor([[0.0, 1.0], [5.0, 6.0]]), 2).tolist() == [0, 0]
    assert _with_room(torch.tensor([[0.0, 1.0], [0.5, 6.0]]), 1).tolist() == [0, 1]
