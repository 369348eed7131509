"""The memory of lanes: each holds one client's parameters, optimizer state, batches and constants."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves, tree_map_only

from fedcc.core.model import Arch, Model, Outputs
from fedcc.core.requests import Fit, Fitted
from fedcc.core.step import Batch, Step
from fedcc.engine.jobs import Job, SamplePools
from fedcc.engine.mapped import together
from fedcc.engine.plain import LazyStreams
from fedcc.engine.stack import Together, batches_counted

REALS = ("age", "lr", "length", "cosine", "loss", "finite_steps")  # the numbers of a lane
COUNTS = ("step", "position", "seed")


@dataclass(frozen=True)
class Compute:
    """Where and in which number formats the lanes compute."""

    device: torch.device
    dtype: torch.dtype  # of weights, statistics and losses
    low: torch.dtype  # of convolutions and linear layers
    kernels: bool  # whether the project's own kernels compute them
    graphs: bool  # whether a step is captured as a CUDA graph
    graph_pools: dict[Arch, Any] = field(default_factory=dict)  # graphs of one network never run side by side

    def together(self, arch: Arch) -> Together:
        """Networks of one architecture, one per lane."""
        return together(arch, self.kernels, self.device, self.dtype, self.low)

    def outputs(self, stack: Together, x: Tensor) -> Outputs:
        """A stack's outputs [lanes, batch, ...] on inputs [lanes, batch, ...]."""
        x = x if stack.casts else x.to(self.low)
        return Outputs(*(part.to(self.dtype) for part in stack(x)))


class LaneTensors(NamedTuple):
    """Views of one lane's tensors."""

    params: list[Tensor]
    moments: list[Tensor]
    fixed: list[Tensor]


