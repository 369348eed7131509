"""FedOV: clients learn an output "unknown" from outliers that they make, so that a vote counts where it is informed.

Diao, Li and He, "Towards addressing label skews in one-shot federated learning", ICLR 2023: FedCC's closest relative.
Shares nothing while training, and its model once at the end; receives nothing; predicts by the sum of the clients'
probabilities over C + 1 outputs, without "unknown". It needs no public samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedcc.core.method import Family, Method, Trained, Votes, option
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.core.step import Loss, Step
from fedcc.losses import CrossEntropy, cross_entropy, is_class
from fedcc.methods.groups import logits
from fedcc.methods.outliers import outliers


@dataclass(frozen=True)
class SecondIsUnknown(Loss):
    """Cross entropy of "unknown" with the true class left out of the softmax: it should be the next best answer."""

    def __call__(self, step: Step) -> Tensor:
        batch = step["private"]
        others = batch.logits.masked_fill(is_class(batch["y"], batch.logits.shape[-1]), -math.inf)
        return cross_entropy(others, torch.full_like(batch["y"], batch.logits.shape[-1] - 1))


@dataclass(frozen=True)
class FedOV(Method[None, None]):
    """Train alone with an output "unknown" and outliers made from its own samples; vote once, at the end."""

    family: ClassVar[Family] = "ensemble"
    source: ClassVar[str] = "Diao et al., ICLR 2023"
    scores = "shares"
    uploads_models: ClassVar[bool] = True
    read_with: ClassVar[tuple[Mapping[str, Any], ...]] = ({"voters": 1}, {"voters": 2})

    weight: float = option(0.5, "share of the outliers in the loss; 0: none are made", "official code", low=0, high=1)
    second: bool = option(False, '"unknown" should be the second best answer', "official code, one of two variants")
    voters: int | None = option(None, "clients that vote on a sample, the surest first; all by default", "paper", low=1)

    def outputs(self, classes: int) -> int:
        return classes + 1

    async def client(self, c: Client, down: None) -> None:
        known = CrossEntropy("private") + float(self.second) * SecondIsUnknown()
        if not self.weight:
            await c.fit("fit", known, private=c.private)
            return
        strange = outliers(c.private, c.key.of(phase="outliers").generator())
        unknown = torch.full_like(c.private["y"], c.classes)
        await c.fit(
            "fit",
            (1 - self.weight) * known + self.weight * CrossEntropy("outlier"),
            private=c.private,
            outlier=c.private.with_(x=strange, y=unknown),
        )

    async def server(self, s: Server, ups: Mapping[int, None]) -> Mapping[int, None]:
        return s.to_all(None)

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        v = (await logits(t.clients.values(), samples)).softmax(-1)
        return vote(v, self.voters)

    async def votes(self, t: Trained, samples: Samples) -> Votes:
        v = (await logits(t.clients.values(), samples)).softmax(-1)
        counted = heard(v, self.voters)
        return Votes(v[..., :-1], counted / counted.sum(0))


def heard(v: Tensor, voters: int | None) -> Tensor:
    """Which clients vote on a sample, ones in [K, N]: those with the least mass for "unknown"."""
    if voters is None or voters >= len(v):
        return torch.ones_like(v[..., -1])
    rank = v[..., -1].argsort(dim=0, stable=True).argsort(dim=0)
    return (rank < voters).to(v.dtype)


def vote(v: Tensor, voters: int | None = None) -> Tensor:
    """Scores [N, C]: the sum over those who vote of their probabilities [K, N, C + 1], without "unknown"."""
    return (heard(v, voters)[..., None] * v[..., :-1]).sum(0)
