"""The command line: ``fedcc run``, ``resume``, ``sweep``, ``analyse``, ``report`` and the rest."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import click
import typer.core
from rich.table import Table
from rich.text import Text

from fedcc import __version__
from fedcc.cli_federation import app as federation_app
from fedcc.cli_sweep import sweep
from fedcc.core.digests import DIGEST, UNCHECKED
from fedcc.core.method import AnyMethod, check_value
from fedcc.core.naming import unknown
from fedcc.data.dataset import DataError
from fedcc.ending import Signals, Stopped, explained, warnings_to
from fedcc.interrupts import is_program
from fedcc.options import (
    Augment,
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
from fedcc.report.command import report

app = typer.Typer(
    name="fedcc",
    help="Federated learning by distillation, with clients that may answer 'unknown'.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="List, fetch and check data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(federation_app, name="federation")

Method = Annotated[str, typer.Argument(help="the method's name; `fedcc methods` lists them", show_default=False)]
DataOption = Annotated[str | None, typer.Option("--data", help="data set; digits by default")]
SkewOption = Annotated[str | None, typer.Option("--skew", help="dirichlet:ETA, classes:N or iid")]
Clients = Annotated[int | None, typer.Option("--clients", help="number of clients")]


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def run(
    method: Annotated[str | None, typer.Argument(help="the method's name; `fedcc methods` lists them")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="an experiment.toml to start from")] = None,
    data: DataOption = None,
    skew: SkewOption = None,
    clients: Clients = None,
    models: Annotated[str | None, typer.Option(help="networks, given to clients in turn: resnet14,resnet20")] = None,
    assignment: Annotated[str | None, typer.Option(help="alternate or halves: how networks go to clients")] = None,
    rounds: Annotated[int | None, typer.Option(help="rounds T")] = None,
    epochs: Annotated[int | None, typer.Option(help="local epochs E per phase")] = None,
    participation: Annotated[float | None, typer.Option(help="share of clients in each round")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of everything random; 0 by default")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="a method's setting, name=value; repeatable")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Adam's learning rate")] = None,
    batch: Annotated[int | None, typer.Option(help="batch size")] = None,
    reset: Annotated[str | None, typer.Option(help="when Adam starts anew: phase or round")] = None,
    public: Annotated[float | None, typer.Option(help="share of the training set that is public")] = None,
    stratified: Annotated[
        bool | None, typer.Option("--stratified/--no-stratified", help="public split by class")
    ] = None,
    fraction: Annotated[float | None, typer.Option(help="keep this share of the training set")] = None,
    augment: Augment = None,
    validation: Annotated[
        float | None, typer.Option(help="hold out this share of each client's samples; it replaces the test set")
    ] = None,
    resize: Annotated[int | None, typer.Option(help="side of Tiny ImageNet's images: 32 or 64")] = None,
    wire: Annotated[
        str | None, typer.Option(help="number format on the wire: fp32, fp16, int8 or int8-stochastic")
    ] = None,
    client_accuracy: Annotated[
        bool | None,
        typer.Option("--client-accuracy/--no-client-accuracy", help="evaluate every client's own model too"),
    ] = None,
    device: Device = None,
    precision: Precision = None,
    engine: Engine = None,
    deterministic: Deterministic = None,
    threads: Threads = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="run folder; runs/DATA_SKEW/METHOD/seedS by default")
    ] = None,
    data_dir: DataDir = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the run that the folder holds")] = False,
    save_models: SaveModels = True,
    checkpoint: Checkpointed = True,
    checkpoint_every: CheckpointEvery = None,
    keep_checkpoints: KeepCheckpoints = False,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Train one method on one federation and record it in a run folder."""
    from fedcc.engine.threads import check_threads
    from fedcc.experiments import Experiment, RunFolder, Unfinished, prepare
    from fedcc.experiments.experiment import parse_settings
    from fedcc.experiments.toml import load
    from fedcc.experiments.tracking import checked
    from fedcc.methods import METHODS

    given: dict[str, Any] = {
        name: value
        for name, value in {
            "data": data, "skew": skew, "clients": clients, "models": models, "assignment": assignment,
            "rounds": rounds, "epochs": epochs, "participation": participation, "seed": seed, "lr": lr,
            "batch": batch, "reset": reset, "public": public, "stratified": stratified, "fraction": fraction,
            "augment": augment, "validation": validation, "resize": resize, "wire": wire,
            "client_accuracy": client_accuracy,
            "device": device, "precision": precision, "threads": threads, "engine": engine,
            "deterministic": deterministic,
        }.items()
        if value is not None
    }  # fmt: skip
    chosen: dict[str, Any] = {}
    if config is not None:
        Experiment.read(config)  # says what is wrong with the file itself
        table = load(config)
        named = table.pop("method")
        stored = table.pop("settings", {})
        if method is None or method.lower() == named.lower():
            chosen = stored
        method, given = method or named, table | given
    if method is None:
        raise ValueError(f"name a method ({', '.join(METHODS)}; `fedcc methods` explains them), or give --config FILE")
    chosen = chosen | parse_settings(method, settings or [])
    experiment = Experiment.resolved(method, settings=chosen, **given)
    place = out_dir or Path("runs") / experiment.place
    check_threads(experiment.threads)
    every = rounds_between(checkpoint, checkpoint_every)
    try:
        RunFolder(place).check(experiment, overwrite)
    except Unfinished:
        if as_json or not sys.stdin.isatty():
            raise
        if not typer.confirm(f"{place} holds this run, unfinished; go on with it?", default=True, err=True):
            raise
        resume(place, data_dir, save_models, checkpoint, checkpoint_every, keep_checkpoints, track)
        return
    names = checked(track or [], warn)
    with RunFolder(place).held():
        federation = prepare(experiment, place, data_dir=data_dir, overwrite=overwrite)
        out(stderr=as_json).print(describe(experiment), soft_wrap=True)
        options = {"save_models": save_models, "checkpoint_every": every, "keep_checkpoints": keep_checkpoints}
        train(experiment, place, federation, as_json, track=names, **options)