class Lanes:
    """Memory for ``width`` clients: every tensor of a fit once per lane."""

    def __init__(self, pools: SamplePools, width: int, compute: Compute):
        fit, device, dtype = pools.fit, compute.device, compute.dtype

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.pools, self.width, self.fit = pools, width, fit
        self.stack = compute.together(fit.model.arch)
        self.teachers = {name: compute.together(f.model.arch).eval() for name, f in fit.frozen.items()}
        self.trained = self.stack.train_part(fit.only)
        self.counted = batches_counted(fit.model.arch)
        template = self.stack.template
        # One flat tensor for all trained parameters, each [width, ...]: one cast and one optimizer step for all.
        self.sizes = [width * template[n].numel() for n in self.trained]
        self.params, self.means, self.squares = (zeros(sum(self.sizes)) for _ in range(3))
        lane_of = [torch.arange(width).repeat_interleave(template[n].numel()) for n in self.trained]
        self.lane_of = torch.cat(lane_of).to(device, torch.int32)
        self.fixed = {
            name: zeros(width, *value.shape)
            for name, value in template.items()
            if name not in self.trained and value.is_floating_point()
        }
        self.teacher_tensors = {
            name: {n: zeros(width, *v.shape) for n, v in teacher.template.items() if v.is_floating_point()}
            for name, teacher in self.teachers.items()
        }
        self.constants: dict[str, Any] = tree_map_only(
            Tensor, lambda t: zeros(width, *t.shape, dtype=t.dtype), fit.constants
        )
        # Each number of all lanes is a row, so that clients' numbers are written, and moved, in two calls.
        self.reals = zeros(len(REALS), width, dtype=torch.float64)
        self.counts = zeros(len(COUNTS) + len(pools.pools), width, dtype=torch.long)
        self.numbers = dict(zip((*REALS, *COUNTS), (*self.reals, *self.counts), strict=False))
        self.offsets = dict(zip(pools.pools, self.counts[len(COUNTS) :].unsqueeze(-1), strict=True))
        self.batches = {s: fit.recipe.batch_size(s) for s in fit.streams}
        self.plan = {s: zeros(width, Job.WINDOW, b, dtype=torch.int32) for s, b in self.batches.items()}
        self.draws = {
            s: zeros(
                width, Job.WINDOW, self.batches[s] if v.view.augments else 0, v.view.draws_per_image, dtype=torch.uint8
            )
            for s, v in fit.streams.items()
        }
        self.rows = torch.arange(width, device=device)
        self.streams = streams_read(fit)
        self._tensors: dict[int, LaneTensors] = {}

    def load(self, seats: Mapping[int, Job]) -> None:
        """Put clients into lanes, in few calls however many they are."""
        slots, values, reals, counts = list[Tensor](), list[Tensor](), list[list[float]](), list[list[int]]()
        fresh: list[Tensor] = []
        for lane, job in seats.items():
            fit, optimizer, own = job.fit, job.fit.optimizer, self.tensors(lane)
            slots += [*own.params, *own.fixed]
            values += [fit.model.state[name] for name in (*self.trained, *self.fixed)]
            for name, tensors in self.teacher_tensors.items():
                slots += [value[lane] for value in tensors.values()]
                values += [fit.frozen[name].model.state[n] for n in tensors]
            slots += [slot[lane] for slot in _tensors(self.constants)]
            values += _tensors(fit.constants)
            if optimizer:
                slots += own.moments
                values += [optimizer[f"{kind}/{name}"] for kind in ("mean", "square") for name in self.trained]
            else:
                fresh += own.moments
            age = float(optimizer[f"step/{self.trained[0]}"]) if optimizer else 0.0
            reals.append([age, fit.recipe.lr, job.steps, fit.recipe.schedule == "cosine", 0.0, 0.0])
            seed = fit.key.of(stream="dropout").integer() if self.stack.dropouts else 0
            counts.append([0, 0, seed, *(job.offsets[pool] for pool in self.offsets)])
        if len(fresh) == 2 * len(self.trained) * self.width:
            fresh = [self.means, self.squares]
        if fresh:
            torch._foreach_zero_(fresh)
        torch._foreach_copy_(slots, values)
        index = self._index(seats)
        self.reals[:, index] = self._to_device(torch.tensor(reals, dtype=torch.float64)).T
        self.counts[:, index] = self._to_device(torch.tensor(counts)).T
        self.refill(seats)

    def refill(self, seats: Mapping[int, Job]) -> None:
        """Copy the batches of clients' next steps."""
        if not seats:
            return
        index, prepared = self._index(seats), [job.prepare() for job in seats.values()]
        for stream in self.plan:
            indices, draws = zip(*(batches[stream] for batches in prepared), strict=True)
            self._write(self.plan[stream], index, indices)
            if self.draws[stream].numel():
                self._write(self.draws[stream], index, draws)
            for job, own in zip(seats.values(), indices, strict=True):
                job.steps_loaded = len(own)
        for job in seats.values():
            job.prepared = {}
        self.numbers["position"][index] = 0

    def _write(self, slots: Tensor, index: Any, values: tuple[Tensor, ...]) -> None:
        """Write the first steps of lanes [width, steps, ...]; what lies behind a shorter one's is never read."""
        rows = pad_sequence([value.to(slots.dtype) for value in values], batch_first=True)
        slots[index, : rows.shape[1]] = self._to_device(rows)

    def _to_device(self, values: Tensor) -> Tensor:
        return values.to(self.rows.device, non_blocking=True)

    def _index(self, lanes: Collection[int]) -> Any:
        """Lanes as an index of tensors on the device; all of them, or a single one, need no copy to it."""
        first = next(iter(lanes))
        if len(lanes) == 1:
            return slice(first, first + 1)
        return slice(None) if list(lanes) == list(range(self.width)) else self._to_device(torch.tensor(list(lanes)))

    def idle(self, lanes: Collection[int]) -> None:
        """Empty lanes take part in every step: keep their batches within window and pool."""
        if lanes:
            self.counts[:, self._index(lanes)] = 0

    @cached_property
    def _counters(self) -> dict[str, int]:
        """Entries that count batches in training, and by how many a step moves them."""
        training = {name for name in self.counted if self.stack.get_submodule(name.rpartition(".")[0]).training}
        return {name: number for name, number in self.counted.items() if name in training}

    def unload(self, seats: Mapping[int, Job]) -> list[Fitted]:
        """Copy clients' results out of their lanes, in few calls however many they are."""
        originals, counters, counts = list[Tensor](), list[Tensor](), list[int]()
        for lane, job in seats.items():
            own = self.tensors(lane)
            originals += [*own.params, *own.fixed, *(own.moments if job.keeps_optimizer else [])]
            counters += [job.fit.model.state[name] for name in self._counters]
            steps = job.steps * (1 if self.fit.joint else len(self.streams))
            counts += [steps * number for number in self._counters.values()]
        copies = iter(torch._foreach_mul(originals, 1))  # exact; the copies are made in the same call
        counted = iter(torch._foreach_add(counters, counts) if counters else [])
        largest = torch.stack(torch._foreach_norm([self.params, *self.fixed.values()], math.inf)).amax()
        ends = torch.cat([self.reals[-2:], largest.double().expand(1, self.width)])  # loss, finite_steps, magnitude
        fitted: list[Fitted] = []
        for lane, job in seats.items():
            entries = dict(zip((*self.trained, *self.fixed), copies, strict=False))
            entries |= dict(zip(self._counters, counted, strict=False))
            job.ends = ends[:, lane]
            optimizer: dict[str, Tensor] = {}
            if job.keeps_optimizer:
                names = [f"{kind}/{n}" for kind in ("mean", "square") for n in self.trained]
                optimizer = dict(zip(names, copies, strict=False))
                optimizer |= {f"step/{n}": self.numbers["age"][lane].float() for n in self.trained}
            model = Model(job.fit.model.arch, {n: entries.get(n, v) for n, v in job.fit.model.state.items()})
            fitted.append(Fitted(model, job.steps, 0.0, optimizer, tuple(self.trained)))
        return fitted

    def move(self, other: Lanes, lanes: list[int]) -> None:
        """Move clients from these lanes of wider memory to lanes 0, 1, ... here, in few calls and without waiting."""
        slots, values = (
            [t for lane in order for part in memory.tensors(lane) for t in part]
            for memory, order in ((self, range(len(lanes))), (other, lanes))
        )
        torch._foreach_copy_(slots, values)
        index = self._to_device(torch.tensor(lanes))
        for slot, value in zip(self._rest(), other._rest(), strict=True):
            slot[: len(lanes)].copy_(value[index])

    def _rest(self) -> list[Tensor]:
        """What lanes hold besides the tensors of :meth:`tensors`, [width, ...] each."""
        batches = [*self.plan.values(), *self.draws.values()]
        teacher_tensors = [value for tensors in self.teacher_tensors.values() for value in tensors.values()]
        return [*batches, *teacher_tensors, *_tensors(self.constants), self.reals.T, self.counts.T]

    def tensors(self, lane: int) -> LaneTensors:
        """The tensors of one lane; the views are made once."""
        if lane not in self._tensors:
            params, means, squares = (
                [block[lane] for block in self.blocks(flat).values()]
                for flat in (self.params, self.means, self.squares)
            )
            self._tensors[lane] = LaneTensors(params, means + squares, [value[lane] for value in self.fixed.values()])
        return self._tensors[lane]

    def blocks(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat tensor as one [width, ...] per trained parameter."""
        template = self.stack.template
        return {
            name: part.view(self.width, *template[name].shape)
            for name, part in zip(self.trained, torch.split(flat, self.sizes), strict=True)
        }


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def streams_read(fit: Fit) -> list[str]:
    """The streams that a fit's loss reads, in that order; the others need no forward pass of their own."""
    if fit.joint:
        return list(fit.streams)
    names: list[str] = []
    size, arch = 2, fit.model.arch
    blank = Outputs(torch.zeros(size, arch.outputs), torch.zeros(size, 1))

    def dummy(name: str) -> Batch:
        names.append(name)
        columns = {n: torch.zeros((size, *c.shape[1:]), dtype=c.dtype) for n, c in fit.streams[name].columns.items()}
        return Batch(blank, columns)

    state, constants = tree_map_only(Tensor, lambda t: t.detach().cpu(), (dict(fit.model.state), fit.constants))
    fit.loss(Step(LazyStreams(fit.streams, dummy), state, constants, dict.fromkeys(fit.frozen, blank)))
    return names
