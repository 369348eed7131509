"""Run a method on a federation (``fedcc.run``), or an experiment into its folder."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcc.core.method import AnyMethod, Method
from fedcc.core.options import Engine, Optimizer, Precision, Reset, Schedule, Share, Wire
from fedcc.core.requests import Fit, Recipe
from fedcc.core.rng import Key
from fedcc.engine import Plain, choose_device, drive, set_deterministic
from fedcc.engine import engine as engine_named
from fedcc.engine.threads import check_threads, fixed_threads, warn_of_threads
from fedcc.evaluate import Metric
from fedcc.experiments.advice import PublicAdvice
from fedcc.experiments.checkpoint import Checkpoint, Checkpoints
from fedcc.experiments.described import describe_run, recorded_difference
from fedcc.experiments.experiment import Experiment, resolve_machine
from fedcc.experiments.options import OPTIONS, Machine, Measurement, Output, Training, group_of
from fedcc.experiments.record import Record, summary
from fedcc.experiments.result import Result
from fedcc.experiments.rounds import FinishedRound, Observer, Observers, Simulation, follow, run_rounds
from fedcc.experiments.sharing import shared
from fedcc.experiments.store import RunFolder, RunFolderError
from fedcc.experiments.tracking import Trackers, check_trackers
from fedcc.federate import Snapshot, build_roles
from fedcc.federation import Federation
from fedcc.methods import make
from fedcc.nets import PLAIN, build

DEFAULT_OUTPUT = Output()


class RunWarning(UserWarning):
    """Something about a run's folder or its trackers."""


def run(
    method: AnyMethod | str,
    federation: Federation,
    rounds: int | None = None,
    *,
    epochs: int | None = None,
    optimizer: Optimizer | None = None,
    momentum: float | None = None,
    lr: float | None = None,
    schedule: Schedule | None = None,
    decay: float | None = None,
    batch: int | None = None,
    reset: Reset | None = None,
    participation: float | None = None,
    wire: Wire | None = None,
    share: Share | None = None,
    answer_epsilon: float | None = None,
    seed: int | None = None,
    client_accuracy: bool | None = None,
    evaluate_every: int | None = None,
    readings: bool | None = None,
    device: str | None = None,
    precision: Precision | None = None,
    engine: Engine | None = None,
    threads: int | None = None,
    deterministic: bool | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    track: Sequence[str] = (),
    progress: bool = False,
    metrics: Mapping[str, Metric] | None = None,
    observers: Sequence[Observer] = (),
    start: Snapshot | Checkpoint | None = None,
    on_round: Callable[[Record], None] | None = None,
    monitor: Any = None,
    on_snapshot: Callable[[Snapshot], None] | None = None,
) -> Result:
    """Train a method on a federation; rounds and epochs are those of the data set by default.

    The other options have the defaults that `fedcc run --help` gives. ``observers`` follow the run and may stop it
    (:class:`~fedcc.experiments.rounds.Observer`). With ``start``, a snapshot that an observer took, the run continues
    after that round, and its result has the rounds from there on. The same seed gives the same numbers for the same
    number of CPU ``threads``; on a GPU, up to rounding unless ``deterministic``. ``on_round``, ``monitor`` and
    ``on_snapshot`` are deprecated: use an observer.

    With ``out`` the run has a folder as `fedcc run` writes it, with checkpoints; ``track`` names trackers.
    ``resume=True`` continues the run in the folder, if there is one: to its end, or to more ``rounds``.
    ``overwrite=True`` replaces it. ``progress=True`` prints a line for each round. ``metrics`` are numbers of your own
    by name, functions of the predicted probabilities [N, classes] and the labels [N] of the test samples; every
    evaluated round records them.

    >>> federation = Federation.named("digits", skew="classes:2", clients=5, models="resnet8")
    >>> result = run("fedcc", federation, rounds=2, epochs=1, seed=0)
    >>> [t for t, accuracy in result.curve], result.accuracy > 80
    ([1, 2], True)
    """
    options = {name: value for name, value in locals().items() if name in OPTIONS and value is not None}
    method = make(method) if isinstance(method, str) else method
    if not isinstance(method, Method):
        raise TypeError(f"a method is a name or an instance such as FedCC(), got {method!r}")
    if on_round or monitor or on_snapshot:
        text = "on_round=, monitor= and on_snapshot= are deprecated: give fedcc.run(..., observers=[...]) an Observer"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        observers = [*observers, Callbacks(on_round, monitor, on_snapshot)]
    options = resolve_machine({"rounds": federation.rounds, "epochs": federation.epochs, **options})
    groups = (group_of(Training, options), group_of(Measurement, options), group_of(Machine, options))
    before = start if isinstance(start, Checkpoint) else Checkpoint(start) if start else None
    extra: dict[str, Any] = {"metrics": metrics}
    if out is None:
        if resume or overwrite or track:
            raise ValueError("resume=, overwrite= and track= are for runs with a folder: pass out=FOLDER")
        with shown(progress, method.rounds(groups[0].rounds)) as shown_by:
            return train(method, federation, *groups, observers=[*shown_by, *observers], start=before, **extra)
    if start is not None:
        raise ValueError("start= is for a run without a folder; resume=True continues one with a folder")
    return run_in_folder(
        *describe_run(method, federation, options), Path(out), resume, overwrite, track, progress, observers, metrics
    )


