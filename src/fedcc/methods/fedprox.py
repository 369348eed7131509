"""FedProx: a pull to the received weights. Li et al., "Federated optimization in heterogeneous networks", MLSys 2020.

Shares, receives and predicts as FedAvg.
"""

from dataclasses import dataclass

from fedcc.core.messages import Weights
from fedcc.core.method import option
from fedcc.core.requests import Fitted
from fedcc.core.roles import Client
from fedcc.losses import CrossEntropy, Proximal
from fedcc.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a pull to the received weights: mu / 2 times the squared distance in the local loss."""

    source = "Li et al., MLSys 2020"
    mu: float = option(0.01, "weight of the pull; others use 0.001 to 1", "FedVLS appendix", low=0)

    async def train(self, c: Client, received: Weights) -> Fitted:
        loss = CrossEntropy("private") + self.mu / 2 * Proximal()
        return await c.fit("fit", loss, private=c.private, constants={"w": received.state})
