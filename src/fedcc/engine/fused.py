"""The fused engine: the clients of a group train together, stacked in lanes, each step one captured graph on a GPU.

A lane is a slot for one client. Longest clients go first; the lanes run until the next client has finished, whose slot
then takes the next client; when nobody waits, the rest move to fewer lanes. So ragged clients cost no masks and no
padding, and a thousand clients run in the memory of a few.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedcc.core.model import Arch, Model, Outputs, State
from fedcc.core.requests import Fit, Fitted, Predict, Request
from fedcc.core.samples import Samples
from fedcc.core.step import Batch, Step
from fedcc.engine import cuda, stepping
from fedcc.engine.adam import BETAS, EPS
from fedcc.engine.cuda import Side
from fedcc.engine.drive import signature
from fedcc.engine.fast import FastTrunk
from fedcc.engine.finite import check_predictions, fit_fault, magnitudes
from fedcc.engine.plain import Lazily, Monitor, Plain, Precision
from fedcc.engine.plan import Plan
from fedcc.engine.stack import Stacked, stackable, stacked_state

WINDOW = 512  # steps whose batches lie on the device at a time
MOST_LANES = 64  # more gain nothing: the device is full long before
STRETCH = 16  # steps between two pauses of a group
DONE = object()
REALS, COUNTS = ("age", "lr", "length", "cosine", "loss", "finite"), ("at", "place")  # the numbers of a lane
PREDICT_ROWS = 8192  # inputs of all clients together in one forward pass
PREDICT_PIXELS = 2**26  # of one client in one forward pass: kernels count its numbers with 32 bits


class Fused:
    """Serves groups of equal requests together; what can't be stacked goes to the plain engine."""

    name = "fused"

    def __init__(
        self,
        device: str | torch.device = "cpu",
        precision: Precision = "bf16",
        monitor: Monitor | None = None,
        lanes: int | None = None,
        graphs: bool | None = None,
        kernels: bool | None = None,
    ):
        self.plain = Plain(device, precision, monitor)
        self.device, self.precision, self.dtype = self.plain.device, precision, self.plain.dtype
        self.low = torch.bfloat16 if precision == "bf16" else self.dtype
        self.monitor, self.seconds = monitor, self.plain.seconds
        self.most = lanes
        self.graphs = self.device.type == "cuda" if graphs is None else graphs
        self.kernels = usable(self.device, precision) if kernels is None else kernels
        if self.kernels and precision != "bf16":
            raise ValueError(f"the project's own kernels compute in bf16, not in {precision}")
        if self.kernels and not cuda.available(self.device):
            least = f"{'.'.join(map(str, cuda.OLDEST))} or later with {cuda.LEAST_SHARED // 1024} KiB of shared memory"
            raise ValueError(
                f"the project's own kernels need NVRTC and a GPU of compute capability {least}, got {self.device}"
            )
        self.memory_pools: dict[Arch, Any] = {}  # graphs of one network never run side by side
        self.streams: dict[Arch, Any] = {}
        self.kits: dict[Hashable, Kit] = {}
        self.stacks: dict[Arch, Stacked] = {}

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        self.plain.seconds = self.seconds
        groups: dict[Hashable, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(signature(request), []).append(i)
        answers: dict[int, Any] = {}
        training: list[list[int]] = []
        for places in groups.values():
            group, first = [requests[i] for i in places], requests[places[0]]
            if isinstance(first, Fit) and _stacks(first.model, *(f.model for f in first.frozen.values())):
                training.append(places)
            elif isinstance(first, Predict) and _stacks(first.model):
                answers |= zip(places, self._timed("predict", self.predict, group), strict=True)
            else:
                answers |= zip(places, self.plain.serve(group), strict=True)
        if training:
            fits: list[list[Any]] = [[requests[i] for i in places] for places in training]
            for places, fitted in zip(training, self._timed(fits[0][0].key.phase, self.fit, fits), strict=True):
                answers |= zip(places, fitted, strict=True)
        return [answers[i] for i in range(len(requests))]

    def _timed(self, phase: str, work: Callable[[list[Any]], list[Any]], given: list[Any]) -> list[Any]:
        begun = time.perf_counter()
        answers = work(given)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begun
        return answers

    # -- predictions

    @torch.no_grad()
    def predict(self, requests: list[Predict]) -> list[Outputs]:
        """The models of a group side by side, a few inputs at a time."""
        arch = requests[0].model.arch
        if arch not in self.stacks:
            self.stacks[arch] = Stacked(arch, self.kernels).eval()
        stack = self.stacks[arch]
        answers: list[Outputs] = []
        for at in range(0, len(requests), MOST_LANES):
            part = requests[at : at + MOST_LANES]
            if len({len(r.samples) for r in part}) > 1:
                answers += self.plain.serve(part)
                continue
            stack.hold(stacked_state([r.model.state for r in part], stack.template))
            pixels = math.prod(part[0].samples.x.shape[2:])
            rows, found = max(1, min(PREDICT_ROWS // len(part), PREDICT_PIXELS // pixels)), []
            for start in range(0, len(part[0].samples), rows):
                found.append(self._outputs(stack, torch.stack([self._clean(r.samples, start, rows) for r in part])))
            logits, features = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
            stack.slots.clear()
            check_predictions(part, logits)
            answers += [Outputs(logits[k], features[k]) for k in range(len(part))]
        return answers

    def _clean(self, samples: Samples, start: int, rows: int) -> Tensor:
        return samples.view.clean(samples.x[start : start + rows].to(self.device), self.dtype)

    def _outputs(self, stack: Stacked, x: Tensor) -> Outputs:
        return Outputs(*(part.to(self.dtype) for part in stack(x.to(self.low))))

    # -- training

    def fit(self, groups: list[list[Fit]]) -> list[list[Fitted]]:
        """Train groups, one per network, side by side; the fits' keys, lengths, learning rates and sizes may differ."""
        numbers = count()
        jobs = [[Job(next(numbers), fit, fit.steps) for fit in group] for group in groups]
        every = [job for group in jobs for job in group]
        longest = [sorted(group, key=lambda j: -j.steps) for group in jobs]
        answers: dict[int, Fitted] = {j.index: self.plain.fit(j.fit) for j in every if not j.steps}
        while todo := list(filter(None, ([j for j in group if j.index not in answers] for group in longest))):
            try:
                self._side_by_side({group[0].fit.model.arch: self._train(group, answers) for group in todo})
            except torch.cuda.OutOfMemoryError:
                self.most = (self.most or min(MOST_LANES, max(map(len, todo)))) // 2
                self.kits.clear()
                torch.cuda.empty_cache()
                if not self.most:
                    raise
                for job in every:  # those that were under way begin again
                    job.again()
        self._finish([job for job in every if job.losses is not None], answers)
        return [[answers[j.index] for j in group] for group in jobs]

    def _finish(self, jobs: list[Job], answers: dict[int, Fitted]) -> None:
        """Give each fit its mean loss; refuse one that is not finite. Here the device is waited for."""
        sums = torch.stack([j.losses for j in jobs if j.losses is not None]).tolist() if jobs else []
        largest = magnitudes([answers[j.index].model.state for j in jobs])
        for job, (total, finite_steps), own in zip(jobs, sums, largest, strict=True):
            made = answers[job.index]
            if fault := fit_fault(job.fit, made.model.state, total, int(finite_steps), own):
                error = FloatingPointError(fault)
                error.add_note(str(job.fit.key))
                raise error
            answers[job.index] = replace(made, loss=total / job.steps)

    def _side_by_side(self, groups: dict[Arch, Iterator[None]]) -> None:
        """Advance the groups, on a GPU each on a stream of its own, so that one fills the gaps of another.

        Each is given a little work in advance, and more when it has done some of it.
        """
        if self.device.type != "cuda" or len(groups) == 1:
            for group in groups.values():
                deque(group, maxlen=0)
            return
        here = torch.cuda.current_stream(self.device)
        for arch in groups:
            if arch not in self.streams:
                self.streams[arch] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self.streams[arch].wait_stream(here)
        ahead: dict[Arch, deque[Any]] = {arch: deque() for arch in groups}
        try:
            while ahead:
                for arch, marks in list(ahead.items()):
                    while marks and marks[0].query():
                        marks.popleft()
                    if len(marks) > 1:
                        continue
                    with torch.cuda.stream(self.streams[arch]):
                        if next(groups[arch], DONE) is DONE:
                            del ahead[arch]
                        else:
                            marks.append(self.streams[arch].record_event())
                if ahead and all(len(marks) > 1 for marks in ahead.values()):
                    time.sleep(2e-4)
        finally:
            for arch in groups:
                here.wait_stream(self.streams[arch])

    def _train(self, jobs: list[Job], answers: dict[int, Fitted]) -> Iterator[None]:
        """Train a group; a pause after every few steps."""
        kit = self._kit(jobs)
        waiting, width = deque(jobs), allowed(min(len(jobs), self._lanes(kit, len(jobs))))
        lanes = kit.lanes(width, self)
        seats: list[Job | None] = [None] * width
        for seat in range(width):
            if waiting:
                lanes.load(seat, waiting[0])
                seats[seat] = waiting.popleft()
        while active := [j for j in seats if j is not None]:
            for one in active:  # all of them first: the device has work yet, and may have none while batches are copied
                if one.window == 0:
                    one.prepare()
            for seat, job in enumerate(seats):
                if job is None:
                    lanes.rest(seat)
                elif job.window == 0:
                    lanes.refill(seat, job)
            steps = min(min(j.steps - j.done, j.window) for j in active)
            if self.monitor:
                self.monitor.fitting(active[0].fit)
            for begin in range(0, steps, STRETCH):
                lanes.run(min(STRETCH, steps - begin), self)
                yield
            for one in islice(waiting, sum(j.steps - j.done == steps for j in active)):
                one.prepare()
            for seat, job in enumerate(seats):
                if job is None:
                    continue
                job.done += steps
                job.window -= steps
                if job.done == job.steps:
                    answers[job.index] = lanes.unload(seat, job)
                    seats[seat] = None
                    if waiting:
                        lanes.load(seat, waiting[0])
                        seats[seat] = waiting.popleft()
            left = [seat for seat, job in enumerate(seats) if job is not None]
            if left and allowed(len(left)) < lanes.width:
                narrower = kit.lanes(allowed(len(left)), self)
                narrower.take(lanes, left)
                seats = [seats[seat] for seat in left] + [None] * (narrower.width - len(left))
                lanes = narrower

    def _kit(self, jobs: list[Job]) -> Kit:
        key = signature(jobs[0].fit)
        kit = self.kits.get(key)
        if kit is None or not kit.fits(jobs):
            kit = self.kits[key] = Kit(jobs, self.device)
        kit.fill(jobs)
        return kit

    def _lanes(self, kit: Kit, wanted: int) -> int:
        """As many lanes as memory allows: judged by what one lane takes beyond what is there before."""
        limit = self.most or MOST_LANES
        if self.device.type != "cuda" or wanted <= 4:
            return limit
        if kit.lane_bytes is None:
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            kit.lanes(1, self).step(self)
            kit.lane_bytes = torch.cuda.max_memory_allocated(self.device) - before
        free = torch.cuda.mem_get_info(self.device)[0]
        return max(1, min(limit, int(0.7 * free / max(1, kit.lane_bytes))))


@dataclass(eq=False)
class Job:
    """One client's fit on its way through the lanes."""

    index: int
    fit: Fit
    steps: int
    done: int = 0
    window: int = 0  # steps whose batches lie ready
    losses: Tensor | None = None  # their sum over its steps, and the number of steps until that was not finite
    plans: dict[str, Plan] = field(default_factory=dict)
    ready: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def prepare(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Indices and augmentation of the steps that come next, by stream: made when first asked for."""
        fit, steps = self.fit, min(WINDOW, self.steps - self.done)
        if not self.ready:
            for name, samples in fit.streams.items():
                if name not in self.plans:
                    batch = fit.recipe.batch_of(name)
                    self.plans[name] = Plan(fit.key.of(stream=name), len(samples), batch, samples.view)
                self.ready[name] = self.plans[name].indices(steps), self.plans[name].augmentation(steps)
        return self.ready

    def again(self) -> None:
        """Begin from the first step."""
        self.done = self.window = 0
        self.plans, self.ready = {}, {}


class Kit:
    """What a group of equal requests shares: its samples in one place, and lanes of several widths."""

    def __init__(self, jobs: list[Job], device: torch.device):
        self.fit, self.device = jobs[0].fit, device
        self.lane_bytes: int | None = None
        self.widths: dict[int, Lanes] = {}
        self.pools: dict[tuple[str, str], Tensor] = {}
        self.offsets: dict[tuple[str, str, int], int] = {}  # (stream, column, job) -> where its rows begin
        for place, columns in self._columns(jobs).items():
            rows = sum(len(c) for c in columns.values())
            like = next(iter(columns.values()))
            self.pools[place] = torch.zeros((rows, *like.shape[1:]), dtype=like.dtype, device=device)

    def _columns(self, jobs: list[Job]) -> dict[tuple[str, str], dict[int, Tensor]]:
        """The distinct tensors of every column: those that several clients share stand there once."""
        return {
            (name, column): {id(j.fit.streams[name][column]): j.fit.streams[name][column] for j in jobs}
            for name, samples in self.fit.streams.items()
            for column in samples.columns
        }

    def fits(self, jobs: list[Job]) -> bool:
        """Whether these requests' samples fit into the pools."""
        rows = {place: sum(len(c) for c in columns.values()) for place, columns in self._columns(jobs).items()}
        return all(rows[place] <= len(pool) for place, pool in self.pools.items())

    def fill(self, jobs: list[Job]) -> None:
        self.offsets = {}
        for (name, column), columns in self._columns(jobs).items():
            begins, at = {}, 0
            for key, tensor in columns.items():
                self.pools[name, column][at : at + len(tensor)].copy_(tensor, non_blocking=True)
                begins[key], at = at, at + len(tensor)
            for job in jobs:
                self.offsets[name, column, job.index] = begins[id(job.fit.streams[name][column])]

    def lanes(self, width: int, engine: Fused) -> Lanes:
        if width not in self.widths:
            self.widths[width] = Lanes(self, width, engine)
        return self.widths[width]


@dataclass(frozen=True)
class Drawn:
    """The batches of a step: inputs [width, images, ...] of all streams side by side, and columns by stream."""

    x: Tensor
    batches: Mapping[str, int]
    columns: dict[str, dict[str, Tensor]]
    ready: Any  # the mark of the inputs on the side stream

    def inputs(self) -> dict[str, Tensor]:
        return dict(zip(self.batches, torch.split(self.x, list(self.batches.values()), 1), strict=True))


class Seat(NamedTuple):
    """The tensors of one lane: views."""

    params: list[Tensor]
    moments: list[Tensor]
    fixed: list[Tensor]


class Lanes:
    """Slots for ``width`` clients: every tensor of a network once per slot, trained together by one step."""

    def __init__(self, kit: Kit, width: int, engine: Fused):
        fit, device = kit.fit, kit.device
        self.kit, self.width, self.fit = kit, width, fit
        self.stack = Stacked(fit.model.arch, engine.kernels)
        self.teachers = {name: Stacked(f.model.arch, engine.kernels).eval() for name, f in fit.frozen.items()}
        self.trained = self.stack.train_part(fit.only)
        template = self.stack.template
        # One flat tensor for all trained parameters, leaf by leaf, each [width, ...]: cast and stepped as one.
        self.sizes = [width * template[n].numel() for n in self.trained]
        total = sum(self.sizes)
        self.params, self.means, self.squares = (
            torch.zeros(total, dtype=engine.dtype, device=device) for _ in range(3)
        )
        lane = [torch.arange(width).repeat_interleave(template[n].numel()) for n in self.trained]
        self.lane = torch.cat(lane).to(device, torch.int32)
        self.kernels, self.side = engine.kernels, Side(device, engine.kernels)
        self.fixed = {
            name: torch.zeros((width, *value.shape), dtype=engine.dtype, device=device)
            for name, value in template.items()
            if name not in self.trained and value.is_floating_point()
        }
        self.taught = {
            name: {
                n: torch.zeros((width, *v.shape), dtype=engine.dtype, device=device)
                for n, v in teacher.template.items()
                if v.is_floating_point()
            }
            for name, teacher in self.teachers.items()
        }
        self.constants = _map(lambda t: torch.zeros((width, *t.shape), dtype=t.dtype, device=device), fit.constants)
        # Each number of all lanes is a row, so that a client's are written, and moved, in two calls.
        self.reals = torch.zeros(len(REALS), width, dtype=torch.float64, device=device)
        self.counts = torch.zeros(len(COUNTS), width, dtype=torch.long, device=device)
        self.numbers = dict(zip((*REALS, *COUNTS), (*self.reals, *self.counts), strict=True))
        self.batches = {s: fit.recipe.batch_of(s) for s in fit.streams}
        self.plan = {
            s: torch.zeros(width, WINDOW, b, dtype=torch.int32, device=device) for s, b in self.batches.items()
        }
        self.draws = {
            s: torch.zeros(
                width, WINDOW, self.batches[s] if v.view.augments else 0, v.view.draws, dtype=torch.uint8, device=device
            )
            for s, v in fit.streams.items()
        }
        self.offsets = {p: torch.zeros(width, 1, dtype=torch.long, device=device) for p in kit.pools}
        self.rows = torch.arange(width, device=device)
        self.ones = torch.ones(width, dtype=engine.dtype, device=device)
        self.names = _read(fit)
        self.climbs = False
        if fit.gradient is not None:  # asked once, not in every captured step
            ones = {n: torch.ones(template[n].shape, dtype=engine.dtype, device=device) for n in self.trained}
            self.climbs = fit.gradient.ascent(ones) is not None
        self.seats: dict[int, Seat] = {}
        pools = [pool for (_, column), pool in kit.pools.items() if column == "x"]
        self.images = engine.kernels and all(p.ndim == 4 and p.dtype == torch.uint8 for p in pools)
        self.graph: Any = None
        if engine.graphs:
            self.capture(engine)

    # -- clients in and out

    def load(self, seat: int, job: Job) -> None:
        fit, saved = job.fit, job.fit.optimizer
        own = self.seat(seat)
        slots = [*own.params, *own.fixed]
        given = [fit.model.state[name] for name in (*self.trained, *self.fixed)]
        for name, tensors in self.taught.items():
            slots += [value[seat] for value in tensors.values()]
            given += [fit.frozen[name].model.state[n] for n in tensors]
        pairs: list[tuple[Tensor, Tensor]] = []
        _each(lambda slot, value: pairs.append((slot[seat], value)), self.constants, fit.constants)
        slots += [slot for slot, _ in pairs]
        given += [value for _, value in pairs]
        if saved:
            slots += own.moments
            given += [saved[f"{kind}/{name}"] for kind in ("mean", "square") for name in self.trained]
        else:
            torch._foreach_zero_(own.moments)
        torch._foreach_copy_(slots, given)
        age = float(saved[f"step/{self.trained[0]}"]) if saved else 0.0
        reals = [age, fit.recipe.lr, job.steps, fit.recipe.schedule == "cosine", 0.0, 0.0]
        self.reals[:, seat].copy_(torch.tensor(reals, dtype=torch.float64), non_blocking=True)
        self.counts[:, seat] = 0
        for (stream, column), offset in self.offsets.items():
            offset[seat] = self.kit.offsets[stream, column, job.index]
        self.refill(seat, job)

    def refill(self, seat: int, job: Job) -> None:
        """The batches of the steps that come next."""
        for stream, (indices, draws) in job.prepare().items():
            self.plan[stream][seat, : len(indices)].copy_(indices.to(torch.int32), non_blocking=True)
            self.draws[stream][seat, : len(draws)].copy_(draws.to(torch.uint8), non_blocking=True)
            job.window = len(indices)
        job.ready = {}
        self.numbers["place"][seat] = 0

    def rest(self, seat: int) -> None:
        """A seat without a client goes through the steps too: it must find its batches within window and pool."""
        self.numbers["place"][seat] = 0
        for offset in self.offsets.values():
            offset[seat] = 0

    def unload(self, seat: int, job: Job) -> Fitted:
        own, again = self.seat(seat), job.fit.recipe.reset == "round"
        taken = [*own.params, *own.fixed, *(own.moments if again else [])]
        copies = [torch.empty_like(t) for t in taken]
        torch._foreach_copy_(copies, taken)
        held = dict(zip((*self.trained, *self.fixed), copies, strict=False))
        steps = job.steps * (1 if self.fit.joint else len(self.names))

        def count(name: str, value: Tensor) -> Tensor:
            module, _, own = name.rpartition(".")
            counts = own == "num_batches_tracked" and self.stack.get_submodule(module).training
            return value + steps if counts else value

        state = {n: held[n] if n in held else count(n, v) for n, v in job.fit.model.state.items()}
        job.losses = self.reals[-2:, seat].clone()  # loss and finite
        optimizer: dict[str, Tensor] = {}
        if again:
            names = [f"{kind}/{n}" for kind in ("mean", "square") for n in self.trained]
            optimizer = dict(zip(names, copies[-len(names) :], strict=True))
            optimizer |= {f"step/{n}": self.numbers["age"][seat].float() for n in self.trained}
        return Fitted(Model(job.fit.model.arch, state), job.steps, 0.0, optimizer, tuple(self.trained))

    def seat(self, seat: int) -> Seat:
        """The tensors of one lane, found once."""
        if seat not in self.seats:
            params, means, squares = (
                [block[seat] for block in self._blocks(flat).values()]
                for flat in (self.params, self.means, self.squares)
            )
            self.seats[seat] = Seat(params, means + squares, [value[seat] for value in self.fixed.values()])
        return self.seats[seat]

    def take(self, other: Lanes, seats: list[int]) -> None:
        """Move clients over from wider lanes, to the seats 0, 1, ... here, in few calls and without waiting."""
        slots, given = (
            [t for k in order for part in lanes.seat(k) for t in part]
            for lanes, order in ((self, range(len(seats))), (other, seats))
        )
        torch._foreach_copy_(slots, given)
        index = torch.tensor(seats).to(self.rows.device, non_blocking=True)
        pairs: list[tuple[Tensor, Tensor]] = []
        for mine, theirs in ((self.plan, other.plan), (self.draws, other.draws), (self.offsets, other.offsets)):
            pairs += [(value, theirs[name]) for name, value in mine.items()]  # type: ignore[index]
        pairs += [(v, other.taught[name][n]) for name, tensors in self.taught.items() for n, v in tensors.items()]
        _each(lambda slot, value: pairs.append((slot, value)), self.constants, other.constants)
        pairs += [(self.reals.T, other.reals.T), (self.counts.T, other.counts.T)]
        for slot, value in pairs:
            slot[: len(seats)].copy_(value[index])

    def _blocks(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat tensor as one [width, ...] per trained parameter."""
        template = self.stack.template
        return {
            name: part.view(self.width, *template[name].shape)
            for name, part in zip(self.trained, torch.split(flat, self.sizes), strict=True)
        }

    # -- one step for all lanes

    def run(self, steps: int, engine: Fused) -> None:
        for _ in range(steps):
            if self.graph is not None:
                self.graph.replay()
            else:
                self.step(engine)
            if engine.monitor:
                engine.monitor.trained(self.width * sum(self.batches.values()))

    def step(self, engine: Fused) -> None:
        """A step of every lane: batches, forward, losses, gradients, Adam.

        The batches are made beside the packing of weights, and the step is counted beside the way back.
        """
        try:
            drawn = self.batch(engine)
            losses, leaves = self.losses(engine, self.params, drawn)
            pace = self.tick(losses.detach())
            grads = self.gradients(losses, leaves)
            if self.fit.gradient is not None:
                grads = [self.adjusted(engine, _whole(grads), drawn)]
        finally:  # a capture that fails has to end too
            self.side.join()
        if self.fit.recipe.momentum is None:
            self.adam(grads, *pace)
        else:
            self.descend(_whole(grads), pace[0], self.fit.recipe.momentum)

    def batch(self, engine: Fused) -> Drawn:
        """This step's batches: gathered, augmented, normalised."""
        x = self._images(engine.low) if self.images else self._inputs(engine.dtype)
        with self.side.stretch():
            ready = self.side.mark()
            columns = {
                stream: {c: self._rows(stream, c) for c in samples.columns if c != "x"}
                for stream, samples in self.fit.streams.items()
            }
        return Drawn(x, self.batches, columns, ready)

    def _inputs(self, dtype: torch.dtype) -> Tensor:
        """The inputs of all streams side by side."""
        inputs = []
        for stream, samples in self.fit.streams.items():
            x = self._rows(stream, "x")
            draws = self.draws[stream][self.rows, self.numbers["place"]].flatten(0, 1)
            shown = samples.view.augmented(x.flatten(0, 1), draws.long(), dtype)
            inputs.append(shown.reshape(*x.shape[:2], *shown.shape[1:]))
        return torch.cat(inputs, 1) if len(inputs) > 1 else inputs[0]

    def _rows(self, stream: str, column: str) -> Tensor:
        """A column's batch, [width, batch, ...]."""
        pool, offset = self.kit.pools[stream, column], self.offsets[stream, column]
        plan, place = self.plan[stream], self.numbers["place"]
        if self.kernels:
            return stepping.rows(pool, plan, place, offset)
        return pool[plan[self.rows, place].long() + offset]

    def _images(self, dtype: torch.dtype) -> Tensor:
        """The inputs of all streams side by side, by a kernel, on the side stream."""
        channels, height, width = next(iter(self.fit.streams.values())).shape
        shape = (self.width, sum(self.batches.values()), height, width, channels)
        out, first = torch.empty(shape, dtype=dtype, device=self.rows.device), 0
        with self.side.stretch():
            for stream, samples in self.fit.streams.items():
                given = self.plan[stream], self.draws[stream], self.numbers["place"], self.offsets[stream, "x"]
                stepping.images(self.kit.pools[stream, "x"], *given, samples.view, out, first)
                first += self.batches[stream]
        return out.permute(0, 1, 4, 2, 3)

    def losses(self, engine: Fused, flat: Tensor, drawn: Drawn) -> tuple[Tensor, list[Tensor]]:
        """All lanes' losses [width] at ``flat``, and the leaves that they are functions of."""
        leaf = flat.detach().requires_grad_()
        params, leaves, inputs = self._blocks(leaf), [leaf], drawn.inputs()
        held = params
        if self.stack.fast:  # leaves of their own: their gradients lie one behind another already, most of them
            held = {name: block.detach().requires_grad_() for name, block in params.items()}
            params = {name: block.detach().requires_grad_() for name, block in params.items()}  # what a loss may read
            leaves = [*held.values(), *params.values()]
        if engine.low != engine.dtype and not self.stack.fast:
            # convolutions and linear layers in low precision, cast all at once; BatchNorm's own stay
            low = self._blocks(leaf.to(engine.low))
            held = {n: low[n] if low[n].ndim > 2 else params[n] for n in params}
        self.stack.hold({**self.fixed, **held})
        if self.stack.training:
            for trunk in self.stack.fast:
                cast(FastTrunk, trunk).pack()
        self.side.join(drawn.ready)
        outputs: dict[str, Outputs] = {}
        if self.fit.joint:
            both = engine._outputs(self.stack, drawn.x)
            sizes = list(self.batches.values())
            cuts = [torch.split(part, sizes, 1) if len(sizes) > 1 else [part] for part in both]
            outputs = {name: Outputs(*pair) for name, *pair in zip(inputs, *cuts, strict=True)}
        else:
            for name in self.names:
                outputs[name] = engine._outputs(self.stack, inputs[name])
        seen = {}
        with torch.no_grad():
            for name, teacher in self.teachers.items():
                teacher.hold(self.taught[name])
                seen[name] = engine._outputs(teacher, inputs[self.fit.frozen[name].stream])

        def one(outputs: Any, columns: Any, params: Any, constants: Any, seen: Any) -> Tensor:
            streams = {n: Batch(Outputs(*outputs[n]), columns[n]) for n in outputs}
            return self.fit.loss(Step(streams, params, constants, {n: Outputs(*s) for n, s in seen.items()}))

        self.side.join()
        given = {n: tuple(o) for n, o in outputs.items()}, {n: drawn.columns[n] for n in outputs}
        losses = torch.vmap(one)(*given, params, dict(self.constants), {n: tuple(s) for n, s in seen.items()})
        return losses, leaves

    def gradients(self, losses: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        """Gradients of all lanes' losses, flat, in parts."""
        found = torch.autograd.grad(losses, leaves, self.ones, allow_unused=True)
        held, read = (found[: len(self.trained)], found[len(self.trained) :]) if self.stack.fast else (found, ())
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, held, strict=False)]
        more = [(grad, pull) for grad, pull in zip(grads, read, strict=False) if pull is not None]
        if more:  # in place, so that neighbours in memory remain neighbours
            torch._foreach_add_([grad for grad, _ in more], [pull for _, pull in more])
        return _runs(grads)

    def adjusted(self, engine: Fused, grads: Tensor, drawn: Drawn) -> Tensor:
        """The gradients as the fit's gradient rule wants them: perhaps taken again elsewhere, perhaps transformed."""
        rule = self.fit.gradient
        assert rule is not None
        if self.climbs:
            offsets = torch.vmap(rule.ascent)(self._blocks(grads))
            moved = self.params + torch.cat([offsets[n].reshape(-1) for n in self.trained])  # type: ignore[index]
            self.stack.stay(True)
            grads = _whole(self.gradients(*self.losses(engine, moved, drawn)))
            self.stack.stay(False)
        changed = torch.vmap(rule.transform)(self._blocks(grads))
        return torch.cat([changed[n].reshape(-1) for n in self.trained])

    def tick(self, losses: Tensor) -> tuple[Tensor, Tensor]:
        """Count a step of these losses; Adam's step sizes and bias corrections [width], found in float64.

        With momentum the step sizes are the learning rates.
        """
        n, momentum = self.numbers, self.fit.recipe.momentum
        if self.kernels and momentum is None:
            with self.side.stretch():
                return stepping.tick(losses, n, BETAS)
        n["loss"].add_(losses)
        n["finite"].add_(n["loss"].isfinite())
        n["age"].add_(1)
        slower = 0.5 * (1 - torch.cos(math.pi * n["at"].double() / n["length"].clamp(min=1)))
        lr = n["lr"] * (1 - n["cosine"] * slower)
        n["at"].add_(1)
        n["place"].add_(1)
        size, root = lr / (1 - BETAS[0] ** n["age"]), (1 - BETAS[1] ** n["age"]).rsqrt()
        size = size if momentum is None else lr
        return size.to(self.params.dtype), root.to(self.params.dtype)

    def adam(self, parts: list[Tensor], size: Tensor, root: Tensor) -> None:
        """Adam with a step size and a bias correction per lane."""
        if self.kernels:
            stepping.adam(self.params, self.means, self.squares, parts, self.lane, size, root, BETAS, EPS)
            return
        grads, size, root = _whole(parts), size[self.lane], root[self.lane]
        self.means.lerp_(grads, 1 - BETAS[0])
        self.squares.mul_(BETAS[1]).addcmul_(grads, grads, value=1 - BETAS[1])
        self.params.addcmul_(self.means / self.squares.sqrt().mul_(root).add_(EPS), size, value=-1)

    def descend(self, grads: Tensor, rate: Tensor, momentum: float) -> None:
        """SGD with momentum, with a learning rate per lane; the means hold the velocities."""
        self.params.addcmul_(self.means.mul_(momentum).add_(grads), rate[self.lane], value=-1)

    def capture(self, engine: Fused) -> None:
        """Record a step as a graph; what the trial steps do to the slots is overwritten when clients are loaded."""
        # Ahead of what runs beside it, the gradients of weights: layer waits for layer here.
        side = torch.cuda.Stream(engine.device, priority=-1)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(engine.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step(engine)
                self.numbers["place"].zero_()
        torch.cuda.current_stream(engine.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        arch, collects = self.fit.model.arch, gc.isenabled()
        gc.disable()  # to free an old graph in the middle would spoil the new one
        try:
            with torch.cuda.graph(graph, pool=engine.memory_pools.get(arch), stream=side):
                self.step(engine)
        finally:
            if collects:
                gc.enable()
        engine.memory_pools[arch] = graph.pool()
        self.graph = graph


def _stacks(*models: Model) -> bool:
    return not any(stackable(model.arch) for model in models)


def usable(device: torch.device, precision: Precision) -> bool:
    """Whether the project's own kernels run here: on a GPU that knows bf16, where NVRTC is found."""
    return precision == "bf16" and cuda.available(device)


def allowed(clients: int) -> int:
    """The number of lanes for so many clients: at most 15 % more, so that few graphs are captured.

    >>> [allowed(n) for n in (1, 9, 10, 11, 13, 33)]
    [1, 9, 10, 12, 14, 36]
    """
    width = clients
    if clients > 10:
        grain = 2 ** max(1, (clients - 1).bit_length() - 4)
        width = -(-clients // grain) * grain
    return min(width, MOST_LANES) if clients <= MOST_LANES else MOST_LANES


def _runs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """These one after another, as flat tensors: neighbours that lie one behind another in memory are one, not copied.

    >>> a, b, c = torch.arange(6).split((2, 3, 1))
    >>> [run.tolist() for run in _runs([a, b, torch.tensor([[7, 8]]), c])]
    [[0, 1, 2, 3, 4], [7, 8], [5]]
    """
    runs: list[Tensor] = []
    for flat in (tensor.reshape(-1) for tensor in tensors):
        if runs and _behind(runs[-1], flat):
            runs[-1] = runs[-1].as_strided((len(runs[-1]) + len(flat),), (1,), runs[-1].storage_offset())
        else:
            runs.append(flat)
    return runs


def _behind(first: Tensor, second: Tensor) -> bool:
    """Whether the second of two flat tensors begins where the first ends, in the same storage."""
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return same and first.storage_offset() + len(first) == second.storage_offset()


def _whole(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _read(fit: Fit) -> list[str]:
    """The streams that a fit's loss reads, in that order; the others need no forward pass of their own."""
    if fit.joint:
        return list(fit.streams)
    asked: list[str] = []
    size, arch = 2, fit.model.arch

    def dummy(name: str) -> Batch:
        asked.append(name)
        columns = {n: torch.zeros((size, *c.shape[1:]), dtype=c.dtype) for n, c in fit.streams[name].columns.items()}
        return Batch(Outputs(torch.zeros(size, arch.outputs), torch.zeros(size, 1)), columns)

    state: State = {n: v.detach().cpu() for n, v in fit.model.state.items()}
    constants = _map(lambda t: t.detach().cpu(), fit.constants)
    blank = Outputs(torch.zeros(size, arch.outputs), torch.zeros(size, 1))
    fit.loss(Step(Lazily(fit.streams, dummy), state, constants, dict.fromkeys(fit.frozen, blank)))
    return asked


def _map(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """A tree of tensors, changed leaf by leaf; other leaves stay."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {name: _map(change, value) for name, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(_map(change, value) for value in tree)
    return tree


def _each(visit: Callable[[Tensor, Tensor], Any], slots: Any, values: Any) -> None:
    """Visit two trees of tensors together."""
    if isinstance(slots, Tensor):
        visit(slots, values)
    elif isinstance(slots, Mapping):
        for name in slots:
            _each(visit, slots[name], values[name])
    elif isinstance(slots, tuple | list):
        for slot, value in zip(slots, values, strict=True):
            _each(visit, slot, value)
