"""SSL: each client labels the public samples itself and trains on them too; nothing is shared.

Plain self-training (Yarowsky, ACL 1995), Eq. (3) of the FedCC paper; the comparison of its Table II.
Shares and receives nothing; each client predicts with its own model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedcc.core.method import option
from fedcc.core.roles import Client
from fedcc.losses import CrossEntropy, SoftCrossEntropy
from fedcc.methods.bounds import Local


@dataclass(frozen=True)
class SSL(Local):
    """Local self-training with hard pseudo labels on the public samples."""

    source: ClassVar[str] = "Yarowsky, ACL 1995; Eq. (3)"
    retired: ClassVar[Mapping[str, Any]] = {"cycles": None, "refine_epoch": "max"}

    lam: float = option(0.2, "weight of the public loss", "Sec. V-A", low=0)
    threshold: float = option(0.0, "pseudo labels below this confidence are left out", "Eq. (3)", low=0, high=1)
    refine_joint_batch: bool = option(True, "private and public batch in one forward pass", "as FedCC")

    @property
    def needs_public(self) -> bool:
        return True

    async def client(self, c: Client, down: None) -> None:
        await super().client(c, down)
        logits = (await c.predict(c.public)).logits
        await c.fit(
            "refine",
            CrossEntropy("private") + self.lam * SoftCrossEntropy("public"),  # Eq. (3)
            private=c.private,
            public=c.public.with_(target=hard_labels(logits, self.threshold)),
            joint=self.refine_joint_batch,
        )


def hard_labels(logits: Tensor, threshold: float = 0.0) -> Tensor:
    """One-hot argmax_c f_c(x), the pseudo label of Eq. (3); all zero (no loss) where it is less probable than that."""
    label = F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return label * (logits.softmax(-1).amax(-1, keepdim=True) >= threshold)
