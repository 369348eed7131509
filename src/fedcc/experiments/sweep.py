"""Sweeps: methods x scenarios x seeds from one TOML file, each run in its folder, whatever was done before."""

from __future__ import annotations

import os
import re
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any, Literal

from fedcc.code import allow
from fedcc.core.digests import DamagedFile
from fedcc.core.naming import shortened
from fedcc.core.options import check_names, check_value
from fedcc.errors import error_line, warnings_to
from fedcc.experiments.experiment import Experiment, first_difference
from fedcc.experiments.options import MACHINE, OPTIONS, Output
from fedcc.experiments.rounds import FinishedRound, Observer, Pause, Paused
from fedcc.experiments.run import execute, load_unfinished, prepare
from fedcc.experiments.store import InUse, RunFolder, RunFolderError
from fedcc.experiments.toml import load
from fedcc.experiments.tracking import Trackers
from fedcc.experiments.workers import Pool, WorkerDeath, drain
from fedcc.methods import METHODS, method_name, recorded_settings
from fedcc.signals import Interrupted

NAMES = tuple(name for name in OPTIONS if name != "seed")
LONGEST = 100  # bytes of a scenario's or a variant's name
State = Literal["finished", "unfinished", "missing", "blocked"]


@dataclass(frozen=True)
class Run:
    """One run of a sweep: its folder below the folder of runs, and the options that were set for it."""

    folder: Path
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def experiment(self) -> Experiment:
        """The experiment, resolved on this machine."""
        return Experiment.resolve(self.method, settings=self.settings, **self.options)

    def state(self, root: Path) -> tuple[State, str]:
        """How far it is, and why it cannot be run if it is blocked."""
        folder = root / self.folder
        try:
            if not (folder / "experiment.toml").is_file():
                RunFolder(folder).check(_without_machine(self.method, self.settings, self.options))
                return "missing", ""
            try:
                other = self.difference(load(folder / "experiment.toml"))
            except ValueError as error:
                return "blocked", f"{folder} holds another run: {error}"
            if other:
                return "blocked", f"{folder} holds another run ({other}); choose another --out, or move it away"
            return ("unfinished" if RunFolder(folder).summary() is None else "finished"), ""
        except (DamagedFile, RunFolderError) as error:
            return "blocked", str(error)

    def difference(self, table: Mapping[str, Any]) -> str:
        """Where a folder's ``experiment.toml`` says something else; what was left to the machine does not count."""
        recorded = dict(table)
        for name in MACHINE:
            if (mine := self.options.get(name, "auto")) not in ("auto", recorded.get(name)):
                return f"{name} is {recorded.get(name)} there, {mine} here"
        method, version = recorded.pop("method", ""), recorded.pop("version", None)
        settings, reason = recorded_settings(method, recorded.pop("settings", {}), version)
        if reason:
            return reason
        stored = _without_machine(method, settings, recorded).values()
        own = _without_machine(self.method, self.settings, self.options).values()
        difference = first_difference(stored, own)
        return "{} is {} there, {} here".format(*difference) if difference else ""


def _without_machine(method: str, settings: Mapping[str, Any], options: Mapping[str, Any]) -> Experiment:
    """An experiment without the options that belong to the machine."""
    rest = {name: value for name, value in options.items() if name not in MACHINE}
    return Experiment.resolve(method, settings=settings, device="cpu", **rest)


def read(path: Path, changes: Mapping[str, Any] | None = None) -> list[Run]:
    """The runs of a file, in its order: by seed, then scenario, then method; ``changes`` win over what it says."""
    try:
        return planned(load(path), changes or {})
    except ValueError as error:
        raise error if str(error).startswith(str(path)) else ValueError(f"{path}: {error}") from None


