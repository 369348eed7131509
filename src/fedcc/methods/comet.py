"""COMET: clients that predict alike teach each other; each learns the centroid of its own cluster of predictions.

Cho et al., "Communication-efficient and model-heterogeneous personalized federated learning via clustered knowledge
transfer", IEEE Journal of Selected Topics in Signal Processing 2023.
Shares probabilities on the public samples [n_u, C]; receives its own clusters' centroids; predicts by the mean
probabilities of all clients. The original is evaluated on each client's own distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcc.core.messages import Predictions
from fedcc.core.method import Family, Method, Trained, option
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.losses import CrossEntropy, Distill
from fedcc.methods.fedmd import FedMD

PLAIN = FedMD()  # what a cluster of all clients gives
ITERATIONS = 10


@dataclass(frozen=True)
class COMET(Method[Predictions, Predictions]):
    """Cluster the clients' predictions of each public sample; every client learns the centroid of its cluster."""

    family: ClassVar[Family] = "distillation"
    source: ClassVar[str] = "Cho et al., IEEE JSTSP 2023"
    note: ClassVar[str] = "personalised, reconstruction from a port"
    scores = "shares"
    uploads_models: ClassVar[bool] = True
    answers = "probabilities"

    clusters: int = option(2, "clusters of clients; at most as many as answered", "port", low=1)
    lam: float = option(1.0, "weight of the centroids' loss", "port", low=0)
    level: Literal["sample", "client"] = option("sample", "clusters by public sample, or one clustering", "port")
    joint: bool = option(False, "private samples and centroids in one phase, instead of two", "paper; port: two")

    async def client(self, c: Client, down: Predictions | None) -> Predictions:
        private, public = CrossEntropy("private"), self.lam * Distill("public")
        if down is None or not self.lam:
            await c.fit("fit", private, private=c.private)
        elif self.joint:
            learned = c.public.with_(target=down.values)
            await c.fit("fit", private + public, private=c.private, public=learned)
        else:
            await c.fit("sync", public, public=c.public.with_(target=down.values))
            await c.fit("fit", private, private=c.private)
        return Predictions((await c.predict(c.public)).logits.softmax(-1))

    async def server(self, s: Server, ups: Mapping[int, Predictions]) -> Mapping[int, Predictions]:
        ids = sorted(ups)
        p = torch.stack([ups[k].values for k in ids])  # [K, N, C]
        own = centroids(p, self.clusters, self.level)
        s.log["distance to the mean"] = float((own - p.mean(0)).abs().sum(-1).mean())
        absent = Predictions(PLAIN.mean(list(p)))
        return {k: Predictions(own[ids.index(k)]) if k in ups else absent for k in s.archs}

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        return await PLAIN.predict(t, samples)


def centroids(p: Tensor, clusters: int, level: str = "sample") -> Tensor:
    """For every client the mean of its cluster: [K, N, C] from predictions [K, N, C]."""
    points = p.movedim(0, 1) if level == "sample" else p.flatten(1)[None]  # [batch, K, features]
    member = members(points.double(), clusters)  # [batch, K, M]
    together = member @ member.mT  # 1 for two clients of one cluster
    own = (together / together.sum(-1, keepdim=True)) @ points.double()
    return (own.movedim(1, 0) if level == "sample" else own[0].view_as(p)).to(p.dtype)


def members(points: Tensor, clusters: int) -> Tensor:
    """k-means of each batch of points [B, K, F] by Lloyd: who is in which cluster, as ones in [B, K, M].

    It starts from the point farthest from the mean, then those farthest from the starts so far; ties go to the lowest
    client. A cluster that loses its members keeps its centre.
    """
    distance = (points - points.mean(1, keepdim=True)).square().sum(-1)  # [B, K]
    starts: list[Tensor] = []
    for _ in range(min(clusters, points.shape[1])):
        starts.append(points.take_along_dim(distance.argmax(1)[:, None, None], 1))
        near = torch.cat(starts, 1)
        distance = torch.cdist(points, near).amin(-1)
    centres, member = torch.cat(starts, 1), torch.zeros(0)
    for _ in range(ITERATIONS):
        nearest = torch.cdist(points, centres).argmin(-1)
        member = torch.nn.functional.one_hot(nearest, centres.shape[1]).to(points.dtype)
        size = member.sum(1)[..., None]  # [B, M, 1]
        centres = torch.where(size > 0, member.mT @ points / size.clamp(min=1), centres)
    return member
