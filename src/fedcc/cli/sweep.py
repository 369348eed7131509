"""``fedcc sweep``: its options, what it shows while it runs, and what it says at the end."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fedcc.cli.console import console, say_starting
from fedcc.cli.live import RunRows
from fedcc.cli.options import Json, run_options, take
from fedcc.core.naming import clock
from fedcc.core.options import check_value
from fedcc.experiments.options import Machine, Output

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fedcc.experiments.sweep import Outcome, Run, Sweep
    from fedcc.experiments.workers import Pool


@run_options(Machine, Output)
def sweep(
    options: dict[str, Any],
    file: Annotated[
        Path,
        Argument(
            metavar="FILE.toml", help="The file that names methods, scenarios and seeds; see docs/experiments.md."
        ),
    ],
    root: Annotated[Path, Option("--out", help="Write the runs below this folder.")] = Path("runs"),
    jobs: Annotated[
        int | None, Option(help="Run this many at a time. The default is 1, or on Ray as many as fit.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="List the runs and their progress, and run none.")] = False,
    shard: Annotated[str | None, Option(help="Run only part i/n, such as 2/4.")] = None,
    only: Annotated[
        list[str] | None, Option(help="Run only those whose folder matches, such as 'cifar10_*/fedcc/*'; repeatable.")
    ] = None,
    time_limit: Annotated[str | None, Option(help="Stop at a checkpoint after this time, such as 90m.")] = None,
    changes: Annotated[
        list[str] | None,
        Option("--with", help="Change an option of all runs, name=value, whatever the file says; repeatable."),
    ] = None,
    on: Annotated[str, Option(help="Run on this machine (local) or on a Ray cluster (ray).")] = "local",
    address: Annotated[
        str | None,
        Option(
            help="Connect to the Ray cluster at this address. The default is $RAY_ADDRESS, else one is started here."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run methods x scenarios x seeds: skip finished runs, resume unfinished ones, continue past failures."""
    terminal = console(stderr=as_json)
    say_starting(terminal)
    from fedcc.core.naming import unknown
    from fedcc.engine.threads import check_threads
    from fedcc.experiments.store import RunFolder
    from fedcc.experiments.sweep import Sweep, SweepOptions, duration, perform, read
    from fedcc.experiments.sweep import shard as part
    from fedcc.experiments.tracking import check_trackers
    from fedcc.experiments.workers import ProcessPool, RayPool

    if on not in ("local", "ray"):
        raise unknown("place to run on", on, ("local", "ray"))
    check_value("jobs", jobs, int | None, 1)
    if address is not None and on != "ray":
        raise ValueError(f"--address goes with --on ray, got {address!r}")
    output, overrides = Output(**take(Output, options)), parse_changes(changes or []) | options
    runs = read(file, overrides)
    total = len(runs)
    runs = [r for r in runs if not only or any(fnmatch(r.folder.as_posix(), pattern) for pattern in only)]
    if not runs:
        example = read(file)[0].folder
        raise ValueError(f"none of the {total} runs matches {' or '.join(only or [])}, as {example} would")
    runs = part(runs, shard) if shard else runs
    limit = duration(time_limit) if time_limit else None
    states = {run.folder: run.state(root) for run in runs}
    if dry_run:
        show_plan(runs, root, states, as_json, terminal)
        return
    if on == "local":
        try:
            for number in {run.options.get("threads", 1) for run in runs}:
                check_threads(number)
            runs[0].experiment()  # a device that is not here, say
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    def warn(text: str) -> None:
        terminal.out(f"warning: {text}")

    output = replace(
        output,
        data_dir=output.data_dir.absolute() if output.data_dir else None,
        track=check_trackers(output.track, warn),
    )
    common = SweepOptions(root.absolute(), output, time.time() + limit if limit else None)
    for run in runs:
        if states[run.folder][0] == "finished":
            RunFolder(root / run.folder).tidy()
    todo = deque(run for run in runs if states[run.folder][0] != "finished")
    work = Sweep(todo, common.deadline)
    board = Board(work, len(runs), len(runs) - len(todo), root, terminal)
    terminal.out(
        f"{file}: {len(runs)} runs{f' of {total}' if len(runs) < total else ''}, {board.before} finished before, "
        f"{len(todo)} to do"
    )
    if todo:
        action = partial(perform, options=common)
        pool: Pool[Run, Outcome]
        if on == "ray":
            pool = RayPool(action, jobs, address, options.get("threads", 1), overrides.get("device", "auto"))
        else:
            pool = ProcessPool(action, min(jobs or 1, len(todo)))
        try:
            board.follow(pool)
        except BaseException as error:
            error.add_note("run the same command to continue")
            board.end()
            raise
    board.end()
    if as_json:
        typer.echo(json.dumps(board.plain(runs), indent=1))
    if work.count("failed"):
        raise typer.Exit(1)


