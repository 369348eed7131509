"""Decision margins (the paper's Fig. 2): how far the true class is ahead of the best wrong one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

EDGES = tuple(round(-1 + 0.05 * i, 2) for i in range(41))


def margins(probabilities: Tensor, labels: Tensor) -> Tensor:
    """p_y - max_{c != y} p_c, [N] in [-1, 1] from probabilities [N, C]; above 0 where the prediction is right.

    >>> margins(torch.tensor([[0.7, 0.2, 0.1], [0.7, 0.2, 0.1]]), torch.tensor([0, 2]))
    tensor([ 0.5000, -0.6000])
    """
    label = labels[:, None]
    others = probabilities.scatter(1, label, -math.inf).amax(1)
    return probabilities.gather(1, label).squeeze(1) - others


def histogram(values: Tensor) -> dict[str, Any]:
    """The mean of margins and how many lie between the ``EDGES``; a bin holds its lower edge, the last one both."""
    bins = torch.bucketize(values.double(), torch.tensor(EDGES[1:-1], dtype=torch.float64), right=True)
    counts = torch.bincount(bins, minlength=len(EDGES) - 1)
    return {"mean": round(float(values.double().mean()), 6), "counts": counts.tolist()}


def histograms(global_probabilities: Tensor | None, clients: Mapping[int, Tensor], labels: Tensor) -> dict[str, Any]:
    """Histograms by model, from probabilities [N, C]: the global one, every client's, and those of all clients."""
    models: list[dict[str, Any]] = []
    if global_probabilities is not None:
        models.append({"name": "global", **histogram(margins(global_probabilities, labels))})
    own = {k: margins(p, labels) for k, p in clients.items()}
    models += [{"name": f"client {k}", **histogram(m)} for k, m in own.items()]
    if own:
        models.append({"name": "clients", **histogram(torch.cat(list(own.values())))})
    return {"edges": list(EDGES), "models": models}
