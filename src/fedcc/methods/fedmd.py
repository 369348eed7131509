"""FedMD: clients align their predictions on public data with the average, then return to their private data.

Li and Wang, "FedMD: heterogenous federated learning via model distillation", NeurIPS workshop 2019.
Shares probabilities on the public samples [n_u, C]; receives their average; predicts by the mean probabilities of all
clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedcc.core.messages import Predictions
from fedcc.core.method import Answers, Family, Method, Reading, Trained, option, shares
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
    version: ClassVar[int] = 2
    earlier: ClassVar[Mapping[int, Mapping[str, Any]]] = {1: {"loss": "l1", "average": "logits"}}

    loss: Literal["l1", "mse", "kl"] = option("kl", "distance to the average while digesting", "Eq. (2)")
    average: Literal["logits", "probs"] = option("probs", "what is shared and averaged", "Eq. (1)")
    logit_limit: float = option(100.0, "shared logits are cut to -limit .. limit", "ours", above=0)
    digest_epochs: int | None = option(None, "epochs of alignment; the run's by default", "parity", low=0)
    revisit_epochs: int | None = option(None, "epochs on private data; the run's by default", "parity", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.average == "probs" and self.loss != "kl":
            raise ValueError(f"average=probs needs loss=kl (the other losses compare logits), got loss={self.loss}")

    @property
    def answers(self) -> Answers:  # type: ignore[override]
        return "probabilities" if self.average == "probs" else "logits"

    async def client(self, c: Client, down: Predictions | None) -> Predictions:
        if down is not None:
            target = down.values if self.loss != "kl" or self.average == "probs" else down.values.softmax(-1)
            recipe = c.recipe_with(epochs=self.digest_epochs)
            await c.fit("sync", self.digest, public=c.public.with_(target=target), recipe=recipe)
        await c.fit("fit", CrossEntropy("private"), private=c.private, recipe=c.recipe_with(epochs=self.revisit_epochs))
        return Predictions(self.shared((await c.predict(c.public)).logits))

    async def server(self, s: Server, ups: Mapping[int, Predictions]) -> Mapping[int, Predictions]:
        return s.to_all(Predictions(self.mean([up.values for up in ups.values()])))

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        outputs = await gather(*(Predict(model, samples) for model in t.clients.values()))
        return self.mean([self.shared(o.logits) for o in outputs])

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

    def mean(self, values: list[Tensor]) -> Tensor:
        """The unweighted mean [N, C]; logits are cut to the limit, so that no client decides it alone."""
        stacked = torch.stack(values)
        return (stacked if self.average == "probs" else stacked.clamp(-self.logit_limit, self.logit_limit)).mean(0)

    def shared(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self.average == "probs" else logits
