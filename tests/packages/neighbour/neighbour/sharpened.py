"""Sharpened: the clients' mean prediction on public samples, sharpened, teaches the clients and a model of the server.

The idea is that of DS-FL (Itahara et al., IEEE Transactions on Mobile Computing 2021), written for this example.
Shares probabilities on the public samples [n_u, C]; receives their sharpened mean; predicts with the server's model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcc import Method, option
from fedcc.core.messages import Predictions
from fedcc.core.method import Family, Reading, Trained
from fedcc.core.requests import Predict, gather
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.losses import CrossEntropy, Distill


@dataclass(frozen=True)
class Sharpened(Method[Predictions, Predictions]):
    """Learn the sharpened mean of all clients' predictions on public data, at the clients and at the server."""

    family: ClassVar[Family] = "distillation"
    source: ClassVar[str] = "Itahara et al., IEEE TMC 2021"

    temperature: float = option(
        0.1, "of the softmax that sharpens mean probabilities", "a port by its authors", above=0
    )

    async def start(self, s: Server) -> Mapping[int, Predictions | None]:
        s.models["global"] = await s.init(s.archs[0])
        return dict.fromkeys(s.archs)

    async def client(self, c: Client, down: Predictions | None) -> Predictions:
        if down is not None:
            await c.fit("sync", Distill("public"), public=c.public.with_(target=down.values))
        await c.fit("fit", CrossEntropy("private"), private=c.private)
        return Predictions((await c.predict(c.public)).logits.softmax(-1))

    async def server(self, s: Server, ups: Mapping[int, Predictions]) -> Mapping[int, Predictions]:
        target = sharpened(torch.stack([up.values for up in ups.values()]).mean(0), self.temperature)
        public = s.public.with_(target=target)
        s.models["global"] = (await s.fit_request("distil", s.models["global"], Distill("public"), public=public)).model
        return s.to_all(Predictions(target))

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        return (await Predict(t.server["global"], samples)).logits

    def readings(self, public: Samples) -> Mapping[str, Reading]:
        return {**super().readings(public), "clients-mean": clients_mean}


async def clients_mean(t: Trained, samples: Samples) -> Tensor | None:
    if not t.clients:  # across machines their models do not come to the server
        return None
    outputs = await gather(*(Predict(model, samples) for model in t.clients.values()))
    return torch.stack([o.logits.softmax(-1) for o in outputs]).mean(0)


def sharpened(probabilities: Tensor, temperature: float) -> Tensor:
    """Entropy reduction: a softmax over probabilities."""
    return (probabilities / temperature).softmax(-1)
