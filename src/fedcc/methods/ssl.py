"""SSL: each client labels the public samples itself and trains on them too; nothing is shared.

Plain self-training (Yarowsky, ACL 1995), Eq. (3) of the FedCC paper; the comparison of its Table II.
Shares and receives nothing; each client predicts with its own model.
Deviations: one cycle of fit and self-training a round, to equal the rounds of the others; no confidence threshold by
default, as in the equation (the prose speaks of high confidence).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from fedcc.core.method import Family, Method, Trained, option
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.losses import CrossEntropy, SoftCrossEntropy
from fedcc.methods.bounds import each_client

PACES: dict[str, str | None] = {"max": None, "labelled": "private", "public": "public"}


@dataclass(frozen=True)
class SSL(Method[None, None]):
    """Local self-training with hard pseudo labels on the public samples."""

    family: ClassVar[Family] = "bound"
    source: ClassVar[str] = "Yarowsky, ACL 1995; Eq. (3)"

    lam: float = option(0.2, "weight of the public loss", "Sec. V-A", low=0)
    threshold: float = option(0.0, "pseudo labels below this confidence are left out", "Eq. (3)", low=0, high=1)
    cycles: int | None = option(None, "cycles of fit and self-training; one a round by default", "parity", low=1)
    refine_joint_batch: bool = option(True, "private and public batch in one forward pass", "as FedCC")
    refine_epoch: Literal["max", "labelled", "public"] = option("max", "which set's length makes an epoch", "as FedCC")

    async def client(self, c: Client, down: None) -> None:
        if self.cycles is not None and c.round > self.cycles:
            return
        await c.fit("fit", CrossEntropy("private"), private=c.private)
        logits = (await c.predict(c.public)).logits
        await c.fit(
            "refine",
            CrossEntropy("private") + self.lam * SoftCrossEntropy("public"),  # Eq. (3)
            private=c.private,
            public=c.public.with_(target=hard_labels(logits, self.threshold)),
            joint=self.refine_joint_batch,
            recipe=c.recipe_with(pace=PACES[self.refine_epoch]),
        )

    async def server(self, s: Server, ups: Mapping[int, None]) -> Mapping[int, None]:
        return s.to_all(None)

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        return await each_client(t, samples)


def hard_labels(logits: Tensor, threshold: float = 0.0) -> Tensor:
    """One-hot argmax_c f_c(x), the pseudo label of Eq. (3); all zero (no loss) where it is less probable than that."""
    label = F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return label * (logits.softmax(-1).amax(-1, keepdim=True) >= threshold)
