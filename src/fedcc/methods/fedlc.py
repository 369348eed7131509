"""FedLC: every logit is reduced by a margin that is larger the rarer its class is at the client.

Zhang et al., "Federated learning with label distribution skew via logits calibration", ICML 2022.
Shares, receives and predicts as FedAvg: plain logits when predicting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import option
from fedcc.core.requests import Fitted
from fedcc.core.roles import Client
from fedcc.core.step import Loss, Step
from fedcc.losses import CrossEntropy, cross_entropy, is_class, masked_logsumexp
from fedcc.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Calibrated(Loss):
    """Cross entropy of the logits minus ``constants["offset"]`` [C]; an infinite offset removes a class."""

    def __call__(self, step: Step) -> Tensor:
        batch = step["private"]
        return cross_entropy(batch.logits - step.constants["offset"].to(batch.logits.dtype), batch["y"])


@dataclass(frozen=True)
class CalibratedAgainstOthers(Loss):
    """-ln(e^{z_y} / sum_{c != y} e^{z_c}), z the logits minus the offset: the published formula.

    A sample whose class has no rival adds nothing.
    """

    def __call__(self, step: Step) -> Tensor:
        batch = step["private"]
        offset: Tensor = step.constants["offset"].to(batch.logits.dtype)
        z = batch.logits - offset.nan_to_num(posinf=0.0)
        label = is_class(batch["y"], z.shape[-1])
        rivals = label.logical_not() & offset.isfinite()
        margin = masked_logsumexp(z, rivals, -1) - (z * label).sum(-1)
        return (margin * rivals.any(-1)).mean()


@dataclass(frozen=True)
class FedLC(FedAvg):
    """FedAvg with logits calibrated by the client's label counts."""

    source: ClassVar[str] = "Zhang et al., ICML 2022"
    tau: float = option(0.5, "size of the margins; 0 is FedAvg", "FedVLS appendix, MarsFL", low=0)
    denominator: Literal["include", "exclude"] = option("include", "include or exclude the true class", "all code")

    async def train(self, c: Client, received: Weights) -> Fitted:
        loss: Loss = CalibratedAgainstOthers() if self.denominator == "exclude" else Calibrated()
        if self.tau == 0 and self.denominator == "include":
            loss = CrossEntropy("private")
        return await c.fit("fit", loss, private=c.private, constants={"offset": offsets(c.counts(), self.tau)})


def offsets(counts: Tensor, tau: float) -> Tensor:
    """Tau n_c^(-1/4), infinite for missing classes; 0 for all if tau is 0. [C]."""
    n = counts.double()
    return tau * n.pow(-0.25) if tau else torch.zeros_like(n)
