"""The demonstration: FedCC against FedAvg, FedMD and the two bounds on embedded digits, one method per core."""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from fedcc.cli.console import console, noted, say_starting, table
from fedcc.cli.live import RunRows
from fedcc.cli.options import Json, run_options
from fedcc.core.naming import clock
from fedcc.core.options import check_value
from fedcc.experiments.options import Output

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fedcc.experiments.experiment import Experiment

COMPARED = ("fedcc", "fedmd", "fedavg", "local", "centralized")  # the longest first


@run_options("rounds", "epochs", "clients", "seed")
def demo(
    options: dict[str, Any],
    out: Annotated[Path, Option("--out", help="Write runs and pictures to this folder.")] = Path("runs/demo"),
    jobs: Annotated[int | None, Option(help="Run this many methods at once. The default is one per core.")] = None,
    as_json: Json = False,
) -> None:
    """Compare FedCC with FedAvg, FedMD and the two bounds: ten clients with one digit each, one method per core."""
    terminal = console(stderr=as_json)
    say_starting(terminal)
    from fedcc.core.files import make_folder
    from fedcc.engine.threads import cores
    from fedcc.experiments.experiment import Experiment
    from fedcc.experiments.run import prepare
    from fedcc.experiments.store import RunFolder

    common = {"data": "digits", "skew": "classes:1", "device": "cpu"} | options
    experiments = {name: Experiment.resolve(name, **common) for name in COMPARED}
    first = experiments["fedcc"]
    check_value("jobs", jobs, int | None, 1)
    for name, experiment in experiments.items():
        RunFolder(out / name).check(experiment, overwrite=is_demo(out / name, experiment))
    prepare(first, out / "fedcc", overwrite=True)
    for name in experiments:  # what an earlier demo left must not be taken for this one's
        if (out / name).exists():
            RunFolder(out / name).clear()
    make_folder(out)
    workers = min(len(experiments), jobs or cores())
    terminal.out(
        f"{first.split.clients} clients with one digit each, T={first.training.rounds}, E={first.training.epochs}; "
        f"{len(experiments)} methods, {workers} at a time"
    )
    start_time = time.perf_counter()
    with noted(f"see {out}"):
        run_all(experiments, common, out, workers, terminal)
    summaries = {name: RunFolder(out / name).summary() or {} for name in experiments}
    pictures = draw(summaries, out)
    if as_json:
        typer.echo(json.dumps({"runs": summaries, "pictures": [str(p) for p in pictures], "out": str(out)}))
        return
    terminal.print(comparison(summaries))
    terminal.out(f"\n{clock(time.perf_counter() - start_time)} in all. Run folders: {out}/<method>. Pictures:")
    for picture in pictures:
        terminal.out(f"  {picture}")


def is_demo(folder: Path, experiment: Experiment) -> bool:
    """Whether a folder's run is an earlier demo's, which the next one may replace."""
    from fedcc.experiments.experiment import Experiment

    try:
        stored = Experiment.read(folder / "experiment.toml")
    except ValueError:
        return False
    values = stored.values()
    return experiment.with_options(**{name: values[name] for name in ("rounds", "epochs", "clients", "seed")}) == stored


def run_all(
    experiments: dict[str, Experiment], options: dict[str, Any], out: Path, jobs: int, terminal: Console
) -> None:
    """Run all experiments, so many at a time, and show what they write into their folders."""
    from rich.live import Live
    from rich.progress_bar import ProgressBar

    from fedcc.errors import UserError
    from fedcc.experiments.store import RunFolder
    from fedcc.experiments.sweep import Run, Sweep, SweepOptions, perform
    from fedcc.experiments.workers import ProcessPool

    sweep = Sweep(deque(Run(Path(name), name, options=options) for name in experiments))
    printed = dict.fromkeys(experiments, 0)  # rounds

    start_time, rows = time.monotonic(), RunRows(out)

    def grid() -> Table:
        listed: list[tuple[str, ...]] = []
        for name in map(Path, experiments):
            if name in sweep.outcomes:
                summary = RunFolder(out / name).summary() or {}
                accuracy = summary["accuracy"]["final"] if summary else None
                done = f"{accuracy:.1f} %" if accuracy is not None else ""
                listed.append((str(name), "done", done, clock(sweep.outcomes[name].seconds), ""))
            elif name in sweep.start_times:
                listed.append(rows.row(name, sweep.start_times[name]))
            else:
                listed.append((str(name), "waiting", "", "", ""))
        bar = ProgressBar(total=len(experiments), completed=len(sweep.outcomes), width=12)
        head = (f"{len(sweep.outcomes)}/{len(experiments)} methods", bar, "", clock(time.monotonic() - start_time), "")
        return rows.table(head, listed)

    def print_rounds() -> None:
        for name, experiment in experiments.items():
            for record in RunFolder(out / name).metrics()[printed[name] :]:
                printed[name] += 1
                line = f"round {record['round']}/{experiment.training.rounds}  accuracy {record['accuracy']:6.2f} %"
                terminal.out(f"{name:<12} {line}")

    def show() -> None:
        live.update(grid()) if terminal.is_terminal else print_rounds()
        for name, outcome in sweep.outcomes.items():
            if outcome.kind != "finished":
                raise UserError(f"{name}: {outcome.text}")

    pool = ProcessPool(partial(perform, options=SweepOptions(out, Output(checkpoint=False))), jobs)
    live = Live(grid(), console=terminal, refresh_per_second=4, transient=True)
    with live if terminal.is_terminal else nullcontext():
        sweep.go(pool, lambda *_: None, show)


def comparison(summaries: dict[str, dict[str, Any]]) -> Table:
    """The methods side by side."""
    rows = table("method", "final %", "best % (round)", "up and down per client and round", "seconds")
    for summary in summaries.values():
        accuracy, volume = summary["accuracy"], summary["bytes"]
        sent = (volume["up"] + volume["down"]) / summary["clients"] / summary["rounds"]
        rows.add_row(
            summary["method"],
            f"{accuracy['final']:.1f}",
            f"{accuracy['best']:.1f} ({accuracy['best_round']})",
            f"{sent / 1000:,.1f} kB" if sent else "nothing",
            f"{summary['seconds']:.1f}",
        )
    return rows


def draw(summaries: dict[str, dict[str, Any]], out: Path) -> list[Path]:
    """The learning curves and the partition."""
    from fedcc.data.partition import Partition
    from fedcc.report.figures import curves_figure, partition_figure, save
    from fedcc.report.style import look

    split = Partition.load(out / "fedcc" / "partition.npz")
    curves = {s["method"]: list(enumerate(s["accuracy"]["rounds"], start=1)) for s in summaries.values()}
    styles = {s["method"]: look(name).print for name, s in summaries.items()}
    title = f"digits, {split.skew}, {len(split.clients)} clients"
    return [
        save(curves_figure(curves, title, chance=10.0, styles=styles), out / "curves.png"),
        save(partition_figure(split.counts.tolist(), title), out / "partition.png"),
    ]
