"""FedCT: clients share nothing but hard labels of the public samples; the majority becomes everybody's pseudo label.

Abourayya et al., "Little is enough: boosting privacy by sharing only hard labels in federated semi-supervised
learning" (FedCT), AAAI 2025.
Shares one small integer per public sample; receives the consensus; predicts by majority vote, ties by mean probability.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedcc.core.messages import Labels
from fedcc.core.method import Family, Method, Trained, option
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.losses import CrossEntropy
from fedcc.methods.groups import logits


@dataclass(frozen=True)
class FedCT(Method[Labels, Labels]):
    """Train on private samples and on public ones with the labels that most clients gave them."""

    family: ClassVar[Family] = "distillation"
    source: ClassVar[str] = "Abourayya et al., AAAI 2025"
    scores = "shares"
    uploads_models: ClassVar[bool] = True
    answers = "labels"
    retired: ClassVar[Mapping[str, Any]] = {"tie": "lowest"}

    public_batch: int | None = option(
        None, "public samples in a step; the run's batch by default", "64; port: 32", low=1
    )

    async def client(self, c: Client, down: Labels | None) -> Labels:
        if down is None:
            await c.fit("fit", CrossEntropy("private"), private=c.private)
        else:
            size = self.public_batch or c.recipe.batch
            share = size / (c.recipe.batch + size)  # so that every sample of the union weighs the same
            await c.fit(
                "fit",
                (1 - share) * CrossEntropy("private") + share * CrossEntropy("public"),
                private=c.private,
                public=c.public.with_(y=down.values.long()),
                recipe=c.recipe_with(batches=(("public", size),)),
            )
        return Labels.of((await c.predict(c.public)).logits.argmax(-1), c.classes)

    async def server(self, s: Server, ups: Mapping[int, Labels]) -> Mapping[int, Labels]:
        votes = ballot(torch.stack([up.values.long() for up in ups.values()]), s.classes)
        s.log["ties"] = float(tied(votes).double().mean())
        return s.to_all(Labels.of(votes.argmax(-1), s.classes))  # the lowest class of several with the most votes

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        return majority(await logits(t.clients.values(), samples))


def ballot(labels: Tensor, classes: int) -> Tensor:
    """How many clients vote for each class: [N, C] from labels [K, N]."""
    votes = torch.zeros(labels.shape[1], classes, dtype=torch.long, device=labels.device)
    return votes.scatter_add(1, labels.T, torch.ones_like(labels.T))


def majority(logits: Tensor) -> Tensor:
    """Scores [N, C] from the clients' logits [K, N, C]: the votes, and the mean probability where they are tied."""
    return ballot(logits.argmax(-1), logits.shape[-1]) + 0.5 * logits.softmax(-1).mean(0)


def tied(votes: Tensor) -> Tensor:
    """Whether several classes have the most votes, [N]."""
    return (votes == votes.amax(-1, keepdim=True)).sum(-1) > 1
