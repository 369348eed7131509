"""Adam and SGD with momentum on named parameters.

Adam calls the fused kernel of torch.optim directly, whose own first step would import the compiler (3 s).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

BETAS, EPS = (0.9, 0.999), 1e-8
RULE: dict[str, Any] = {"beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "weight_decay": 0.0}
RULE |= {"amsgrad": False, "maximize": False}


class Adam:
    """``torch.optim.Adam(fused=True)`` to the bit; its state is a flat mapping, from which another can continue."""

    def __init__(self, params: Mapping[str, Tensor], state: Mapping[str, Tensor] | None = None):
        self.params = params
        saved = state or {}
        self.means = {n: self._slot(saved, f"mean/{n}", p) for n, p in params.items()}
        self.squares = {n: self._slot(saved, f"square/{n}", p) for n, p in params.items()}
        zero = torch.zeros((), dtype=torch.float32, device=next(iter(params.values())).device)
        self.steps = {n: saved.get(f"step/{n}", zero).clone() for n in params}

    @staticmethod
    def _slot(saved: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
        slot = torch.zeros_like(like, memory_format=torch.preserve_format, requires_grad=False)
        return slot.copy_(saved[name]) if name in saved else slot

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step with the gradients in ``grad``; a parameter without one stays unchanged."""
        names = [name for name, p in self.params.items() if p.grad is not None]
        grads = [g for name in names if (g := self.params[name].grad) is not None]
        params, means, squares, steps = (
            [tensors[name] for name in names] for tensors in (self.params, self.means, self.squares, self.steps)
        )
        torch._foreach_add_(steps, 1)
        torch._fused_adam_(params, grads, means, squares, [], steps, lr=lr, **RULE)

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue."""
        kinds = {"mean": self.means, "square": self.squares, "step": self.steps}
        return {f"{kind}/{n}": v.clone() for kind, tensors in kinds.items() for n, v in tensors.items()}


class Momentum:
    """``torch.optim.SGD`` with momentum; its state ends with the fit."""

    def __init__(self, params: Mapping[str, Tensor], momentum: float):
        self.params, self.momentum = params, momentum
        self.velocities = {name: torch.zeros_like(p, requires_grad=False) for name, p in params.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step with the gradients in ``grad``; a parameter without one stays unchanged."""
        for name, p in self.params.items():
            if p.grad is not None:
                p.sub_(self.velocities[name].mul_(self.momentum).add_(p.grad), alpha=lr)

    def state(self) -> dict[str, Tensor]:
        return {}
