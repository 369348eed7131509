"""The batches and augmentation of a fit, as arrays made from its key alone, so that every engine sees the same."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedcc.core.rng import Key
from fedcc.core.samples import View


def batches(key: Key, samples: int, batch: int, steps: int) -> Tensor:
    """Sample indices [steps, batch]: full batches only, every sample at least once an epoch.

    An epoch is a permutation of the samples, its last batch topped up from the head of another permutation; a
    stream shorter than the fit goes on with epochs of its own. A plan with more steps begins with the same ones.

    >>> sorted(set(batches(Key(0), samples=5, batch=4, steps=2).flatten().tolist()))
    [0, 1, 2, 3, 4]
    """
    if samples < 1:
        raise ValueError(f"a stream needs at least one sample, got {samples}")
    generator = key.generator()
    per_epoch = -(-samples // batch)
    need = per_epoch * batch
    epochs = []
    for _ in range(-(-steps // per_epoch)):
        permutations = [generator.permutation(samples) for _ in range(-(-need // samples))]
        epochs.append(np.concatenate(permutations)[:need].reshape(per_epoch, batch))
    plan = np.concatenate(epochs)[:steps] if epochs else np.empty((0, batch), np.int64)
    return torch.from_numpy(plan.astype(np.int64, copy=False))


def augmentation(key: Key, view: View, batch: int, steps: int) -> Tensor:
    """Crop row, crop column and flip of every image, int64 [steps, batch, 3]; empty without augmentation."""
    if not view.augments:
        return torch.empty(steps, 0, 3, dtype=torch.long)
    generator = key.of(stream=f"{key.stream}/augment").generator()
    limits = np.array([2 * view.pad + 1, 2 * view.pad + 1, 2 if view.flip else 1])
    return torch.from_numpy(generator.integers(0, limits, (steps, batch, 3)))
