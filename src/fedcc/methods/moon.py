"""MOON: a sample's features are pulled to the received model's and pushed away from those of the client's previous one.

Li, He and Song, "Model-contrastive federated learning", CVPR 2021.
Shares, receives and predicts as FedAvg. A client keeps the model that it trained last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import option
from fedcc.core.requests import Frozen
from fedcc.core.roles import Client
from fedcc.core.step import Loss, Step
from fedcc.losses import CrossEntropy
from fedcc.methods.fedavg import FedAvg


@dataclass(frozen=True)
class ModelContrast(Loss):
    """The contrast of a batch's features with those of the received and of the previous model."""

    kappa: float

    def __call__(self, step: Step) -> Tensor:
        received, previous = step.seen["received"].features, step.seen["previous"].features
        return contrast(step["private"].features, received, previous, self.kappa)


@dataclass(frozen=True)
class MOON(FedAvg):
    """FedAvg with a contrast between the received model's features and those of the client's previous model."""

    source: ClassVar[str] = "Li et al., CVPR 2021"
    mu: float | None = option(None, "weight of the contrast; by default 5 up to 10 classes, 1 above", "official", low=0)
    kappa: float = option(0.5, "temperature of the contrast", "official code", above=0)

    async def client(self, c: Client, down: Weights | None) -> Weights:
        assert down is not None
        mu = self.mu if self.mu is not None else 5.0 if c.classes <= 10 else 1.0
        previous, c.model = c.model, c.model.with_(down.state)
        loss: Loss = CrossEntropy("private")
        frozen: dict[str, Frozen] = {}
        if mu and c.memory.get("trained"):  # there is no previous model in a client's first round
            loss += mu * ModelContrast(self.kappa)
            frozen = {"received": Frozen(c.model, "private"), "previous": Frozen(previous, "private")}
        await c.fit("fit", loss, private=c.private, frozen=frozen)
        c.memory["trained"] = True
        return Weights.of(c.model, len(c.private))


def contrast(h: Tensor, received: Tensor, previous: Tensor, kappa: float) -> Tensor:
    """The mean of -ln(e^{cos(h, h^g) / kappa} / (e^{cos(h, h^g) / kappa} + e^{cos(h, h^p) / kappa})), [B, d] each."""
    return -F.logsigmoid((cosine(h, received) - cosine(h, previous)) / kappa).mean()


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """The cosine of the angle between rows, [B]; 0 if one of them is 0."""
    lengths: list[Tensor] = [torch.linalg.vector_norm(rows, dim=-1).clamp(min=1e-8) for rows in (a, b)]
    return (a * b).sum(-1) / (lengths[0] * lengths[1])
