"""FedDF: the server distils the ensemble of all clients into one student per architecture.

Lin et al., "Ensemble distillation for robust model fusion in federated learning", NeurIPS 2020.
Shares weights; receives the student of its own architecture; predicts with the student of the last distinct
architecture in client order (ResNet20 where clients have ResNet14 and ResNet20).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import Family, Reading, option
from fedcc.core.model import Model
from fedcc.core.requests import Predict
from fedcc.core.roles import Server
from fedcc.core.samples import Samples
from fedcc.gradients import Clip
from fedcc.losses import Distill, kl
from fedcc.methods import groups
from fedcc.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedDF(FedAvg):
    """Average within each architecture, then learn the mean of all clients' logits on the public samples."""

    family: ClassVar[Family] = "distillation"
    source: ClassVar[str] = "Lin et al., NeurIPS 2020"
    averaged: ClassVar[bool] = False  # trained on the public samples, statistics included

    average: Literal["logits", "probs"] = option("logits", "what the teacher averages", "official commands")
    epochs: int | None = option(None, "epochs of distillation; the run's by default", "parity", low=0)
    steps: int | None = option(None, "steps of distillation, instead of epochs", "official code: 10,000", low=0)
    clip: float = option(5.0, "largest norm of a student's gradient; 0: no limit", "official code", low=0)
    early_stop: Literal["none", "kl"] = option("none", "kl: keep the student best on a held-out 10 %", "no labels")
    patience: int = option(1000, "steps without gain after which early_stop ends", "official code", low=1)

    def readings(self, public: Samples) -> Mapping[str, Reading]:
        return {**super().readings(public), "clients-mean": groups.clients_mean}

    async def start(self, s: Server) -> Mapping[int, Weights]:
        if self.early_stop == "kl" and s.recipe.momentum is not None:
            raise ValueError("early_stop=kl continues with Adam's state from epoch to epoch: it needs optimizer=adam")
        await groups.first_models(s)
        return self.publish(s)

    async def server(self, s: Server, ups: Mapping[int, Weights]) -> Mapping[int, Weights]:
        names = groups.by_architecture(s)
        target = self.teacher(s, ups, await groups.logits(groups.uploaded(s, ups), s.public))
        groups.merge(s, ups, names)  # the students' starts
        for name in dict.fromkeys(names.values()):
            s.models[name], s.log[f"kl, {name}"] = await self.distil(s, s.models[name], s.public.with_(target=target))
        return self.publish(s)

    def teacher(self, s: Server, ups: Mapping[int, Weights], logits: Tensor) -> Tensor:
        """What the students learn [N, C], from the clients' logits [K, N, C]."""
        return ensemble(logits, self.average)

    def publish(self, s: Server) -> Mapping[int, Weights]:
        s.models["global"] = s.models[f"group {len(groups.distinct(s.archs)) - 1}"]
        return groups.downlinks(s)

    async def distil(self, s: Server, student: Model, public: Samples) -> tuple[Model, float]:
        """A student after its distillation, and its divergence from the teacher (while training, or held out)."""
        recipe = s.recipe_with(epochs=self.epochs, steps=self.steps, schedule="cosine")
        held_out, rest = holdout(s, public) if self.early_stop == "kl" else (public, public)
        clip = Clip(self.clip) if self.clip else None
        whole = s.fit_request("distill", student, Distill("public"), public=rest, recipe=recipe, gradient=clip)
        if self.early_stop == "none":
            fitted = await whole
            return fitted.model, fitted.loss

        best, lowest, last_gain, optimizer = student, await divergence(student, held_out), 0, whole.optimizer
        epoch = -(-len(rest) // recipe.batch)
        for t in range(0, whole.steps, epoch):
            if t - last_gain >= self.patience:
                break
            steps = min(epoch, whole.steps - t)
            rate = recipe.lr * 0.5 * (1 + math.cos(math.pi * t / whole.steps))  # cosine, in stairs of an epoch
            part = replace(recipe, steps=steps, lr=rate, schedule="constant", reset="round")
            key = whole.key.of(phase=f"distill from {t}")
            fitted = await replace(whole, model=student, recipe=part, key=key, optimizer=optimizer)
            student, optimizer = fitted.model, fitted.optimizer
            if (now := await divergence(student, held_out)) < lowest:
                best, lowest, last_gain = student, now, t + steps
        return best, lowest


def ensemble(logits: Tensor, average: str) -> Tensor:
    """The teacher's probabilities [N, C] from the clients' logits [K, N, C]: softmax of the mean, or its reverse."""
    return logits.mean(0).softmax(-1) if average == "logits" else logits.softmax(-1).mean(0)


async def divergence(student: Model, samples: Samples) -> float:
    """The mean of KL(target || student) on clean samples."""
    return float(kl(samples["target"], (await Predict(student, samples.only("x"))).logits))


def holdout(s: Server, public: Samples) -> tuple[Samples, Samples]:
    """A tenth of the public samples, the same in every round, and the rest."""
    if len(public) < 2:
        raise ValueError(f"early_stop=kl holds public samples out, so it needs at least 2, got {len(public)}")
    order = torch.from_numpy(s.key.of(round=0, phase="holdout").generator().permutation(len(public)))
    cut = max(1, len(public) // 10)
    return public.at(order[:cut]), public.at(order[cut:])
