"""FedNova: updates are normalised by the steps behind them, so that clients that do more steps do not dominate.

Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated optimization", NeurIPS 2020.
Shares weights, running statistics and the number of local steps; receives and predicts as FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.method import Family, option
from fedcc.core.model import State
from fedcc.core.roles import Client, Server
from fedcc.losses import CrossEntropy
from fedcc.methods.fedavg import GlobalModel, average, one_network, shares, sum_of


@dataclass(frozen=True, eq=False)
class Update:
    """The trained entries, the running statistics separately, and how many samples and steps they come from."""

    weights: State
    statistics: State
    samples: int
    steps: int


@dataclass(frozen=True)
class FedNova(GlobalModel[Update, Weights]):
    """FedAvg with normalised averaging: w <- w - tau_eff sum_k p_k (w - w_k) / a_k."""

    family: ClassVar[Family] = "parameters"
    source: ClassVar[str] = "Wang et al., NeurIPS 2020"
    averaged: ClassVar[bool] = True
    version: ClassVar[int] = 2
    earlier: ClassVar[Mapping[int, Mapping[str, Any]]] = {1: {"statistics": "average"}}
    normaliser: Literal["steps", "momentum"] = option("steps", "a_k: steps, or as for SGD with momentum", "Adam")
    momentum: float = option(0.9, "the momentum that normaliser=momentum assumes", "paper", low=0, high=1)
    server_momentum: float = option(0.0, "momentum of the server's update", "paper", low=0, high=1)
    statistics: Literal["average", "normalised"] = option("normalised", "rule for BatchNorm's statistics", "NIID-Bench")

    async def start(self, s: Server) -> Mapping[int, Weights]:
        s.models["global"] = await s.init(one_network(self.name, s.archs))
        return s.to_all(Weights.of(s.models["global"]))

    async def client(self, c: Client, down: Weights | None) -> Update:
        assert down is not None
        c.model = c.model.with_(down.state)
        fitted = await c.fit("fit", CrossEntropy("private"), private=c.private)
        if fitted.steps and not fitted.trained:
            raise RuntimeError("FedNova must know which entries were trained, but the engine does not report them")
        weights = {name: c.model.state[name] for name in fitted.trained}
        statistics = {name: value for name, value in c.model.floating.items() if name not in weights}
        return Update(weights, statistics, len(c.private), fitted.steps)

    async def server(self, s: Server, ups: Mapping[int, Update]) -> Mapping[int, Weights]:
        w, updates = s.models["global"].state, list(ups.values())
        p = shares([up.samples for up in updates])
        gammas = coefficients(p, [self.normalised(up.steps) for up in updates])
        moves = {name: sum_of(gammas, [up.weights[name] - w[name] for up in updates]) for name in updates[0].weights}
        if self.server_momentum:
            before = s.memory.get("moves") or dict.fromkeys(moves, 0.0)
            moves = s.memory["moves"] = {n: self.server_momentum * before[n] + move for n, move in moves.items()}
        if self.statistics == "normalised":
            names = updates[0].statistics
            statistics = {n: extrapolated(w[n], gammas, [up.statistics[n] for up in updates]) for n in names}
        else:
            statistics = {**average([Weights(up.statistics, up.samples) for up in updates])}
        s.models["global"] = s.models["global"].with_({n: w[n] + move for n, move in moves.items()} | statistics)
        return s.to_all(Weights.of(s.models["global"]))

    def normalised(self, steps: int) -> float:
        """a_k, at least 1: a client that made no step has not moved anyway."""
        return max(1.0, heavy_ball(steps, self.momentum) if self.normaliser == "momentum" else steps)


def heavy_ball(steps: int, rho: float) -> float:
    """A = (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho): the weight of all gradients in tau steps with momentum."""
    if rho == 1:
        return steps * (steps + 1) / 2
    return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)


def coefficients(p: list[float], a: list[float]) -> list[float]:
    """p_k tau_eff / a_k with tau_eff = sum_k p_k a_k: the weight of each client's update; their sum is 1 or more."""
    tau_eff = sum(share * steps for share, steps in zip(p, a, strict=True))
    return [share * tau_eff / steps for share, steps in zip(p, a, strict=True)]


def extrapolated(w: Tensor, gammas: list[float], values: list[Tensor]) -> Tensor:
    """W + sum_k gamma_k (v_k - w), but not below 0 where no client's value is: a variance stays one."""
    moved = w + sum_of(gammas, [value - w for value in values])
    return torch.where(torch.stack(values).amin(0) < 0, moved, moved.clamp(min=0))
