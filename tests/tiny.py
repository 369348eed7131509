"""A federation small enough for a unit test: blobs in a few dimensions, networks of two layers, a plain engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedcc.core.method import AnyMethod
from fedcc.core.model import Arch, Factory
from fedcc.core.requests import Recipe
from fedcc.core.rng import Key
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples, View
from fedcc.engine import Plain, drive
from fedcc.experiments.rounds import FinishedRound
from fedcc.federate import RoundMessages, Simulated, federate

DIMENSIONS = 6


@dataclass(frozen=True)
class Mlp:
    """A factory: linear, BatchNorm (optional), ReLU, linear."""

    width: int = 8
    norm: bool = True

    def __call__(self, outputs: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(DIMENSIONS, self.width, bias=not self.norm)]
        layers += [nn.BatchNorm1d(self.width)] if self.norm else []
        return nn.Sequential(*layers, nn.ReLU(), nn.Linear(self.width, outputs))


def finished(**record: Any) -> FinishedRound:
    """A round as an observer sees it, by its record."""
    t = record["round"]
    return FinishedRound(t, 3, record, RoundMessages(t, {}, {}, 0, 0), lambda: pytest.fail("nobody needs a snapshot"))


def blobs(labels: Sequence[int] | Tensor, classes: int, seed: int = 0) -> Tensor:
    """Inputs [N, 6] around one centre per class."""
    centres = torch.randn(classes, DIMENSIONS, generator=torch.Generator().manual_seed(99)) * 2
    noise = torch.randn(len(labels), DIMENSIONS, generator=torch.Generator().manual_seed(seed))
    return centres[torch.as_tensor(labels)] + 0.5 * noise


@dataclass(frozen=True)
class Flat:
    """A factory for small images: flattened, linear, ReLU, linear."""

    width: int = 8

    def __call__(self, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, self.width), nn.ReLU(), nn.Linear(self.width, outputs))


@dataclass
class Tiny:
    """Everything of a run, open to a test: ``Tiny(FedAvg()).run(2)``.

    ``labels`` holds each client's private labels; ``factories`` are given to clients in turn. With ``images``, a view,
    the inputs are images [1, 4, 4].
    """

    method: AnyMethod
    labels: Sequence[Sequence[int]] = ((0,) * 20, (1,) * 20, (2,) * 20)
    classes: int = 3
    publics: int = 24
    factories: Sequence[Factory] = (Mlp(),)
    recipe: Recipe = field(default_factory=lambda: Recipe(lr=1e-2, batch=8, epochs=2))
    seed: int = 0
    precision: Any = "fp64"
    options: dict[str, Any] = field(default_factory=dict)  # of Simulated
    images: View | None = None

    def __post_init__(self) -> None:
        self.executor = Plain("cpu", self.precision)
        everyone = torch.arange(self.publics) % self.classes
        self.hidden = everyone
        self.public = self.samples(everyone, seed=7).only("x")
        self.test = self.samples(everyone, seed=8)
        outputs, shape = self.method.outputs(self.classes), self.public.shape
        archs = {k: Arch((self.factories[k % len(self.factories)],), outputs, shape) for k in range(len(self.labels))}
        self.clients = [
            Client(
                public=self.public,
                classes=self.classes,
                recipe=self.recipe,
                key=Key(self.seed, 0, k),
                id=k,
                arch=archs[k],
                archs=archs,
                private=self.samples(torch.as_tensor(own), seed=100 + k),
            )
            for k, own in enumerate(self.labels)
        ]
        self.server = Server(
            public=self.public,
            classes=self.classes,
            recipe=self.recipe,
            key=Key(self.seed),
            archs=archs,
        )
        self.cohort = Simulated(self.method, self.clients, self.executor, **self.options)
        self.rounds: list[RoundMessages] = []

    def samples(self, labels: Tensor, seed: int) -> Samples:
        x = blobs(labels, self.classes, seed)
        if self.images is None:
            return Samples({"x": x, "y": labels})
        return Samples({"x": x.repeat(1, 3)[:, :16].view(-1, 1, 4, 4), "y": labels}, self.images)

    def run(self, rounds: int = 1) -> Tiny:
        self.rounds = list(federate(self.method, self.server, self.cohort, rounds, self.executor))
        return self

    def ask(self, coroutine: Any) -> Any:
        """The result of one coroutine."""
        return drive([coroutine], self.executor)[0]

    def scores(self) -> Tensor:
        """The method's own prediction on the test samples."""
        scores: Tensor = self.ask(self.method.predict(self.cohort.trained_models(self.server), self.test.only("x")))
        return scores

    def accuracy(self) -> float:
        return float((self.scores().argmax(-1) == self.test["y"]).double().mean())
