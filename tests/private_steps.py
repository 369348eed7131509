"""A step made by hand, what a method asks for, and how a loss over clients at once is compared with a loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedcc.core.messages import Weights
from fedcc.core.model import Outputs, State
from fedcc.core.requests import Fit, Init
from fedcc.core.rng import Key
from fedcc.core.roles import Client
from fedcc.core.step import Batch, Loss, Step
from tiny import Tiny


def step(
    logits: Tensor,
    y: Tensor,
    features: Tensor | None = None,
    constants: Mapping[str, Any] | None = None,
    teacher: Tensor | None = None,
    params: Mapping[str, Tensor] | None = None,
) -> Step:
    """One step on a private batch."""
    features = torch.zeros(len(logits), 1, dtype=logits.dtype) if features is None else features
    seen = {} if teacher is None else {"teacher": Outputs(teacher, teacher)}
    return Step({"private": Batch(Outputs(logits, features), {"y": y})}, params or {}, constants or {}, seen)


def slopes(loss: Loss, logits: Tensor, y: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    """A loss and its gradient with respect to the logits."""
    leaf = logits.detach().clone().requires_grad_()
    value = loss(step(leaf, y, **rest))
    (grad,) = torch.autograd.grad(value, leaf, allow_unused=True)
    return value.detach(), torch.zeros_like(leaf) if grad is None else grad


def agrees_over_clients(loss: Loss, cases: Sequence[Mapping[str, Any]]) -> None:
    """The loss of all clients at once (vmap) has the values and gradients of a loop over them."""

    def stacked(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {name: stacked([value[name] for value in values]) for name in values[0]}
        return torch.stack(list(values))

    def leaves(tree: Any) -> list[Tensor]:
        return [leaf for value in tree.values() for leaf in leaves(value)] if isinstance(tree, dict) else [tree]

    together = {name: stacked([case[name] for case in cases]) for name in cases[0]}
    inputs = [t for n in ("logits", "features", "params") if n in together for t in leaves(together[n])]
    for tensor in inputs:
        tensor.requires_grad_()
    names = list(together)
    values = torch.vmap(lambda *a: loss(step(**dict(zip(names, a, strict=True)))))(*together.values())
    grads = torch.autograd.grad(values.sum(), inputs, allow_unused=True)
    alone = []
    for case in cases:
        own = [t.requires_grad_() for n in ("logits", "features", "params") if n in case for t in leaves(case[n])]
        value = loss(step(**case))
        alone.append((value.detach(), torch.autograd.grad(value, own, allow_unused=True)))
    for k, (value, slope) in enumerate(alone):
        torch.testing.assert_close(values[k].detach(), value, rtol=1e-12, atol=1e-12)
        for at_once, single in zip(grads, slope, strict=True):
            if single is not None:
                assert at_once is not None
                torch.testing.assert_close(at_once[k], single, rtol=1e-12, atol=1e-12)
                assert torch.isfinite(single).all()


def asked(method: Any, c: Client) -> Fit:
    """The fit that a method's local training asks for, from the client's own weights as the received ones."""
    coroutine = method.train(c, Weights.of(c.model))
    request = coroutine.send(None)
    coroutine.close()
    assert isinstance(request, Fit)
    return request


def initial(tiny: Tiny) -> State:
    """The weights that a method with one shared first model starts from."""
    (model,) = tiny.executor.serve([Init(tiny.clients[0].arch, Key(tiny.seed, phase="init"))])
    state: State = model.floating
    return state


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(batch: int, classes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, classes, (batch,), generator=torch.Generator().manual_seed(seed))


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Equal to the bit, names included."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
