"""FENS: an ensemble in one shot, whose rule of combination is a tiny network that the clients train together.

Allouah et al., "Revisiting ensembling in one-shot federated learning", NeurIPS 2024.
For T rounds every client trains alone and holds some samples out. Then it shares its model once and receives all of
them once; for R more rounds it shares and receives the aggregator, trained on held-out samples. Predicts with the
aggregator on all models' logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import Family, Method, Trained, option
from fedcc.core.model import Arch, Hidden, Linear, Model, State
from fedcc.core.requests import Init, Predict, gather
from fedcc.core.rng import SERVER
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.core.step import Gradient, Tensors
from fedcc.losses import CrossEntropy
from fedcc.methods.fedavg import shares, sum_of
from fedcc.methods.groups import logits

BETAS, EPS = (0.9, 0.99), 1e-3  # of the server's Adam, which has no bias correction
BATCH, RATE = 128, 1.0  # of a client's only step
MANY = 100  # classes from which the aggregator is a weight for each client and class


@dataclass(frozen=True, eq=False)
class Finish:
    """The client's training ends with this round: its model is wanted."""

    wanted: bool = True


@dataclass(frozen=True, eq=False)
class Ensemble:
    """The aggregator, and the models that the client has not shown to have, by their clients' numbers."""

    aggregator: State
    models: Mapping[str, State]


@dataclass(frozen=True, eq=False)
class Aggregator:
    """A client's aggregator, the held-out samples behind it, and how many models it knows."""

    state: State
    samples: int
    models: int


Up = Weights | Aggregator | None
Down = Finish | Ensemble | None


