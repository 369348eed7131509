"""DS-FL: the clients' mean prediction on public data, sharpened, teaches the clients and a model of the server.

Itahara et al., "Distillation-based semi-supervised federated learning for communication-efficient collaborative
training with non-IID private data", IEEE Transactions on Mobile Computing 2021.
Shares probabilities on the public samples [n_u, C]; receives their sharpened mean; predicts with the server's model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedcc.core.messages import Predictions
from fedcc.core.method import Family, Reading, option
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.losses import Distill
from fedcc.methods import groups
from fedcc.methods.abstention import entropy
from fedcc.methods.fedavg import GlobalModel
from fedcc.methods.fedmd import FedMD
from fedcc.methods.sharpen import era

PLAIN = FedMD()  # the clients' side


@dataclass(frozen=True)
class DSFL(GlobalModel[Predictions, Predictions]):
    """Learn the sharpened mean of all clients' predictions on public data, at the clients and at the server."""

    family: ClassVar[Family] = "distillation"
    source: ClassVar[str] = "Itahara et al., IEEE TMC 2021"
    note: ClassVar[str] = "reconstruction from a port"
    answers = "probabilities"

    temperature: float = option(0.1, "temperature of the sharpening softmax", "port by its authors", above=0)
    server_arch: str | None = option(None, "the server's network; the clients' last distinct one by default", "parity")

    def readings(self, public: Samples) -> Mapping[str, Reading]:
        return {**super().readings(public), "clients-mean": groups.clients_mean}

    async def start(self, s: Server) -> Mapping[int, None]:
        s.models["global"] = await s.init(groups.chosen_network(s, self.server_arch), "server")
        return dict.fromkeys(s.archs)

    async def client(self, c: Client, down: Predictions | None) -> Predictions:
        return await PLAIN.client(c, down)

    async def server(self, s: Server, ups: Mapping[int, Predictions]) -> Mapping[int, Predictions]:
        mean = PLAIN.mean([up.values for up in ups.values()])
        target = era(mean, self.temperature)
        s.log |= {"entropy, mean": float(entropy(mean).mean()), "entropy, target": float(entropy(target).mean())}
        await learn(s, target)
        return s.to_all(Predictions(target))


async def learn(s: Server, target: Tensor, rows: Tensor | None = None) -> None:
    """Train the server's model on its targets [n_u, C]; on those of some rows, if they are given."""
    public = s.public.with_(target=target)
    public = public if rows is None else public.at(rows)
    fitted = await s.fit_request("distil", s.models["global"], Distill("public"), public=public)
    s.models["global"], s.log["distillation loss"] = fitted.model, fitted.loss
