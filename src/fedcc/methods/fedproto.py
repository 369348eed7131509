"""FedProto: clients share nothing but the mean feature of each class, and pull their features to everybody's means.

Tan et al., "FedProto: federated prototype learning across heterogeneous clients", AAAI 2022. A personalised method:
its authors test each client on its own classes.
Shares class means of its features [C, d] and their counts; receives the means over clients; predicts by the mean
probabilities of all clients. Networks may differ, but for the number of features d.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcc.core.method import Family, Method, Reading, Trained, Votes, option
from fedcc.core.model import Arch, Linear, Model
from fedcc.core.requests import Predict, gather
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.core.step import Loss, Step
from fedcc.losses import CrossEntropy
from fedcc.methods.fedmr import class_means, prototypes
from fedcc.methods.groups import distinct, logits

NONE = -1e9  # the score of a class without prototype


@dataclass(frozen=True, eq=False)
class ClassMeans:
    """The mean feature of each class, means [C, d] of counts [C] samples (0: no prototype)."""

    means: Tensor
    counts: Tensor


@dataclass(frozen=True)
class PrototypeDistance(Loss):
    """The mean over batch and features of (h - g_y)^2; a sample whose class has no prototype adds 0."""

    def __call__(self, step: Step) -> Tensor:
        batch, means, known = step["private"], step.constants["means"], step.constants["known"]
        gaps: Tensor = (batch.features - means[batch["y"]]) * known[batch["y"]][:, None]
        return gaps.square().mean()


@dataclass(frozen=True)
class FedProto(Method[ClassMeans, ClassMeans]):
    """Local training with features pulled to the prototypes that all clients share."""

    family: ClassVar[Family] = "ensemble"
    source: ClassVar[str] = "Tan et al., AAAI 2022"
    note: ClassVar[str] = "personalised"
    scores = "shares"
    uploads_models: ClassVar[bool] = True
    lam: float = option(0.1, "weight of the pull; 1 for MNIST", "official command for CIFAR-10", low=0)
    weight: Literal["equal", "counts"] = option("equal", "clients' weights in a prototype; paper: counts", "official")

    async def start(self, s: Server) -> Mapping[int, None]:
        widths = {arch: (await s.init(arch)).state["head.weight"].shape[1] for arch in distinct(s.archs)}
        if len(set(widths.values())) > 1:
            known = ", ".join(f"{arch.name} with {width}" for arch, width in widths.items())
            raise ValueError(f"FedProto averages features, so all networks need the same number of them, got {known}")
        return s.to_all(None)

    async def client(self, c: Client, down: ClassMeans | None) -> ClassMeans:
        loss: Loss = CrossEntropy("private")
        if down is None or not self.lam:  # round 1
            await c.fit("fit", loss, private=c.private)
        else:
            loss, constants = loss + self.lam * PrototypeDistance(), {"means": down.means, "known": down.counts > 0}
            await c.fit("fit", loss, private=c.private, constants=constants)
        means = class_means((await c.predict(c.private)).features, c.private["y"], c.classes)
        return ClassMeans(means, c.counts().int())

    async def server(self, s: Server, ups: Mapping[int, ClassMeans]) -> Mapping[int, ClassMeans]:
        counts = torch.stack([up.counts for up in ups.values()])
        weights = (counts > 0).to(counts.dtype) if self.weight == "equal" else counts
        means, _ = prototypes(torch.stack([up.means for up in ups.values()]), weights)
        total = counts.sum(0, dtype=counts.dtype)
        if "means" in s.memory:  # a class that nobody sent keeps its prototype
            means = torch.where(total[:, None] > 0, means, s.memory["means"])
            total = torch.where(total > 0, total, s.memory["counts"])
        s.memory |= {"means": means, "counts": total}
        s.models["prototypes"] = nearest(means, total > 0)
        return s.to_all(ClassMeans(means, total))

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        return (await logits(t.clients.values(), samples)).softmax(-1).mean(0)

    async def votes(self, t: Trained, samples: Samples) -> Votes:
        return await super().votes(Trained(t.classes, t.clients), samples)

    def readings(self, public: Samples) -> Mapping[str, Reading]:
        return {**super().readings(public), "prototype": by_prototype}


async def by_prototype(t: Trained, samples: Samples) -> Tensor | None:
    """The sum over clients of -|h_k(x) - g_c|^2, up to a term that all classes share: [N, C]."""
    outputs = await gather(*(Predict(model, samples) for model in t.clients.values()))
    linear = t.server["prototypes"].state
    if not all(out.features.shape[-1] for out in outputs):  # of models that stay at their sites
        return None
    return torch.stack([F.linear(out.features, linear["head.weight"], linear["head.bias"]) for out in outputs]).sum(0)


def nearest(means: Tensor, known: Tensor) -> Model:
    """Prototypes [C, d] as a linear model: 2 <h, g_c> - |g_c|^2 is largest for the one nearest to h."""
    classes, width = means.shape
    bias = torch.where(known, -means.square().sum(-1), NONE)
    return Model(Arch((Linear(width),), classes, (width,)), {"head.weight": 2 * means, "head.bias": bias})
