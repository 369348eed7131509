"""FedET: a server model learns the clients' confidence-weighted consensus, and a little from those who dissent.

Cho et al., "Heterogeneous ensemble knowledge transfer for training large models in federated learning" (Fed-ET),
IJCAI 2022. Shares weights; receives the average of the own architecture with the server's head; predicts with the
server's model.
Deviations: no official code exists; where the two public ports differ the weights sum to 1, and a sample without
dissenters (or with weightless ones only) has no diversity term, where the ports pull it to uniform. Adam and the
run's epochs as in all methods here. Heads of another width than the server's are neither averaged nor replaced.
The server is as large as the clients' last distinct network by default (the original: larger).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import Family, Reading, option
from fedcc.core.model import Model, State
from fedcc.core.roles import Server
from fedcc.core.samples import Samples
from fedcc.core.step import Loss, Step
from fedcc.losses import CrossEntropy
from fedcc.methods.fedavg import FedAvg
from fedcc.methods.groups import (
    by_architecture,
    chosen_network,
    clients_mean,
    downlinks,
    first_models,
    logits,
    merge,
    uploaded,
)


@dataclass(frozen=True)
class FedET(FedAvg):
    """Consensus labels by weighted vote, a diversity term from dissenters, heads shared by all architectures."""

    family: ClassVar[Family] = "distillation"
    source: ClassVar[str] = "Cho et al., IJCAI 2022"
    averaged: ClassVar[bool] = False  # trained on the public samples, statistics included

    lam: float = option(0.05, "weight of the diversity term", "port for CIFAR-10", low=0)
    temperature: float = option(1.0, "temperature of the diversity term, times its square", "ports: 1, 3", low=1e-3)
    epochs: int | None = option(None, "epochs of the server's training; the run's by default", "parity", low=0)
    steps: int | None = option(None, "steps of the server's training, instead of epochs", "port: 128", low=0)
    lr: float | None = option(None, "the server's learning rate; the run's by default", "parity", low=0)
    server_arch: str | None = option(None, "the server's network; the clients' last distinct one by default", "parity")
    reuse_server: bool = option(False, "clients of the server's network take its whole model", "one port")

    def readings(self, public: Samples) -> Mapping[str, Reading]:
        return {**super().readings(public), "clients-mean": clients_mean}

    async def start(self, s: Server) -> Mapping[int, Weights]:
        groups = by_architecture(s.archs)
        await first_models(s, groups)
        s.models["global"] = await s.init(chosen_network(s, self.server_arch), "server")
        return downlinks(s, groups)

    async def server(self, s: Server, ups: Mapping[int, Weights]) -> Mapping[int, Weights]:
        groups = by_architecture(s.archs)
        z = await logits(uploaded(s, ups, groups), s.public)
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
        merge(s, ups, groups)
        for name in dict.fromkeys(groups.values()):
            model, same = s.models[name], s.models[name].arch == fitted.model.arch
            reused = fitted.model if self.reuse_server and same else model
            s.models[name] = reused.with_(head(fitted.model.state, model))
        return downlinks(s, groups)


@dataclass(frozen=True)
class Diversity(Loss):
    """T^2 KL(target || softmax(z / T)), the mean over the batch; a row whose target is all zero adds nothing."""

    stream: str
    temperature: float = 1.0

    def __call__(self, step: Step) -> Tensor:
        q = step[self.stream]["target"]
        log_p = F.log_softmax(step[self.stream].logits / self.temperature, -1)
        return self.temperature**2 * (torch.xlogy(q, q) - q * log_p).sum(-1).mean()


def confidence(z: Tensor) -> Tensor:
    """alpha_k = s_k / sum_j s_j, s_k the variance of z_k over classes: [K, N] from [K, N, C]; equal if all are 0."""
    s = z.var(-1, correction=0)
    total = s.sum(0)
    return torch.where(total > 0, s / total.clamp(min=torch.finfo(s.dtype).tiny), torch.full_like(s, 1 / len(s)))


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
