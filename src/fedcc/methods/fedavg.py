"""FedAvg: weighted averaging of locally trained weights.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017.
Shares weights and running statistics; receives the average; predicts with the averaged model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import Down, Family, Method, Trained, Up
from fedcc.core.model import Arch, State
from fedcc.core.requests import Fitted, Predict
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.losses import CrossEntropy


class GlobalModel(Method[Up, Down]):
    """A method that predicts with the server's model ``global``."""

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        return (await Predict(t.server["global"], samples)).logits


@dataclass(frozen=True)
class FedAvg(GlobalModel[Weights, Weights]):
    """Every client trains the received model on its own data; the server averages by number of samples."""

    family: ClassVar[Family] = "parameters"
    source: ClassVar[str] = "McMahan et al., AISTATS 2017"
    averaged: ClassVar[bool] = True

    async def start(self, s: Server) -> Mapping[int, Weights]:
        s.models["global"] = await s.init(one_network(self.name, s.archs))
        return s.to_all(Weights.of(s.models["global"]))

    async def client(self, c: Client, down: Weights | None) -> Weights:
        assert down is not None
        c.model = c.model.with_(down.state)
        await self.train(c, down)
        return Weights.of(c.model, len(c.private))

    async def train(self, c: Client, received: Weights) -> Fitted:
        """Local training from the received weights: what most variants change."""
        return await c.fit("fit", CrossEntropy("private"), private=c.private)

    async def server(self, s: Server, ups: Mapping[int, Weights]) -> Mapping[int, Weights]:
        s.models["global"] = s.models["global"].with_(average(list(ups.values())))
        return s.to_all(Weights.of(s.models["global"]))

    def influence(self, ups: Mapping[int, Weights]) -> Mapping[int, float]:
        return dict(zip(ups, shares([up.samples for up in ups.values()]), strict=True))


def average(uplinks: list[Weights]) -> State:
    """sum_k p_k w_k with p_k = n_k / sum_j n_j, running statistics included.

    A number that all clients agree on comes out as it is, not rounded: what a network's author froze stays frozen.
    """
    p, averages = shares([up.samples for up in uplinks]), {}
    for name, first in uplinks[0].state.items():
        values = torch.stack([up.state[name] for up in uplinks])
        averages[name] = torch.where((values == first).all(0), first, sum_of(p, values))
    return averages


def shares(samples: list[int]) -> list[float]:
    """p_k = n_k / sum_j n_j."""
    return [n / sum(samples) for n in samples]


def sum_of(weights: list[float], tensors: Iterable[Tensor]) -> Tensor:
    """The sum of the tensors, each times its weight."""
    return torch.stack([weight * tensor for weight, tensor in zip(weights, tensors, strict=True)]).sum(0)


def one_network(method: str, archs: Mapping[int, Arch]) -> Arch:
    """The network that all clients have, or a refusal."""
    kinds = list(dict.fromkeys(archs.values()))
    if len(kinds) > 1:
        raise ValueError(
            f"{method} averages weights, so all clients need the same network, got {', '.join(a.name for a in kinds)}; "
            "give every client one of them, or use a method that shares predictions (FedCC, FedMD)"
        )
    return kinds[0]
