"""The batches and augmentation of a fit, as arrays made from its key alone, so that every engine sees the same."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedcc.core.rng import Key
from fedcc.core.samples import LEVELS, View


class Plan:
    """The batches of one stream of a fit, made as they are asked for: what comes next does not depend on how many."""

    def __init__(self, key: Key, samples: int, batch: int, view: View):
        if samples < 1:
            raise ValueError(f"a stream needs at least one sample, got {samples}")
        self.samples, self.batch, self.view = samples, batch, view
        self.generator, self.rest = key.generator(), np.empty((0, batch), np.int64)
        self.draws = key.of(stream=f"{key.stream}/augment").generator()
        self.limits = np.array([2 * view.pad + 1, 2 * view.pad + 1, 2 if view.flip else 1])
        self.strong = key.of(stream=f"{key.stream}/strong").generator()

    def indices(self, steps: int) -> Tensor:
        """Samples of the next steps, int64 [steps, batch]."""
        per_epoch = -(-self.samples // self.batch)
        need, epochs = per_epoch * self.batch, [self.rest]
        for _ in range(-(-(steps - len(self.rest)) // per_epoch)):
            permutations = [self.generator.permutation(self.samples) for _ in range(-(-need // self.samples))]
            epochs.append(np.concatenate(permutations)[:need].reshape(per_epoch, self.batch))
        made = np.concatenate(epochs)
        self.rest = made[steps:]
        return torch.from_numpy(made[:steps].astype(np.int64, copy=False))

    def augmentation(self, steps: int) -> Tensor:
        """What :meth:`View.augmented` needs for the next steps' images, int64 [steps, batch, draws]; empty without.

        Crop and flip are the same whatever comes beside them.
        """
        if not self.view.augments:
            return torch.empty(steps, 0, 0, dtype=torch.long)
        draws = self.draws.integers(0, self.limits, (steps, self.batch, 3))
        if self.view.strong:
            draws = np.concatenate([draws, self.strong.integers(0, LEVELS, (steps, self.batch, 4))], axis=-1)
        return torch.from_numpy(draws)


def batches(key: Key, samples: int, batch: int, steps: int) -> Tensor:
    """Sample indices [steps, batch]: full batches only, every sample at least once an epoch.

    An epoch is a permutation of the samples, its last batch topped up from the head of another permutation; a
    stream shorter than the fit goes on with epochs of its own. A plan with more steps begins with the same ones.

    >>> sorted(set(batches(Key(0), samples=5, batch=4, steps=2).flatten().tolist()))
    [0, 1, 2, 3, 4]
    """
    return Plan(key, samples, batch, View()).indices(steps)


def augmentation(key: Key, view: View, batch: int, steps: int) -> Tensor:
    """The draws of every image, int64 [steps, batch, draws]; empty without augmentation."""
    return Plan(key, 1, batch, view).augmentation(steps)
