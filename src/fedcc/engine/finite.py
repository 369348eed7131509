"""Results must be finite. They are checked once per request, at its end, so that no step waits for a GPU.

A weight counts as finite only if its square is finite: beyond that (1.8e19 in fp32) the next product overflows.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedcc.core.model import Model, State
from fedcc.core.requests import Fit, Predict


class NotFiniteError(FloatingPointError):
    """Predictions that are not finite, and the model that made them."""

    def __init__(self, message: str, model: Model):
        super().__init__(message)
        self.model = model


def magnitudes(state: State) -> dict[str, float]:
    """The largest absolute value of every floating entry; waits for the device once."""
    tensors = {name: value for name, value in state.items() if value.is_floating_point() and value.numel()}
    if not tensors:
        return {}
    norms = torch.stack(torch._foreach_norm(list(tensors.values()), math.inf)).tolist()
    return dict(zip(tensors, norms, strict=True))


def overflowing_entry(before: State, after: State, largest: Mapping[str, float]) -> str:
    """The first entry that was finite before and is not after, with magnitudes ``largest``; empty if there is none."""
    limits = {dtype: limit(dtype) for dtype in {after[name].dtype for name in largest}}
    for name, magnitude in largest.items():
        # a network may contain a mask of infinities
        if not magnitude <= limits[after[name].dtype] and bool((~_fine(after[name]) & _fine(before[name])).any()):
            return name
    return ""


def limit(dtype: torch.dtype) -> float:
    """The largest number of a type whose square is finite."""
    return math.sqrt(torch.finfo(dtype).max)


def _fine(value: Tensor) -> Tensor:
    return value.abs() <= limit(value.dtype)


def nonfinite_reason(fit: Fit, after: State, total: float, finite_steps: int, largest: Mapping[str, float]) -> str:
    """What is not finite after a fit, and since which step; empty if everything is finite.

    ``total`` is the sum of its losses, ``finite_steps`` the number of steps for which that was finite.
    """
    steps, rate = fit.steps, f"with lr {fit.recipe.lr}"
    if not math.isfinite(total):
        return f"the loss is not finite ({total}) at step {min(finite_steps + 1, steps)} of {steps} {rate}"
    if name := overflowing_entry(fit.model.state, after, largest):
        overflow = f"{name} reaches {largest[name]:.3g}"
        return f"the weights are not finite or overflow ({overflow}) after step {steps} of {steps} {rate}"
    return ""


def check_predictions(requests: Sequence[Predict], logits: Tensor) -> None:
    """Refuse logits [K, N, C] that are not finite; features that are not finite would show in them."""
    fine = logits.isfinite().flatten(1).all(1).tolist()
    for request, own, good in zip(requests, logits, fine, strict=True):
        if not good:
            rows = int((~own.isfinite()).any(-1).sum())
            error = NotFiniteError(f"the predictions are not finite on {rows:,} of {len(own):,} samples", request.model)
            if request.key is not None:
                error.add_note(str(request.key))
            raise error


def check_models(before: Mapping[str, Model], after: Mapping[str, Model]) -> None:
    """Refuse entries of a server's models that were finite before and no longer are; only new entries are read."""
    for who, model in after.items():
        if who in before and before[who].arch == model.arch:
            old = before[who].state
            new = {name: value for name, value in model.state.items() if value is not old[name]}
            if name := overflowing_entry(old, new, magnitudes(new)):
                raise FloatingPointError(
                    f"the weights of the server's model {who!r} are not finite or overflow ({name})"
                )
