"""``fedcc sweep``: its options, what it shows while it runs, and what it says at the end."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from fedcc.core.digests import DamagedFile
from fedcc.options import (
    Checkpointed,
    CheckpointEvery,
    DataDir,
    Deterministic,
    Device,
    Engine,
    Json,
    KeepCheckpoints,
    Precision,
    SaveModels,
    Threads,
    Track,
    out,
    rounds_between,
)

if TYPE_CHECKING:
    from fedcc.experiments.sweep import Outcome, Run, Sweep
    from fedcc.experiments.workers import Pool


def sweep(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.toml", help="methods, scenarios and seeds; docs/experiments.md")
    ],
    root: Annotated[Path, typer.Option("--out", help="folder of the runs")] = Path("runs"),
    jobs: Annotated[
        int | None, typer.Option(help="runs at a time; 1 by default, on Ray what the cluster holds")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the runs and how far they are")] = False,
    shard: Annotated[str | None, typer.Option(help="do the part i/n of the runs, as 2/4")] = None,
    only: Annotated[list[str] | None, typer.Option(help="do runs whose folder matches, as 'cifar10_*/fedcc/*'")] = None,
    time_limit: Annotated[str | None, typer.Option(help="stop at a checkpoint after this time, as 90m")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--with", help="an option of a run, name=value, over what the file says")
    ] = None,
    on: Annotated[str, typer.Option(help="local or ray: where runs happen")] = "local",
    address: Annotated[str | None, typer.Option(help="the Ray cluster; RAY_ADDRESS, else one is started here")] = None,
    device: Device = None,
    precision: Precision = None,
    engine: Engine = None,
    deterministic: Deterministic = None,
    threads: Threads = None,
    data_dir: DataDir = None,
    save_models: SaveModels = True,
    checkpoint: Checkpointed = True,
    checkpoint_every: CheckpointEvery = None,
    keep_checkpoints: KeepCheckpoints = False,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Run methods x scenarios x seeds: skip what is finished, resume what is half done, go on past failures."""
    from fedcc.core.naming import unknown
    from fedcc.engine.threads import check_threads
    from fedcc.experiments import RunFolder
    from fedcc.experiments.sweep import How, Sweep, duration, perform, read
    from fedcc.experiments.sweep import shard as part
    from fedcc.experiments.tracking import checked
    from fedcc.experiments.workers import ProcessPool, RayPool

    if on not in ("local", "ray"):
        raise unknown("place to run on", on, ("local", "ray"))
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if address is not None and on != "ray":
        raise ValueError(f"--address goes with --on ray, got {address!r}")
    machine = {"device": device, "precision": precision, "engine": engine, "deterministic": deterministic}
    named = changed(changes or []) | {n: v for n, v in (machine | {"threads": threads}).items() if v is not None}
    runs = read(file, named)
    whole = len(runs)
    runs = [r for r in runs if not only or any(fnmatch(r.place.as_posix(), pattern) for pattern in only)]
    if not runs:
        raise ValueError(f"none of the {whole} runs matches {' or '.join(only or [])}, as {read(file)[0].place} would")
    runs = part(runs, shard) if shard else runs
    every, limit = rounds_between(checkpoint, checkpoint_every), duration(time_limit) if time_limit else None
    console = out(stderr=as_json)
    states = {run.place: run.state(root) for run in runs}
    if dry_run:
        show_plan(runs, root, states, as_json, console)
        return
    if on == "local":
        try:
            for number in {run.given.get("threads", 1) for run in runs}:
                check_threads(number)
            runs[0].experiment()  # a device that is not here, say
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    def warn(text: str) -> None:
        console.print(f"warning: {text}", soft_wrap=True)

    how = How(
        root.absolute(),
        data_dir.absolute() if data_dir else None,
        save_models,
        every,
        keep_checkpoints,
        checked(track or [], warn),
        time.time() + limit if limit else None,
    )
    for run in runs:
        if states[run.place][0] == "finished":
            RunFolder(root / run.place).tidy()
    todo = deque(run for run in runs if states[run.place][0] != "finished")
    work = Sweep(todo, how.deadline)
    board = Board(work, len(runs), len(runs) - len(todo), root, console)
    console.print(
        f"{file}: {len(runs)} runs{f' of {whole}' if len(runs) < whole else ''}, {board.before} finished before, "
        f"{len(todo)} to do",
        soft_wrap=True,
    )
    if todo:
        action = partial(perform, how=how)
        pool: Pool[Run, Outcome]
        if on == "ray":
            pool = RayPool(action, jobs, address, threads or 1, named.get("device", "auto"))
        else:
            pool = ProcessPool(action, min(jobs or 1, len(todo)))
        try:
            board.follow(pool)
        except BaseException as error:
            error.add_note("the same command goes on from here")
            board.end()
            raise
    board.end()
    if as_json:
        typer.echo(json.dumps(board.plain(runs), indent=1))
    if work.count("failed"):
        raise typer.Exit(1)


def changed(pairs: list[str]) -> dict[str, Any]:
    """``["rounds=2", "skew=iid"]`` as values: what TOML would read, else a text."""
    from fedcc.experiments.toml import parse

    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not text:
            raise ValueError(f"--with takes name=value, got {pair!r}")
        try:
            table = parse(f"value = {text}")
        except ValueError:
            table = {}
        found[name.strip().replace("-", "_")] = table["value"] if table.keys() == {"value"} else text
    return found


