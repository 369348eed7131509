"""FedNTD: forgetting happens in the classes that a sample is not of, so the received model's opinion on those is kept.

Lee et al., "Preservation of the global knowledge by not-true distillation in federated learning", NeurIPS 2022.
Shares, receives and predicts as FedAvg; the received model is also the frozen teacher (evaluation mode).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import option
from fedcc.core.requests import Fitted, Frozen
from fedcc.core.roles import Client
from fedcc.core.step import Loss, Step
from fedcc.losses import CrossEntropy, is_class, masked_kl
from fedcc.methods.fedavg import FedAvg


@dataclass(frozen=True)
class NotTrue(Loss):
    """tau^2 KL(softmax(f^g / tau) || softmax(f / tau)), both over all classes but the sample's own."""

    tau: float = 1.0

    def __call__(self, step: Step) -> Tensor:
        batch, teacher = step["private"], step.seen["teacher"].logits
        others = ~is_class(batch["y"], batch.logits.shape[-1])
        return self.tau**2 * masked_kl(teacher / self.tau, batch.logits / self.tau, others)


@dataclass(frozen=True)
class FedNTD(FedAvg):
    """FedAvg with the received model as a teacher for all classes but the sample's own."""

    source: ClassVar[str] = "Lee et al., NeurIPS 2022"
    beta: float = option(1.0, "weight of the distillation; 0 is FedAvg", "official code", low=0)
    tau: float = option(1.0, "temperature of the distillation", "official configuration; its class has 3", above=0)

    async def train(self, c: Client, received: Weights) -> Fitted:
        teacher = {"teacher": Frozen(c.model, "private")} if self.beta else {}
        loss = CrossEntropy("private") + self.beta * NotTrue(self.tau)
        return await c.fit("fit", loss, private=c.private, frozen=teacher)
