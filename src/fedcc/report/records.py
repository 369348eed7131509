"""The records of finished runs: found, read, checked. What others wrote is not trusted; what is odd is said."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from fedcc.core.digests import DIGEST, DamagedFile, check_digest, check_files
from fedcc.core.options import setting_text
from fedcc.data.registry import DATASETS
from fedcc.experiments.options import DEFAULTS, MACHINE, MEASUREMENT, OPTIONS
from fedcc.methods import METHODS, completed, outdated
from fedcc.report import paper
from fedcc.report.analysis import read_analysis
from fedcc.report.parts import (
    Scored,
    Sent,
    check_command,
    check_twice,
    read_bytes,
    read_counts,
    read_experiment,
    read_log,
    read_readings,
    read_scored,
    read_targets,
    read_tests,
)
from fedcc.report.values import (
    Disagreement,
    Odd,
    mapping,
    natural,
    number,
    plain,
    printable,
    read_json,
    short,
    text,
    whole,
    word,
)

T = TypeVar("T")
ORDER = {name: place for place, name in enumerate(OPTIONS)}  # of options, whatever version wrote the record
ASIDE = ("method", "data", "skew", "seed", "settings", *MEASUREMENT, *MACHINE)  # no part of the protocol


@dataclass(frozen=True)
class RunRecord:
    """One finished run, checked: the part of its record that tables and figures are made from."""

    file: Path  # the record itself
    name: str  # what it is called: its path below the folder that was given
    method: str  # as on the command line
    label: str
    family: str
    data: str
    skew: str
    seed: int
    final: float
    best: float
    best_round: int
    curve: tuple[float | None, ...]  # accuracy, an entry a round
    experiment: Mapping[str, Any]
    settings: Mapping[str, Any]
    command: str
    readings: Mapping[str, Scored] = field(default_factory=dict)  # by name
    targets: tuple[float | None, ...] = ()
    tests: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # Table II: accuracy by test and client
    log: Mapping[str, Mapping[str, tuple[float | None, ...]]] = field(default_factory=dict)  # by name and client
    counts: tuple[tuple[int, ...], ...] = ()  # samples by client and class
    sent: int | None = None  # bytes up and down, all rounds
    sent_rounds: tuple[int, ...] = ()  # the same by round
    handed: int = 0  # bytes of the models handed over at the end
    seconds: float | None = None
    engine: str = ""
    device: str = ""
    precision: str = ""
    commit: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    in_folder: bool = False
    fingerprints: tuple[str | None, str | None] = (None, None)  # of the data, and of who holds what
    checked: bool = True  # its digest; records of older versions have none
    analysis: Mapping[str, Any] | None = None
    analysis_file: Path | None = None  # beside the record, or beside a copy of it

    @property
    def scenario(self) -> paper.Scenario:
        return self.data, self.skew

    @property
    def asked(self) -> int:
        """The rounds T that were asked for; a method may need more."""
        return int(self.experiment.get("rounds", len(self.curve)))

    @property
    def changed(self) -> tuple[tuple[str, str], ...]:
        """The method's settings that are not its defaults."""
        kind = METHODS.get(self.method)
        usual = {f.name: f.default for f in fields(kind)} if kind else {}  # type: ignore[arg-type]
        told = {
            n: float(v) if isinstance(usual.get(n), float) and type(v) is int else v
            for n, v in completed(self.method, self.settings).items()
        }
        return tuple((n, setting_text(v)) for n, v in told.items() if n not in usual or usual[n] != v)

    @property
    def protocol(self) -> tuple[tuple[str, str], ...]:
        """The values of the run, other than its method's settings, that are not the data set's defaults."""
        usual = usual_values(self.data, self.family, self.method)
        return tuple(
            (name, setting_text(value))
            for name, value in sorted(self.experiment.items(), key=lambda item: ORDER.get(item[0], len(ORDER)))
            if name not in ASIDE and (name not in usual or usual[name] != value)
        )


def usual_values(data: str, family: str, method: str) -> dict[str, Any]:
    """What an experiment on this data set has where nothing else was asked for; empty parts where it is not known."""
    values = dict(DEFAULTS)
    if data in DATASETS:
        d = DATASETS[data].defaults
        one = family == "parameters" or method == "centralized"
        values |= {"clients": d.clients, "rounds": d.rounds, "epochs": d.epochs}
        values["augment"] = "standard" if d.augment else "none"
        values["models"] = d.shared_model if one else d.models
    return values


