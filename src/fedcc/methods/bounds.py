"""The two bounds that every comparison needs: each client alone, and all private data in one place.

``local`` shares nothing; its accuracy is the mean over clients of their own models' on the global test set.
``centralized`` sends every private sample to the server once, which no federation would do, and trains one network
on the pool: T times E epochs, with a new optimiser every round as in all methods here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcc.core.messages import Data
from fedcc.core.method import Family, Method, Trained
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.losses import CrossEntropy
from fedcc.methods.fedavg import GlobalModel
from fedcc.methods.groups import logits


@dataclass(frozen=True)
class Local(Method[None, None]):
    """Each client alone: E epochs a round on its own data, nothing shared. The lower bound."""

    family: ClassVar[Family] = "bound"
    source: ClassVar[str] = "lower bound"

    async def client(self, c: Client, down: None) -> None:
        await c.fit("fit", CrossEntropy("private"), private=c.private)

    async def server(self, s: Server, ups: Mapping[int, None]) -> Mapping[int, None]:
        return s.to_all(None)

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        """Every client's own logits, [clients, N, classes]."""
        return await logits(t.clients.values(), samples)


@dataclass(frozen=True)
class Centralized(GlobalModel[Data | None, None]):
    """All private data pooled on the server, one network trained on it. The upper bound; nothing stays private."""

    family: ClassVar[Family] = "bound"
    source: ClassVar[str] = "upper bound"
    trains_clients: ClassVar[bool] = False

    @property
    def one_network(self) -> bool:
        return True

    async def start(self, s: Server) -> Mapping[int, None]:
        s.models["global"] = await s.init(s.archs[min(s.archs)])
        return s.to_all(None)

    async def client(self, c: Client, down: None) -> Data | None:
        if c.memory.get("sent"):
            return None
        c.memory["sent"] = True
        return Data(c.private.x, c.private["y"])

    async def server(self, s: Server, ups: Mapping[int, Data | None]) -> Mapping[int, None]:
        pool: dict[str, list[Tensor]] = s.memory.setdefault("pool", {"x": [], "y": []})
        for up in ups.values():
            if up is not None:
                pool["x"].append(up.x)
                pool["y"].append(up.y)
        private = Samples({name: torch.cat(parts) for name, parts in pool.items()}, s.public.view)
        fitted = await s.fit_request("fit", s.models["global"], CrossEntropy("private"), private=private)
        s.models["global"] = fitted.model
        return s.to_all(None)
