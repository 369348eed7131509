"""FedMR: with few classes a client's features collapse; decorrelate them within each class, keep classes apart.

Fan et al., "Federated learning under partially class-disjoint data via manifold reshaping", TMLR 2023.
Shares, receives and predicts as FedAvg; with ``mode="paper"`` also class means of the features [C, d] and their counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import option
from fedcc.core.requests import Fitted
from fedcc.core.roles import Client, Server
from fedcc.core.step import Loss, Step
from fedcc.losses import CrossEntropy, is_class
from fedcc.methods.fedavg import FedAvg


@dataclass(frozen=True, eq=False, kw_only=True)
class Prototypes(Weights):
    """Weights with the mean feature of each class, means [C, d] of counts [C] samples (0: not known)."""

    means: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Decorrelation(Loss):
    """L_intra: the correlations of a batch's features within each class."""

    def __call__(self, step: Step) -> Tensor:
        return intra(step["private"].features, step["private"]["y"])


@dataclass(frozen=True)
class PrototypeMargin(Loss):
    """L_inter: samples nearer to another class's prototype than to their own."""

    def __call__(self, step: Step) -> Tensor:
        batch = step["private"]
        return inter(batch.features, batch["y"], step.constants["means"], step.constants["known"])


@dataclass(frozen=True)
class FedMR(FedAvg):
    """FedAvg with features reshaped: mu L_intra, and mu2 L_inter in the paper's mode."""

    source: ClassVar[str] = "Fan et al., TMLR 2023"
    mode: Literal["code", "paper"] = option(
        "code", "only the released code's loss, or both of the paper's, the second reconstructed", "code"
    )
    mu: float = option(0.01, "weight of the decorrelation within classes", "official code", low=0)
    mu2: float = option(0.01, "weight of the margin between prototypes; mode=paper only", "ours", low=0)

    async def client(self, c: Client, down: Weights | None) -> Weights:
        up = await super().client(c, down)
        if self.mode == "code":
            return up
        means = class_means((await c.predict(c.private)).features, c.private["y"], c.classes)
        return Prototypes(up.state, up.samples, means=means, counts=c.counts().int())

    async def train(self, c: Client, received: Weights) -> Fitted:
        loss = CrossEntropy("private") + self.mu * Decorrelation()
        if not isinstance(received, Prototypes):  # the code's mode, or round 1
            return await c.fit("fit", loss, private=c.private)
        constants = {"means": received.means, "known": received.counts > 0}
        return await c.fit("fit", loss + self.mu2 * PrototypeMargin(), private=c.private, constants=constants)

    async def server(self, s: Server, ups: Mapping[int, Weights]) -> Mapping[int, Weights]:
        downs = await super().server(s, ups)
        prototypes_sent = [up for up in ups.values() if isinstance(up, Prototypes)]
        if not prototypes_sent:
            return downs
        means, counts = prototypes(
            torch.stack([up.means for up in prototypes_sent]), torch.stack([up.counts for up in prototypes_sent])
        )
        if "means" in s.memory:
            means = torch.where(counts[:, None] > 0, means, s.memory["means"])
            counts = torch.where(counts > 0, counts, s.memory["counts"])
        s.memory |= {"means": means, "counts": counts}
        return s.to_all(Prototypes(s.models["global"].floating, means=means, counts=counts))


def intra(features: Tensor, y: Tensor) -> Tensor:
    """sum_c mean(offdiag(X_c^T X_c)^2) / sum_c n_c over classes of two samples or more, X_c standardised within c."""
    same = (y[:, None] == y[None, :]).to(features.dtype)
    n = same.sum(1, keepdim=True)
    centred = features - same @ features / n
    x = centred / (1e-8 + same @ centred.square() / (n - 1).clamp(min=1)).sqrt()
    whole = (same * (x @ x.T).square()).sum()  # sum_c |X_c^T X_c|^2, as |X^T X| = |X X^T|: no loop over classes
    diagonal = ((same @ x.square()).square() / n).sum()  # each class counted by each of its n samples
    d = features.shape[1]
    return (whole - diagonal) / max(d * (d - 1), 1) / (n > 1).sum().clamp(min=1)


def inter(z: Tensor, y: Tensor, means: Tensor, known: Tensor) -> Tensor:
    """The mean over samples and known classes j != y of max(0, |z - g_y| - |z - g_j|); 0 if there are none."""
    own = is_class(y, len(means))
    distance: Tensor = torch.linalg.vector_norm(z[:, None] - means, dim=-1)  # [B, C]
    pairs = own.logical_not() & known & (own & known).any(-1, keepdim=True)
    excess = ((distance * own).sum(-1, keepdim=True) - distance).clamp(min=0) * pairs
    return excess.sum() / pairs.sum().clamp(min=1)


def class_means(features: Tensor, y: Tensor, classes: int) -> Tensor:
    """The mean feature of each class [C, d]; zeros for classes that are missing."""
    own = is_class(y, classes).to(features.dtype)
    return own.T @ features / own.sum(0).clamp(min=1)[:, None]


def prototypes(means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """g_c = sum_k n_kc z_kc / sum_k n_kc [C, d] and the counts [C], from means [K, C, d] and counts [K, C]."""
    total = counts.sum(0, dtype=counts.dtype)
    share = counts.to(means.dtype) / total.clamp(min=1)
    return (share[..., None] * means).sum(0), total
