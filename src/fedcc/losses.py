"""Loss terms that several methods share. Each sees one step of one client and returns a mean over the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcc.core.step import Loss, Step, joined


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Cross entropy with the labels in column ``y``; ``known`` restricts the softmax to that many first outputs."""

    stream: str
    known: int | None = None

    def __call__(self, step: Step) -> Tensor:
        batch = step[self.stream]
        return cross_entropy(batch.logits[:, : self.known], batch["y"])


@dataclass(frozen=True)
class SoftCrossEntropy(Loss):
    """Cross entropy with the soft labels in column ``target``: the mean of -sum_c q_c log p_c."""

    stream: str

    def __call__(self, step: Step) -> Tensor:
        batch = step[self.stream]
        return -(batch["target"] * F.log_softmax(batch.logits, -1)).sum(-1).mean()


@dataclass(frozen=True)
class Distill(Loss):
    """KL(target || softmax) over the first ``known`` outputs, the mean over the batch; all-zero targets add nothing."""

    stream: str
    known: int | None = None

    def __call__(self, step: Step) -> Tensor:
        batch = step[self.stream]
        return kl(batch["target"], batch.logits[:, : self.known])  # Eq. (2)


@dataclass(frozen=True)
class LogitDistance(Loss):
    """The mean over batch and classes of |z - target|^power: power 1 is FedMD's alignment of logits."""

    stream: str
    power: int = 1

    def __call__(self, step: Step) -> Tensor:
        batch = step[self.stream]
        difference = batch.logits - batch["target"]
        return difference.abs().mean() if self.power == 1 else difference.square().mean()


@dataclass(frozen=True)
class Proximal(Loss):
    """The sum over what is trained of |theta - w|^2, w in ``constants["w"]``; running statistics have no part in it."""

    def __call__(self, step: Step) -> Tensor:
        w = step.constants["w"]
        return (joined(step.params.values()) - joined(w[name] for name in step.params)).square().sum()


def kl(q: Tensor, z: Tensor) -> Tensor:
    """The mean of KL(q || softmax(z)), [B, C] both."""
    return (torch.xlogy(q, q) - q * F.log_softmax(z, -1)).sum(-1).mean()


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """The mean cross entropy of labels ``y`` [B] and logits ``z`` [B, C], in few operations under ``vmap`` too."""
    if any(torch._C._functorch.is_batchedtensor(t) for t in (z, y)):
        return _OfAllLanes.apply(z, y)  # type: ignore[no-any-return, no-untyped-call]
    return F.cross_entropy(z, y)


class _OfAllLanes(torch.autograd.Function):
    """Cross entropy with its own vmap rule, made of operations that autograd can differentiate."""

    @staticmethod
    def forward(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Saves nothing; torch requires the method."""

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, int | None], z: Tensor, y: Tensor) -> tuple[Tensor, int]:
        z, y = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((z, y), dims, strict=True)
        )
        logs = F.log_softmax(z, -1)
        return F.nll_loss(logs.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1), 0


def is_class(y: Tensor, classes: int) -> Tensor:
    """Which entry of a row is the label's: a mask [B, classes]."""
    return y[:, None] == torch.arange(classes, device=y.device)


def masked_logsumexp(z: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Ln of the sum of e^z over the entries in the mask; 0, and no gradient at all, where the mask is empty."""
    some = mask.any(dim, keepdim=True)
    wide = mask | ~some  # a row masked everywhere would give a gradient of NaN
    return z.masked_fill(~wide, -math.inf).logsumexp(dim) * some.squeeze(dim)


def masked_kl(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """The mean of KL(softmax(z^t) || softmax(z)), both over only the classes in the mask, [C] or [B, C].

    It is 0 for a sample with fewer than two of them.
    """
    enough = mask.sum(-1, keepdim=True) > 1
    inside = mask | ~enough  # a row masked everywhere would give a gradient of NaN
    log_q, log_p = (F.log_softmax(z.masked_fill(~inside, -math.inf), -1) for z in (teacher, student))
    gaps = log_q.masked_fill(~inside, 0) - log_p.masked_fill(~inside, 0)
    return ((log_q.exp() * gaps).sum(-1) * enough.squeeze(-1)).mean()
