"""SCARLET: DS-FL with a power that sharpens, and with caches, so that what both sides have is not sent again.

Azuma et al., "Soft-label caching and sharpening for communication-efficient federated distillation", IEEE
Transactions on Mobile Computing 2026.
Shares probabilities for the public samples that the server asks for; receives the targets that have changed, and what
to answer next; predicts with the server's model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcc.core.messages import Predictions, Rows
from fedcc.core.method import Family, Reading, option
from fedcc.core.rng import SERVER
from fedcc.core.roles import Client, Role, Server
from fedcc.core.samples import Samples
from fedcc.errors import PointlessSetting
from fedcc.losses import CrossEntropy, Distill
from fedcc.methods import groups
from fedcc.methods.dsfl import learn
from fedcc.methods.fedavg import GlobalModel
from fedcc.methods.fedmd import FedMD
from fedcc.methods.sharpen import enhanced_era

PLAIN = FedMD()


@dataclass(frozen=True, eq=False)
class Cached(Rows):
    """Targets that the client lacks, and the public samples that it shall answer for [m]."""

    request: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))


@dataclass(frozen=True)
class SCARLET(GlobalModel[Predictions, Cached]):
    """Learn targets that are sharpened by a power and cached for some rounds, at the clients and at the server."""

    family: ClassVar[Family] = "distillation"
    source: ClassVar[str] = "Azuma et al., IEEE TMC 2026"

    beta: float = option(2.0, "exponent of the mean probabilities; 1: none", "official code", above=0)
    lifetime: int = option(4, "rounds for which a target is cached; 0: none", "ours; official: 50 of 2,000", low=0)
    share: float = option(0.5, "share of the public samples in a round", "ours; official: 0.1", above=0, high=1)
    expired: Literal["refresh", "drop"] = option(
        "refresh", "drop: a target that expired is used once", "ours; code: drop"
    )
    server_arch: str | None = option(None, "the server's network; the clients' last distinct one by default", "parity")

    def readings(self, public: Samples) -> Mapping[str, Reading]:
        return {**super().readings(public), "clients-mean": groups.clients_mean}

    async def start(self, s: Server) -> Mapping[int, Cached]:
        if self.share == 1 and self.lifetime:
            text = (
                f"with share=1 all targets of SCARLET expire together: for lifetime={self.lifetime} rounds they stay "
                "the same; set lifetime=0 or a smaller share"
            )
            warnings.warn(text, PointlessSetting, stacklevel=2)
        s.models["global"] = await s.init(groups.chosen_network(s, self.server_arch), "server")
        n, device = len(s.public), s.public.x.device
        s.memory["cache"] = torch.zeros(n, s.classes, device=device)
        s.memory |= {name: torch.zeros(n, dtype=torch.int32, device=device) for name in ("stamp", "expires")}
        s.memory |= {"received": {}, "offered": {}}
        return self.downlinks(s)

    async def client(self, c: Client, down: Cached | None) -> Predictions:
        assert down is not None
        cache, known = c.memory.get("cache"), c.memory.get("known")
        if cache is None or known is None:
            cache, known = down.values.new_zeros(len(c.public), c.classes), down.mask(len(c.public))
        cache, known = down.onto(cache), known | down.mask(len(c.public))
        c.memory |= {"cache": cache, "known": known}
        rows = subset(c, c.round - 1, self.share)
        if bool(known[rows].any()):  # nothing in the first round
            await c.fit("sync", Distill("public"), public=c.public.with_(target=cache).at(rows))
        await c.fit("fit", CrossEntropy("private"), private=c.private)
        if not len(down.request):
            return Predictions(cache.new_zeros(0, c.classes))
        return Predictions((await c.predict(c.public.at(down.request.long()))).logits.softmax(-1))

    async def server(self, s: Server, ups: Mapping[int, Predictions]) -> Mapping[int, Cached]:
        memory, t = s.memory, s.round
        memory["received"] |= {k: memory["offered"][k] for k in ups if k in memory["offered"]}
        rows = due(memory["expires"], subset(s, t, self.share), t)
        s.log["asked"] = len(rows) / len(s.public)
        if len(rows) and ups:
            target = enhanced_era(PLAIN.mean([ups[k].values for k in sorted(ups)]), self.beta)
            memory["cache"] = memory["cache"].to(target.dtype).index_copy(0, rows, target)
            lives = torch.full_like(rows, t + self.lifetime)
            if self.expired == "drop":
                was_cached = memory["expires"][rows] > memory["stamp"][rows]
                lives = torch.where(was_cached, t, lives)
            memory["expires"] = memory["expires"].index_copy(0, rows, lives.int())
            memory["stamp"] = memory["stamp"].index_copy(0, rows, torch.full_like(rows, t).int())
        await learn(s, memory["cache"], subset(s, t, self.share))
        return self.downlinks(s)

    def downlinks(self, s: Server) -> dict[int, Cached]:
        """What each client lacks of this round's targets, and what to answer in the next round."""
        memory, visited = s.memory, subset(s, s.round, self.share)
        request = due(memory["expires"], subset(s, s.round + 1, self.share), s.round + 1).int()
        downs = {}
        for k in s.archs:
            has = memory["received"].get(k, torch.zeros_like(memory["stamp"]))
            rows = visited[memory["stamp"][visited] != has[visited]]
            memory["offered"][k] = has.index_copy(0, rows, memory["stamp"][rows])
            downs[k] = Cached(rows.int(), memory["cache"][rows], request)
        return downs


def subset(role: Role, t: int, share: float) -> Tensor:
    """The public samples of round t, ascending: both sides draw the same ones."""
    n = len(role.public)
    drawn = role.key.of(client=SERVER, round=t, phase="subset").generator().permutation(n)[: math.ceil(share * n)]
    return torch.from_numpy(drawn).sort().values.to(role.public.x.device)


def due(expires: Tensor, rows: Tensor, t: int) -> Tensor:
    """Those of the rows whose targets are too old in round t, or missing."""
    return rows[expires[rows] < t]
