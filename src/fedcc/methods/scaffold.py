"""SCAFFOLD: every client corrects its gradients by how its own mean gradient differs from everybody's.

Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning", ICML 2020.
Shares weights, running statistics and its control variate c_k; receives the average and the mean variate c; predicts
with the averaged model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import option
from fedcc.core.model import Model, State
from fedcc.core.requests import Fitted
from fedcc.core.roles import Client, Role, Server
from fedcc.core.step import Loss, Step, joined, norm
from fedcc.gradients import Clip
from fedcc.losses import CrossEntropy
from fedcc.methods.fedavg import FedAvg
from fedcc.methods.fednova import heavy_ball

TINY_RATE = 1e-4  # of the steps that measure a gradient


@dataclass(frozen=True, eq=False)
class Controlled(Weights):
    """Weights, and a control variate of what is trained: a client's own, or the mean; empty before there is one."""

    variate: State = field(default_factory=dict)


@dataclass(frozen=True)
class Shift(Loss):
    """<theta - w, shift>, whose gradient is the shift: w and shift are ``constants``."""

    def __call__(self, step: Step) -> Tensor:
        w, shift = (joined(step.constants[name][n] for n in step.params) for name in ("w", "shift"))
        return ((joined(step.params.values()) - w) * shift).sum()


@dataclass(frozen=True)
class SCAFFOLD(FedAvg):
    """FedAvg whose clients train with the gradient plus c - c_k, the mean control variate minus their own."""

    source: ClassVar[str] = "Karimireddy et al., ICML 2020"
    note: ClassVar[str] = "reconstruction from ports"
    variates: Literal["auto", "path", "gradient"] = option(
        "auto",
        "c_k from the path (SGD) or by gradients at the received weights; auto: path where it can",
        "options I, II",
    )
    server_rate: float = option(1.0, "the server's step towards the average", "paper", above=0)
    clip: float = option(0.0, "largest norm of a corrected gradient; 0: no limit", "ours", low=0)

    async def start(self, s: Server) -> Mapping[int, Weights]:
        if self.variates == "path" and not _steady(s):
            raise ValueError(
                "variates=path divides the path by the rate and the momentum of SGD: it needs optimizer=sgd and "
                "schedule=constant; take variates=gradient"
            )
        return await super().start(s)

    async def client(self, c: Client, down: Weights | None) -> Controlled:
        assert isinstance(down, Weights)
        mean = down.variate if isinstance(down, Controlled) else {}
        received, own = c.model.with_(down.state), c.memory.get("variate", {})
        names = mean or own
        shift = {n: _entry(mean, n, names[n]) - _entry(own, n, names[n]) for n in names}
        c.model = received
        fitted = await self.controlled(c, shift)
        if fitted.steps:
            c.memory["variate"] = await self.variate(c, received, fitted, shift)
        variate = c.memory.get("variate") or {n: torch.zeros_like(received.state[n]) for n in fitted.trained}
        return Controlled(c.model.floating, len(c.private), variate)

    async def controlled(self, c: Client, shift: State) -> Fitted:
        """Local training with every gradient shifted by c - c_k; both are 0 in the first round."""
        loss, clip = CrossEntropy("private"), Clip(self.clip) if self.clip else None
        if not shift:
            return await c.fit("fit", loss, private=c.private, gradient=clip)
        constants = {"w": {n: c.model.state[n] for n in shift}, "shift": shift}
        return await c.fit("fit", loss + Shift(), private=c.private, constants=constants, gradient=clip)

    async def variate(self, c: Client, w: Model, fitted: Fitted, shift: State) -> State:
        """c_k after a round: the mean gradient along the path, or at the received weights."""
        if self.variates == "gradient" or not _steady(c):
            steps = -(-len(c.private) // c.recipe.batch)  # an epoch
            recipe = c.recipe_with(steps=steps, lr=TINY_RATE, momentum=0.0, schedule="constant", reset="phase")
            tiny = await c.fit_request("variate", w, CrossEntropy("private"), private=c.private, recipe=recipe)
            return {n: (w.state[n] - tiny.model.state[n]) / (TINY_RATE * steps) for n in fitted.trained}  # option I
        recipe = c.recipe_with()
        a = recipe.lr * heavy_ball(fitted.steps, recipe.momentum or 0.0)
        path = {n: (w.state[n] - fitted.model.state[n]) / a for n in fitted.trained}
        return {n: path[n] - shift[n] if n in shift else path[n] for n in path}  # option II

    async def server(self, s: Server, ups: Mapping[int, Weights]) -> Mapping[int, Controlled]:
        before = s.models["global"].state
        await super().server(s, ups)
        known: dict[int, State] = s.memory.setdefault("variates", {})
        known |= {k: up.variate for k, up in ups.items() if isinstance(up, Controlled)}
        mean = mean_variate(known, len(s.archs))
        s.log["variate"] = float(norm(mean))
        after = s.models["global"].state
        if self.server_rate != 1:  # running statistics are those of the average
            moved = {n: before[n] + self.server_rate * (after[n] - before[n]) for n in mean}
            s.models["global"] = s.models["global"].with_(moved)
        return s.to_all(Controlled(s.models["global"].floating, variate=mean))


def mean_variate(variates: Mapping[int, State], clients: int) -> State:
    """C = (1 / K) sum_k c_k over the last c_k of all K clients, 0 for one that never answered."""
    known = [variates[k] for k in sorted(variates)]
    return {n: torch.stack([own[n] for own in known]).sum(0) / clients for n in known[0]}


def _steady(role: Role) -> bool:
    """Whether the path divided by rate and steps is a mean gradient: SGD with a constant rate."""
    return role.recipe.momentum is not None and role.recipe.schedule == "constant"


def _entry(variate: State, name: str, like: Tensor) -> Tensor:
    return variate[name] if variate else torch.zeros_like(like)
