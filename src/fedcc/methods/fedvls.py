"""FedVLS: calibrated cross entropy, the global model's opinion on classes a client lacks, and suppressed other logits.

Guo et al., "Exploring vacant classes in label-skewed federated learning", AAAI 2025.
Shares, receives and predicts as FedAvg; the received model is also the frozen teacher (evaluation mode).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import option
from fedcc.core.requests import Fitted, Frozen
from fedcc.core.roles import Client
from fedcc.core.step import Loss, Step
from fedcc.losses import cross_entropy, is_class, masked_kl, masked_logsumexp
from fedcc.methods.fedavg import FedAvg


@dataclass(frozen=True)
class PriorCrossEntropy(Loss):
    """L_cal: the cross entropy of f + ln pi; a vacant class (pi = 0) is left out of the softmax."""

    def __call__(self, step: Step) -> Tensor:
        batch = step["private"]
        return cross_entropy(batch.logits + step.constants["prior"].log().to(batch.logits.dtype), batch["y"])


@dataclass(frozen=True)
class VacantDistillation(Loss):
    """L_dis: KL from the teacher's opinion on the vacant classes to the client's own."""

    def __call__(self, step: Step) -> Tensor:
        return masked_kl(step.seen["teacher"].logits, step["private"].logits, step.constants["prior"] == 0)


@dataclass(frozen=True)
class Suppression(Loss):
    """L_logit: the logits of classes that are not the label's, by the paper's form or the released code's."""

    form: Literal["paper", "code"] = "code"

    def __call__(self, step: Step) -> Tensor:
        batch, suppressed = step["private"], suppressed_code if self.form == "code" else suppressed_paper
        return suppressed(batch.logits, batch["y"], step.constants["prior"].to(batch.logits.dtype))


@dataclass(frozen=True)
class FedVLS(FedAvg):
    """FedAvg with vacant-class distillation and logit suppression: L_cal + lambda L_dis + gamma L_logit."""

    source: ClassVar[str] = "Guo et al., AAAI 2025"
    lam: float | None = option(None, "weight of L_dis; by default 0.1 up to 10 classes, 0.5 above", "paper", low=0)
    gamma: float = option(0.005, "weight of L_logit; the paper has 1", "official code", low=0)
    suppress: Literal["paper", "code"] = option("code", "form of L_logit; paper: no lower bound", "official code")

    async def train(self, c: Client, received: Weights) -> Fitted:
        lam = self.lam if self.lam is not None else 0.1 if c.classes <= 10 else 0.5
        return await c.fit(
            "fit",
            PriorCrossEntropy() + lam * VacantDistillation() + self.gamma * Suppression(self.suppress),
            private=c.private,
            constants={"prior": c.counts().double() / len(c.private)},
            frozen={"teacher": Frozen(c.model, "private")} if lam else {},
        )


def suppressed_paper(logits: Tensor, y: Tensor, prior: Tensor) -> Tensor:
    """sum_c pi_c ln(mean_i 1[y_i != c] e^{f_c(x_i)}); a class that all samples of the batch have is left out."""
    others = ~is_class(y, len(prior))
    return (prior * (masked_logsumexp(logits, others, 0) - math.log(len(y)) * others.any(0))).sum()


def suppressed_code(logits: Tensor, y: Tensor, prior: Tensor) -> Tensor:
    """The same of f_c - ln pi_c - ln C, with e^0 where a sample has the class, so at least pi_c ln(share of c)."""
    balanced = logits - torch.where(prior > 0, prior, 1.0).log() - math.log(len(prior))
    return (prior * ((balanced * ~is_class(y, len(prior))).logsumexp(0) - math.log(len(y)))).sum()