@contextmanager
def shown(progress: bool, rounds: int, done: int = 0) -> Iterator[list[Observer]]:
    """Observers that print a line for each round during the block, if there are to be any."""
    if not progress:
        yield []
        return
    from rich.console import Console

    from fedcc.experiments.progress import Progress

    console = Console(highlight=False, markup=False, emoji=False)
    observer = Progress(console, rounds, done)
    with observer.live if console.is_terminal else nullcontext():
        yield [observer]


def run_in_folder(
    experiment: Experiment,
    federation: Federation,
    path: Path,
    resume: bool,
    overwrite: bool,
    track: Sequence[str],
    progress: bool,
    observers: Sequence[Observer],
    metrics: Mapping[str, Metric] | None,
) -> Result:
    """Run in a folder what :func:`run` was called with; continue what is there if ``resume`` is set."""
    folder, method = RunFolder(path), experiment.build_method()
    there, start = (path / "experiment.toml").is_file(), None
    if there and not (resume or overwrite):
        raise RunFolderError(f"{path} holds a run already; pass resume=True to continue it, or overwrite=True")

    def warn(text: str) -> None:
        warnings.warn(text, RunWarning, stacklevel=4)

    trackers = check_trackers(track, warn)
    with folder.lock():
        if there and not overwrite:
            notes, difference = folder.check_description(), recorded_difference(path, experiment)
            if difference and difference[0] != "rounds":
                raise RunFolderError("{} holds another run: {} is {} there, {} here".format(path, *difference))
            if not difference and folder.summary() is not None:
                return Result.load(path, models=federation.models, method=method)
            if difference:
                shorter = experiment.with_options(rounds=difference[1])
                _, start, problems = extended(path, shorter, federation, experiment.training.rounds)
            else:
                start, problems = Checkpoints(path, experiment, federation).latest()
            for note in notes + folder.code_changes() + problems:
                warn(note)
        else:
            folder.check(experiment, overwrite)
            check_method(method, federation)
        done = start.snapshot.t if start else 0
        with shown(progress, method.rounds(experiment.training.rounds), done) as shown_by:
            all_observers = [*shown_by, Trackers(trackers, experiment, path, warn), *observers]
            return execute(experiment, path, federation, start=start, observers=all_observers, metrics=metrics)