# ------------------------------------------------------------------------------------------------ finding and reading


@dataclass(frozen=True)
class Found:
    """The runs below some paths, and what was left out and why."""

    runs: tuple[RunRecord, ...]
    problems: tuple[tuple[str, str], ...]  # name and reason


def find(paths: Sequence[Path]) -> Found:
    """Every record below these paths: run folders, folders of bare records, single files."""
    runs: dict[str, RunRecord] = {}
    problems: list[tuple[str, str]] = []
    for path in paths:
        for file, name in _candidates(path, problems):
            key = os.path.realpath(file)
            if key in runs:
                continue
            try:
                runs[key] = _read(file, name, problems)
            except Odd as error:
                inside = file.name == "summary.json" and not name.endswith("/summary.json")
                problems.append((f"{name}/summary.json" if inside else name, str(error)))
    kept: dict[Any, RunRecord] = {}
    for run in sorted(runs.values(), key=lambda r: natural(r.name)):
        same = (run.method, run.scenario, run.changed, run.protocol, run.seed)
        if same in kept:
            kept[same], said = _repeated(kept[same], run)
            problems.append((run.name, said))
        else:
            kept[same] = run
    return Found(tuple(kept.values()), tuple(problems))


def _repeated(counted: RunRecord, again: RunRecord) -> tuple[RunRecord, str]:
    """The run that counts, and what to say of its repeat, whose analysis serves only where both are the same run."""
    said = f"repeats {counted.name}, which is the one that counts"
    if again.analysis is None or counted.analysis is not None:
        return counted, said
    if other := _differences(counted, again):
        return counted, f"{said}; its analysis is left out, as it may be of other models: {other}"
    return replace(counted, analysis=again.analysis, analysis_file=again.analysis_file), f"{said}; its analysis is used"


def _differences(one: RunRecord, other: RunRecord) -> str:
    """Why two runs with the same settings cannot be taken for one; empty if they have one origin."""
    names = [n for n in {**one.experiment, **other.experiment} if one.experiment.get(n) != other.experiment.get(n)]
    if names:
        return f"the two differ in {', '.join(names)}"
    if None in one.fingerprints or None in other.fingerprints:
        return "the fingerprints of data and partition are not in both records"
    if one.fingerprints != other.fingerprints:
        return "the two have other data or another partition"
    return "" if one.curve == other.curve else "their accuracies differ"


def _candidates(path: Path, problems: list[tuple[str, str]]) -> Iterator[tuple[Path, str]]:
    """Files that may be records, with their names."""
    real = Path(os.path.realpath(path))
    if not os.path.lexists(path):
        raise ValueError(f"{printable(path)} is not there; name run folders, folders of records or records")
    if not path.is_dir():
        inside = path.name == "summary.json"
        yield path, printable(f"{real.parent.name}/{path.name}" if inside else path.name)
        return

    def called(place: str | Path) -> str:
        return printable("/".join((real.name, *Path(place).relative_to(path).parts)))

    def unreadable(error: OSError) -> None:
        problems.append((called(error.filename), f"cannot be read: {error.strerror}"))

    for place, folders, files in os.walk(path, onerror=unreadable):
        folders.sort()
        here, name = Path(place), called(place)
        for link in (here / folder for folder in folders if (here / folder).is_symlink()):
            if not Path(os.path.realpath(link)).is_relative_to(real):
                problems.append((called(link), "is a link to a folder elsewhere, which is not searched; name it too"))
        if "summary.json" in files:
            yield here / "summary.json", name
        elif "summary.json" in folders:
            problems.append((f"{name}/summary.json", "is a folder, not a record"))
            folders.clear()
        elif "experiment.toml" in files:
            problems.append((name, "is not finished: it has no summary.json"))
        else:
            for file in sorted(files):
                if file.endswith(".json") and not file.endswith(".analysis.json") and not file.startswith("."):
                    yield here / file, f"{name}/{printable(file)}"


