"""What methods do to gradients: the ascent of sharpness-aware minimisation, and clipping."""

from __future__ import annotations

from dataclasses import dataclass

from fedcc.core.step import Gradient, Tensors, norm


@dataclass(frozen=True)
class Ascent(Gradient):
    """Take the gradient at theta + rho g / |g| (SAM), the norm over all trained tensors together."""

    rho: float

    def ascent(self, grads: Tensors) -> Tensors | None:
        if self.rho == 0:
            return None
        scale = self.rho / (norm(grads) + 1e-12)
        return {name: grad * scale for name, grad in grads.items()}


@dataclass(frozen=True)
class Clip(Gradient):
    """Scale all gradients together so that their norm is at most ``limit``."""

    limit: float

    def transform(self, grads: Tensors) -> Tensors:
        scale = (self.limit / (norm(grads) + 1e-6)).clamp(max=1.0)
        return {name: grad * scale for name, grad in grads.items()}