def parse_changes(pairs: list[str]) -> dict[str, Any]:
    """``["rounds=2", "skew=iid"]`` as values: what TOML would read, else a text."""
    from fedcc.experiments.toml import parse

    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not text:
            raise ValueError(f"--with takes name=value, got {pair!r}")
        try:
            table = parse(f"value = {text}")
        except ValueError:
            table = {}
        values[name.strip().replace("-", "_")] = table["value"] if table.keys() == {"value"} else text
    return values


def show_plan(
    runs: list[Run], root: Path, states: Mapping[Path, tuple[str, str]], as_json: bool, terminal: Console
) -> None:
    """The runs and how far each is."""
    from fedcc.experiments.store import RunFolder

    if as_json:
        rows = [{"run": str(r.folder), "state": states[r.folder][0], "reason": states[r.folder][1]} for r in runs]
        typer.echo(json.dumps(rows, indent=1))
        return
    for run in runs:
        state, reason = states[run.folder]
        if state == "finished":
            final = (RunFolder(root / run.folder).summary() or {})["accuracy"].get("final")
            reason = f"{final:.2f} %" if final is not None else ""
        elif state == "unfinished":
            reason = f"{len(RunFolder(root / run.folder).metrics())} rounds"
        terminal.out(f"{state:<11} {run.folder}  {reason}".rstrip())
    kinds = [state for state, _ in states.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    terminal.print(f"{len(runs)} runs: {counts}")


class Board:
    """A sweep's text output: a line for each run that ends and, on a terminal, the runs in progress."""

    def __init__(self, work: Sweep, runs: int, before: int, root: Path, console: Console):
        self.work, self.runs, self.before, self.root, self.console = work, runs, before, root, console
        self.start_time, self.rows = time.monotonic(), RunRows(root)

    def follow(self, pool: Pool[Run, Outcome]) -> None:
        if not self.console.is_terminal:
            self.work.go(pool, self.print_end, lambda: None)
            return
        from rich.live import Live

        with Live(console=self.console, transient=True, auto_refresh=False) as live:
            self.work.go(pool, self.print_end, lambda: live.update(self.now(pool.jobs), refresh=True))

    def print_end(self, run: Run, outcome: Outcome) -> None:
        for warning in outcome.warnings:
            self.console.out(f"warning: {run.folder}: {warning}")
        words = {"before": "finished by another process", "elsewhere": "in use elsewhere"}
        what = words.get(outcome.kind, outcome.kind)
        if outcome.accuracy is not None:
            what = f"{outcome.accuracy:6.2f} %  {clock(outcome.seconds)}"
        if outcome.resumed_after:
            what += f"  resumed after round {outcome.resumed_after}"
        if outcome.text and outcome.kind in ("failed", "stopped"):
            what += f": {outcome.text}"
        done = self.before + len(self.work.outcomes)
        self.console.out(f"[{done:>{len(str(self.runs))}}/{self.runs}] {run.folder}  {what}")

    def now(self, jobs: int) -> Table:
        """The state now, for a terminal."""
        from rich.progress_bar import ProgressBar

        done = self.before + len(self.work.outcomes)
        times = [o.seconds for o in self.work.outcomes.values() if o.kind == "finished"]
        left = f"{clock(sum(times) / len(times) * (self.runs - done) / jobs)} left" if times else ""
        bar = ProgressBar(total=self.runs, completed=done, width=12)
        head = (f"{done}/{self.runs} runs", bar, "", clock(time.monotonic() - self.start_time), left)
        return self.rows.table(head, [self.rows.row(*run) for run in self.work.start_times.items()])

    def end(self) -> None:
        """What failed, and one line with counts."""
        failed: dict[str, list[str]] = {}
        for folder, outcome in self.work.outcomes.items():
            if outcome.kind == "failed":
                failed.setdefault(outcome.text, []).append(str(folder))
        for reason, folders in failed.items():
            more = f" and {len(folders) - 3} more" if len(folders) > 4 else ""
            names = ", ".join(folders[:3] if more else folders)
            self.console.out(f"failed: {names}{more}: {reason}")
        work = self.work
        counts = {
            "finished": work.count("finished"),
            "finished before": self.before + work.count("before"),
            "failed": work.count("failed"),
            "in use elsewhere": work.count("elsewhere"),
            "stopped": work.count("stopped"),
            "not begun": len(work.todo),
        }
        text = ", ".join(f"{n} {kind}" for kind, n in counts.items() if n or kind == "finished")
        late = "; the time is up, run the same command to continue" if work.late and work.todo else ""
        self.console.out(f"{text}; {clock(time.monotonic() - self.start_time)}{late}")

    def plain(self, runs: list[Run]) -> list[dict[str, Any]]:
        """Every run and how it ended, for programs."""
        rows = []
        for run in runs:
            o = self.work.outcomes.get(run.folder)
            state = o.kind if o else "not begun" if run in self.work.todo else "before"
            rows.append({"run": str(run.folder), "state": state} | ({"reason": o.text} if o and o.text else {}))
        return rows
