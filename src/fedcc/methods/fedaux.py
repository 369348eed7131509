"""FedAUX: FedDF whose teachers count, per public sample, by how much it looks like their own data.

Sattler et al., "FedAUX: leveraging unlabeled auxiliary data in federated learning", IEEE Transactions on Neural
Networks and Learning Systems 2021. The clients start from features that were trained on the public samples.
Shares weights, and once a score for each public sample; receives the student of its own architecture; predicts with
the student of the last distinct architecture in client order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import option
from fedcc.core.rng import SERVER
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.methods import groups
from fedcc.methods.feddf import FedDF
from fedcc.methods.pretext import pretrained, rotation_reason

NEGATIVES = 0.2  # share of the public samples against which a client's own are told apart
LEAST = 1e-8  # added to every score
NEWTON = 50  # steps at most


@dataclass(frozen=True, eq=False)
class Scored(Weights):
    """Weights; up, the scores [n_u] where the server has asked for them."""

    scores: Tensor | None = None
    asked: int = 0


@dataclass(frozen=True)
class FedAUX(FedDF):
    """FedDF with teachers weighted by certainty, from a start that was trained on the public samples."""

    source: ClassVar[str] = "Sattler et al., IEEE TNNLS 2021"
    note: ClassVar[str] = "reconstruction with another pretext task"

    pretrain: Literal["rotation", "none"] = option("rotation", "the task of the start", "ours; official: SimCLR")
    ridge: float = option(0.01, "weight of the regression's penalty, with the sum of losses", "official code", above=0)

    def unusable_reason(self, samples: Samples) -> str:
        reason = rotation_reason(samples) if self.pretrain == "rotation" and len(samples) else ""
        return super().unusable_reason(samples) or (reason and f"{reason}; set pretrain=none")

    async def start(self, s: Server) -> Mapping[int, Weights]:
        await groups.first_models(s)
        s.memory["scores"] = {}
        if self.pretrain == "rotation":
            s.models = {name: await pretrained(s, model) for name, model in s.models.items()}
        return self.publish(s)

    def publish(self, s: Server) -> Mapping[int, Weights]:
        downs, scores = super().publish(s), s.memory["scores"]
        return {k: Scored(down.state, asked=int(k not in scores)) for k, down in downs.items()}

    async def client(self, c: Client, down: Weights | None) -> Scored:
        assert isinstance(down, Scored)
        c.model = c.model.with_(down.state)
        scores = await self.certainty(c) if down.asked else None
        await self.train(c, down)
        return Scored(c.model.floating, len(c.private), scores)

    async def certainty(self, c: Client) -> Tensor:
        """s_k(x) = P(own | h(x)) + 1e-8 for every public sample [n_u], by the received extractor's features."""
        own, public = (await c.predict(c.private)).features, (await c.predict(c.public)).features
        draws = c.key.of(client=SERVER, round=0, phase="negatives").generator()
        rows = draws.permutation(len(public))[: max(1, round(NEGATIVES * len(public)))]
        scores = certainty(own, public, torch.from_numpy(rows).to(public.device), self.ridge)
        c.log["score"] = float(scores.mean())
        return scores.to(public.dtype)

    async def server(self, s: Server, ups: Mapping[int, Weights]) -> Mapping[int, Weights]:
        new = {k: up.scores for k, up in ups.items() if isinstance(up, Scored) and up.scores is not None}
        s.memory["scores"] |= new
        return await super().server(s, ups)

    def teacher(self, s: Server, ups: Mapping[int, Weights], logits: Tensor) -> Tensor:
        return weighted(logits, torch.stack([s.memory["scores"][k] for k in ups]), self.average)


def weighted(logits: Tensor, scores: Tensor, average: str) -> Tensor:
    """The teacher [N, C]: softmax(sum_k s_k z_k / sum_k s_k), from logits [K, N, C] and scores [K, N]."""
    share = (scores / scores.sum(0)).to(logits.dtype)[..., None]
    if average == "logits":
        return (share * logits).sum(0).softmax(-1)
    return (share * logits.softmax(-1)).sum(0)


def certainty(own: Tensor, public: Tensor, negatives: Tensor, ridge: float) -> Tensor:
    """Scores [n_u]: a logistic regression of the own features [n_k, d] against those of some public samples."""
    own, public = own.double(), public.double()
    norm = torch.cat([own, public]).norm(dim=1).max().clamp(min=1e-12)
    own, public = own / norm, public / norm
    h = torch.cat([own, public[negatives]])
    y = torch.cat([h.new_ones(len(own)), h.new_zeros(len(negatives))])
    return (public @ regression(h, y, ridge)).sigmoid() + LEAST


def penalised(w: Tensor, h: Tensor, y: Tensor, ridge: float) -> Tensor:
    """The sum of log losses + ridge / 2 |w|^2, of weights [d], features [N, d] and labels [N]."""
    return F.binary_cross_entropy_with_logits(h @ w, y, reduction="sum") + ridge / 2 * w.square().sum()


def regression(h: Tensor, y: Tensor, ridge: float) -> Tensor:
    """W [d] of least :func:`penalised`, by Newton's steps, each halved until it descends."""
    w = h.new_zeros(h.shape[1])
    for _ in range(NEWTON):
        p = (h @ w).sigmoid()
        gradient = h.mT @ (p - y) + ridge * w
        if float(gradient.abs().max().item() if len(w) else 0) < 1e-10:
            break
        hessian = h.mT @ (h * (p * (1 - p))[:, None]) + ridge * torch.eye(len(w), dtype=h.dtype, device=h.device)
        step, now, size = torch.linalg.solve(hessian, gradient), penalised(w, h, y, ridge), 1.0
        while size > 1e-6 and float(penalised(w - size * step, h, y, ridge)) > float(now):
            size /= 2
        w = w - size * step
    return w