@dataclass(frozen=True)
class OwnClass(Gradient):
    """Only weights from a model's logit of a class to that class learn, and no bias."""

    def transform(self, grads: Tensors) -> Tensors:
        weight, bias = grads["head.weight"], grads["head.bias"]
        own = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        return {"head.weight": weight * own.repeat(1, weight.shape[1] // len(weight)), "head.bias": bias * 0}


@dataclass(frozen=True)
class FENS(Method[Up, Down]):
    """Train alone, share models once, then learn by federated averaging how to combine their logits."""

    family: ClassVar[Family] = "ensemble"
    source: ClassVar[str] = "Allouah et al., NeurIPS 2024"
    depends_on_rounds: ClassVar[bool] = True
    knows_networks: ClassVar[bool] = True
    aggregator: Literal["auto", "mlp", "weights"] = option(
        "auto", "a hidden layer, or a weight per client and class; auto: weights from 100 classes on", "official"
    )
    units: int = option(2, "hidden units per client of the aggregator", "official script; its class has 4", low=1)
    aggregator_rounds: int = option(500, "rounds for the aggregator after the T for the models", "official", low=0)
    server_lr: float = option(0.001, "the rate of the server's Adam", "official code", low=0)
    holdout: float = option(
        0.1, "share of its samples that a client holds out; 0: it reuses all", "official", low=0, below=1
    )

    def rounds(self, rounds: int) -> int:
        return rounds + self.aggregator_rounds

    def evaluates(self, t: int, rounds: int) -> bool:
        return t in (rounds, self.rounds(rounds))

    async def start(self, s: Server) -> Mapping[int, Down]:
        return s.to_all(Finish() if s.rounds <= 1 else None)

    async def client(self, c: Client, down: Down) -> Up:
        held_out, rest = split(c, self.holdout)
        if isinstance(down, Ensemble):
            return await self.combine(c, down, held_out)
        await c.fit("fit", CrossEntropy("private"), private=rest)
        return Weights.of(c.model, len(rest)) if isinstance(down, Finish) else None

    async def combine(self, c: Client, down: Ensemble, held_out: Samples) -> Aggregator:
        """One step of the aggregator on the models' logits of held-out samples, which are computed once."""
        own = self.built(down.aggregator, c.classes)
        if down.models:
            found = await all_logits(c, down.models, held_out)
            shape = len(held_out), own.arch.shape[0] // c.classes, c.classes
            columns = c.memory["logits"].clone() if "logits" in c.memory else found.new_zeros(shape)
            columns[:, [int(k) for k in down.models]] = found
            c.memory |= {"logits": columns, "models": c.memory.get("models", 0) + len(down.models)}
        recipe = c.recipe_with(
            steps=1, batch=BATCH, batches=(), lr=RATE, momentum=0.0, schedule="constant", reset="phase"
        )
        private = Samples({"x": c.memory["logits"].flatten(1), "y": held_out["y"]})
        rule = OwnClass() if isinstance(own.arch.trunks[0], Linear) else None
        fitted = await c.fit_request(
            "aggregate", own, CrossEntropy("private"), recipe=recipe, private=private, gradient=rule
        )
        return Aggregator(sent(fitted.model), len(held_out), c.memory["models"])

    async def server(self, s: Server, ups: Mapping[int, Up]) -> Mapping[int, Down]:
        for k, up in ups.items():
            if isinstance(up, Weights):
                s.models[f"client {k}"] = (await s.init(s.archs[k])).with_(up.state)
                s.memory["order"] = [*s.memory.get("order", []), k]
        answers = {k: up for k, up in ups.items() if isinstance(up, Aggregator)}
        s.memory["known"] = {**s.memory.get("known", {}), **{k: up.models for k, up in answers.items()}}
        current = s.models.get("aggregator") or await self.first(s)
        if answers:
            current = s.models["aggregator"] = self.built(
                improved(s, sent(current), answers, self.server_lr), s.classes
            )
        if s.round < s.rounds:
            return s.to_all(Finish() if s.round == s.rounds - 1 else None)
        return {k: self.downlink(s, k, current) for k in s.archs}

    def downlink(self, s: Server, k: int, current: Model) -> Down:
        """The aggregator and the models that a client may lack; its own model comes first."""
        if f"client {k}" not in s.models:
            return Finish()
        lacking = s.memory["order"][s.memory["known"].get(k, 0) :]
        return Ensemble(sent(current), {str(j): s.models[f"client {j}"].floating for j in lacking})

    async def first(self, s: Server) -> Model:
        """The aggregator to begin with: random, or the mean of the models' logits."""
        clients, classes = len(s.archs), s.classes
        if self.aggregator == "weights" or (self.aggregator == "auto" and classes >= MANY):
            like = s.public.x.new_ones((), dtype=torch.float32)
            return self.built({"weights": like.expand(clients, classes, 1) / clients}, classes)
        arch = Arch((Hidden(clients * classes, clients * self.units),), classes, (clients * classes,))
        return await Init(arch, s.key.of(round=0, client=SERVER, phase="aggregator"))

    def built(self, state: State, classes: int) -> Model:
        """The aggregator as a model of all logits [N, K C], from what is sent of it."""
        if "weights" in state:
            weights = state["weights"].squeeze(-1)
            dense = torch.diag_embed(weights).movedim(0, 1).flatten(1)
            arch = Arch((Linear(weights.numel()),), classes, (weights.numel(),))
            return Model(arch, {"head.weight": dense, "head.bias": weights.new_zeros(classes)})
        units, inputs = state["trunks.0.0.weight"].shape
        return Model(Arch((Hidden(inputs, units),), classes, (inputs,)), state)

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        models = {int(name.split()[1]): model for name, model in t.server.items() if name != "aggregator"}
        found = await logits(models.values() or t.clients.values(), samples)
        if "aggregator" not in t.server:
            return found.mean(0)
        columns = found.new_zeros(found.shape[1], t.server["aggregator"].arch.shape[0] // t.classes, t.classes)
        columns[:, list(models)] = found.movedim(0, 1)
        return (await Predict(t.server["aggregator"], Samples({"x": columns.flatten(1)}))).logits


def split(c: Client, share: float) -> tuple[Samples, Samples]:
    """Samples to hold out, the same in every round and spread evenly over the classes, and the rest.

    At least one is held out and one is left; a share of 0 gives all samples twice, and so does a client with one.
    """
    n = len(c.private)
    if not share or n == 1:
        return c.private, c.private
    order = torch.from_numpy(c.key.of(round=0, phase="holdout").generator().permutation(n)).to(c.private["y"].device)
    order = order[c.private["y"][order].sort(stable=True).indices]
    number = min(max(1, round(share * n)), n - 1)
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[order[((torch.arange(number) + 0.5) * n / number).long()]] = True
    return c.private.at(chosen), c.private.at(~chosen)


async def all_logits(c: Client, states: Mapping[str, State], samples: Samples) -> Tensor:
    """The logits of these clients' models [N, models, C]."""
    keys, archs = c.key.of(phase="ensemble"), [c.archs[int(k)] for k in states]
    empty = await gather(*(Init(arch, keys) for arch in archs))
    models = [model.with_(state) for model, state in zip(empty, states.values(), strict=True)]
    return (await logits(models, samples)).movedim(0, 1)


def sent(model: Model) -> State:
    """What is sent of an aggregator: its state, or only the weights that may differ from 0.

    They are [K, C, 1], because rows of [K, C] may look like probabilities, which a server checks.
    """
    if isinstance(model.arch.trunks[0], Hidden):
        return model.state
    dense = model.state["head.weight"]
    return {"weights": dense.view(len(dense), -1, len(dense)).diagonal(dim1=0, dim2=2)[..., None].contiguous()}


def improved(s: Server, state: State, answers: Mapping[int, Aggregator], rate: float) -> State:
    """The aggregator after Adam on the clients' mean move, weighted by their held-out samples."""
    p, better = shares([up.samples for up in answers.values()]), {}
    for name, old in state.items():
        move = sum_of(p, [up.state[name] - old for up in answers.values()])
        zero = torch.zeros_like(move)
        mean = BETAS[0] * s.memory.get(f"mean/{name}", zero) + (1 - BETAS[0]) * move
        square = BETAS[1] * s.memory.get(f"square/{name}", zero) + (1 - BETAS[1]) * move.square()
        s.memory |= {f"mean/{name}": mean, f"square/{name}": square}
        better[name] = old + rate * mean / (square.sqrt() + EPS)
    return better