def planned(table: Mapping[str, Any], changes: Mapping[str, Any]) -> list[Run]:
    """The runs that a table describes."""
    check_names("key of a sweep", table, ("methods", "seeds", "scenario", "variant", *NAMES))
    check_names("option of a run", changes, NAMES)
    common = {name: table[name] for name in table if name in NAMES}
    seeds = _listed("seeds", table.get("seeds", [0]), int)
    methods = [{"method": name} for name in _listed("methods", table.get("methods", []), str)]
    variants = _tables("variant", table, ("method", "name", "settings", *NAMES))
    for variant in variants:
        for key in ("method", "name"):
            if key not in variant:
                raise ValueError(f"a variant has a method and a name, got {shortened(variant)}")
        check_value("method", variant["method"], str)
    scenarios = [
        {**common, **scenario, "data": data, "skew": skew}
        for scenario in _tables("scenario", table, ("name", *NAMES)) or [{}]
        for data, skew in product(*(_as_list((common | scenario).get(name)) for name in ("data", "skew")))
    ]
    if not methods + variants:
        raise ValueError(f"name at least one method; known: {', '.join(METHODS)}")
    runs: dict[Path, Run] = {}
    for seed, scenario, entry in product(seeds, scenarios, methods + variants):
        run = _run(seed, scenario, entry, changes)
        if run.folder in runs:
            raise ValueError(f"two runs would share the folder {run.folder}; give a variant or scenario a name")
        runs[run.folder] = run
    if not runs:
        raise ValueError("there is no run: seeds, data and skew must not be empty lists")
    return list(runs.values())


def _run(seed: int, scenario: Mapping[str, Any], entry: Mapping[str, Any], changes: Mapping[str, Any]) -> Run:
    options = {**scenario, **entry, **changes, "seed": seed}
    options = {name: value for name, value in options.items() if name in OPTIONS and value is not None}
    method, settings = method_name(entry["method"]), entry.get("settings", {})
    allow(method, options.get("data"), options.get("models"))  # the file is the user's own
    try:
        data, method_folder, number = _without_machine(method, settings, options).folder.parts
    except ValueError as error:
        where = " ".join(str(v) for v in (entry.get("name"), options.get("data"), options.get("skew")) if v)
        raise ValueError(f"{method}{f' ({where})' if where else ''}: {error}") from None
    for name in (scenario.get("name"), entry.get("name")):
        if name is not None and not (isinstance(name, str) and re.fullmatch(r"\w[\w.-]*", name)):
            raise ValueError(
                f"a name is of letters, digits, '.', '_' and '-', as it becomes a folder's; got {shortened(name)}"
            )
        if name is not None and len(os.fsencode(name)) > LONGEST:
            raise ValueError(f"a name must be at most {LONGEST} bytes long, got {shortened(name)}")
    names = ((data, scenario.get("name")), (method_folder, entry.get("name")), (number,))
    return Run(Path(*("-".join(filter(None, parts)) for parts in names)), method, settings, options)


def _tables(name: str, table: Mapping[str, Any], known: Sequence[str]) -> list[dict[str, Any]]:
    entries = table.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{name} must be tables, [[{name}]], got {shortened(entries)}")
    for entry in entries:
        check_names(f"key of a {name}", entry, known)
    return entries


