"""Which client trains in which lane: the longest first; when nobody waits, the rest move to fewer lanes."""

from collections import deque
from collections.abc import Iterator
from itertools import islice

import torch

from fedcc.engine.jobs import Job, SamplePools
from fedcc.engine.lane_step import LaneStep
from fedcc.engine.lanes import Compute, Lanes
from fedcc.engine.plain import Monitor

MOST_LANES = 64  # more gain nothing: the device is full long before
STRETCH = 16  # steps between two pauses of a group


class Group:
    """Fits that train in the same lanes, whatever their lengths, learning rates and numbers of samples."""

    def __init__(self, jobs: list[Job], compute: Compute):
        self.compute, self.pools = compute, SamplePools(jobs, compute.device)
        self.steps: dict[int, LaneStep] = {}  # by number of lanes
        self.lane_bytes: int | None = None

    def step(self, width: int) -> LaneStep:
        """The step for so many lanes; captured on the first call."""
        if width not in self.steps:
            self.steps[width] = LaneStep(Lanes(self.pools, width, self.compute), self.compute)
        return self.steps[width]

    def train(self, jobs: list[Job], most: int | None, monitor: Monitor | None) -> Iterator[None]:
        """Train jobs, the longest first, in at most so many lanes; pauses after every few steps."""
        waiting, width = deque(jobs), lane_count(min(len(jobs), self._limit(most or MOST_LANES, len(jobs))))
        step = self.step(width)
        seats: list[Job | None] = [None] * width  # the client in each lane
        _fill(step.lanes, seats, waiting)
        while active := [job for job in seats if job is not None]:
            for job in active:  # all of them first: while batches are copied, the device may run out of work
                if job.steps_loaded == 0:
                    job.prepare()
            step.lanes.idle([lane for lane, job in enumerate(seats) if job is None])
            step.lanes.refill({lane: job for lane, job in enumerate(seats) if job is not None and not job.steps_loaded})
            steps = min(min(job.steps - job.done, job.steps_loaded) for job in active)
            if monitor:
                monitor.fit_started(active[0].fit)
            for begin in range(0, steps, STRETCH):
                step.run(min(STRETCH, steps - begin), monitor)
                yield
            for job in islice(waiting, sum(job.steps - job.done == steps for job in active)):
                job.prepare()
            for job in active:
                job.done += steps
                job.steps_loaded -= steps
            ended = {lane: job for lane, job in enumerate(seats) if job is not None and job.done == job.steps}
            if ended:
                for (lane, job), fitted in zip(ended.items(), step.lanes.unload(ended), strict=True):
                    job.fitted, seats[lane] = fitted, None
                _fill(step.lanes, seats, waiting)
            busy = [lane for lane, occupant in enumerate(seats) if occupant is not None]
            if busy and lane_count(len(busy)) < step.lanes.width:
                narrower = self.step(lane_count(len(busy)))
                narrower.lanes.move(step.lanes, busy)
                seats = [seats[lane] for lane in busy] + [None] * (narrower.lanes.width - len(busy))
                step = narrower

    def _limit(self, most: int, job_count: int) -> int:
        """The number of lanes that memory allows, estimated from the memory that one lane takes."""
        device = self.compute.device
        if device.type != "cuda" or job_count <= 4:
            return most
        if self.lane_bytes is None:
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            self.step(1).once()
            self.lane_bytes = torch.cuda.max_memory_allocated(device) - before
        free = torch.cuda.mem_get_info(device)[0]
        return max(1, min(most, int(0.7 * free / max(1, self.lane_bytes))))


def _fill(lanes: Lanes, seats: list[Job | None], waiting: deque[Job]) -> None:
    """Give the empty lanes to those who wait."""
    free = [lane for lane, job in enumerate(seats) if job is None]
    seated = {lane: waiting.popleft() for lane in free[: len(waiting)]}
    if seated:
        lanes.load(seated)
    for lane, job in seated.items():
        seats[lane] = job


def lane_count(clients: int) -> int:
    """The number of lanes for so many clients: at most 15 % more, so that few graphs are captured.

    >>> [lane_count(n) for n in (1, 9, 10, 11, 13, 33)]
    [1, 9, 10, 12, 14, 36]
    """
    width = clients
    if clients > 10:
        grain = 2 ** max(1, (clients - 1).bit_length() - 4)
        width = -(-clients // grain) * grain
    return min(width, MOST_LANES)
