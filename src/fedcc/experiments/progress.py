"""Live progress of a run: a bar on a terminal, plain lines where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.progress
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from fedcc.core.naming import clock
from fedcc.core.requests import Fit
from fedcc.core.rng import SERVER
from fedcc.experiments.rounds import FinishedRound, Observer

Step = Callable[[str, int, int], None]
"""Told what is being done, how many parts of it are done, and of how many."""


@contextmanager
def steps(console: Console) -> Iterator[Step]:
    """Show on a terminal what is being done, how far it is, and the time so far and left; elsewhere, nothing."""
    if not console.is_terminal:
        yield lambda *_: None
        return
    columns = (
        rich.progress.SpinnerColumn(),
        rich.progress.TextColumn("{task.description} {task.completed}/{task.total}"),
        rich.progress.BarColumn(24),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[left]}"),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("starting", total=1, left="")
        start_time, current = time.perf_counter(), ""

        def step(text: str, done: int, total: int) -> None:
            nonlocal start_time, current
            if text != current:
                start_time, current = time.perf_counter(), text
                shown.reset(task)
            elapsed = time.perf_counter() - start_time
            left = f"{clock(elapsed / done * (total - done))} left" if 0 < done < total else ""
            shown.update(task, description=text, completed=done, total=total, left=left)
            shown.tasks[0].finished_time = None  # a task that is complete would stand still until the next begins

        yield step


class Progress(Observer):
    """Shows the phase, the speed and the time left of a run: a line for each round and, inside ``live``, the state now.

    The time left is judged by the last finished round. Where a line is too long, the speed is left
    out, then the bar.
    """

    def __init__(self, console: Console, rounds: int, done: int = 0):
        self.console, self.rounds, self.done = console, rounds, done
        self.phase, self.client = "starting", SERVER
        self.accuracy: float | None = None
        self.start_time = self.round_start = 0.0  # set by the first fit: reading data does not count as training
        self.samples = self.round_samples = 0
        self.expected = 0  # samples of a round
        self.round_seconds = self.last_refresh = 0.0
        # Ticks by itself too: predictions between two fits may take minutes.
        self.live = Live(console=console, transient=True, get_renderable=self.row, refresh_per_second=1)

    def fit_started(self, fit: Fit) -> None:
        self.phase, self.client = fit.key.phase, fit.key.client
        if not self.start_time:
            self.start_time = self.round_start = time.perf_counter()
        self.refresh()

    def samples_trained(self, number: int) -> None:
        self.samples += number
        self.round_samples += number
        self.refresh()

    def round(self, done: FinishedRound) -> None:
        record, now = done.record, time.perf_counter()
        self.done, self.round_seconds = record["round"], now - (self.round_start or now)
        self.accuracy = record.get("accuracy", self.accuracy)
        self.expected, self.round_samples, self.round_start = self.round_samples, 0, now
        self.console.out(self.line())

    def refresh(self) -> None:
        """Show the state now, at most ten times a second."""
        if self.live.is_started and time.perf_counter() - self.last_refresh > 0.1:
            self.last_refresh = time.perf_counter()
            self.live.refresh()

    @property
    def speed(self) -> float:
        """Samples a second so far."""
        return self.samples / max(1e-9, time.perf_counter() - self.start_time) if self.start_time else 0.0

    @property
    def rounds_done(self) -> float:
        """How many rounds are done, with the part of the current one."""
        return self.done + (min(1.0, self.round_samples / self.expected) if self.expected else 0.0)

    @property
    def left(self) -> float | None:
        """Seconds left, or None while nothing is known."""
        if not self.done or not self.expected:
            return None
        return max(0.0, self.round_seconds * (self.rounds - self.rounds_done))

    def line(self) -> str:
        """One finished round, as a line of text."""
        accuracy = f"accuracy {self.accuracy:6.2f} %" if self.accuracy is not None else "not evaluated"
        left = f", about {clock(self.left)} left" if self.left else ""
        speed = f"{self.round_seconds:.1f} s  {self.speed:,.0f} samples/s"
        return f"round {self.done}/{self.rounds}  {accuracy}  {speed}{left}"

    def row(self) -> Table:
        """The state now, for a terminal."""
        who = "server" if self.client == SERVER else f"client {self.client}"
        elapsed = clock(time.perf_counter() - self.start_time if self.start_time else 0.0)
        words = [
            Text(f"round {min(self.done + 1, self.rounds)}/{self.rounds}", style="bold"),
            Text(f"{self.phase}, {who}".ljust(17)),
            Text(f"accuracy {self.accuracy:.1f} %" if self.accuracy is not None else "", style="green"),
            Text(f"{self.speed:,.0f} samples/s"),
            Text(elapsed if self.left is None else f"{elapsed}, {clock(self.left)} left"),
        ]
        if sum(len(w) + 2 for w in words) + 6 > self.console.width:
            del words[3]  # the speed is in the line of each round, too
        room = self.console.width - sum(len(w) + 2 for w in words) - 2
        bar = ProgressBar(total=self.rounds, completed=self.rounds_done, width=min(24, room))
        cells = [words[0], bar, *words[1:]] if room >= 4 else words
        row = Table.grid(*(Column(no_wrap=True) for _ in cells), padding=(0, 2, 0, 0))
        row.add_row(*cells)
        return row
