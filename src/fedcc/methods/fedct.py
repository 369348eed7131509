"""FedCT: clients share nothing but hard labels of the public samples; the majority becomes everybody's pseudo label.

Abourayya et al., "Little is enough: boosting privacy by sharing only hard labels in federated semi-supervised
learning" (FedCT), AAAI 2025.
Shares one small integer per public sample; receives the consensus; predicts by majority vote, ties by mean probability.
Deviations: epochs of the longer set instead of single random batches, and one exchange a round, as in all methods
here; the original reports the clients' own accuracy, which the record holds too. With one class per client every vote
is a tie, and the official rule (lowest class) makes class 0 the consensus everywhere; ``tie`` offers others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedcc.core.messages import Labels
from fedcc.core.method import Family, Method, Trained, option
from fedcc.core.rng import Key
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

    public_batch: int | None = option(
        None, "public samples in a step; the run's batch by default", "64; port: 32", low=1
    )
    tie: Literal["lowest", "random", "drop"] = option(
        "lowest", "tied samples get the lowest tied class, a random one, or no label", "official code"
    )

    async def client(self, c: Client, down: Labels | None) -> Labels:
        public = labelled(c.public, down, c.classes) if down is not None else None
        if public is None:
            await c.fit("fit", CrossEntropy("private"), private=c.private)
        else:
            size = self.public_batch or c.recipe.batch
            share = size / (c.recipe.batch + size)  # so that every sample of the union weighs the same
            await c.fit(
                "fit",
                (1 - share) * CrossEntropy("private") + share * CrossEntropy("public"),
                private=c.private,
                public=public,
                recipe=c.recipe_with(batches=(("public", size),)),
            )
        return compact((await c.predict(c.public)).logits.argmax(-1), c.classes)

    async def server(self, s: Server, ups: Mapping[int, Labels]) -> Mapping[int, Labels]:
        votes = ballot(torch.stack([up.values.long() for up in ups.values()]), s.classes)
        s.log["ties"] = float(tied(votes).double().mean())
        winner = consensus(votes, self.tie, s.key.of(phase="tie"))
        return s.to_all(compact(winner, s.classes + (self.tie == "drop")))

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


def consensus(votes: Tensor, tie: str, key: Key) -> Tensor:
    """The most voted class [N]; a tied sample gets the lowest such class, a random one, or C, which is no class."""
    if tie == "random":
        noise = torch.from_numpy(key.generator().random(tuple(votes.shape), np.float32)).to(votes.device)
        return (votes + 0.5 * noise).argmax(-1)
    winner = votes.argmax(-1)  # the first of several
    return torch.where(tied(votes), votes.shape[-1], winner) if tie == "drop" else winner


def compact(labels: Tensor, different: int) -> Labels:
    """Labels in the smallest integer type that holds this many different ones."""
    kinds = ((2**8, torch.uint8), (2**15, torch.int16), (2**31, torch.int32))
    return Labels(labels.to(next(kind for limit, kind in kinds if different <= limit)))


def labelled(public: Samples, down: Labels, classes: int) -> Samples | None:
    """The public samples with their consensus, without those that were dropped; None if none is left."""
    y = down.values.long()
    if bool((y < classes).all()):
        return public.with_(y=y)
    return public.with_(y=y).at(y < classes) if bool((y < classes).any()) else None
