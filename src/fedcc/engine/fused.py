"""The fused engine: the clients of a group train together, stacked in lanes, each step one captured graph on a GPU."""

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from fedcc.core.model import Arch, Model, Outputs
from fedcc.core.options import Precision
from fedcc.core.requests import Fit, Fitted, Predict, Request
from fedcc.engine import cuda
from fedcc.engine.drive import signature
from fedcc.engine.finite import check_predictions, limit, magnitudes, nonfinite_reason
from fedcc.engine.jobs import Job
from fedcc.engine.lanes import Compute
from fedcc.engine.mapped import AloneWarning, alone_reason
from fedcc.engine.plain import Monitor, Plain
from fedcc.engine.seating import MOST_LANES, Group
from fedcc.engine.stack import Stacked, Together, stacked_state

PREDICT_ROWS = 8192  # inputs of all clients together in one forward pass
PREDICT_PIXELS = 2**26  # of one client in one forward pass: kernels count its numbers with 32 bits


class Fused:
    """Serves groups of equal requests together; networks that cannot train together go to the plain engine."""

    name = "fused"

    def __init__(
        self,
        device: str | torch.device = "cpu",
        precision: Precision = "bf16",
        monitor: Monitor | None = None,
        lanes: int | None = None,  # None: as many as memory allows
        graphs: bool | None = None,  # None: where they run
        kernels: bool | None = None,
    ):
        self.plain = Plain(device, precision, monitor)
        self.device, self.precision, self.dtype = self.plain.device, precision, self.plain.dtype
        self.monitor, self.seconds, self.most_lanes = monitor, self.plain.seconds, lanes
        graphs = self.device.type == "cuda" if graphs is None else graphs
        self.kernels = precision == "bf16" and cuda.available(self.device) if kernels is None else kernels
        if self.kernels and precision != "bf16":
            raise ValueError(f"the project's own kernels compute in bf16, not in {precision}")
        if self.kernels and not cuda.available(self.device):
            least = f"{'.'.join(map(str, cuda.OLDEST))} or later with {cuda.LEAST_SHARED // 1024} KiB of shared memory"
            raise ValueError(
                f"the project's own kernels need NVRTC and a GPU of compute capability {least}, got {self.device}"
            )
        low = torch.bfloat16 if precision == "bf16" else self.dtype
        self.compute = Compute(self.device, self.dtype, low, self.kernels, graphs)
        self.streams: dict[Arch, Any] = {}
        self.groups: dict[Hashable, Group] = {}
        self.stacks: dict[Arch, Together] = {}
        self.alone: dict[Arch, str] = {}  # why networks train one after another; empty if they train together

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        self.plain.seconds = self.seconds
        groups: dict[Hashable, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(signature(request), []).append(i)
        answers: dict[int, Any] = {}
        training: list[list[int]] = []
        for indices in groups.values():
            group, first = [requests[i] for i in indices], requests[indices[0]]
            if isinstance(first, Fit) and self._together(first.model, *(f.model for f in first.frozen.values())):
                training.append(indices)
            elif isinstance(first, Predict) and self._together(first.model):
                answers |= zip(indices, self._timed("predict", self.predict, group), strict=True)
            else:
                answers |= zip(indices, self.plain.serve(group), strict=True)
        if training:
            fits: list[list[Any]] = [[requests[i] for i in indices] for indices in training]
            for indices, fitted in zip(training, self._timed(fits[0][0].key.phase, self.fit, fits), strict=True):
                answers |= zip(indices, fitted, strict=True)
        return [answers[i] for i in range(len(requests))]

    def _timed(self, phase: str, work: Callable[[list[Any]], list[Any]], requests: list[Any]) -> list[Any]:
        start = time.perf_counter()
        answers = work(requests)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
        return answers

    @torch.no_grad()
    def predict(self, requests: list[Predict]) -> list[Outputs]:
        """The outputs of a group's models, computed together, a few inputs at a time."""
        arch = requests[0].model.arch
        if arch not in self.stacks:
            self.stacks[arch] = self.compute.together(arch).eval()
        stack = self.stacks[arch]
        answers: list[Outputs] = []
        for at in range(0, len(requests), MOST_LANES):
            part = requests[at : at + MOST_LANES]
            if len({len(r.samples) for r in part}) > 1:
                answers += self.plain.serve(part)
                continue
            stack.use(stacked_state([r.model.state for r in part], part[0].model.floating))
            outputs = self._outputs(stack, part)
            logits, features = (torch.cat(parts, 1) for parts in zip(*outputs, strict=True))
            stack.slots.clear()
            check_predictions(part, logits)
            answers += [Outputs(logits[k], features[k]) for k in range(len(part))]
        return answers

    def _outputs(self, stack: Together, requests: list[Predict]) -> list[Outputs]:
        """The outputs in parts, of fewer rows where memory does not hold as many."""
        number, pixels = len(requests[0].samples), math.prod(requests[0].samples.x.shape[2:])
        rows, start, outputs = max(1, min(PREDICT_ROWS // len(requests), PREDICT_PIXELS // pixels, number)), 0, []
        while start < number:
            try:
                images = [r.samples.x[start : start + rows].to(self.device) for r in requests]
                views = [r.samples.view.clean(x, self.dtype) for r, x in zip(requests, images, strict=True)]
                outputs.append(self.compute.outputs(stack, torch.stack(views)))
                start += rows
            except torch.cuda.OutOfMemoryError:
                rows //= 2
                if not rows:
                    raise
        return outputs

    def fit(self, groups: list[list[Fit]]) -> list[list[Fitted]]:
        """Train groups, one per network, side by side; the fits' keys, lengths, learning rates and sizes may differ."""
        jobs = [[Job(fit) for fit in group] for group in groups]
        every = [job for group in jobs for job in group]
        for job in every:
            if not job.steps:
                job.fitted = self.plain.fit(job.fit)
        longest_first = [sorted(group, key=lambda job: -job.steps) for group in jobs]
        while todo := [
            unfinished for group in longest_first if (unfinished := [job for job in group if job.fitted is None])
        ]:
            try:
                self._side_by_side({group[0].fit.model.arch: self._train(group) for group in todo})
            except torch.cuda.OutOfMemoryError:
                self.most_lanes = (self.most_lanes or min(MOST_LANES, max(map(len, todo)))) // 2
                self.groups.clear()
                torch.cuda.empty_cache()
                if not self.most_lanes:
                    raise
                for job in every:
                    job.restart()
        self._finish([job for job in every if job.ends is not None])
        return [[cast(Fitted, job.fitted) for job in group] for group in jobs]

    def _finish(self, jobs: list[Job]) -> None:
        """Give each fit its mean loss; refuse one that is not finite. This waits for the device."""
        ends = torch.stack([job.ends for job in jobs if job.ends is not None]).tolist() if jobs else []
        for job, (total, finite_steps, largest) in zip(jobs, ends, strict=True):
            fitted = cast(Fitted, job.fitted)
            state = fitted.model.state
            own = {} if largest <= limit(self.dtype) else magnitudes(state)  # entry by entry only where it matters
            if reason := nonfinite_reason(job.fit, state, total, int(finite_steps), own):
                error = FloatingPointError(reason)
                error.add_note(str(job.fit.key))
                raise error
            job.fitted = replace(fitted, loss=total / job.steps)

    def _side_by_side(self, groups: dict[Arch, Iterator[None]]) -> None:
        """Advance the groups; on a GPU each queues a little work on its own stream, so one fills another's gaps."""
        if self.device.type != "cuda" or len(groups) == 1:
            for group in groups.values():
                deque(group, maxlen=0)
            return
        current = torch.cuda.current_stream(self.device)
        for arch in groups:
            if arch not in self.streams:
                self.streams[arch] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self.streams[arch].wait_stream(current)
        queued: dict[Arch, deque[Any]] = {arch: deque() for arch in groups}
        end = object()
        try:
            while queued:
                for arch, events in list(queued.items()):
                    while events and events[0].query():
                        events.popleft()
                    if len(events) > 1:
                        continue
                    with torch.cuda.stream(self.streams[arch]):
                        if next(groups[arch], end) is end:
                            del queued[arch]
                        else:
                            events.append(self.streams[arch].record_event())
                if queued and all(len(events) > 1 for events in queued.values()):
                    time.sleep(2e-4)
        finally:
            for arch in groups:
                current.wait_stream(self.streams[arch])

    def _train(self, jobs: list[Job]) -> Iterator[None]:
        """Train a group; pauses after every few steps."""
        yield from self._group(jobs).train(jobs, self.most_lanes, self.monitor)

    def _group(self, jobs: list[Job]) -> Group:
        key = signature(jobs[0].fit)
        group = self.groups.get(key)
        if group is None or not group.pools.have_room(jobs):
            group = self.groups[key] = Group(jobs, self.compute)
        group.pools.fill(jobs)
        return group

    def way(self, arch: Arch) -> str:
        """How networks of an architecture that was trained are computed."""
        if self.alone[arch]:
            return f"plain ({self.alone[arch]})"
        networks = self.compute.together(arch)
        return "own kernels" if networks.fast else "stacked" if isinstance(networks, Stacked) else "vmap"

    def _together(self, *models: Model) -> bool:
        for arch in (model.arch for model in models):
            if arch not in self.alone:
                reason = self.alone[arch] = alone_reason(arch, self.device, self.dtype, self.compute.low)
                if reason:
                    text = f"{arch.name}: its clients train one after another, which is slower ({reason})"
                    warnings.warn(text, AloneWarning, stacklevel=2)
        return not any(self.alone[model.arch] for model in models)
