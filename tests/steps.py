"""Steps made by hand for testing losses, and a look at the fits that a method asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedcc.core.model import Outputs
from fedcc.core.requests import Fit
from fedcc.core.rng import Key
from fedcc.core.samples import View
from fedcc.core.step import Batch, Loss, Step
from fedcc.engine.plan import Plan
from tiny import Tiny


def batches(key: Key, samples: int, batch: int, steps: int) -> Tensor:
    """The sample indices of a fit's steps, [steps, batch]."""
    return Plan(key, samples, batch, View()).indices(steps)


def augmentation(key: Key, view: View, batch: int, steps: int) -> Tensor:
    """The draws of every image, [steps, batch, draws]."""
    return Plan(key, 1, batch, view).augmentation(steps)


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers in double precision."""
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(seed: int, classes: int, *shape: int) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def value(loss: Loss, logits: dict[str, Tensor], columns: dict[str, dict[str, Tensor]]) -> Tensor:
    """A loss on hand-made logits and columns, by stream."""
    return loss(Step({name: Batch(Outputs(z, z), columns[name]) for name, z in logits.items()}))


def one(loss: Loss, stream: str, logits: Tensor, **columns: Tensor) -> Tensor:
    """A loss of one stream."""
    return value(loss, {stream: logits}, {stream: columns})


def gradient(loss: Loss, stream: str, logits: Tensor, **columns: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    one(loss, stream, leaf, **columns).backward()
    assert leaf.grad is not None
    return leaf.grad


def assert_same_under_vmap(loss: Loss, logits: dict[str, Tensor], columns: dict[str, dict[str, Tensor]]) -> None:
    """Values and gradients over a client axis [K, ...] are those of a loop over the clients."""
    clients = len(next(iter(logits.values())))
    values = vmap(lambda z, c: value(loss, z, c))(logits, columns)
    gradients = vmap(grad(lambda z, c: value(loss, z, c)))(logits, columns)
    for k in range(clients):
        own = {name: {n: column[k] for n, column in group.items()} for name, group in columns.items()}
        leaves = {name: z[k].clone().requires_grad_() for name, z in logits.items()}
        alone = value(loss, leaves, own)
        alone.backward()
        torch.testing.assert_close(values[k], alone.detach(), rtol=1e-12, atol=1e-12)
        for name, leaf in leaves.items():
            torch.testing.assert_close(gradients[name][k], leaf.grad, rtol=1e-12, atol=1e-12)


def watch(tiny: Tiny) -> list[Fit]:
    """A list that every later fit of this federation is put on."""
    fits: list[Fit] = []
    serve = tiny.executor.fit

    def noting(fit: Fit) -> Any:
        fits.append(fit)
        return serve(fit)

    tiny.executor.fit = noting  # type: ignore[method-assign]
    return fits


def servers(fits: list[Fit], phase: str | None = None) -> list[Fit]:
    """The server's fits among them."""
    return [fit for fit in fits if fit.key.client < 0 and phase in (None, fit.key.phase)]


def equal(a: Any, b: Any) -> bool:
    """Two states, to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a: Any, b: Any, tolerance: float = 1e-12) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], rtol=tolerance, atol=tolerance) for n in a)
