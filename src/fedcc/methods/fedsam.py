"""FedSAM: each local step takes the gradient at the worst point near the weights.

Qu et al., "Generalized federated learning via sharpness aware minimization", ICML 2022.
Shares, receives and predicts as FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedcc.core.messages import Weights
from fedcc.core.method import option
from fedcc.core.requests import Fitted
from fedcc.core.roles import Client
from fedcc.gradients import Ascent
from fedcc.losses import CrossEntropy
from fedcc.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedSAM(FedAvg):
    """FedAvg with gradients taken a step rho uphill, where the loss is higher."""

    source: ClassVar[str] = "Qu et al., ICML 2022"
    rho: float = option(0.1, "how far the worst point lies; 0 is FedAvg", "FedVLS appendix, FedLESAM", low=0)

    async def train(self, c: Client, received: Weights) -> Fitted:
        gradient = Ascent(self.rho) if self.rho else None
        return await c.fit("fit", CrossEntropy("private"), private=c.private, gradient=gradient)