def train(
    method: AnyMethod,
    federation: Federation,
    training: Training,
    measurement: Measurement,
    machine: Machine,
    *,
    observers: Sequence[Observer] = (),
    start: Checkpoint | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> Result:
    """Train a method on a federation, as :func:`run` does, with the options as values."""
    check_threads(machine.threads)
    warn_of_threads(machine.threads)
    observer, result = Observers(*observers, PublicAdvice(method, federation.classes, training.epochs)), None
    executor = engine_named(machine.engine, choose_device(machine.device), machine.precision, observer.monitor)
    set_deterministic(machine.deterministic)
    snapshot, before, past = (start.snapshot, start.records, start.seconds) if start else (None, [], 0.0)
    start_time = time.perf_counter() - past
    try:
        with fixed_threads(machine.threads):
            simulation = Simulation(
                method, federation, training, measurement, executor, start=snapshot, metrics=metrics
            )
            rounds = run_rounds(simulation, training.rounds, evaluate_every=measurement.evaluate_every, start=snapshot)
            records, stopped = follow(rounds, observer, before)
        public, trained = federation.public, simulation.cohort.trained_models(simulation.server)
        dtype, seconds = str(public.x.dtype).removeprefix("torch."), time.perf_counter() - start_time
        named = (federation.labels, stopped, federation.names, federation.encoding)
        result = Result(method, trained, public.view, dtype, records, seconds, *named)
    finally:
        observer.end(result)
    return result


@dataclass(eq=False)
class Callbacks(Observer):
    """The callbacks that :func:`run` took before it had observers."""

    on_round: Callable[[Record], None] | None
    monitor: Any  # with fitting(fit) and trained(samples)
    on_snapshot: Callable[[Snapshot], None] | None

    def fit_started(self, fit: Fit) -> None:
        if self.monitor:
            self.monitor.fitting(fit)

    def samples_trained(self, number: int) -> None:
        if self.monitor:
            self.monitor.trained(number)

    def round(self, done: FinishedRound) -> None:
        if self.on_round:
            self.on_round(done.record)
        if self.on_snapshot:
            self.on_snapshot(done.snapshot())


def check_method(method: AnyMethod, federation: Federation) -> None:
    """Raise now what the start of a run would raise, such as a method and networks that do not fit together."""
    for arch in dict.fromkeys(federation.archs(method).values()):
        if not isinstance(arch.trunks[0], PLAIN):
            build(arch, Key(0))
    server, _ = build_roles(method, federation, Recipe(), 0, "cpu")
    drive([method.start(server)], Plain("cpu"))


def prepare(experiment: Experiment, out: Path, *, data_dir: Path | None = None, overwrite: bool = False) -> Federation:
    """Read and split the data. Whatever is wrong with the call is raised here, before anything is written."""
    check_threads(experiment.machine.threads)
    RunFolder(out).check(experiment, overwrite)
    federation = experiment.federation(data_dir)
    check_method(experiment.build_method(), federation)
    return federation


def load_unfinished(
    out: Path, data_dir: Path | None = None, rounds: int | None = None
) -> tuple[Experiment, Federation, Checkpoint | None, list[str]]:
    """What :func:`execute` needs to resume a folder's run, and what is wrong with files that cannot be used.

    With ``rounds`` the run, which may be finished, is extended to that many.
    """
    notes = RunFolder(out).check_description()
    experiment = Experiment.read(out / "experiment.toml")
    check_threads(experiment.machine.threads)
    try:
        federation = experiment.federation(data_dir)
    except ValueError as error:  # options that are valid one by one, but not together
        raise ValueError(f"{out / 'experiment.toml'}: {error}") from None
    start: Checkpoint | None
    if rounds is not None and rounds != experiment.training.rounds:
        experiment, start, problems = extended(out, experiment, federation, rounds)
    else:
        start, problems = Checkpoints(out, experiment, federation).latest()
    return experiment, federation, start, notes + RunFolder(out).code_changes() + problems


def extended(
    folder: Path, experiment: Experiment, federation: Federation, rounds: int
) -> tuple[Experiment, Checkpoint, list[str]]:
    """Extend a folder's run to more rounds; refused, with nothing changed, where that would give other numbers."""
    before = experiment.training.rounds
    if rounds < before:
        raise ValueError(f"rounds must be more than the run's {before}, got {rounds}")
    if reason := experiment.build_method().extension_reason():
        raise ValueError(f"{folder} cannot be extended: {reason}; run it anew with rounds={rounds}")
    experiment = experiment.with_options(rounds=rounds)
    start, problems = Checkpoints(folder, experiment, federation).latest()
    if start is None:
        raise ValueError(f"{folder} cannot be extended: it holds no checkpoint (--no-keep); run it anew")
    RunFolder(folder).reopen(experiment)
    return experiment, start, problems


def execute(
    experiment: Experiment,
    folder: Path,
    federation: Federation | None = None,
    *,
    start: Checkpoint | None = None,
    observers: Sequence[Observer] = (),
    output: Output = DEFAULT_OUTPUT,
    metrics: Mapping[str, Metric] | None = None,
) -> Result:
    """Run an experiment in its folder, which is valid whenever the run is interrupted.

    Without ``federation`` the experiment is prepared first. With ``start``, a checkpoint of the folder, the run is
    resumed.
    """
    if federation is None:
        federation = prepare(experiment, folder, data_dir=output.data_dir)
    checkpoints = Checkpoints(folder, experiment, federation, every=output.interval, keep=output.kept)
    groups = experiment.training, experiment.measurement, experiment.machine
    with shared(experiment.machine.device) as others:
        writer = FolderWriter(experiment, federation, checkpoints, others, output.save_models)
        writer.begin(start)
        all_observers = [writer, *observers, checkpoints]
        method = experiment.build_method()
        return train(method, federation, *groups, observers=all_observers, start=start, metrics=metrics)


@dataclass(eq=False)
class FolderWriter(Observer):
    """Writes a run's folder: its description, a line of ``metrics.jsonl`` per round; at the end models and summary."""

    experiment: Experiment
    federation: Federation
    checkpoints: Checkpoints
    others: Callable[[], int | None] | None = None  # counts the other runs on the device
    save_models: bool = True

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.checkpoints.folder)

    def begin(self, start: Checkpoint | None) -> None:
        """Make the folder of a new run, or restore that of an unfinished run to its checkpoint."""
        if start is None:
            self.folder.begin(self.experiment, self.federation.partition)
        else:
            self.folder.restore(self.experiment, self.federation.partition, start.records)
        self.checkpoints.begin(start)

    def round(self, done: FinishedRound) -> None:
        if self.others:
            done.record["sharing"] = self.others()
        self.folder.add(done.record)

    def end(self, result: Result | None) -> None:
        if result is not None:
            counts = {str(k): row for k, row in enumerate(self.federation.counts().tolist())}
            facts = {"counts": counts, "public": len(self.federation.public), "classes": list(result.classes)}
            self.finish(result, facts)

    def finish(self, result: Result, facts: Mapping[str, Any]) -> None:
        """Write the models and the summary, with further facts."""
        if self.save_models:
            result.save(self.folder.path)
        checkpoints = self.checkpoints
        content = summary(self.experiment, result, checkpoints.seconds) | dict(facts)
        content |= {**self.federation.digests, "checkpoint_bytes": checkpoints.size}
        self.folder.finish(content, result.rounds, checkpoints.kept())
