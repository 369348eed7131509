"""FedAvg inside clusters of clients with similar labels: the first stage of FedConcat.

The server's memory holds the clusters (:mod:`fedcc.clustering`), its models are ``init`` and ``cluster 0`` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcc.clustering import join
from fedcc.core.messages import Weights
from fedcc.core.model import Model
from fedcc.core.requests import Predict, gather
from fedcc.core.roles import Server
from fedcc.core.samples import Samples, View
from fedcc.methods.fedavg import average

NOISE = 10_000  # images from which a model's classes are inferred


@dataclass(frozen=True, eq=False)
class Encoder(Weights):
    """A cluster's model, or a client's with its label histogram [C] as long as it has no cluster (-1)."""

    cluster: int = -1
    histogram: Tensor | None = None


async def average_clusters(s: Server, ups: Mapping[int, Encoder], number: int, cap: float | None) -> None:
    """FedAvg inside each cluster, in client order. Clients without a cluster get one first.

    In the first round all have trained from the same weights. Later, a client that had no cluster has not trained from
    its cluster's model, so it does not count yet.
    """
    known = [k for group in s.memory.get("clusters", []) for k in group]
    new = {k: up for k, up in ups.items() if k not in known}
    if new:
        largest = int(cap * len(new) / number) if cap else None
        join(s.memory, await histograms(s, new), number, s.key.of(round=0, phase="cluster").integer(), largest)
    for m, group in enumerate(s.memory["clusters"]):
        model = s.models.setdefault(f"cluster {m}", s.models["init"])
        trained: list[Weights] = [ups[k] for k in group if k in ups and k in (known or new)]
        if trained:
            s.models[f"cluster {m}"] = model.with_(average(trained))


async def histograms(s: Server, ups: Mapping[int, Encoder]) -> dict[int, Tensor]:
    """The clients' label shares [C], as told; of those that tell nothing, their models' mean prediction on noise."""
    silent = {k: s.models["init"].with_(up.state) for k, up in ups.items() if up.histogram is None}
    told = {k: up.histogram for k, up in ups.items() if up.histogram is not None}
    if not silent:
        return told
    draws = s.key.of(round=0, phase="noise").generator().integers(0, 256, (NOISE, *s.public.shape), "uint8")
    noise = Samples({"x": torch.from_numpy(draws)}, View(scale=1 / 255))
    outputs = await gather(*(Predict(model, noise) for model in silent.values()))
    return told | {k: out.logits.softmax(-1).mean(0) for k, out in zip(silent, outputs, strict=True)}


def cluster_models(s: Server) -> list[Model]:
    """The clusters' models, in order."""
    return [s.models[f"cluster {m}"] for m in range(len(s.memory["clusters"]))]


def downlinks(s: Server) -> dict[int, Encoder]:
    """Its cluster's model for every client; the initial one for those that have no cluster yet."""
    own = {k: Encoder(s.models["init"].floating) for k in s.archs}
    for m, (group, model) in enumerate(zip(s.memory["clusters"], cluster_models(s), strict=True)):
        own |= dict.fromkeys(group, Encoder(model.floating, cluster=m))
    return own
