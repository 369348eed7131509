"""``fedcc run`` and ``fedcc resume``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fedcc.cli.console import console, noted, say_starting, show, warn
from fedcc.cli.options import Code, Json, Settings, run_options, take
from fedcc.experiments.options import GROUPS, OPTIONS, Output

if TYPE_CHECKING:
    from fedcc.experiments.checkpoint import Checkpoint
    from fedcc.experiments.experiment import Experiment
    from fedcc.federation import Federation


@run_options(*GROUPS, Output)
def run(
    options: dict[str, Any],
    method: Annotated[
        str | None, Argument(help="The method's name, or module:Class of your own; `fedcc methods` lists them.")
    ] = None,
    config: Annotated[
        Path | None,
        Option("--config", help="Start from this experiment.toml, or repeat the run of this record (.json)."),
    ] = None,
    settings: Settings = None,
    out_dir: Annotated[
        Path | None, Option("--out", help="Write the run to this folder. The default is runs/DATA_SKEW/METHOD/seedS.")
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the run in the folder.")] = False,
    as_json: Json = False,
) -> None:
    """Train one method on one federation and record it in a run folder."""
    say_starting(console(stderr=as_json))
    from fedcc.code import allow
    from fedcc.engine.threads import check_threads
    from fedcc.experiments.advice import public_line
    from fedcc.experiments.experiment import Experiment, parse_settings
    from fedcc.experiments.run import prepare
    from fedcc.experiments.store import RunFolder, Unfinished
    from fedcc.experiments.tracking import check_trackers
    from fedcc.methods import METHODS, method_name

    output = Output(**take(Output, options))
    stored: Mapping[str, Any] = {}
    data_digest = ""  # of a record's data
    allow(method, options.get("data"), options.get("models"))
    if config is not None:
        named, values, settings_of, data_digest = read_config(config)
        data_digest = "" if "data" in options else data_digest
        method, options = method or named, values | options
        stored = settings_of if method_name(method) == named else {}
    if method is None:
        raise ValueError(f"name a method ({', '.join(METHODS)}; `fedcc methods` explains them), or give --config FILE")
    experiment = Experiment.resolve(method, settings={**stored, **parse_settings(method, settings or [])}, **options)
    folder = RunFolder(out_dir or Path("runs") / experiment.folder)
    check_threads(experiment.machine.threads)
    try:
        folder.check(experiment, overwrite)
    except Unfinished:
        if as_json or not sys.stdin.isatty():
            raise
        if not typer.confirm(f"{folder.path} holds this run, unfinished; resume it?", default=True, err=True):
            raise
        _resume(folder.path, output, as_json)
        return
    output = replace(output, track=check_trackers(output.track, warn))
    with folder.lock():
        federation = prepare(experiment, folder.path, data_dir=output.data_dir, overwrite=overwrite)
        if data_digest and data_digest != federation.digests["data_sha256"]:
            warn(f"the data of {experiment.split.data} are not those of {config}: another run, not the same again")
        show(console(stderr=as_json), describe(experiment))
        if line := public_line(experiment.build_method(), federation):
            show(console(stderr=as_json), line)
        train(experiment, folder.path, federation, output, as_json)


def read_config(path: Path) -> tuple[str, dict[str, Any], Mapping[str, Any], str]:
    """The method, options and settings of ``experiment.toml``, or of a record without what belongs to its machine.

    The last value is the digest of a record's data.
    """
    from fedcc.code import allow
    from fedcc.core.options import check_names
    from fedcc.experiments.experiment import Experiment
    from fedcc.experiments.options import MACHINE, current_values
    from fedcc.experiments.toml import load
    from fedcc.report.parts import read_record
    from fedcc.report.values import InvalidRecord

    if path.suffix == ".json":
        try:
            record = read_record(path, path.name, [])
        except InvalidRecord as error:
            raise ValueError(f"{path} {error}") from None
        named = {n: v for n, v in record["experiment"].items() if n not in ("method", "version", "settings")}
        check_names(f"setting of a run in {path}", named, OPTIONS)
        values = current_values({n: v for n, v in named.items() if n not in MACHINE})
        # others may have written it, so code that it names is not imported
        return record["method"], values, record["settings"], record["fingerprints"][0]
    values = {name: value for name, value in load(path).items() if name in (*OPTIONS, "method")}
    allow(values.pop("method", None), values.get("data"), values.get("models"))
    written = Experiment.read(path)  # says what is wrong with the file itself
    return written.method, values, written.settings, ""


@run_options(Output)
def resume(
    options: dict[str, Any],
    folder: Annotated[Path, Argument(metavar="RUN", help="The run's folder.")],
    rounds: Annotated[
        int | None, Option("--rounds", help="Extend the run, finished or not, to this many rounds.")
    ] = None,
    code: Code = None,
    as_json: Json = False,
) -> None:
    """Resume a run from its last checkpoint; results match an uninterrupted one."""
    say_starting(console(stderr=as_json))
    from fedcc.code import allow_code

    allow_code(code)
    _resume(folder, Output(**take(Output, options)), as_json, rounds)


def _resume(path: Path, output: Output, as_json: bool, rounds: int | None = None) -> None:
    from fedcc.experiments.run import load_unfinished
    from fedcc.experiments.store import RunFolder
    from fedcc.experiments.tracking import check_trackers

    terminal, folder = console(stderr=as_json), RunFolder(path)

    def finished() -> bool:
        try:
            summary = folder.summary()
            if summary is None or rounds not in (None, summary["experiment"].get("rounds")):
                return False
        except ValueError as error:
            error.add_note(f"remove summary.json and `{folder.resume}` continues or repeats the run")
            raise
        terminal.out(f"{path} holds a finished run; there is nothing to do")
        if as_json:
            typer.echo((path / "summary.json").read_text(), nl=False)
        return True

    if not (path / "experiment.toml").is_file():
        raise ValueError(f"{path} holds no run: experiment.toml is missing; `fedcc run ... --out {path}` starts one")
    if finished():
        folder.tidy()
        return
    output = replace(output, track=check_trackers(output.track, warn))
    with folder.lock():
        if finished():  # by another process, meanwhile
            return
        experiment, federation, start, problems = load_unfinished(path, output.data_dir, rounds)
        for problem in problems:
            warn(problem)
        show(terminal, describe(experiment))
        if start is None:
            terminal.print("no checkpoint to resume from: starting again")
        else:
            size = f"{start.size / 1e6:,.1f} MB"
            terminal.print(f"resuming after round {start.snapshot.t}, from a checkpoint of {size}")
        train(experiment, path, federation, output, as_json, start)


def train(
    experiment: Experiment,
    path: Path,
    federation: Federation,
    output: Output,
    as_json: bool,
    start: Checkpoint | None = None,
) -> None:
    """Run an experiment into its folder, with progress, and say how it ended."""
    from fedcc.experiments.progress import Progress
    from fedcc.experiments.run import execute
    from fedcc.experiments.store import RunFolder
    from fedcc.experiments.tracking import Trackers

    terminal = console(stderr=as_json)
    total = experiment.build_method().rounds(experiment.training.rounds)
    progress = Progress(terminal, total, start.snapshot.t if start else 0)
    observers = (progress, Trackers(output.track, experiment, path, warn))
    with (
        progress.live if terminal.is_terminal else nullcontext(),
        noted(f"see {path}", lambda: f"resume with `{RunFolder(path).resume}`"),
    ):
        result = execute(experiment, path, federation, start=start, observers=observers, output=output)
    if as_json:
        typer.echo((path / "summary.json").read_text(), nl=False)
        return
    best_round, best = result.best
    size = sum(file.stat().st_size for file in path.glob("checkpoint-*.safetensors"))
    kept = f" (checkpoint: {size / 1e6:,.1f} MB)" if size else ""
    show(
        terminal,
        f"{result.method.label}: final {result.accuracy:.2f} %, best {best:.2f} % in round {best_round}, "
        f"{result.seconds:.1f} s, {path}{kept}",
    )


def describe(experiment: Experiment) -> str:
    """One line on what is about to run."""
    split, training, machine = experiment.split, experiment.training, experiment.machine
    return (
        f"{experiment.build_method().label} on {split.data}, {split.skew}, {split.clients} clients ({split.models}), "
        f"T={training.rounds}, E={training.epochs}, seed {training.seed}, "
        f"{machine.device} {machine.precision} {machine.engine}"
    )
