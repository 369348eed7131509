"""The records of finished runs below some paths; what is left out is reported."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedcc.core.options import setting_text
from fedcc.data.registry import DATASETS
from fedcc.experiments.options import DEFAULTS, MACHINE, MEASUREMENT, OPTIONS
from fedcc.methods import METHODS
from fedcc.report.paper import Scenario
from fedcc.report.parts import AccuracyCurve, Log, Traffic, Work, read_record
from fedcc.report.values import InvalidRecord, natural, position, printable

Changes = tuple[tuple[str, str], ...]  # names and values, as text, that are not the defaults
ORDER = ("clients", "models", "rounds", "epochs", *OPTIONS)  # of options in titles: the most telling first
ASIDE = ("method", "version", "data", "skew", "seed", "settings", *MEASUREMENT, *MACHINE)  # not part of the protocol


@dataclass(frozen=True)
class RunRecord:
    """One finished run: the part of its record that tables and figures are made from."""

    file: Path
    name: str  # the path below the folder that was searched
    method: str  # as on the command line
    label: str
    family: str
    data: str
    skew: str
    seed: int
    final: float
    best: float
    best_round: int
    curve: tuple[float | None, ...]  # accuracy by round
    experiment: Mapping[str, Any]
    settings: Mapping[str, Any]
    command: str
    readings: Mapping[str, AccuracyCurve] = field(default_factory=dict)
    targets: tuple[float | None, ...] = ()
    tests: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # Table II: accuracy by test and client
    log: Log = field(default_factory=dict)
    uploads: Log = field(default_factory=dict)  # what the server can tell of clients from their uploads
    warnings: tuple[str, ...] = ()  # about these
    counts: tuple[tuple[int, ...], ...] = ()  # samples by client and class
    confusion: tuple[tuple[int, ...], ...] = ()  # test samples by label and predicted class
    known: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)  # 1 - p(unknown) by client and label
    class_names: tuple[str, ...] = ()
    metrics: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)  # of the caller's own, by round
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of methods and data of other packages
    traffic: Traffic = Traffic()
    work: Work = Work()
    seconds: float | None = None
    engine: str = ""
    device: str = ""
    precision: str = ""
    commit: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    fingerprints: tuple[str, str] = ("", "")  # of the data and of the partition
    has_digest: bool = True  # records of older versions have none
    analysis: Mapping[str, Any] | None = None
    analysis_file: Path | None = None  # beside the record, or beside a copy of it

    @property
    def in_folder(self) -> bool:
        return self.file.name == "summary.json"

    @property
    def scenario(self) -> Scenario:
        return self.data, self.skew

    @property
    def requested_rounds(self) -> int:
        """The rounds T that were requested; a method may need more."""
        return int(self.experiment.get("rounds", len(self.curve)))

    def own_accuracies(self, test: str) -> list[float]:
        """Of the clients' own models; without "unknown", ``valid`` and ``valid_labels`` are the same as ``global``."""
        if test in ("valid", "valid_labels") and test not in self.tests and self.method != "fedcc":
            test = "global"
        return list(self.tests.get(test, {}).values())

    @property
    def changed_settings(self) -> Changes:
        """The method's settings that are not its defaults."""
        kind = METHODS.get(self.method)
        usual = dict(self.defaults.get("settings", {}))
        usual |= {f.name: f.default for f in fields(kind)} if kind else {}  # type: ignore[arg-type]
        settings = {
            n: float(v) if isinstance(usual.get(n), float) and type(v) is int else v for n, v in self.settings.items()
        }
        return tuple((n, setting_text(v)) for n, v in settings.items() if n not in usual or usual[n] != v)

    @property
    def protocol(self) -> Changes:
        """The values of the run, other than its method's settings, that are not the data set's defaults."""
        usual = {**DEFAULTS, **self.defaults.get("options", {})}
        if self.data in DATASETS:
            one_network = METHODS[self.method]().one_network if self.method in METHODS else self.family == "parameters"
            usual = usual | DATASETS[self.data].defaults.options(one_network)
        changed = [n for n, v in self.experiment.items() if n not in ASIDE and (n not in usual or usual[n] != v)]
        return tuple((n, setting_text(self.experiment[n])) for n in sorted(changed, key=lambda n: position(n, ORDER)))


