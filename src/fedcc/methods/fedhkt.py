"""FedHKT: a **reconstruction**. Clusters of similar clients average weights; a server model and the clusters distil.

Deng et al., "A hierarchical knowledge transfer framework for heterogeneous federated learning", INFOCOM 2023.
Shares weights, and label counts until it has a cluster; receives its cluster's model; predicts with the server's model.
Deviations: only the abstract could be read, so formulas and numbers are ours and reports say "reconstruction". One
server plays cloud and edges, so their exchange costs no bytes here. Clusters are made from the first uplinks, until
when the clients of an architecture have one model; a client that appears later joins the nearest cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import Family, Method, Reading, Trained, option
from fedcc.core.requests import Predict, gather
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.losses import CrossEntropy, Distill
from fedcc.methods.abstention import entropy
from fedcc.methods.clusters import cluster_models, cluster_of, model_of, place
from fedcc.methods.groups import (
    by_architecture,
    chosen_network,
    clients_mean,
    distinct,
    first_models,
    logits,
    merge,
    uploaded,
)


@dataclass(frozen=True, eq=False)
class Counted(Weights):
    """Weights and, until the client has a cluster, how many private samples it has of each class [C]."""

    counts: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Clustered(Weights):
    """A cluster's weights and its number; -1 before the client has one."""

    cluster: int = -1


@dataclass(frozen=True)
class FedHKT(Method[Counted, Clustered]):
    """Clusters of one architecture specialise; what they are sure of is distilled to the server and back."""

    family: ClassVar[Family] = "distillation"
    source: ClassVar[str] = "Deng et al., INFOCOM 2023"
    note: ClassVar[str] = "reconstruction"

    clusters: int = option(4, "clusters, shared evenly by the architectures", "ours", low=1)
    kappa: float = option(0.9, "samples with a target this sure are always selected", "ours", low=0, high=1)
    cluster_on: Literal["histogram", "public_predictions"] = option("histogram", "what makes clients similar", "ours")
    epochs: int | None = option(None, "epochs of both distillations; the run's by default", "parity", low=0)
    server_arch: str | None = option(None, "the server's network; the clients' last distinct one by default", "parity")

    def readings(self, public: Samples) -> Mapping[str, Reading]:
        return {**super().readings(public), "clients-mean": clients_mean}

    async def start(self, s: Server) -> Mapping[int, Clustered]:
        await first_models(s, by_architecture(s.archs))
        s.models["global"] = await s.init(chosen_network(s, self.server_arch), "server")
        return self.downlinks(s)

    async def client(self, c: Client, down: Clustered | None) -> Counted:
        assert down is not None
        c.model = c.model.with_(down.state)
        await c.fit("fit", CrossEntropy("private"), private=c.private)
        counts = c.counts().int() if down.cluster < 0 and self.cluster_on == "histogram" else None
        return Counted(c.model.floating, len(c.private), counts)

    async def server(self, s: Server, ups: Mapping[int, Counted]) -> Mapping[int, Clustered]:
        kappa = self.kappa if cluster_models(s) else 0.0  # everything is selected in round 1
        place(s, await self.likeness(s, ups), max(1, self.clusters // len(distinct(s.archs))))
        merge(s, ups, by_architecture(s.archs))  # for clients that have no cluster yet
        merge(s, ups, {k: f"cluster {cluster_of(s, k)}" for k in ups})

        models = cluster_models(s)
        q = fused((await logits(models, s.public)).softmax(-1))
        chosen = selected(q, (await Predict(s.models["global"], s.public)).logits, kappa)
        s.log["selected"] = float(chosen.double().mean())
        if chosen.any():
            knowledge, recipe = s.public.with_(target=q).at(chosen), s.recipe_with(epochs=self.epochs)
            fitted = await s.fit_request("up", s.models["global"], Distill("public"), public=knowledge, recipe=recipe)
            s.models["global"] = fitted.model
            taught = knowledge.with_(target=(await Predict(fitted.model, knowledge)).logits.softmax(-1))
            fits = [s.fit_request("down", model, Distill("public"), public=taught, recipe=recipe) for model in models]
            s.models |= {f"cluster {m}": done.model for m, done in enumerate(await gather(*fits))}
        return self.downlinks(s)

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        return (await Predict(t.server["global"], samples)).logits

    def downlinks(self, s: Server) -> dict[int, Clustered]:
        return {k: Clustered(model_of(s, k).floating, cluster=cluster_of(s, k)) for k in s.archs}

    async def likeness(self, s: Server, ups: Mapping[int, Counted]) -> dict[int, Tensor]:
        """What clusters are made from, [C] for each client without one: its label shares, or its mean prediction."""
        new = {k: up for k, up in ups.items() if cluster_of(s, k) < 0}
        if self.cluster_on == "histogram":
            return {k: up.counts / up.counts.sum() for k, up in new.items() if up.counts is not None}
        outputs = await gather(*(Predict(model, s.public) for model in uploaded(s, new, by_architecture(s.archs))))
        return {k: out.logits.softmax(-1).mean(0) for k, out in zip(new, outputs, strict=True)}


def confidence(q: Tensor) -> Tensor:
    """omega_m = c_m / sum c, c_m = 1 - H(q_m) / ln C: [M, N] from [M, N, C]; equal where all are uniform."""
    c = 1 - entropy(q) / math.log(q.shape[-1])
    c = torch.where(c > 1e-6, c, 0.0)  # rounding leaves a little of nothing
    total = c.sum(0)
    return torch.where(total > 0, c / total.clamp(min=1e-6), 1 / len(c))


def fused(q: Tensor) -> Tensor:
    """The clusters' knowledge q = sum_m omega_m q_m: [N, C]."""
    return (confidence(q)[..., None] * q).sum(0)


def selected(q: Tensor, previous: Tensor, kappa: float) -> Tensor:
    """S: where q agrees with the server's previous model, or is sure (max q >= kappa); a mask [N]."""
    return (q.argmax(-1) == previous.argmax(-1)) | (q.amax(-1) >= kappa)
