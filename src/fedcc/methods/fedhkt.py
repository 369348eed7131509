"""FedHKT: a **reconstruction**. Clusters of similar clients average weights; a server model and the clusters distil.

Deng et al., "A hierarchical knowledge transfer framework for heterogeneous federated learning", INFOCOM 2023.
Shares weights, and label counts until it has a cluster; receives its cluster's model; predicts with the server's model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import Family, Reading, option, shares
from fedcc.core.requests import Predict, gather
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.losses import CrossEntropy, Distill
from fedcc.methods import groups
from fedcc.methods.abstention import entropy
from fedcc.methods.clusters import cluster_models, cluster_of, join, model_of
from fedcc.methods.fedavg import GlobalModel


@dataclass(frozen=True, eq=False)
class Counted(Weights):
    """Weights and, until the client has a cluster, how many private samples it has of each class [C]."""

    counts: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Clustered(Weights):
    """A cluster's weights and its number; -1 before the client has one."""

    cluster: int = -1


@dataclass(frozen=True)
class FedHKT(GlobalModel[Counted, Clustered]):
    """Clusters of one architecture specialise; what they are sure of is distilled to the server and back."""

    family: ClassVar[Family] = "distillation"
    source: ClassVar[str] = "Deng et al., INFOCOM 2023"
    note: ClassVar[str] = "reconstruction"
    retired: ClassVar[Mapping[str, Any]] = {"cluster_on": "histogram"}

    clusters: int = option(4, "clusters, shared evenly by the architectures", "ours", low=1)
    kappa: float = option(0.9, "samples with a target this sure are always selected", "ours", low=0, high=1)
    epochs: int | None = option(None, "epochs of both distillations; the run's by default", "parity", low=0)
    server_arch: str | None = option(None, "the server's network; the clients' last distinct one by default", "parity")

    def readings(self, public: Samples) -> Mapping[str, Reading]:
        return {**super().readings(public), "clients-mean": groups.clients_mean}

    async def start(self, s: Server) -> Mapping[int, Clustered]:
        await groups.first_models(s)
        s.models["global"] = await s.init(groups.chosen_network(s, self.server_arch), "server")
        return self.downlinks(s)

    async def client(self, c: Client, down: Clustered | None) -> Counted:
        assert down is not None
        c.model = c.model.with_(down.state)
        await c.fit("fit", CrossEntropy("private"), private=c.private)
        counts = c.counts().int() if down.cluster < 0 else None
        return Counted(c.model.floating, len(c.private), counts)

    async def server(self, s: Server, ups: Mapping[int, Counted]) -> Mapping[int, Clustered]:
        update_memory(s.memory)
        kappa = self.kappa if cluster_models(s) else 0.0  # everything is selected in round 1
        assign(s, ups, max(1, self.clusters // len(groups.distinct(s.archs))))
        groups.merge(s, ups, groups.by_architecture(s))  # for clients that have no cluster yet
        groups.merge(s, ups, {k: f"cluster {cluster_of(s, k)}" for k in ups})

        models = cluster_models(s)
        q = fused((await groups.logits(models, s.public)).softmax(-1))
        chosen = selected(q, (await Predict(s.models["global"], s.public)).logits, kappa)
        s.log["selected"] = float(chosen.double().mean())
        if chosen.any():
            knowledge, recipe = s.public.with_(target=q).at(chosen), s.recipe_with(epochs=self.epochs)
            fitted = await s.fit_request("up", s.models["global"], Distill("public"), public=knowledge, recipe=recipe)
            s.models["global"] = fitted.model
            relabelled = knowledge.with_(target=(await Predict(fitted.model, knowledge)).logits.softmax(-1))
            fits = [
                s.fit_request("down", model, Distill("public"), public=relabelled, recipe=recipe) for model in models
            ]
            s.models |= {f"cluster {m}": done.model for m, done in enumerate(await gather(*fits))}
        return self.downlinks(s)

    def downlinks(self, s: Server) -> dict[int, Clustered]:
        names = groups.by_architecture(s)
        return {k: Clustered(model_of(s, k, names[k]).floating, cluster=cluster_of(s, k)) for k in s.archs}


def assign(s: Server, ups: Mapping[int, Counted], number: int) -> None:
    """Give each client without a cluster, by its label shares, one of up to ``number`` of its architecture."""
    names, seed = groups.by_architecture(s), s.key.of(round=0, phase="clusters").integer()
    new = {k: up.counts / up.counts.sum() for k, up in ups.items() if cluster_of(s, k) < 0 and up.counts is not None}
    for arch in groups.distinct(s.archs):
        if rows := {k: row for k, row in new.items() if s.archs[k] == arch}:
            models = cluster_models(s)
            join(s.memory, rows, number, seed, own=[m for m, model in enumerate(models) if model.arch == arch])
            first = s.models[names[next(iter(rows))]]
            s.models |= {f"cluster {m}": first for m in range(len(models), len(s.memory["clusters"]))}


def update_memory(memory: dict[str, Any]) -> None:
    """Bring clusters from a checkpoint of an older version, a table of clients, into today's form."""
    if isinstance(memory.get("clusters"), dict):
        numbers, centres = memory["clusters"], memory["centres"]
        memory["clusters"] = [[int(k) for k, m in numbers.items() if m == n] for n in range(len(centres))]
        memory["centres"] = torch.tensor(centres, dtype=torch.float64)


def confidence(q: Tensor) -> Tensor:
    """omega_m = c_m / sum c, c_m = 1 - H(q_m) / ln C: [M, N] from [M, N, C]; equal where all are uniform."""
    c = 1 - entropy(q) / math.log(q.shape[-1])
    return shares(torch.where(c > 1e-6, c, 0.0), 0)  # rounding may leave a tiny value instead of 0


def fused(q: Tensor) -> Tensor:
    """The clusters' knowledge q = sum_m omega_m q_m: [N, C]."""
    return (confidence(q)[..., None] * q).sum(0)


def selected(q: Tensor, previous: Tensor, kappa: float) -> Tensor:
    """S: where q agrees with the server's previous model, or is sure (max q >= kappa); a mask [N]."""
    return (q.argmax(-1) == previous.argmax(-1)) | (q.amax(-1) >= kappa)