@app.command()
def resume(
    place: Annotated[Path, typer.Argument(metavar="RUN", help="the run's folder")],
    data_dir: DataDir = None,
    save_models: SaveModels = True,
    checkpoint: Checkpointed = True,
    checkpoint_every: CheckpointEvery = None,
    keep_checkpoints: KeepCheckpoints = False,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Go on with an unfinished run, from its last checkpoint; one that has none yet starts anew."""
    from fedcc.experiments import RunFolder, unfinished
    from fedcc.experiments.tracking import checked

    every = rounds_between(checkpoint, checkpoint_every)
    console, folder = out(stderr=as_json), RunFolder(place)

    def finished() -> bool:
        if folder.summary() is None:
            return False
        console.print(f"{place} holds a finished run; there is nothing to do", soft_wrap=True)
        if as_json:
            typer.echo((place / "summary.json").read_text(), nl=False)
        return True

    if not (place / "experiment.toml").is_file():
        raise ValueError(f"{place} holds no run: experiment.toml is missing; `fedcc run ... --out {place}` starts one")
    if finished():
        folder.tidy()
        return
    names = checked(track or [], warn)
    with folder.held():
        if finished():  # by another process, meanwhile
            return
        experiment, federation, start, problems = unfinished(place, data_dir)
        for problem in problems:
            warn(problem)
        console.print(describe(experiment), soft_wrap=True)
        if start is None:
            console.print("no checkpoint to go on from: starting anew")
        else:
            console.print(f"going on after round {start.snapshot.t}, from a checkpoint of {start.size / 1e6:,.1f} MB")
        options = {"save_models": save_models, "checkpoint_every": every, "keep_checkpoints": keep_checkpoints}
        train(experiment, place, federation, as_json, start=start, track=names, **options)


def train(
    experiment: Any,
    place: Path,
    federation: Any,
    as_json: bool,
    start: Any = None,
    track: tuple[str, ...] = (),
    **options: Any,
) -> None:
    """Run an experiment into its folder, with progress, and say how it ended."""
    from fedcc.experiments import RunFolder, execute
    from fedcc.experiments.tracking import Trackers
    from fedcc.progress import Progress, shown

    console = out(stderr=as_json)
    progress = Progress(experiment.made().rounds(experiment.rounds), start.snapshot.t if start else 0)
    with (
        shown(progress, console),
        noted(f"see {place}", f"go on with `{RunFolder(place).resume}`"),
    ):
        observers = (progress, Trackers(track, experiment, place, warn))
        result = execute(experiment, place, federation, start=start, observers=observers, **options)
    if as_json:
        typer.echo((place / "summary.json").read_text(), nl=False)
        return
    best_round, best = result.best
    console.print(
        f"{result.method.label}: final {result.accuracy:.2f} %, best {best:.2f} % in round {best_round}, "
        f"{result.seconds:.1f} s, {place}",
        soft_wrap=True,
    )


app.command()(sweep)


@app.command()
def analyse(
    places: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of finished runs")],
    samples: Annotated[int, typer.Option(help="test samples of the embeddings")] = 1000,
    variance: Annotated[float, typer.Option(help="share of the variance that PCA whitening keeps")] = 0.9,
    client: Annotated[int, typer.Option(help="the client whose model is the local one")] = 0,
    public_index: Annotated[
        int | None, typer.Option(help="the example's position in the training set; chosen by default")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Compute margins, embeddings and an example from a run's models into its analysis.json."""
    from fedcc.experiments.analyse import Options, check
    from fedcc.experiments.analyse import analyse as analysed

    options = Options(samples, variance, client, public_index)
    for place in places:  # before anything is computed
        if DIGEST not in check(place):
            warn(f"{place / 'summary.json'} {UNCHECKED}")
    console = out(stderr=as_json)
    for place in places:
        with console.status(f"analysing {place}"), noted(f"see {place}", ""):
            found = analysed(place, options, device=device, data_dir=data_dir)
        if as_json:
            typer.echo(json.dumps(found))
            continue
        means = [
            f"{m['name']} {m['mean']:+.3f}" for m in found["margins"]["models"] if m["name"] in ("global", "clients")
        ]
        pure = [f"{p['name']} {p['purity']:.3f}" for p in found["embeddings"]["panels"]]
        console.print(
            f"{found['method']}: mean margin {', '.join(means)}; purity {', '.join(pure)}; {place}/analysis.json",
            soft_wrap=True,
        )
        for note in found["notes"]:
            console.print(f"  {note}", soft_wrap=True)


app.command()(report)


@contextmanager
def noted(where: str, onwards: str) -> Iterator[None]:
    """Whatever ends the block early says where to look; a signal, how to go on too."""
    try:
        yield
    except BaseException as error:
        error.add_note(where)
        if isinstance(error, Stopped):
            error.add_note(onwards)
        raise


def describe(experiment: Any) -> str:
    """One line on what is about to run."""
    e = experiment
    return (
        f"{e.made().label} on {e.data}, {e.skew}, {e.clients} clients ({e.models}), T={e.rounds}, E={e.epochs}, "
        f"seed {e.seed}, {e.device} {e.precision} {e.engine}"
    )


@app.command()
def demo(
    out_dir: Annotated[Path, typer.Option("--out", help="folder for the runs and pictures")] = Path("runs/demo"),
    rounds: Annotated[int | None, typer.Option(help="rounds T")] = None,
    epochs: Annotated[int | None, typer.Option(help="local epochs E per phase")] = None,
    clients: Clients = None,
    seed: Annotated[int, typer.Option(help="seed")] = 0,
    jobs: Annotated[int | None, typer.Option(help="methods at once; one per core by default")] = None,
    as_json: Json = False,
) -> None:
    """Ten clients with one digit each: FedCC against FedAvg, FedMD and the two bounds, one method per core."""
    from fedcc.demo import show

    show(
        out_dir,
        rounds=rounds,
        epochs=epochs,
        clients=clients,
        seed=seed,
        jobs=jobs,
        as_json=as_json,
        console=out(as_json),
    )


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="one method, with its settings")] = None, as_json: Json = False
) -> None:
    """List the methods, or one method's settings with their meaning and source."""
    from fedcc.methods import METHODS

    if name is not None and name.lower() not in METHODS:
        raise unknown("method", name, METHODS)
    known = METHODS if name is None else {name.lower(): METHODS[name.lower()]}
    if as_json:
        listed = {n: about(kind) for n, kind in known.items()}
        typer.echo(json.dumps(listed if name is None else listed[name.lower()], indent=1))
        return
    console = out()
    if name is None:
        listing = Table("name", "method", "family", "settings", "source", box=None, header_style="bold", pad_edge=False)
        for n, kind in known.items():
            chosen = ", ".join(f"{f['name']}={f['default']}" for f in about(kind)["settings"])
            noted = f"{kind.__name__} ({kind.note})" if kind.note else kind.__name__
            listing.add_row(n, noted, kind.family, chosen, kind.source)
        console.print(listing)
        console.print("\n`fedcc methods NAME` explains one; `fedcc run NAME --set name=value` sets them.")
        return
    kind = known[name.lower()]
    console.print(Text(f"{kind.__name__}: {about(kind)['summary']}", style="bold"))
    console.print(Text(f"{kind.family}; {kind.source}\n"))
    console.print(Text((sys.modules[kind.__module__].__doc__ or "").strip() + "\n"))
    table = Table("setting", "default", "allowed", "meaning", "source", box=None, header_style="bold", pad_edge=False)
    for f in about(kind)["settings"]:
        table.add_row(f["name"], str(f["default"]), f["allowed"], f["meaning"], f["source"])
    console.print(table if table.row_count else "no settings of its own")