@dataclass(frozen=True)
class Records:
    """The runs below some paths, and what was left out and why."""

    runs: tuple[RunRecord, ...]
    problems: tuple[tuple[str, str], ...]  # name and reason


def find_records(paths: Sequence[Path]) -> Records:
    """Every record below these paths: run folders, folders of bare records, single files."""
    runs: dict[str, RunRecord] = {}
    problems: list[tuple[str, str]] = []
    for path in paths:
        for file, name in _candidates(path, problems):
            key = os.path.realpath(file)
            if key in runs:
                continue
            try:
                runs[key] = RunRecord(file=file, name=name, **read_record(file, name, problems))
            except InvalidRecord as error:
                inside = file.name == "summary.json" and not name.endswith("/summary.json")
                problems.append((f"{name}/summary.json" if inside else name, str(error)))
    runs_by_identity: dict[Any, RunRecord] = {}
    for run in sorted(runs.values(), key=lambda r: natural(r.name)):
        identity = (run.method, run.scenario, run.changed_settings, run.protocol, run.seed)
        if identity in runs_by_identity:
            runs_by_identity[identity], note = _repeated(runs_by_identity[identity], run)
            problems.append((run.name, note))
        else:
            runs_by_identity[identity] = run
    return Records(tuple(runs_by_identity.values()), tuple(problems))


def _repeated(counted: RunRecord, repeat: RunRecord) -> tuple[RunRecord, str]:
    """The run that counts, and a note on its repeat, whose analysis is used only if both are the same run."""
    note = f"repeats {counted.name}, which is the one that counts"
    if repeat.analysis is None or counted.analysis is not None:
        return counted, note
    if reason := _difference_reason(counted, repeat):
        return counted, f"{note}; its analysis is left out, as it may be of other models: {reason}"
    run = replace(counted, analysis=repeat.analysis, analysis_file=repeat.analysis_file)
    return run, f"{note}; its analysis is used"


def _difference_reason(one: RunRecord, other: RunRecord) -> str:
    """Why two runs with the same settings cannot be taken for one; empty if they have one origin."""
    names = [n for n in {**one.experiment, **other.experiment} if one.experiment.get(n) != other.experiment.get(n)]
    if names:
        return f"the two differ in {', '.join(names)}"
    if not all(one.fingerprints + other.fingerprints):
        return "the fingerprints of data and partition are not in both records"
    if one.fingerprints != other.fingerprints:
        return "the two have different data or partitions"
    return "" if one.curve == other.curve else "their accuracies differ"


def _candidates(path: Path, problems: list[tuple[str, str]]) -> Iterator[tuple[Path, str]]:
    """Files that may be records, with their names."""
    real = Path(os.path.realpath(path))
    if not os.path.lexists(path):
        raise ValueError(f"{printable(path)} does not exist; give run folders, folders of records or records")
    if not path.is_dir():
        inside = path.name == "summary.json"
        yield path, printable(f"{real.parent.name}/{path.name}" if inside else path.name)
        return

    def name_of(below: str | Path) -> str:
        return printable("/".join((real.name, *Path(below).relative_to(path).parts)))

    def unreadable(error: OSError) -> None:
        problems.append((name_of(error.filename), f"cannot be read: {error.strerror}"))

    for folder, folders, files in os.walk(path, onerror=unreadable):
        folders.sort()
        here, name = Path(folder), name_of(folder)
        for link in (here / inner for inner in folders if (here / inner).is_symlink()):
            if not Path(os.path.realpath(link)).is_relative_to(real):
                problems.append((name_of(link), "is a link to a folder elsewhere, which is not searched; name it too"))
        if "summary.json" in files:
            yield here / "summary.json", name
        elif "summary.json" in folders:
            problems.append((f"{name}/summary.json", "is a folder, not a record"))
            folders.clear()
        elif "student.json" in files:  # a student is no run
            continue
        elif "experiment.toml" in files:
            problems.append((name, "is not finished: it has no summary.json"))
        else:
            for file in sorted(files):
                if file.endswith(".json") and not file.endswith(".analysis.json") and not file.startswith("."):
                    yield here / file, f"{name}/{printable(file)}"