def _read(file: Path, name: str, problems: list[tuple[str, str]]) -> RunRecord:
    record = mapping(read_json(file), "the file")

    def part(what: str, read: Callable[[], T], otherwise: T) -> T:
        """A part that a record may lack, or that is left out, and said, if it is odd."""
        try:
            return read()
        except Disagreement:
            raise
        except Odd as error:
            problems.append((name, f"{what} left out: {error}"))
            return otherwise

    if "format" not in record or "method" not in record:
        raise Odd("is no record of a run: it has no format and method")
    if record["format"] != 1:
        raise Odd(f"has format {short(record['format'])}; this version reads format 1")
    checked = _checked(file, record)
    experiment = read_experiment(record.get("experiment"))
    method = text(experiment.get("method"), "experiment.method").lower()
    settings = {k: plain(v, k) for k, v in mapping(record.get("settings"), "settings").items()}
    if old := outdated(method, settings):
        raise Odd(f"does not count: {old}")
    if record.get("stopped"):
        stage = " of ".join(short(table.get("rounds")) for table in (record, experiment))
        raise Odd(f"does not count: it was stopped after round {stage} ({short(record['stopped'])})")
    label, family = text(record["method"], "method"), text(record.get("family"), "family")
    data, skew = text(record.get("data"), "data"), text(record.get("skew"), "skew")
    seed, command = whole(record.get("seed"), "seed", 0, 2**63 - 1), text(record.get("command"), "command", 20_000)
    accuracy = mapping(record.get("accuracy"), "accuracy")
    scored = read_scored(accuracy, "accuracy")
    check_twice(record, scored, method, settings)
    check_command(command, experiment, settings)
    rounds, clients = len(scored.curve), experiment.get("clients")
    note = METHODS[method].note if method in METHODS else ""
    nothing: Sent = (None, (), 0)
    sent = part("bytes", lambda: read_bytes(record.get("bytes"), rounds), nothing)
    in_folder = file.name == "summary.json"
    beside = file.with_name("analysis.json" if in_folder else f"{file.stem}.analysis.json")
    analysed = os.path.lexists(beside)
    versions = record.get("versions")
    data_sha, partition_sha = (word(record.get(name)) or None for name in ("data_sha256", "partition_sha256"))
    return RunRecord(
        file=file,
        name=name,
        method=method,
        label=f"{label} ({note})" if note else label,
        family=family,
        data=data,
        skew=skew,
        seed=seed,
        final=scored.final,
        best=scored.best,
        best_round=scored.best_round,
        curve=scored.curve,
        experiment=experiment,
        settings=settings,
        command=command,
        readings=part("readings", lambda: read_readings(accuracy.get("readings", {}), rounds), {}),
        targets=part("targets", lambda: read_targets(accuracy.get("targets", []), rounds), ()),
        tests=part("accuracies of clients", lambda: read_tests(accuracy, clients), {}),
        log=part("log", lambda: read_log(record.get("log", {}), rounds, clients), {}),
        counts=part("counts", lambda: read_counts(record.get("counts", {}), clients), ()),
        sent=sent[0],
        sent_rounds=sent[1],
        handed=sent[2],
        seconds=part("seconds", lambda: number(record.get("seconds"), "seconds", 0), None),
        engine=word(record.get("engine")),
        device=word(record.get("device")),
        precision=word(record.get("precision")),
        commit=word(record.get("commit")),
        versions={str(k): word(v) for k, v in versions.items()} if isinstance(versions, Mapping) else {},
        in_folder=in_folder,
        fingerprints=(data_sha, partition_sha),
        checked=checked,
        analysis=part(beside.name, lambda: read_analysis(_own(beside, record), record), None) if analysed else None,
        analysis_file=beside if analysed else None,
    )


def _checked(file: Path, content: Mapping[str, Any]) -> bool:
    """Whether a file has a digest, which must be right, as must those of the files beside a run's own record."""
    try:
        if file.name == "summary.json":
            check_files(file, content)
        return check_digest(file, content)
    except DamagedFile as error:
        raise Odd(str(error).removeprefix(f"{file} ")) from None
    except OSError as error:
        raise Odd(f"cannot be checked: {error.filename}: {error.strerror}") from None


def _own(file: Path, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """An analysis, if it is that of this record."""
    analysis = mapping(read_json(file), "analysis")
    _checked(file, analysis)
    if analysis.get("summary_sha256") not in (None, record.get(DIGEST)):
        raise Odd("it is the analysis of another record")
    return analysis