def about(kind: type[AnyMethod]) -> dict[str, Any]:
    """A method and its settings, as plain values."""
    hints = get_type_hints(kind)
    return {
        "method": kind.__name__,
        "family": kind.family,
        "source": kind.source,
        "note": kind.note,
        "summary": (kind.__doc__ or "").strip().splitlines()[0],
        "settings": [
            {
                "name": f.name,
                "default": None if f.default is MISSING else f.default,
                "allowed": allowed(hints[f.name], f.metadata.get("low"), f.metadata.get("high")),
                "meaning": f.metadata.get("meaning", ""),
                "source": f.metadata.get("source", ""),
            }
            for f in fields(kind)  # type: ignore[arg-type]
        ],
    }


def allowed(hint: Any, low: float | None, high: float | None) -> str:
    """What a setting may be, in words."""
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    if hint is bool:
        return "true, false"
    limits = f" >= {low:g}" if low is not None and high is None else f" {low:g} to {high:g}" if low is not None else ""
    words = {int: "whole number", float: "number", str: "text", type(None): "none"}
    kinds = get_args(hint) or (hint,)
    return (
        " or ".join(words.get(k, getattr(k, "__name__", str(k))) for k in kinds if k is not type(None)) + limits
    ) + (" or none" if type(None) in kinds else "")