def _listed(name: str, value: Any, kind: type) -> list[Any]:
    if not isinstance(value, list) or not all(type(v) is kind for v in value):
        raise ValueError(f"{name} must be a list of {'integers' if kind is int else 'strings'}, got {shortened(value)}")
    return value


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def shard(runs: Sequence[Run], text: str) -> list[Run]:
    """Part ``i/n`` of the runs; the parts are disjoint, differ by at most one run, and mix methods and scenarios.

    >>> [len(shard([Run(Path(str(n)), "fedcc") for n in range(8)], part)) for part in ("1/3", "2/3", "3/3")]
    [3, 3, 2]
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--shard is i/n with i from 1 to n, such as 2/4, got {text!r}")
    shuffled = sorted(runs, key=lambda run: blake2b(run.folder.as_posix().encode()).digest())
    mine = {run.folder for run in shuffled[int(match[1]) - 1 :: int(match[2])]}
    return [run for run in runs if run.folder in mine]


def duration(text: str) -> float:
    """Seconds of a time as people write it.

    >>> duration("90m"), duration("1h30m"), duration("45s"), duration("10")
    (5400.0, 5400.0, 45.0, 10.0)
    """
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhms])", text)
    if "".join(number + unit for number, unit in parts) == text and parts:
        return float(sum(float(number) * units[unit] for number, unit in parts))
    with suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise ValueError(f"a time is given as 90m, 1h30m or 45s, got {text!r}")


@dataclass(frozen=True)
class SweepOptions:
    """What the runs of a sweep have in common that does not decide their numbers."""

    root: Path
    output: Output = field(default_factory=Output)
    deadline: float | None = None  # by time.time(), which machines share


@dataclass(frozen=True)
class Outcome:
    """How one run ended: it is finished, was finished before, is in use elsewhere, was stopped, or failed."""

    kind: Literal["finished", "before", "elsewhere", "stopped", "failed"]
    text: str = ""
    accuracy: float | None = None
    seconds: float = 0.0  # that this sweep spent on it
    resumed_after: int = 0  # the round after which it resumed; 0 if it was new
    warnings: tuple[str, ...] = ()


class Deadline(Observer):
    """Pauses a run if another round as long as the last one would end after the deadline."""

    def __init__(self, deadline: float | None):
        self.deadline, self.last = deadline, time.time()

    def round(self, done: FinishedRound) -> Pause | None:
        now = time.time()
        round_seconds, self.last = now - self.last, now
        late = self.deadline is not None and now + round_seconds > self.deadline
        return Pause("the next round would end after the deadline") if late else None


def perform(run: Run, options: SweepOptions) -> Outcome:
    """Start or resume a run in its folder; any failure becomes its outcome."""
    folder, output, start_time = options.root / run.folder, options.output, time.perf_counter()
    warnings: list[str] = []
    resumed_after = 0
    allow(run.method, run.options.get("data"), run.options.get("models"))  # as in the process that read the file

    def outcome(kind: Any, text: str = "", accuracy: float | None = None) -> Outcome:
        return Outcome(kind, text, accuracy, time.perf_counter() - start_time, resumed_after, tuple(warnings))

    try:
        with RunFolder(folder).lock(), warnings_to(warnings.append):
            state, reason = run.state(options.root)
            if state == "finished":
                return outcome("before")
            if state == "blocked":
                return outcome("failed", reason)
            start = None
            if state == "unfinished":
                experiment, federation, start, problems = load_unfinished(folder, output.data_dir)
                warnings += problems
            else:
                experiment = run.experiment()
                federation = prepare(experiment, folder, data_dir=output.data_dir)
            resumed_after = start.snapshot.t if start else 0
            observers = (Trackers(output.track, experiment, folder, warnings.append), Deadline(options.deadline))
            result = execute(experiment, folder, federation, start=start, observers=observers, output=output)
            return outcome("finished", accuracy=result.accuracy)
    except InUse as error:
        return outcome("elsewhere", str(error))
    except (Paused, Interrupted, KeyboardInterrupt) as error:  # the last one is how Ray cancels
        return outcome("stopped", str(error))
    except Exception as error:
        if os.environ.get("FEDCC_DEBUG"):
            traceback.print_exc()
        return outcome("failed", error_line(error))


@dataclass
class Sweep:
    """The runs that are to be done, those in progress, and how the others ended."""

    todo: deque[Run]
    deadline: float | None = None
    start_times: dict[Path, float] = field(default_factory=dict)  # of the runs in progress
    outcomes: dict[Path, Outcome] = field(default_factory=dict)

    def go(self, pool: Pool[Run, Outcome], on_end: Callable[[Run, Outcome], None], tick: Callable[[], None]) -> None:
        """Do all runs; stop at the deadline or on any exception."""
        try:
            while True:
                while self.todo and len(pool.busy) < pool.jobs and not self.late:
                    run = self.todo.popleft()
                    pool.give(run)
                    self.start_times[run.folder] = time.monotonic()
                if not pool.busy:
                    break
                self._take(pool.wait(0.25), on_end)
                tick()
        except BaseException:
            rest = drain(pool)
            self._take(rest, on_end, stopping=True)
            raise
        finally:
            pool.close()

    @property
    def late(self) -> bool:
        return self.deadline is not None and time.time() >= self.deadline

    def _take(
        self,
        answers: Iterable[tuple[Run, Outcome | WorkerDeath]],
        on_end: Callable[[Run, Outcome], None],
        stopping: bool = False,
    ) -> None:
        for run, answer in answers:
            if isinstance(answer, WorkerDeath):
                answer = Outcome("stopped") if stopping else Outcome("failed", answer.reason)
            self.start_times.pop(run.folder, None)
            self.outcomes[run.folder] = answer
            on_end(run, answer)

    def count(self, kind: str) -> int:
        return sum(outcome.kind == kind for outcome in self.outcomes.values())
