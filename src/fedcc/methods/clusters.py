"""Clusters of similar clients within each architecture, kept in the server's memory.

``memory["clusters"]`` holds each client's cluster, ``memory["centres"]`` the clusters' centres, and the server's model
``cluster m`` belongs to cluster m.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedcc.clustering import clusters
from fedcc.core.model import Model
from fedcc.core.roles import Server
from fedcc.methods.groups import by_architecture, distinct


def cluster_of(s: Server, client: int) -> int:
    """A client's cluster; -1 if it has none yet."""
    number: int = s.memory.get("clusters", {}).get(str(client), -1)
    return number


def model_of(s: Server, client: int) -> Model:
    """The model of a client's cluster; of its architecture, if it has none yet."""
    number = cluster_of(s, client)
    return s.models[f"cluster {number}" if number >= 0 else by_architecture(s.archs)[client]]


def place(s: Server, likeness: Mapping[int, Tensor], wanted: int) -> None:
    """A cluster for each of these clients: the nearest of its architecture, which k-means makes for the first ones."""
    centres: list[list[float]] = s.memory.setdefault("centres", [])
    for arch in distinct(s.archs):
        rows = {k: row.tolist() for k, row in sorted(likeness.items()) if s.archs[k] == arch}
        if rows and not any(model.arch == arch for model in cluster_models(s)):
            table = torch.tensor(list(rows.values()), dtype=torch.float64)
            which = torch.tensor(clusters(table, wanted, s.key.of(round=0, phase="clusters").integer()))
            found = [table[which == m].mean(0).tolist() for m in range(int(which.max()) + 1)]
            group = by_architecture(s.archs)[next(iter(rows))]
            s.models |= {f"cluster {len(centres) + i}": s.models[group] for i in range(len(found))}
            centres += found
        own = [m for m, model in enumerate(cluster_models(s)) if model.arch == arch]
        for k, row in rows.items():
            s.memory.setdefault("clusters", {})[str(k)] = min(own, key=lambda m: math.dist(row, centres[m]))


def cluster_models(s: Server) -> list[Model]:
    """The clusters' models, in their order."""
    return [s.models[f"cluster {m}"] for m in range(len(s.memory.get("centres", [])))]
