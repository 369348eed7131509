"""FedConcat: one encoder for each cluster of clients with similar labels, side by side under one new linear head.

Diao, Li and He, "Exploiting label skews in federated learning with model concatenation", AAAI 2024.
Shares label shares once and weights for T rounds, then the head; receives its cluster's weights, then all encoders
once and the head; predicts with the concatenated model (until there is one, by the mean logits of the clusters').
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import LOST, Family, Method, Trained, option
from fedcc.core.model import HEAD, Model, State, head_model, joined_state
from fedcc.core.requests import Init, Predict, gather
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples, View
from fedcc.losses import CrossEntropy
from fedcc.methods.clusters import cluster_models, cluster_of, join, model_of
from fedcc.methods.fedavg import average, one_network


@dataclass(frozen=True, eq=False)
class Encoder(Weights):
    """A cluster's model, or a client's with its label shares [C] as long as it has no cluster (-1)."""

    cluster: int = -1
    histogram: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Classifier:
    """The head on all encoders, and those too until the client has shown that it has them."""

    head: State
    encoders: State | None = None
    trunks: int = 0


Message = Encoder | Classifier
MOMENTUM, MANY = 0.9, 100  # of SGD for the head; classes from which the official code caps clusters and joins heads
NOISE = 10_000  # images from which a model's classes are inferred


@dataclass(frozen=True)
class FedConcat(Method[Message, Message]):
    """Cluster clients by labels, average inside clusters, concatenate the encoders and train one head on them."""

    family: ClassVar[Family] = "parameters"
    source: ClassVar[str] = "Diao et al., AAAI 2024"
    depends_on_rounds: ClassVar[bool] = True
    version: ClassVar[int] = 2
    earlier: ClassVar[Mapping[int, Mapping[str, Any]]] = {1: {"classifier_lr": LOST}}  # the head learned by Adam
    retired: ClassVar[Mapping[str, Any]] = {"cache_features": True}
    clusters: int = option(4, "clusters of clients, hence encoders", "FedVLS has 2 or 4 for 10 clients", low=1)
    classifier_rounds: int = option(200, "rounds for the head after the T for encoders", "official: 1000", low=0)
    classifier_steps: int = option(3, "batches that a client takes in such a round", "official code", low=1)
    classifier_lr: float = option(0.01, "SGD's rate in such a round, momentum 0.9", "official code", low=0)
    histogram: Literal["labels", "inferred"] = option("labels", "label shares as sent, or inferred from noise", "paper")
    head_init: Literal["auto", "random", "joined"] = option("auto", "auto: joined from 100 classes on", "official code")
    cap: float | None = option(None, "largest cluster / (K / M); by default 1.2 from 100 classes on", "official", low=1)

    def rounds(self, rounds: int) -> int:
        return rounds + self.classifier_rounds

    def evaluates(self, t: int, rounds: int) -> bool:
        return t < rounds or t == self.rounds(rounds)

    async def start(self, s: Server) -> Mapping[int, Message]:
        s.models["init"] = await s.init(one_network(self.name, s.archs))
        return s.to_all(Encoder(s.models["init"].floating))

    async def client(self, c: Client, down: Message | None) -> Message:
        assert down is not None
        if isinstance(down, Classifier):
            return await self.classify(c, down)
        c.model = c.model.with_(down.state)
        await c.fit("fit", CrossEntropy("private"), private=c.private)
        shares = c.counts() / len(c.private) if down.cluster < 0 and self.histogram == "labels" else None
        return Encoder(c.model.floating, len(c.private), down.cluster, shares)

    async def classify(self, c: Client, down: Classifier) -> Classifier:
        """A few steps of the head on the encoders' features of clean images, which are computed once."""
        if down.encoders is not None:
            c.model = (await Init(c.arch.times(down.trunks), c.key.of(phase="concat"))).with_(down.encoders)
            c.memory["features"] = (await c.predict(c.private)).features
        c.model = c.model.with_(down.head)
        recipe = c.recipe_with(steps=self.classifier_steps, lr=self.classifier_lr, momentum=MOMENTUM, reset="phase")
        private, head = Samples({"x": c.memory["features"], "y": c.private["y"]}), head_model(c.model)
        fitted = await c.fit_request("head", head, CrossEntropy("private"), recipe=recipe, private=private)
        c.model = c.model.with_(fitted.model.state)
        return Classifier({name: c.model.state[name] for name in HEAD})

    async def server(self, s: Server, ups: Mapping[int, Message]) -> Mapping[int, Message]:
        encoders = {k: up for k, up in sorted(ups.items()) if isinstance(up, Encoder)}
        heads = {k: Weights(up.head, 1) for k, up in sorted(ups.items()) if isinstance(up, Classifier)}
        if encoders:
            await average_clusters(s, encoders, self.clusters, self.cap or (1.2 if s.classes >= MANY else None))
        if heads:
            s.models["concat"] = s.models["concat"].with_(average(list(heads.values())))  # unweighted
            s.memory["equipped"] = sorted({*s.memory.get("equipped", []), *heads})
        if s.round >= s.rounds and "concat" not in s.models:
            joined = self.head_init == "joined" or (self.head_init == "auto" and s.classes >= MANY)
            s.models = {"concat": await concatenated(s, cluster_models(s), joined)}
        if "concat" in s.models:
            return head_downlinks(s)
        return {k: Encoder(model_of(s, k, "init").floating, cluster=cluster_of(s, k)) for k in s.archs}

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        models = [model for name, model in t.server.items() if name != "init"] or list(t.server.values())
        return torch.stack([out.logits for out in await gather(*(Predict(m, samples) for m in models))]).mean(0)


