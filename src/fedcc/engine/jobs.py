"""What clients bring to the lanes: a fit each, with its next batches, and their samples in shared pools."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedcc.core.requests import Fit, Fitted
from fedcc.engine.plan import Plan

PoolName = tuple[str, str]  # a stream, and a column of its samples


@dataclass(eq=False)
class Job:
    """One client's fit on its way through the lanes."""

    WINDOW: ClassVar[int] = 512  # steps whose batches are on the device at a time

    fit: Fit
    done: int = 0  # steps
    steps_loaded: int = 0  # steps whose batches are on the device and not used yet
    ends: Tensor | None = None  # the sum of its losses, the steps for which that was finite, a bound of its weights
    fitted: Fitted | None = None
    offsets: dict[PoolName, int] = field(default_factory=dict)  # its first row in each pool
    plans: dict[str, Plan] = field(default_factory=dict)
    prepared: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps, self.keeps_optimizer = self.fit.steps, self.fit.recipe.reset == "round"

    def prepare(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Indices and augmentation of the next steps by stream; drawn on the first call after a refill."""
        fit, steps = self.fit, min(self.WINDOW, self.steps - self.done)
        if not self.prepared:
            for name, samples in fit.streams.items():
                if name not in self.plans:
                    batch = fit.recipe.batch_size(name)
                    self.plans[name] = Plan(fit.key.of(stream=name), len(samples), batch, samples.view)
                self.prepared[name] = self.plans[name].indices(steps), self.plans[name].augmentation(steps)
        return self.prepared

    def restart(self) -> None:
        """Begin again with the first step, if it has not ended."""
        self.done = self.steps_loaded = 0
        self.plans, self.prepared = {}, {}


class SamplePools:
    """The samples of all jobs of a group on the device: one tensor per stream and column."""

    def __init__(self, jobs: list[Job], device: torch.device):
        self.fit, self.device = jobs[0].fit, device
        self.pools: dict[PoolName, Tensor] = {}
        for name, columns in self._columns(jobs).items():
            rows = sum(len(c) for c in columns.values())
            like = next(iter(columns.values()))
            self.pools[name] = torch.zeros((rows, *like.shape[1:]), dtype=like.dtype, device=device)

    def _columns(self, jobs: list[Job]) -> dict[PoolName, dict[int, Tensor]]:
        """The distinct tensors of every column; one that several clients share appears once."""
        return {
            (name, column): {id(j.fit.streams[name][column]): j.fit.streams[name][column] for j in jobs}
            for name, samples in self.fit.streams.items()
            for column in samples.columns
        }

    def have_room(self, jobs: list[Job]) -> bool:
        """Whether these jobs' samples fit into the pools."""
        rows = {name: sum(len(c) for c in columns.values()) for name, columns in self._columns(jobs).items()}
        return all(rows[name] <= len(pool) for name, pool in self.pools.items())

    def fill(self, jobs: list[Job]) -> None:
        for (stream, column), columns in self._columns(jobs).items():
            begins, at = {}, 0
            for key, tensor in columns.items():
                self.pools[stream, column][at : at + len(tensor)].copy_(tensor, non_blocking=True)
                begins[key], at = at, at + len(tensor)
            for job in jobs:
                job.offsets[stream, column] = begins[id(job.fit.streams[stream][column])]