@app.command()
def skew(
    data: DataOption = None,
    skew: Annotated[str | None, typer.Option("--skew", help="dirichlet:ETA, classes:N or iid")] = None,
    clients: Clients = None,
    seed: Annotated[int, typer.Option(help="seed")] = 0,
    public: Annotated[float, typer.Option(help="share of the training set that is public")] = 0.1,
    picture: Annotated[Path, typer.Option("--out", help="the picture to write: .png, .pdf or .svg")] = Path("skew.png"),
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show who would hold what: print the client x class table and write the plot."""
    from fedcc.federation import Federation
    from fedcc.report.figures import FORMATS, partition_figure, save

    if picture.suffix.lstrip(".").lower() not in FORMATS:
        raise ValueError(f"--out must end in {', '.join('.' + f for f in FORMATS)}, got {picture.name!r}")
    federation = Federation.named(data or "digits", skew, clients, seed=seed, public=public, folder=data_dir)
    split = federation.partition
    assert split is not None
    counts = split.counts()
    title = f"{federation.data}, {federation.skew}, {len(counts)} clients, seed {seed}"
    save(partition_figure(counts.tolist(), title), picture)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "data": federation.data, "skew": federation.skew, "seed": seed, "public": len(split.public),
                    "counts": counts.tolist(), "moved": split.moved, "sha256": split.sha256, "picture": str(picture),
                }
            )
        )  # fmt: skip
        return
    console = out()
    console.print(
        f"{title}; {len(split.public)} public samples"
        + (f"; {split.moved} samples moved to reach the minimum" if split.moved else "")
    )
    if counts.shape[1] <= 20:
        table = Table("client", *map(str, range(counts.shape[1])), "all", box=None, header_style="bold", pad_edge=False)
        for k, row in enumerate(counts):
            table.add_row(str(k), *(str(n) if n else "." for n in row), str(row.sum()))
    else:
        table = Table("client", "samples", "classes", "most of", box=None, header_style="bold", pad_edge=False)
        for k, row in enumerate(counts):
            most = ", ".join(f"{c} ({row[c]})" for c in row.argsort()[::-1][:6] if row[c])
            table.add_row(str(k), str(row.sum()), str((row > 0).sum()), most)
    console.print(table)
    console.print(f"picture: {picture}", soft_wrap=True)


@app.command()
def bench(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    clients: Annotated[str | None, typer.Option(help="numbers of clients; 1,10,100 on a GPU, 1,4 on a CPU")] = None,
    steps: Annotated[int | None, typer.Option(help="steps per client; 200 on a GPU, 4 on a CPU")] = None,
    model: Annotated[str, typer.Option(help="the network")] = "resnet20",
    batch: Annotated[int, typer.Option(help="batch size")] = 64,
    augment: Augment = "standard",
    threads: Annotated[int, typer.Option(help="torch threads")] = 1,
    as_json: Json = False,
) -> None:
    """Measure the engines here: one table, ratios within one run."""
    from fedcc.bench import bench as measure
    from fedcc.engine import choose_device
    from fedcc.engine.threads import check_threads, fixed_threads

    check_threads(threads)
    where = choose_device(device)
    gpu = where.type == "cuda"
    try:
        numbers = [int(n) for n in (clients or ("1,10,100" if gpu else "1,4")).split(",")]
    except ValueError:
        raise ValueError(f"clients must be whole numbers with commas, got {clients!r}") from None
    length = steps if steps is not None else 200 if gpu else 4
    for what, number in (("steps", length), ("batch", batch), *(("clients", n) for n in numbers)):
        check_value(what, number, int, 1, 65_536)
    console = out(stderr=as_json)
    console.print(
        f"{model}, batch {batch}, 32x32 images, {length} steps, {where}; predict is per 1,000 images", soft_wrap=True
    )
    rows = []
    table = Table(
        "phase", "engine", "clients", "ms / client-step", "faster", "first s", "GiB", "busy %", box=None, pad_edge=False
    )
    with console.status("measuring"), fixed_threads(threads):
        for row in measure(where, numbers, length, model, batch, augment or "standard"):
            rows.append(row.plain())
            shown = {"ratio": "{:.1f}x", "first": "{:.1f}", "memory": "{:.2f}", "busy": "{:.0f}"}
            rest = ["" if rows[-1][n] is None else text.format(rows[-1][n]) for n, text in shown.items()]
            table.add_row(row.phase, row.engine, str(row.clients), f"{row.ms:.3f}", *rest)
    if as_json:
        from fedcc.experiments.environment import environment

        settings = {"model": model, "batch": batch, "steps": length, "augment": augment}
        typer.echo(
            json.dumps({"settings": settings, "machine": environment(str(where), threads), "rows": rows}, indent=1)
        )
    else:
        console.print(table)


@data_app.command("list")
def data_list(data_dir: DataDir = None, as_json: Json = False) -> None:
    """The data sets, and which of them are here."""
    from fedcc.data import DATASETS
    from fedcc.data.fetch import data_folder

    folder = data_folder(data_dir)
    rows: list[dict[str, Any]] = [
        {
            "name": d.name, "title": d.title, "train": d.train, "test": d.test, "classes": d.classes,
            "shape": list(d.shape), "source": d.source, "here": d.embedded or not d.missing(folder),
        }
        for d in DATASETS.values()
    ]  # fmt: skip
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    console = out()
    table = Table(
        "name", "title", "train", "test", "classes", "shape", "here", box=None, header_style="bold", pad_edge=False
    )
    for r in rows:
        shape = "x".join(map(str, r["shape"]))
        table.add_row(
            r["name"],
            r["title"],
            f"{r['train']:,}",
            f"{r['test']:,}",
            str(r["classes"]),
            shape,
            "yes" if r["here"] else "no",
        )
    console.print(table)
    console.print(f"data folder: {folder}", soft_wrap=True)


@data_app.command("fetch")
def data_fetch(name: Annotated[str, typer.Argument(help="the data set")], data_dir: DataDir = None) -> None:
    """Download a data set from upstream, checked, unless it is here."""
    from fedcc.data import find
    from fedcc.data.fetch import fetch

    if find(name).embedded:
        typer.echo(f"{find(name).name} comes with scikit-learn; there is nothing to fetch")
        return
    typer.echo(f"{find(name).name}: {fetch(name, data_dir)}")


@data_app.command("check")
def data_check(
    name: Annotated[str, typer.Argument(help="the data set")], data_dir: DataDir = None, as_json: Json = False
) -> None:
    """Compare a data set's files with upstream's checksums."""
    from fedcc.data.fetch import check

    found = check(name, data_dir)
    if as_json:
        typer.echo(json.dumps([c._asdict() for c in found], indent=1))
    else:
        table = Table("file", "expected", "found", "", box=None, header_style="bold", pad_edge=False)
        for c in found:
            table.add_row(c.file, c.expected, c.found, "ok" if c.ok else "differs")
        out().print(table)
    if odd := sum(not c.ok for c in found):
        raise DataError(f"{name}: {odd} of {len(found)} files are missing or not upstream's")


def main() -> None:
    """The program: 0 on success, 1 on failure, 2 for a wrong call, 130 or 143 when stopped; no traceback.

    FEDCC_DEBUG=1 shows the traceback.
    """
    typer.core.HAS_RICH = False  # or help has "\\[default: ..." in it: typer escapes for rich markup that is turned off
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may be anything
    signals = Signals()
    try:
        signals.catch()
        with warnings_to(warn):
            code = app(_words(), standalone_mode=False, prog_name="fedcc")
        signals.over = True
    except BaseException as error:
        signals.over = True
        code = answer(error)
    finally:
        signals.restore(to_default=is_program())
    sys.exit(code if isinstance(code, int) else 0)


def _words() -> list[str]:
    from fedcc.experiments.experiment import present_words

    return present_words(sys.argv[1:])


def answer(error: BaseException) -> int:
    """Say how a call has ended; the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return 2
    if isinstance(error, click.UsageError):
        asked = error.ctx.command_path if error.ctx else "fedcc"
        _say(f"{usage(error)} (`{asked} --help` lists what there is)")
        return 2
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if not isinstance(error, Exception | Stopped):
        raise error
    if os.environ.get("FEDCC_DEBUG"):
        traceback.print_exception(error)
    _say(explained(error))
    return error.code if isinstance(error, Stopped) else 2 if isinstance(error, ValueError) else 1


def usage(error: click.UsageError) -> str:
    """What is wrong with the call, with the nearest known name."""
    context = error.ctx.command if error.ctx else None
    if isinstance(error, click.NoSuchOption) and context is not None:
        names = [o for p in context.params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")]
        return str(unknown("option", error.option_name, names)).partition(" Known:")[0].rstrip(".")
    if isinstance(context, click.Group) and (word := re.search(r"No such command '(.*?)'", error.message)):
        return str(unknown("command", word[1], context.commands))
    return error.format_message().rstrip(".")


def _say(text: str) -> None:
    print(f"fedcc: {text}", file=sys.stderr)


def warn(text: str) -> None:
    _say(f"warning: {text}")


if __name__ == "__main__":
    main()
