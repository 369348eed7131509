"""Adam on named parameters: the fused kernel of torch.optim without what its first step imports (the compiler, 3 s).

And SGD with momentum, for what a source trains so and a few steps of Adam would not learn.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BETAS, EPS = (0.9, 0.999), 1e-8


class Adam:
    """The kernel of ``torch.optim.Adam(fused=True)``, to the bit; its state is a flat mapping that can be handed on."""

    def __init__(self, params: Mapping[str, Tensor], state: Mapping[str, Tensor] | None = None):
        self.params = params
        saved = state or {}
        self.means = {n: self._slot(saved, f"mean/{n}", p) for n, p in params.items()}
        self.squares = {n: self._slot(saved, f"square/{n}", p) for n, p in params.items()}
        one = torch.zeros((), dtype=torch.float32, device=next(iter(params.values())).device)
        self.steps = [saved[f"step/{n}"].clone() if f"step/{n}" in saved else one.clone() for n in params]

    @staticmethod
    def _slot(saved: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
        slot = torch.zeros_like(like, memory_format=torch.preserve_format, requires_grad=False)
        return slot.copy_(saved[name]) if name in saved else slot

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step with the gradients in ``grad``; a parameter without one is left alone."""
        names = [(i, name) for i, (name, p) in enumerate(self.params.items()) if p.grad is not None]
        steps = [self.steps[i] for i, _ in names]
        torch._foreach_add_(steps, 1)
        torch._fused_adam_(
            [self.params[n] for _, n in names],
            [g for _, n in names if (g := self.params[n].grad) is not None],
            [self.means[n] for _, n in names],
            [self.squares[n] for _, n in names],
            [],
            steps,
            lr=lr,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=0.0,
            eps=EPS,
            amsgrad=False,
            maximize=False,
        )

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on."""
        return (
            {f"mean/{n}": v.clone() for n, v in self.means.items()}
            | {f"square/{n}": v.clone() for n, v in self.squares.items()}
            | {f"step/{n}": v.clone() for n, v in zip(self.params, self.steps, strict=True)}
        )


class Momentum:
    """``torch.optim.SGD`` with momentum; nothing of it outlives a fit."""

    def __init__(self, params: Mapping[str, Tensor], momentum: float):
        self.params, self.momentum = params, momentum
        self.velocities = {name: torch.zeros_like(p, requires_grad=False) for name, p in params.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step with the gradients in ``grad``; a parameter without one is left alone."""
        for name, p in self.params.items():
            if p.grad is not None:
                p.sub_(self.velocities[name].mul_(self.momentum).add_(p.grad), alpha=lr)

    def state(self) -> dict[str, Tensor]:
        return {}
