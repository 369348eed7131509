"""Pools of workers: processes of this machine, or tasks of a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, Protocol, TypeVar

from fedcc.engine.threads import cores
from fedcc.processes import end_with_parent, interrupts_blocked
from fedcc.signals import Interrupted, interrupt

Item = TypeVar("Item")
Result = TypeVar("Result")
PATIENCE = 60  # seconds for a worker to finish writing


@dataclass(frozen=True)
class WorkerDeath:
    """What a pool returns for a worker that ended without an answer."""

    reason: str


class Pool(Protocol[Item, Result]):
    """Works on up to ``jobs`` items at a time."""

    jobs: int

    @property
    def busy(self) -> list[Item]:
        """The items in progress."""

    def give(self, item: Item) -> None:
        """Start an item; fewer than ``jobs`` may be in progress."""

    def wait(self, seconds: float) -> list[tuple[Item, Result | WorkerDeath]]:
        """The results so far, as soon as there is one or the time is over."""

    def stop(self) -> None:
        """Ask all work in progress to end soon."""

    def close(self) -> None:
        """End the workers."""


class ProcessPool(Generic[Item, Result]):
    """Processes that each work on one item after another; one that dies loses only its own item."""

    def __init__(self, work: Callable[[Item], Result], jobs: int):
        self.work, self.jobs = work, jobs
        self.idle: list[tuple[SpawnProcess, Connection]] = []
        self.active: dict[Connection, tuple[SpawnProcess, Item]] = {}

    @property
    def busy(self) -> list[Item]:
        return [item for _, item in self.active.values()]

    def give(self, item: Item) -> None:
        process, pipe = self.idle.pop() if self.idle else self._start()
        pipe.send(item)
        self.active[pipe] = process, item

    def wait(self, seconds: float) -> list[tuple[Item, Result | WorkerDeath]]:
        ended: list[tuple[Item, Result | WorkerDeath]] = []
        for pipe in wait(list(self.active), seconds):
            assert isinstance(pipe, Connection)
            process, item = self.active.pop(pipe)
            try:
                ended.append((item, pipe.recv()))
                self.idle.append((process, pipe))
            except (EOFError, ConnectionResetError):  # the latter if it had not read its item yet
                process.join()
                code = process.exitcode or 0
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                hint = "; is there enough memory?" if code == -signal.SIGKILL else ""
                ended.append((item, WorkerDeath(f"its process died ({how}{hint})")))
        return ended

    def stop(self) -> None:
        for process, _ in self.active.values():
            process.terminate()

    def close(self) -> None:
        workers = [*self.idle, *((process, pipe) for pipe, (process, _) in self.active.items())]
        for _, pipe in workers:
            pipe.close()
        for process, _ in workers:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()

    def _start(self) -> tuple[SpawnProcess, Connection]:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self.work, os.getpid()))
        with interrupts_blocked():  # the worker inherits this: only the parent answers Ctrl-C
            process.start()
        theirs.close()
        return process, mine


def _serve(pipe: Connection, work: Callable[[Any], Any], parent: int) -> None:
    signal.signal(signal.SIGTERM, interrupt)
    end_with_parent(parent=parent)
    with suppress(EOFError, Interrupted):
        while True:
            pipe.send(work(pipe.recv()))


class RayPool(Generic[Item, Result]):
    """Tasks of the Ray cluster at ``address`` or RAY_ADDRESS, else of one that is started on this machine.

    A run reserves one core per thread and, if the cluster has GPUs and the device is not the CPU, one GPU.
    """

    def __init__(
        self,
        work: Callable[[Item], Result],
        jobs: int | None = None,
        address: str | None = None,
        threads: int = 1,
        device: str = "auto",
    ):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ModuleNotFoundError:
            raise ValueError("--on ray needs Ray: pip install '.[ray]' in fedcc's checkout") from None
        self.ray: Any = ray
        address = address or os.environ.get("RAY_ADDRESS")
        if address:
            try:
                ray.init(address=address, log_to_driver=False)
            except ConnectionError as error:
                raise ValueError(f"there is no Ray cluster at {address}: {error}") from None
        else:
            cpus = max(cores(), (jobs or 1) * threads)
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)
        resources = self.ray.cluster_resources()
        gpu = device != "cpu" and resources.get("GPU", 0) >= 1
        self.jobs = jobs or max(1, int(resources["GPU"] if gpu else resources.get("CPU", 1) // threads))

        self.task: Any = ray.remote(num_cpus=threads, num_gpus=int(gpu))(lambda item: work(item))
        self.active: dict[Any, Item] = {}

    @property
    def busy(self) -> list[Item]:
        return list(self.active.values())

    def give(self, item: Item) -> None:
        self.active[self.task.remote(item)] = item

    def wait(self, seconds: float) -> list[tuple[Item, Result | WorkerDeath]]:
        if not self.active:
            return []
        done, _ = self.ray.wait(list(self.active), timeout=seconds)
        return [(self.active.pop(reference), self._result(reference)) for reference in done]

    def stop(self) -> None:
        for reference in self.active:
            self.ray.cancel(reference)

    def close(self) -> None:
        self.ray.shutdown()

    def _result(self, reference: Any) -> Result | WorkerDeath:
        try:
            return self.ray.get(reference)  # type: ignore[no-any-return]
        except self.ray.exceptions.RayError as error:
            return WorkerDeath(str(error).strip().splitlines()[-1])


def drain(pool: Pool[Item, Result]) -> Iterator[tuple[Item, Result | WorkerDeath]]:
    """Stop a pool and yield the results of its last items; workers that take too long are abandoned."""
    pool.stop()
    end = time.monotonic() + PATIENCE
    while pool.busy and time.monotonic() < end:
        yield from pool.wait(1)
