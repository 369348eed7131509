"""Clients that share weights only within their group: what FedDF, FedET and FedHKT have in common.

A grouping names the server's model of each client's group; a group never mixes architectures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import Trained
from fedcc.core.model import Arch, Model
from fedcc.core.naming import unknown
from fedcc.core.requests import Predict, gather
from fedcc.core.roles import Server
from fedcc.core.samples import Samples
from fedcc.methods.fedavg import average


def distinct(archs: Mapping[int, Arch]) -> list[Arch]:
    """The clients' architectures, each once, in the order of the clients."""
    return list(dict.fromkeys(archs[k] for k in sorted(archs)))


def by_architecture(s: Server) -> dict[int, str]:
    """A group for each architecture."""
    kinds = distinct(s.archs)
    return {k: f"group {kinds.index(arch)}" for k, arch in sorted(s.archs.items())}


def chosen_network(s: Server, name: str | None) -> Arch:
    """The server's own architecture: the named one, or the last distinct one in client order (ResNet20 of 14 and 20).

    A name is looked up among the clients' networks first, so that a network of the caller's own can be named too.
    """
    known = {arch.name: arch for arch in distinct(s.archs)}
    if name is None:
        return list(known.values())[-1]
    if name in known:
        return known[name]
    if s.networks is None:
        raise unknown("server_arch", name, known)
    return s.networks(name)


async def first_models(s: Server) -> None:
    """One first model per architecture, the same for all its clients."""
    for k, name in by_architecture(s).items():
        if name not in s.models:
            s.models[name] = await s.init(s.archs[k])


def uploaded(s: Server, ups: Mapping[int, Weights]) -> list[Model]:
    """The clients' models, rebuilt from what they sent."""
    groups = by_architecture(s)
    return [s.models[groups[k]].with_(up.state) for k, up in ups.items()]


async def clients_mean(t: Trained, samples: Samples) -> Tensor | None:
    """The mean of the clients' probabilities [N, C], a reading; None where their models did not come to the server."""
    return (await logits(t.clients.values(), samples)).softmax(-1).mean(0) if t.clients else None


async def logits(models: Iterable[Model], samples: Samples) -> Tensor:
    """Every model's logits [K, N, C] on clean inputs."""
    return torch.stack([out.logits for out in await gather(*(Predict(model, samples) for model in models))])


def merge(s: Server, ups: Mapping[int, Weights], groups: Mapping[int, str]) -> None:
    """FedAvg inside each group; a group from which no client answered keeps its model."""
    for name in dict.fromkeys(groups[k] for k in ups):
        s.models[name] = s.models[name].with_(average([up for k, up in ups.items() if groups[k] == name]))


def downlinks(s: Server) -> dict[int, Weights]:
    """Its architecture's model for every client."""
    return {k: Weights.of(s.models[name]) for k, name in by_architecture(s).items()}
