"""Selective-FD: a client answers only for public samples that look like its own; ambiguous answers teach nobody.

Shao, Wu and Zhang, "Selective knowledge sharing for privacy-preserving federated distillation without a good
teacher", Nature Communications 2024.
Shares probabilities for the public samples that it chooses; receives the mean of the answers where there is one and
it is clear; predicts by the mean probabilities of all clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcc.core.messages import Rows
from fedcc.core.method import Family, Method, Trained, option
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.losses import CrossEntropy, Distill
from fedcc.methods.density import looks_own
from fedcc.methods.fedmd import FedMD

PLAIN = FedMD()


@dataclass(frozen=True)
class SelectiveFD(Method[Rows, Rows]):
    """Answer for public samples that look like a client's own; learn answers that are not ambiguous."""

    family: ClassVar[Family] = "distillation"
    source: ClassVar[str] = "Shao et al., Nature Communications 2024"
    note: ClassVar[str] = "reconstruction"  # its features outside of MNIST are unknown
    scores = "shares"
    uploads_models: ClassVar[bool] = True

    quantile: float = option(
        0.25, "share of its own samples that a client would refuse", "official code", low=0, high=1
    )
    ambiguity: float = option(2.0, "answers this far from one class are left out; 2: none", "port", low=0, high=2)
    points: int = option(250, "largest number of own and of noise points", "official code", low=1)
    space: Literal["own", "pixels"] = option("own", "where samples are compared: features or inputs", "ours")
    when: Literal["round", "once"] = option("round", "when the choice is made", "ours; official: once")

    async def client(self, c: Client, down: Rows | None) -> Rows:
        if down is not None:
            target = down.scattered(len(c.public))
            await c.fit("sync", Distill("public"), public=c.public.with_(target=target))
        await c.fit("fit", CrossEntropy("private"), private=c.private)
        out = await c.predict(c.public)
        rows = c.memory.get("chosen")
        if rows is None:
            rows = await self.chosen(c, out.features)
            if self.when == "once":
                c.memory["chosen"] = rows
        c.log["chosen"] = len(rows) / len(c.public)
        return Rows(rows, out.logits.softmax(-1)[rows.long()])

    async def chosen(self, c: Client, features: Tensor) -> Tensor:
        """The numbers [m] of the public samples that look like the client's own."""
        if self.space == "pixels":
            public, own = (samples.view.clean(samples.x) for samples in (c.public, c.private))
        else:
            public, own = features, (await c.predict(c.private)).features
        draws = c.key.of(phase="density").generator()
        return looks_own(public, own, self.points, self.quantile, draws).nonzero()[:, 0].int()

    async def server(self, s: Server, ups: Mapping[int, Rows]) -> Mapping[int, Rows]:
        q, answered = mean_answer([ups[k] for k in sorted(ups)], len(s.public))
        clear = 2 * (1 - q.amax(-1)) < self.ambiguity  # the L1 distance to its own one-hot; 2 where nobody answered
        s.log |= {"answered": float(answered.double().mean()), "clear": float(clear.double().mean())}
        rows = clear.nonzero()[:, 0]
        return s.to_all(Rows(rows.int(), q[rows]))

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        return await PLAIN.predict(t, samples)


def mean_answer(answers: list[Rows], samples: int) -> tuple[Tensor, Tensor]:
    """The mean of the answers for each public sample [n_u, C], zero where there is none, and where there is one."""
    dense = torch.stack([answer.scattered(samples) for answer in answers])
    number = torch.stack([answer.mask(samples) for answer in answers]).sum(0)
    return dense.sum(0) / number.clamp(min=1)[:, None], number > 0
