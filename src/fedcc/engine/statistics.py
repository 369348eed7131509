"""BatchNorm's statistics of a network on given inputs: their mean and variance, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def statistics(module: nn.Module, forward: Callable[[Tensor], Any], parts: Iterable[Tensor]) -> dict[str, Tensor]:
    """The running means and variances by name, of all that enters the norms when each part is normalised by itself.

    The rest of the module is left in evaluation mode, so that no dropout draws; its own statistics are overwritten.
    """
    norms = {n: m for n, m in module.eval().named_modules() if isinstance(m, _BatchNorm) and m.running_mean is not None}
    if not norms:
        return {}
    seen: dict[str, list[tuple[int, Tensor, Tensor]]] = {name: [] for name in norms}

    def note(name: str, norm: _BatchNorm, inputs: tuple[Tensor]) -> None:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        x = inputs[0].to(norm.running_mean.dtype)
        var, mean = torch.var_mean(x, [d for d in range(x.ndim) if d != 1], correction=0)
        seen[name].append((x.numel() // x.shape[1], mean, var))
        norm.running_mean.copy_(mean)  # in evaluation mode this is what normalises the part
        norm.running_var.copy_(var)

    hooks = [m.register_forward_pre_hook(partial(note, name)) for name, m in norms.items()]
    try:
        for x in parts:
            forward(x)
    finally:
        for hook in hooks:
            hook.remove()
    return {f"{name}.{n}": v for name, own in seen.items() if own for n, v in _pooled(own).items()}


def _pooled(parts: list[tuple[int, Tensor, Tensor]]) -> dict[str, Tensor]:
    """Mean and unbiased variance over all parts: the spread between their means counts too."""
    numbers, means, variances = (list(column) for column in zip(*parts, strict=True))
    total = sum(numbers)
    share = torch.tensor([n / total for n in numbers], dtype=means[0].dtype, device=means[0].device)[:, None]
    mean = (share * torch.stack(means)).sum(0)
    var = (share * (torch.stack(variances) + (torch.stack(means) - mean) ** 2)).sum(0)
    return {"running_mean": mean, "running_var": var * (total / max(1, total - 1))}
