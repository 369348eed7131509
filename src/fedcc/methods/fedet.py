"""FedET: a server model learns the clients' confidence-weighted consensus, and a little from those who dissent.

Cho et al., "Heterogeneous ensemble knowledge transfer for training large models in federated learning" (Fed-ET),
IJCAI 2022. Shares weights; receives the average of its own architecture with the server's head; predicts with the
server's model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import Family, Reading, option, shares
from fedcc.core.model import Model, State
from fedcc.core.roles import Server
from fedcc.core.samples import Samples
from fedcc.core.step import Loss, Step
from fedcc.losses import CrossEntropy, kl
from fedcc.methods import groups
from fedcc.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedET(FedAvg):
    """Consensus labels by weighted vote, a diversity term from dissenters, heads shared by all architectures."""

    family: ClassVar[Family] = "distillation"
    source: ClassVar[str] = "Cho et al., IJCAI 2022"
    averaged: ClassVar[bool] = False  # trained on the public samples, statistics included

    lam: float = option(0.05, "weight of the diversity term", "port for CIFAR-10", low=0)
    temperature: float = option(1.0, "temperature T of the diversity term, scaled by T^2", "ports: 1, 3", low=1e-3)
    epochs: int | None = option(None, "epochs of the server's training; the run's by default", "parity", low=0)
    steps: int | None = option(None, "steps of the server's training, instead of epochs", "port: 128", low=0)
    lr: float | None = option(None, "the server's learning rate; the run's by default", "parity", low=0)
    server_arch: str | None = option(None, "the server's network; the clients' last distinct one by default", "parity")
    reuse_server: bool = option(False, "clients of the server's network take its whole model", "one port")

    def readings(self, public: Samples) -> Mapping[str, Reading]:
        return {**super().readings(public), "clients-mean": groups.clients_mean}

    async def start(self, s: Server) -> Mapping[int, Weights]:
        await groups.first_models(s)
        s.models["global"] = await s.init(groups.chosen_network(s, self.server_arch), "server")
        return groups.downlinks(s)

    async def server(self, s: Server, ups: Mapping[int, Weights]) -> Mapping[int, Weights]:
        z = await groups.logits(groups.uploaded(s, ups), s.public)
        y = consensus(z)
        start = s.models["global"].with_(mean_head(s.models["global"], [up.state for up in ups.values()]))
        fitted = await s.fit_request(
            "consensus",
            start,
            CrossEntropy("public") + self.lam * Diversity("public", self.temperature),
            public=s.public.with_(y=y, target=dissent(z, y, self.temperature)),
            recipe=s.recipe_with(epochs=self.epochs, steps=self.steps, lr=self.lr),
        )
        s.models["global"], s.log["consensus_loss"] = fitted.model, fitted.loss
        names = groups.by_architecture(s)
        groups.merge(s, ups, names)
        for name in dict.fromkeys(names.values()):
            model, same = s.models[name], s.models[name].arch == fitted.model.arch
            base = fitted.model if self.reuse_server and same else model
            s.models[name] = base.with_(head(fitted.model.state, model))
        return groups.downlinks(s)


@dataclass(frozen=True)
class Diversity(Loss):
    """T^2 KL(target || softmax(z / T)), the mean over the batch; a row whose target is all zero adds nothing."""

    stream: str
    temperature: float = 1.0

    def __call__(self, step: Step) -> Tensor:
        batch = step[self.stream]
        return self.temperature**2 * kl(batch["target"], batch.logits / self.temperature)


def confidence(z: Tensor) -> Tensor:
    """alpha_k = s_k / sum_j s_j, s_k the variance of z_k over classes: [K, N] from [K, N, C]; equal if all are 0."""
    return shares(z.var(-1, correction=0), 0)


def consensus(z: Tensor) -> Tensor:
    """The label [N] with the largest sum_k alpha_k z_k."""
    return (confidence(z)[..., None] * z).sum(0).argmax(-1)


def dissent(z: Tensor, y: Tensor, temperature: float) -> Tensor:
    """softmax(z_div / T) [N, C], z_div the mean of those whose argmax is not y, by alpha; zero rows without any."""
    weight = confidence(z) * (z.argmax(-1) != y)  # [K, N]
    mass = weight.sum(0)
    z_div = (weight[..., None] * z).sum(0) / mass.clamp(min=torch.finfo(z.dtype).tiny)[:, None]
    return (z_div / temperature).softmax(-1) * (mass > 0)[:, None]


def head(state: State, fits: Model) -> State:
    """The entries of the last linear layer that have the shapes of another model's."""
    own = {name: value for name, value in state.items() if name.startswith("head.")}
    return own if all(fits.state[name].shape == value.shape for name, value in own.items()) else {}


def mean_head(server: Model, states: list[State]) -> State:
    """The mean of the clients' heads, of those that fit the server's."""
    heads = [own for state in states if (own := head(state, server))]
    return {name: torch.stack([own[name] for own in heads]).mean(0) for name in heads[0]} if heads else {}
