"""Clients with similar labels: k-means on label histograms, the same whatever the clients' order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def clusters(histograms: Tensor, number: int, seed: int, largest: int | None = None) -> list[int]:
    """A cluster for each row of the histograms [K, C]; clusters are numbered from 0 without gaps.

    Equal histograms share a cluster and there are never more clusters than different histograms, unless ``largest``
    caps their size: then the rows nearest to a centre come first, and the others go to the next with room.

    >>> a, b, c = clusters(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1]]), number=2, seed=0)
    >>> a == c, a == b
    (True, False)
    """
    from sklearn.cluster import KMeans

    rows, inverse, weights = torch.unique(histograms.double().cpu(), dim=0, return_inverse=True, return_counts=True)
    means = KMeans(min(number, len(rows)), n_init=10, random_state=seed % 2**32)
    labels = torch.from_numpy(means.fit(rows.numpy(), sample_weight=weights.numpy()).labels_).long()[inverse]
    if largest is not None:
        room = max(largest, -(-len(inverse) // means.n_clusters))
        labels = _with_room(torch.cdist(rows, torch.from_numpy(means.cluster_centers_))[inverse], room)
    return [int(label) for label in torch.unique(labels, return_inverse=True)[1]]


def join(memory: dict[str, Any], histograms: Mapping[int, Tensor], number: int, seed: int, largest: int | None) -> None:
    """Give clients a cluster: the first ones by k-means, those met later by the nearest centre.

    The memory holds ``clusters``, the ids in each, and ``centres``, their mean histograms [clusters, C].
    """
    ids, rows = sorted(histograms), torch.stack([histograms[k] for k in sorted(histograms)]).double()
    if "clusters" not in memory:
        labels = clusters(rows, number, seed, largest)
        which = torch.tensor(labels, device=rows.device)
        memory["clusters"] = [[] for _ in range(max(labels) + 1)]
        memory["centres"] = torch.stack([rows[which == m].mean(0) for m in range(max(labels) + 1)])
    else:
        labels = torch.cdist(rows, memory["centres"]).argmin(1).tolist()
    for k, label in zip(ids, labels, strict=True):
        memory["clusters"][label].append(k)


def _with_room(distances: Tensor, room: int) -> Tensor:
    """Row by row of the distances [K, clusters], the nearest first, to a cluster that still has room."""
    labels = torch.full((len(distances),), -1)
    for index in distances.flatten().argsort(stable=True).tolist():
        row, cluster = divmod(index, distances.shape[1])
        if labels[row] < 0 and int((labels == cluster).sum()) < room:
            labels[row] = cluster
    return labels
