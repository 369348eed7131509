"""LSR: local training with a label-smoothing regulariser inside the plain exchange of predictions.

Yuan et al., "Revisiting knowledge distillation via label smoothing regularization", CVPR 2020: distillation acts as
label smoothing, so a hand-made teacher can stand in for a trained one.
Shares probabilities on the public samples [n_u, C]; receives their mean; predicts by the mean probability.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcc.core.messages import Predictions
from fedcc.core.method import Family, Method, Trained, option
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.core.step import Loss, Step
from fedcc.losses import CrossEntropy, Distill, is_class
from fedcc.methods.fedmd import FedMD

PLAIN = FedMD()  # the protocol around the regulariser


@dataclass(frozen=True)
class LSR(Method[Predictions, Predictions]):
    """Learn the mean prediction on public data, then private data with smoothed labels."""

    family: ClassVar[Family] = "distillation"
    source: ClassVar[str] = "Yuan et al., CVPR 2020"
    scores = "shares"
    uploads_models: ClassVar[bool] = True
    answers = "probabilities"

    a: float = option(0.1, "weight of the smoothing", "official code", low=0, high=1)
    variant: Literal["ls", "ls_code", "tfkd_reg"] = option(
        "ls", "a/C on every class; a/(C-1) on the wrong ones; a virtual teacher", "official code"
    )

    async def client(self, c: Client, down: Predictions | None) -> Predictions:
        if down is not None:
            await c.fit("sync", Distill("public"), public=c.public.with_(target=down.values))
        await c.fit("fit", self.objective(c.classes), private=c.private)
        return Predictions((await c.predict(c.public)).logits.softmax(-1))

    async def server(self, s: Server, ups: Mapping[int, Predictions]) -> Mapping[int, Predictions]:
        return await PLAIN.server(s, ups)

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        return await PLAIN.predict(t, samples)

    def objective(self, classes: int) -> Loss:
        """(1 - a) CE + a R: R is the cross entropy with the uniform distribution, or KL from the virtual teacher."""
        a = self.a * classes / (classes - 1) if self.variant == "ls_code" else self.a
        regulariser = VirtualTeacher("private") if self.variant == "tfkd_reg" else Uniform("private")
        return (1 - a) * CrossEntropy("private") + a * regulariser


@dataclass(frozen=True)
class Uniform(Loss):
    """Cross entropy with the uniform distribution."""

    stream: str

    def __call__(self, step: Step) -> Tensor:
        return -F.log_softmax(step[self.stream].logits, -1).mean()


@dataclass(frozen=True)
class VirtualTeacher(Loss):
    """KL(q || softmax) with the virtual teacher's q, the mean over the batch."""

    stream: str

    def __call__(self, step: Step) -> Tensor:
        batch = step[self.stream]
        q = virtual_teacher(batch["y"], batch.logits)
        return (q * (q.log() - F.log_softmax(batch.logits, -1))).sum(-1).mean()


def virtual_teacher(y: Tensor, like: Tensor, correct: float = 0.99, temperature: float = 20.0) -> Tensor:
    """softmax(r / 20) with r = 0.99 at y and 0.01 / (C - 1) elsewhere: [N, C], in the type of ``like``."""
    classes = like.shape[-1]
    other = torch.full_like(like, (1 - correct) / (classes - 1))
    return (torch.where(is_class(y, classes), torch.full_like(like, correct), other) / temperature).softmax(-1)
