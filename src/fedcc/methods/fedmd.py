"""FedMD: clients align their predictions on public data with the average, then return to their private data.

Li and Wang, "FedMD: heterogenous federated learning via model distillation", NeurIPS workshop 2019.
Shares probabilities on the public samples [n_u, C]; receives their average; predicts by the mean probabilities of all
clients.
Deviations: KL on probabilities, as in Eqs. (1) and (2) of the FedCC paper; the authors' code has ``loss="l1",
average="logits"``. No pre-training on labelled public data (there is none); the run's epochs for both phases; the
original reports the clients' own accuracy, which the record holds too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcc.core.messages import Predictions
from fedcc.core.method import Family, Method, Reading, Trained, option, shares
from fedcc.core.requests import Predict, gather
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.core.step import Loss
from fedcc.losses import CrossEntropy, Distill, LogitDistance


@dataclass(frozen=True)
class FedMD(Method[Predictions, Predictions]):
    """Digest the average of all clients' predictions on public data, then revisit private data."""

    family: ClassVar[Family] = "distillation"
    source: ClassVar[str] = "Li & Wang, NeurIPS workshop 2019"
    uploads_models: ClassVar[bool] = True

    loss: Literal["l1", "mse", "kl"] = option("kl", "distance to the average while digesting", "Eq. (2)")
    average: Literal["logits", "probs"] = option("probs", "what is shared and averaged", "Eq. (1)")
    digest_epochs: int | None = option(None, "epochs of alignment; the run's by default", "parity", low=0)
    revisit_epochs: int | None = option(None, "epochs on private data; the run's by default", "parity", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.average == "probs" and self.loss != "kl":
            raise ValueError(f"average=probs needs loss=kl (the other losses compare logits), got loss={self.loss}")

    async def client(self, c: Client, down: Predictions | None) -> Predictions:
        if down is not None:
            target = down.values if self.loss != "kl" or self.average == "probs" else down.values.softmax(-1)
            recipe = c.recipe_with(epochs=self.digest_epochs)
            await c.fit("sync", self.digest, public=c.public.with_(target=target), recipe=recipe)
        await c.fit("fit", CrossEntropy("private"), private=c.private, recipe=c.recipe_with(epochs=self.revisit_epochs))
        return Predictions(self.shared((await c.predict(c.public)).logits))

    async def server(self, s: Server, ups: Mapping[int, Predictions]) -> Mapping[int, Predictions]:
        return s.to_all(Predictions(torch.stack([up.values for up in ups.values()]).mean(0)))

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        outputs = await gather(*(Predict(model, samples) for model in t.clients.values()))
        return torch.stack([self.shared(o.logits) for o in outputs]).mean(0)

    def readings(self, public: Samples) -> Mapping[str, Reading]:
        others = dict(super().readings(public))
        if self.average == "probs":
            others["mean-logits"] = replace(self, average="logits").predict
        return others

    def probabilities(self, scores: Tensor) -> Tensor:
        return shares(scores) if self.average == "probs" else super().probabilities(scores)

    @property
    def digest(self) -> Loss:
        return Distill("public") if self.loss == "kl" else LogitDistance("public", 1 if self.loss == "l1" else 2)

    def shared(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self.average == "probs" else logits
