"""Clusters of clients with similar labels, kept in the server's memory: what FedConcat and FedHKT have in common.

``memory["clusters"]`` lists the clients of each cluster, ``memory["centres"]`` holds their mean label shares [M, C],
and the server's model ``cluster m`` belongs to cluster m.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedcc.core.model import Model
from fedcc.core.roles import Server


def cluster_of(s: Server, client: int) -> int:
    """A client's cluster; -1 if it has none yet."""
    return next((m for m, group in enumerate(s.memory.get("clusters", [])) if client in group), -1)


def cluster_models(s: Server) -> list[Model]:
    """The clusters' models, in order."""
    return [s.models[f"cluster {m}"] for m in range(len(s.memory.get("clusters", [])))]


def model_of(s: Server, client: int, otherwise: str) -> Model:
    """The model of a client's cluster; the server's model of that name if it has none yet."""
    number = cluster_of(s, client)
    return s.models[f"cluster {number}" if number >= 0 else otherwise]


def join(
    memory: dict[str, Any],
    shares: Mapping[int, Tensor],
    number: int,
    seed: int,
    largest: int | None = None,
    own: Sequence[int] | None = None,
) -> None:
    """Give each client, by its label shares [C], the nearest of its ``own`` clusters, which are all by default.

    Where there are none yet, k-means makes up to ``number`` of them.
    """
    ids, rows = sorted(shares), torch.stack([shares[k] for k in sorted(shares)]).double()
    groups = memory.setdefault("clusters", [])
    own = range(len(groups)) if own is None else own
    if own:
        labels = torch.cdist(rows, memory["centres"][list(own)]).argmin(1).tolist()
    else:
        labels = k_means(rows, number, seed, largest)
        which = torch.tensor(labels, device=rows.device)
        centres = torch.stack([rows[which == m].mean(0) for m in range(max(labels) + 1)])
        memory["centres"] = torch.cat([memory["centres"], centres]) if groups else centres
        own = range(len(groups), len(groups) + len(centres))
        groups += [[] for _ in centres]
    for k, label in zip(ids, labels, strict=True):
        groups[own[label]].append(k)


def k_means(shares: Tensor, number: int, seed: int, largest: int | None = None) -> list[int]:
    """A cluster for each row of the shares [K, C], whatever their order; clusters are numbered from 0 without gaps.

    Equal rows share a cluster and there are never more clusters than different rows, unless ``largest`` caps their
    size: then the rows nearest to a centre come first, and the others go to the next cluster with room.

    >>> a, b, c = k_means(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1]]), number=2, seed=0)
    >>> a == c, a == b
    (True, False)
    """
    from sklearn.cluster import KMeans

    rows, inverse, weights = torch.unique(shares.double().cpu(), dim=0, return_inverse=True, return_counts=True)
    means = KMeans(min(number, len(rows)), n_init=10, random_state=seed % 2**32)
    labels = torch.from_numpy(means.fit(rows.numpy(), sample_weight=weights.numpy()).labels_).long()[inverse]
    if largest is not None:
        room = max(largest, -(-len(inverse) // means.n_clusters))
        labels = _with_room(torch.cdist(rows, torch.from_numpy(means.cluster_centers_))[inverse], room)
    return [int(label) for label in torch.unique(labels, return_inverse=True)[1]]


def _with_room(distances: Tensor, room: int) -> Tensor:
    """Each row of the distances [K, M], the nearest first, goes to a cluster that still has room."""
    labels = torch.full((len(distances),), -1)
    for index in distances.flatten().argsort(stable=True).tolist():
        row, cluster = divmod(index, distances.shape[1])
        if labels[row] < 0 and int((labels == cluster).sum()) < room:
            labels[row] = cluster
    return labels
