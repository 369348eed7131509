"""BatchNorm's statistics of a network: the exact mean and variance over some inputs."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def statistics(module: nn.Module, forward: Callable[[Tensor], Any], parts: Iterable[Tensor]) -> dict[str, Tensor]:
    """The running means and variances by name, over everything that enters the norms; each part is a batch.

    Norms that stay in evaluation mode in training keep theirs; the others change in place.
    """
    batch_norms = {n: m for n, m in module.train().named_modules() if isinstance(m, _BatchNorm) and m.training}
    norms = {name: norm for name, norm in batch_norms.items() if norm.running_mean is not None}
    module.eval()
    if not norms:
        return {}
    seen: dict[str, list[tuple[int, Tensor, Tensor]]] = {name: [] for name in norms}

    def note(name: str, norm: _BatchNorm, inputs: tuple[Tensor], _: Tensor) -> None:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        n = inputs[0].numel() // inputs[0].shape[1]
        seen[name].append((n, norm.running_mean.clone(), norm.running_var * ((n - 1) / n)))

    for norm in norms.values():
        norm.train().momentum = 1.0  # the running statistics are those of the latest part
    hooks = [norm.register_forward_hook(partial(note, name)) for name, norm in norms.items()]
    try:
        for x in parts:
            forward(x)
    finally:
        for hook in hooks:
            hook.remove()
    return {f"{name}.{n}": v for name, own in seen.items() if own for n, v in _pooled(own).items()}


def _pooled(parts: list[tuple[int, Tensor, Tensor]]) -> dict[str, Tensor]:
    """Mean and unbiased variance over all parts, from those of each part."""
    numbers, means, variances = (list(column) for column in zip(*parts, strict=True))
    total = sum(numbers)
    share = torch.tensor([n / total for n in numbers], dtype=means[0].dtype, device=means[0].device)[:, None]
    mean = (share * torch.stack(means)).sum(0)
    var = (share * (torch.stack(variances) + (torch.stack(means) - mean) ** 2)).sum(0)
    return {"running_mean": mean, "running_var": var * (total / (total - 1))}
