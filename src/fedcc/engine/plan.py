"""The batches and augmentation of a fit: drawn only from its key, so that every engine sees the same."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedcc.core.rng import Key
from fedcc.core.samples import LEVELS, View


class Plan:
    """The batches of one stream of a fit, drawn on demand: always the same ones, however many are drawn at a time.

    Batches are full, and every sample is used at least once an epoch: an epoch is a permutation of the samples, its
    last batch topped up from the head of another permutation. A stream shorter than the fit begins another epoch.

    >>> plan = Plan(Key(0), samples=5, batch=4, view=View())
    >>> sorted(set(plan.indices(2).flatten().tolist()))
    [0, 1, 2, 3, 4]
    """

    def __init__(self, key: Key, samples: int, batch: int, view: View):
        if samples < 1:
            raise ValueError(f"a stream needs at least one sample, got {samples}")
        self.key, self.samples, self.batch, self.view = key, samples, batch, view
        self.generator, self.rest = key.generator(), np.empty((0, batch), np.int64)
        self.limits = np.array([2 * view.pad + 1, 2 * view.pad + 1, 2 if view.flip else 1])

    @cached_property
    def draws(self) -> np.random.Generator:
        """Draws crops and flips."""
        return self.key.of(stream=f"{self.key.stream}/augment").generator()

    @cached_property
    def strong(self) -> np.random.Generator:
        """Draws holes, brightness and shifts."""
        return self.key.of(stream=f"{self.key.stream}/strong").generator()

    def indices(self, steps: int) -> Tensor:
        """Samples of the next steps, int64 [steps, batch]."""
        per_epoch = -(-self.samples // self.batch)
        need, epochs = per_epoch * self.batch, [self.rest]
        for _ in range(-(-(steps - len(self.rest)) // per_epoch)):
            permutations = [self.generator.permutation(self.samples) for _ in range(-(-need // self.samples))]
            epochs.append(np.concatenate(permutations)[:need].reshape(per_epoch, self.batch))
        rows = np.concatenate(epochs)
        self.rest = rows[steps:]
        return torch.from_numpy(rows[:steps].astype(np.int64, copy=False))

    def augmentation(self, steps: int) -> Tensor:
        """The draws of :meth:`View.augmented` for the next steps, int64 [steps, batch, draws]; perhaps none."""
        if not self.view.augments:
            return torch.empty(steps, 0, 0, dtype=torch.long)
        draws = self.draws.integers(0, self.limits, (steps, self.batch, 3))
        if self.view.strong:  # crop and flip do not depend on it
            draws = np.concatenate([draws, self.strong.integers(0, LEVELS, (steps, self.batch, 4))], axis=-1)
        return torch.from_numpy(draws)
