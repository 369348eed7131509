"""Where a sweep's runs happen: in processes of this machine, or as tasks of a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, Protocol, TypeVar

from fedcc.engine.threads import cores
from fedcc.signals import Interrupted, interrupt

Item = TypeVar("Item")
Result = TypeVar("Result")
PATIENCE = 60  # seconds that a worker has to finish what it writes


@dataclass(frozen=True)
class Died:
    """A worker that ended instead of answering."""

    reason: str


class Pool(Protocol[Item, Result]):
    """Does so many pieces of work at a time."""

    jobs: int

    @property
    def busy(self) -> list[Item]:
        """The pieces of work under way."""

    def give(self, item: Item) -> None:
        """Begin a piece of work; there must be room."""

    def wait(self, seconds: float) -> list[tuple[Item, Result | Died]]:
        """What has ended, as soon as something has or the time is over."""

    def stop(self) -> None:
        """Ask all work under way to end soon."""

    def close(self) -> None:
        """End the workers."""


# --------------------------------------------------------------------------------------------------- this machine


class Processes(Generic[Item, Result]):
    """Processes that do one piece of work after another; one that dies takes only its own piece with it."""

    def __init__(self, work: Callable[[Item], Result], jobs: int):
        self.work, self.jobs = work, jobs
        self.idle: list[tuple[SpawnProcess, Connection]] = []
        self.at: dict[Connection, tuple[SpawnProcess, Item]] = {}

    @property
    def busy(self) -> list[Item]:
        return [item for _, item in self.at.values()]

    def give(self, item: Item) -> None:
        process, pipe = self.idle.pop() if self.idle else self._started()
        pipe.send(item)
        self.at[pipe] = process, item

    def wait(self, seconds: float) -> list[tuple[Item, Result | Died]]:
        ended: list[tuple[Item, Result | Died]] = []
        for pipe in wait(list(self.at), seconds):
            assert isinstance(pipe, Connection)
            process, item = self.at.pop(pipe)
            try:
                ended.append((item, pipe.recv()))
                self.idle.append((process, pipe))
            except EOFError:
                process.join()
                code = process.exitcode or 0
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                hint = "; is there enough memory?" if code == -signal.SIGKILL else ""
                ended.append((item, Died(f"its process died ({how}{hint})")))
        return ended

    def stop(self) -> None:
        for process, _ in self.at.values():
            process.terminate()

    def close(self) -> None:
        held = [*self.idle, *((process, pipe) for pipe, (process, _) in self.at.items())]
        for _, pipe in held:
            pipe.close()
        for process, _ in held:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()

    def _started(self) -> tuple[SpawnProcess, Connection]:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self.work))
        with no_interrupts():  # which the process inherits: the parent alone answers Ctrl-C
            process.start()
        theirs.close()
        return process, mine


def _serve(pipe: Connection, work: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGTERM, interrupt)
    threading.Thread(target=leave_with_parent, daemon=True).start()
    with suppress(EOFError, Interrupted):
        while True:
            pipe.send(work(pipe.recv()))


@contextmanager
def no_interrupts() -> Iterator[None]:
    """Ctrl-C waits until the block has ended; processes that begin in it never see one."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_with_parent() -> None:
    """No worker outlives the program, even if that was killed; for a thread of the worker."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# ------------------------------------------------------------------------------------------------------------ Ray


class Ray(Generic[Item, Result]):
    """Tasks of a Ray cluster: that of an address, of RAY_ADDRESS, or one of this machine that is started for it.

    A run takes as many cores as it has threads and, where the cluster has GPUs and the device is not the CPU, a GPU.
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
            raise ValueError("--on ray needs Ray: pip install 'fedcc[ray]'") from None
        self.ray: Any = ray
        address = address or os.environ.get("RAY_ADDRESS")
        if address:
            try:
                ray.init(address=address, log_to_driver=False)
            except ConnectionError as error:
                raise ValueError(f"there is no Ray cluster at {address}: {error}") from None
        else:
            own = max(cores(), (jobs or 1) * threads)
            ray.init(address="local", num_cpus=own, include_dashboard=False, log_to_driver=False)
        there = self.ray.cluster_resources()
        gpu = device != "cpu" and there.get("GPU", 0) >= 1
        self.jobs = jobs or max(1, int(there["GPU"] if gpu else there.get("CPU", 1) // threads))

        def task(item: Item) -> Result:
            return work(item)

        self.task = ray.remote(num_cpus=threads, num_gpus=int(gpu))(task)
        self.at: dict[Any, Item] = {}

    @property
    def busy(self) -> list[Item]:
        return list(self.at.values())

    def give(self, item: Item) -> None:
        self.at[self.task.remote(item)] = item

    def wait(self, seconds: float) -> list[tuple[Item, Result | Died]]:
        if not self.at:
            return []
        done, _ = self.ray.wait(list(self.at), timeout=seconds)
        return [(self.at.pop(reference), self._got(reference)) for reference in done]

    def stop(self) -> None:
        for reference in self.at:
            self.ray.cancel(reference)

    def close(self) -> None:
        self.ray.shutdown()

    def _got(self, reference: Any) -> Result | Died:
        try:
            result: Result = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            return Died(str(error).strip().splitlines()[-1])
        return result


def drained(pool: Pool[Item, Result]) -> Iterator[tuple[Item, Result | Died]]:
    """Stop a pool's work, and what comes of it; whoever takes too long is left behind."""
    pool.stop()
    end = time.monotonic() + PATIENCE
    while pool.busy and time.monotonic() < end:
        yield from pool.wait(1)