async def average_clusters(s: Server, ups: Mapping[int, Encoder], number: int, cap: float | None) -> None:
    """FedAvg inside each cluster, in client order. Clients without a cluster get one first.

    In the first round all have trained from the same weights. Later, a client that had no cluster has not trained from
    its cluster's model, so it does not count yet.
    """
    known = [k for group in s.memory.get("clusters", []) for k in group]
    new = {k: up for k, up in ups.items() if k not in known}
    if new:
        largest = int(cap * len(new) / number) if cap else None
        join(s.memory, await label_shares(s, new), number, s.key.of(round=0, phase="cluster").integer(), largest)
    for m, group in enumerate(s.memory["clusters"]):
        model = s.models.setdefault(f"cluster {m}", s.models["init"])
        trained: list[Weights] = [ups[k] for k in group if k in ups and k in (known or new)]
        if trained:
            s.models[f"cluster {m}"] = model.with_(average(trained))


async def label_shares(s: Server, ups: Mapping[int, Encoder]) -> dict[int, Tensor]:
    """The clients' label shares [C] as sent; for those that send none, their models' mean prediction on noise."""
    shares = {k: up.histogram for k, up in ups.items() if up.histogram is not None}
    silent = {k: s.models["init"].with_(up.state) for k, up in ups.items() if up.histogram is None}
    if not silent:
        return shares
    draws = s.key.of(round=0, phase="noise").generator().integers(0, 256, (NOISE, *s.public.shape), "uint8")
    noise = Samples({"x": torch.from_numpy(draws)}, View(scale=1 / 255))
    outputs = await gather(*(Predict(model, noise) for model in silent.values()))
    return shares | {k: out.logits.softmax(-1).mean(0) for k, out in zip(silent, outputs, strict=True)}


async def concatenated(s: Server, models: Sequence[Model], joined: bool) -> Model:
    """One model with all the trunks; its head is new, or the models' heads joined, which adds up their logits."""
    state = {name: value for name, value in joined_state(models).items() if joined or name not in HEAD}
    return (await s.init(models[0].arch.times(len(models)), "concat")).with_(state)


def head_downlinks(s: Server) -> dict[int, Message]:
    """The head for every client, with the encoders for those that may lack them."""
    model, equipped = s.models["concat"], s.memory.get("equipped", [])
    head, encoders = ({n: v for n, v in model.floating.items() if (n in HEAD) is own} for own in (True, False))
    return {k: Classifier(head, None if k in equipped else encoders, len(model.arch.trunks)) for k in s.archs}
