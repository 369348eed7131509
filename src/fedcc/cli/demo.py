"""The demonstration: FedCC against FedAvg, FedMD and the two bounds on embedded digits, one method per core."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcc.cli.console import clock, console, table
from fedcc.cli.options import Json, run_options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fedcc.experiments.experiment import Experiment

COMPARED = ("fedcc", "fedmd", "fedavg", "local", "centralized")  # the longest first


@run_options("rounds", "epochs", "clients", "seed")
def demo(
    options: dict[str, Any],
    out: Annotated[Path, typer.Option("--out", help="folder for the runs and pictures")] = Path("runs/demo"),
    jobs: Annotated[int | None, typer.Option(help="methods at once; one per core by default")] = None,
    as_json: Json = False,
) -> None:
    """Ten clients with one digit each: FedCC against FedAvg, FedMD and the two bounds, one method per core."""
    from fedcc.core.files import make_folder
    from fedcc.engine.threads import cores
    from fedcc.experiments.experiment import Experiment
    from fedcc.experiments.run import prepare
    from fedcc.experiments.store import RunFolder
    from fedcc.processes import interrupts_blocked

    terminal = console(stderr=as_json)
    common = {"data": "digits", "skew": "classes:1", "device": "cpu"} | options
    experiments = {name: Experiment.resolve(name, **common) for name in COMPARED}
    first = experiments["fedcc"]
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    for name, experiment in experiments.items():
        RunFolder(out / name).check(experiment, overwrite=is_demo(out / name, experiment))
    prepare(first, out / "fedcc", overwrite=True)
    for name in experiments:  # what an earlier demo left must not be taken for this one's
        if (out / name).exists():
            RunFolder(out / name).clear()
    make_folder(out)
    workers = min(len(experiments), jobs or cores())
    terminal.print(
        f"{first.split.clients} clients with one digit each, T={first.training.rounds}, E={first.training.epochs}; "
        f"{len(experiments)} methods, {workers} at a time",
        soft_wrap=True,
    )
    started = time.perf_counter()
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        with interrupts_blocked():  # which the workers inherit: only the parent answers Ctrl-C
            futures = {name: pool.submit(_one, e, out / name, os.getpid()) for name, e in experiments.items()}
        watch(futures, out, first.training.rounds, terminal)
        for future in futures.values():
            future.result()
    except BaseException as error:
        error.add_note(f"see {out}")
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    summaries = {name: RunFolder(out / name).summary() or {} for name in experiments}
    pictures = draw(summaries, out)
    if as_json:
        typer.echo(json.dumps({"runs": summaries, "pictures": [str(p) for p in pictures], "out": str(out)}))
        return
    terminal.print(comparison(summaries))
    terminal.print(
        f"\n{clock(time.perf_counter() - started)} in all. Run folders: {out}/<method>. Pictures:", soft_wrap=True
    )
    for picture in pictures:
        terminal.print(f"  {picture}", soft_wrap=True)


def is_demo(folder: Path, experiment: Experiment) -> bool:
    """Whether a folder's run is an earlier demo's, which the next one may replace."""
    from fedcc.experiments.experiment import Experiment

    try:
        stored = Experiment.read(folder / "experiment.toml")
    except ValueError:
        return False
    values = stored.values()
    return experiment.with_options(**{name: values[name] for name in ("rounds", "epochs", "clients", "seed")}) == stored


def _one(experiment: Experiment, out: Path, parent: int) -> None:
    from fedcc.experiments.run import execute
    from fedcc.processes import end_with_parent

    end_with_parent(parent=parent)
    try:
        execute(experiment, out, checkpoint_every=0)
    except Exception as error:
        error.add_note(experiment.method)
        raise


def watch(futures: dict[str, Future[None]], out: Path, rounds: int, terminal: Console) -> None:
    """Follow the runs by what they write into their folders until all have done."""
    from rich.live import Live
    from rich.table import Table

    from fedcc.experiments.store import RunFolder

    said: set[tuple[str, int]] = set()

    def state() -> Table:
        grid = Table.grid(padding=(0, 2))
        for name, future in futures.items():
            records = RunFolder(out / name).metrics()
            accuracy = f"{records[-1]['accuracy']:.1f} %" if records else ""
            done = "done" if future.done() else f"round {len(records)}/{rounds}" if future.running() else "waiting"
            grid.add_row(name, done, accuracy)
        return grid

    def going() -> bool:
        done = [f for f in futures.values() if f.done()]
        return len(done) < len(futures) and not any(f.exception() for f in done)

    if terminal.is_terminal:
        with Live(state(), console=terminal, refresh_per_second=4, transient=True) as live:
            while going():
                time.sleep(0.25)
                live.update(state())
        return
    while True:
        more = going()
        for name in futures:
            for record in RunFolder(out / name).metrics():
                if (name, record["round"]) not in said:
                    said.add((name, record["round"]))
                    line = f"{name:<12} round {record['round']}/{rounds}  accuracy {record['accuracy']:6.2f} %"
                    terminal.print(line, soft_wrap=True)
        if not more:
            return
        time.sleep(0.25)


def comparison(summaries: dict[str, dict[str, Any]]) -> Table:
    """The methods side by side."""
    rows = table("method", "final %", "best % (round)", "sent per client and round", "seconds")
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