def show_plan(
    runs: list[Run], root: Path, states: Mapping[Path, tuple[str, str]], as_json: bool, console: Console
) -> None:
    """The runs and how far each is."""
    from fedcc.experiments import RunFolder

    if as_json:
        rows = [{"run": str(r.place), "state": states[r.place][0], "reason": states[r.place][1]} for r in runs]
        typer.echo(json.dumps(rows, indent=1))
        return
    for run in runs:
        state, reason = states[run.place]
        if state == "finished":
            final = (RunFolder(root / run.place).summary() or {})["accuracy"].get("final")
            reason = f"{final:.2f} %" if final is not None else ""
        elif state == "unfinished":
            reason = f"{len(RunFolder(root / run.place).metrics())} rounds"
        console.print(f"{state:<11} {run.place}  {reason}".rstrip(), soft_wrap=True)
    kinds = [state for state, _ in states.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    console.print(f"{len(runs)} runs: {counts}")


class Board:
    """What is shown of a sweep: a line for each run that ends and, on a terminal, those under way."""

    def __init__(self, work: Sweep, runs: int, before: int, root: Path, console: Console):
        self.work, self.runs, self.before, self.root, self.console = work, runs, before, root, console
        self.begun = time.monotonic()

    def follow(self, pool: Pool[Run, Outcome]) -> None:
        if not self.console.is_terminal:
            self.work.go(pool, self.ended, lambda: None)
            return
        with Live(console=self.console, transient=True, auto_refresh=False) as live:
            self.work.go(pool, self.ended, lambda: live.update(self.now(pool.jobs), refresh=True))

    def ended(self, run: Run, outcome: Outcome) -> None:
        from fedcc.progress import clock

        for warning in outcome.warnings:
            self.console.print(f"warning: {run.place}: {warning}", soft_wrap=True)
        words = {"before": "finished by another process", "elsewhere": "in use elsewhere"}
        what = words.get(outcome.kind, outcome.kind)
        if outcome.accuracy is not None:
            what = f"{outcome.accuracy:6.2f} %  {clock(outcome.seconds)}"
        if outcome.resumed:
            what += f"  resumed after round {outcome.resumed}"
        if outcome.text and outcome.kind in ("failed", "stopped"):
            what += f": {outcome.text}"
        done = self.before + len(self.work.outcomes)
        self.console.print(f"[{done:>{len(str(self.runs))}}/{self.runs}] {run.place}  {what}", soft_wrap=True)

    def now(self, jobs: int) -> Table:
        """The state now, for a terminal."""
        from fedcc.experiments import RunFolder
        from fedcc.progress import clock

        done, now = self.before + len(self.work.outcomes), time.monotonic()
        taken = [o.seconds for o in self.work.outcomes.values() if o.kind == "finished"]
        left = sum(taken) / len(taken) * (self.runs - done) / jobs if taken else None
        table = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=self.runs, completed=done, width=24)
        rest = f"about {clock(left)} left" if left is not None else ""
        table.add_row(f"{done}/{self.runs} runs", bar, clock(now - self.begun), rest)
        for place, begun in self.work.began.items():
            records = []
            with suppress(DamagedFile):  # the run itself says so, and writes it anew
                records = RunFolder(self.root / place).metrics()
            accuracy = records[-1].get("accuracy") if records else None
            shown = f"{accuracy:.1f} %" if accuracy is not None else ""
            table.add_row(str(place), f"{len(records)} rounds", clock(now - begun), shown)
        return table

    def end(self) -> None:
        """What failed, and one line with counts."""
        from fedcc.progress import clock

        failed: dict[str, list[str]] = {}
        for place, outcome in self.work.outcomes.items():
            if outcome.kind == "failed":
                failed.setdefault(outcome.text, []).append(str(place))
        for reason, places in failed.items():
            more = f" and {len(places) - 3} more" if len(places) > 4 else ""
            shown = places[:3] if more else places
            self.console.print(f"failed: {', '.join(shown)}{more}: {reason}", soft_wrap=True)
        work = self.work
        counts = {
            "finished": work.count("finished"),
            "finished before": self.before + work.count("before"),
            "failed": work.count("failed"),
            "in use elsewhere": work.count("elsewhere"),
            "stopped": work.count("stopped"),
            "not begun": len(work.todo),
        }
        said = ", ".join(f"{n} {kind}" for kind, n in counts.items() if n or kind == "finished")
        late = "; the time is up, the same command goes on from here" if work.late and work.todo else ""
        self.console.print(f"{said}; {clock(time.monotonic() - self.begun)}{late}", soft_wrap=True)

    def plain(self, runs: list[Run]) -> list[dict[str, Any]]:
        """Every run and how it ended, for programs."""
        rows = []
        for run in runs:
            o = self.work.outcomes.get(run.place)
            state = o.kind if o else "not begun" if run in self.work.todo else "before"
            rows.append({"run": str(run.place), "state": state} | ({"reason": o.text} if o and o.text else {}))
        return rows
