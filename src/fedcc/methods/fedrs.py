"""FedRS: the logits of classes that a client does not have are shrunk, so that their weights are pushed down less.

Li and Zhan, "FedRS: federated learning with restricted softmax for label distribution non-IID data", KDD 2021.
Shares, receives and predicts as FedAvg: plain logits when predicting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import option
from fedcc.core.requests import Fitted
from fedcc.core.roles import Client
from fedcc.core.step import Loss, Step
from fedcc.losses import cross_entropy
from fedcc.methods.fedavg import FedAvg

Rule = Literal["binary", "continuous"]


@dataclass(frozen=True)
class RestrictedSoftmax(Loss):
    """Cross entropy of the logits times ``constants["scale"]`` [C]."""

    def __call__(self, step: Step) -> Tensor:
        batch = step["private"]
        return cross_entropy(batch.logits * step.constants["scale"].to(batch.logits.dtype), batch["y"])


@dataclass(frozen=True)
class FedRS(FedAvg):
    """FedAvg with a softmax that restricts missing classes."""

    source: ClassVar[str] = "Li & Zhan, KDD 2021"
    alpha: float = option(0.5, "scale of a missing class's logit; 1 is FedAvg", "paper", low=0, high=1)
    rule: Rule = option(
        "binary", "scale only missing classes, or every class by its count relative to the largest", "paper"
    )

    async def train(self, c: Client, received: Weights) -> Fitted:
        if self.alpha == 1:
            return await super().train(c, received)
        constants = {"scale": scales(c.counts(), self.alpha, self.rule)}
        return await c.fit("fit", RestrictedSoftmax(), private=c.private, constants=constants)


def scales(counts: Tensor, alpha: float, rule: Rule) -> Tensor:
    """1 for present and alpha for missing classes; continuous: alpha + (1 - alpha) n_c / max n. [C]."""
    n = counts.double()
    share = n / n.max() if rule == "continuous" else (n > 0).double()
    return share + alpha * (1 - share)  # exactly 1 where share is
