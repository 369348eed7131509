"""One record, read and checked. It is not trusted: what it says twice has to agree, or none of it counts."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedcc.core.digests import DIGEST, DamagedFile, check_digest, check_files
from fedcc.core.options import check_value, setting_text
from fedcc.experiments.options import OPTIONS, current_values, current_words
from fedcc.methods import METHODS, build_method, method_name, recorded_settings
from fedcc.report.analysis import read_analysis
from fedcc.report.values import (
    Contradiction,
    InvalidRecord,
    agree,
    check,
    mapping,
    natural,
    number,
    optional,
    read_json,
    scalar,
    short,
    short_text,
    text,
    whole,
)

RECORD = {
    "settings": {str: scalar},
    **dict.fromkeys(("method", "family", "data", "skew"), text),
    "seed": partial(whole, high=2**63 - 1),
    "command": partial(text, longest=20_000),
    **dict.fromkeys(("engine", "device", "precision", "commit"), short_text),
}
TWICE = ("data", "skew", "seed", "clients", "models", "epochs", "settings", "engine", "precision", "threads")
LOCAL_TESTS = ("local", "global", "valid", "valid_labels", "local_full")
ACCURACY = partial(number, low=0, high=100)
ACCURACIES = [optional(ACCURACY)]
CURVE = {"final": ACCURACY, "best": ACCURACY, "best_round": partial(whole, low=1), "rounds": ACCURACIES}
METRICS = {str: [optional(number)]}
BYTES = {"up": whole, "down": whole, "models": optional(whole), "rounds": optional({"up": [whole], "down": [whole]})}
IMAGES = {
    "trained": {str: whole},
    "predicted": whole,
    "rounds": {"trained": [whole], "predicted": [whole]},
    "counted": optional(text),
}
Log = Mapping[str, Mapping[str, Sequence[float | None]]]  # by name and client


@dataclass(frozen=True)
class AccuracyCurve:
    """Accuracy over the rounds, the last value and the best one."""

    final: float
    best: float
    best_round: int
    curve: tuple[float | None, ...]


@dataclass(frozen=True)
class Traffic:
    """Bytes up and down: all rounds, each round, and the models sent at the end for prediction."""

    total: int | None = None
    rounds: tuple[int, ...] = ()
    models: int = 0


@dataclass(frozen=True)
class Work:
    """Images that networks processed, by round: forward and backward, and forward only."""

    trained: tuple[int, ...] = ()
    predicted: tuple[int, ...] = ()
    afterwards: bool = False  # counted without the run, by experiments/count_images.py


def read_record(file: Path, name: str, problems: list[tuple[str, str]]) -> dict[str, Any]:
    """The values of a run, by the names that they have in ``RunRecord``; ``problems`` gets parts that are left out."""
    record = mapping(read_json(file), "the file")
    if "format" not in record or "method" not in record:
        raise InvalidRecord("is not a record of a run: it has no format or no method")
    if record["format"] != 1:
        raise InvalidRecord(f"has format {short(record['format'])}; this version reads format 1")
    has_digest = _has_digest(file, record)
    experiment = read_experiment(record.get("experiment"))
    method = method_name(text(experiment.get("method"), "experiment.method"))
    values: dict[str, Any] = check(record, RECORD)
    version = whole(experiment["version"], "experiment.version", 1) if "version" in experiment else None
    values["settings"], reason = recorded_settings(method, values["settings"], version)
    if reason:
        raise InvalidRecord(f"does not count: {reason}")
    if record.get("stopped"):
        stage = " of ".join(short(table.get("rounds")) for table in (record, experiment))
        raise InvalidRecord(f"does not count: it was stopped after round {stage} ({short(record['stopped'])})")
    accuracy = mapping(record.get("accuracy"), "accuracy")
    curve = read_curve(accuracy, "accuracy")
    rounds, clients = len(curve.curve), experiment.get("clients")
    check_twice(record, rounds, method, values["settings"])
    values["command"] = check_command(values["command"], experiment, values["settings"])
    versions = record.get("versions")
    values |= vars(curve) | {
        "method": method,
        "label": METHODS[method]().label if method in METHODS else own_label(record),
        "experiment": experiment,
        "versions": {str(k): short_text(v) for k, v in versions.items()} if isinstance(versions, Mapping) else {},
        "fingerprints": (short_text(record.get("data_sha256")), short_text(record.get("partition_sha256"))),
        "has_digest": has_digest,
    }
    readers: list[tuple[Any, ...]] = [  # of parts that a record may lack
        ("traffic", "bytes", read_traffic, record.get("bytes"), rounds),
        ("readings", "readings", read_readings, accuracy.get("readings", {}), rounds),
        ("targets", "targets", read_targets, accuracy.get("targets", []), rounds),
        ("tests", "accuracies of clients", read_tests, accuracy, clients),
        ("log", "log", read_log, record.get("log", {}), rounds, clients),
        ("uploads", "uploads", read_log, record.get("uploads", {}), rounds, clients, "uploads"),
        ("warnings", "warnings", read_warnings, record.get("warnings", [])),
        ("counts", "counts", read_counts, record.get("counts", {}), clients),
        ("confusion", "confusion", read_confusion, record.get("confusion", []), curve.final),
        ("class_names", "classes", read_names, record.get("classes", [])),
        ("metrics", "metrics", read_metrics, record.get("metrics", {}), rounds),
        ("defaults", "defaults", read_defaults, record.get("defaults", {})),
        ("known", "known", read_known, record.get("known", {}), clients),
        ("work", "images", read_work, record.get("images"), rounds),
        ("seconds", "seconds", number, record.get("seconds"), "seconds", 0),
    ]
    beside = file.with_name("analysis.json" if file.name == "summary.json" else f"{file.stem}.analysis.json")
    if os.path.lexists(beside):
        values["analysis_file"] = beside
        readers.append(("analysis", beside.name, _read_analysis, beside, record))
    for part, words, read, *arguments in readers:
        try:
            values[part] = read(*arguments)
        except Contradiction:
            raise
        except InvalidRecord as error:
            problems.append((name, f"{words} left out: {error}"))
    return values


def _has_digest(file: Path, content: Mapping[str, Any]) -> bool:
    """Whether a file has a digest, which must match, as must those of the files beside a run's own record."""
    try:
        if file.name == "summary.json":
            check_files(file, content)
        return check_digest(file, content)
    except DamagedFile as error:
        raise InvalidRecord(str(error).removeprefix(f"{file} ")) from None
    except OSError as error:
        raise InvalidRecord(f"cannot be checked: {error.filename}: {error.strerror}") from None


def _read_analysis(file: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    analysis = mapping(read_json(file), "analysis")
    _has_digest(file, analysis)
    if analysis.get("summary_sha256") not in (None, record.get(DIGEST)):
        raise InvalidRecord("it is the analysis of another record")
    return read_analysis(analysis, record)


def own_label(record: Mapping[str, Any]) -> str:
    """The label of a method that is not in this package: its class and its note."""
    note = short_text(record.get("note"))
    return f"{short(record['method'])} ({note})" if note else short(record["method"])


def read_confusion(value: Any, final: float) -> tuple[tuple[int, ...], ...]:
    """Test samples by label and predicted class, whose right answers are the final accuracy."""
    rows = tuple(map(tuple, check(value, [[whole]], "confusion")))
    if any(len(row) != len(rows) for row in rows):
        raise InvalidRecord("confusion must have as many columns as rows")
    total = sum(map(sum, rows))
    if total and abs(100 * sum(row[c] for c, row in enumerate(rows)) / total - final) > 0.01:
        raise Contradiction(f"contradicts itself: confusion does not give the accuracy {short(final)}")
    return rows


def read_names(value: Any) -> tuple[str, ...]:
    return tuple(short(text(name, "a class")) for name in check(value, [lambda name, _: name], "classes"))


def read_metrics(value: Any, rounds: int) -> dict[str, tuple[float | None, ...]]:
    """Metrics of the caller's own, one value a round."""
    metrics = {short(text(n, "a metric's name")): tuple(v) for n, v in check(value, METRICS, "metrics").items()}
    for name, values in metrics.items():
        _check_length(f"metrics.{name}", values, rounds)
    return metrics


def read_defaults(value: Any) -> dict[str, dict[str, Any]]:
    """Defaults of a method's settings and of a data set's options, where they are not of this package."""
    stored = mapping(value, "defaults")
    return {kind: check(stored.get(kind, {}), {str: scalar}, f"defaults.{kind}") for kind in ("settings", "options")}


def read_experiment(value: Any) -> dict[str, Any]:
    """All values of the run but the settings; those that this version knows have the right type."""
    values = current_values(mapping(value, "experiment"))
    stored = {k: scalar(v, f"experiment.{k}") for k, v in values.items() if k != "settings"}
    hints = {"method": str} | {name: str if o.choices else o.hint for name, o in OPTIONS.items()}  # of any version
    for name in stored.keys() & hints.keys():
        try:
            check_value(f"experiment.{name}", stored[name], hints[name])
        except ValueError as error:
            raise InvalidRecord(str(error)) from None
    return stored


def check_twice(record: Mapping[str, Any], rounds: int, method: str, settings: Mapping[str, Any]) -> None:
    """Values that a record holds again in its experiment, or that follow from its method."""
    experiment = record["experiment"]
    for name in TWICE:
        if name in record and name in experiment:
            agree(name, record[name], f"experiment.{name}", experiment[name])
    if "rounds" in record:
        agree("rounds", record["rounds"], "the number of accuracy.rounds", rounds)
    if method not in METHODS:  # of another package, which is not imported
        return
    agree("method", record["method"].lower(), "experiment.method", method)
    agree("family", record["family"], f"that of {method}", METHODS[method].family)
    try:
        needed = build_method(method, settings).rounds(experiment["rounds"])
    except (KeyError, ValueError):  # settings of another version
        return
    agree("rounds", rounds, f"the number that {method} needs for T={experiment['rounds']}", needed)


def check_command(command: str, experiment: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The command as it is spelled now; its options must be the run's values."""
    try:
        words = current_words(shlex.split(command))
    except ValueError as error:
        raise InvalidRecord(f"command is not a command line: {error}") from None
    if words[:2] != ["fedcc", "run"]:  # a federation's values are in its folder
        return command
    agree("the command's method", "".join(words[2:3]).lower(), "experiment.method", experiment["method"].lower())
    options = dict(pair for pair in pairwise(words) if pair[0].startswith("--"))
    for name, value in experiment.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            for flag, says in ((option, True), (f"--no-{option[2:]}", False)):
                if flag in words:
                    agree(f"the command's {flag}", says, f"experiment.{name}", value)
        elif option in options:
            agree(f"the command's {option}", options[option], f"experiment.{name}", str(value))
    for before, pair in pairwise(words):
        name, equals, value = pair.partition("=")
        if before == "--set" and equals and name in settings:
            agree(f"the command's {name}", value, f"settings.{name}", setting_text(settings[name]))
    return shlex.join(words)


def read_curve(value: Any, what: str) -> AccuracyCurve:
    stored = check(value, CURVE, what)
    curve = tuple(stored.pop("rounds"))
    known = [v for v in curve if v is not None]
    agree(f"{what}.final", stored["final"], f"the last of {what}.rounds", known[-1] if known else None)
    agree(f"{what}.best", stored["best"], f"the highest of {what}.rounds", max(known))
    agree(f"{what}.best_round", stored["best_round"], "the first round with it", 1 + curve.index(stored["best"]))
    return AccuracyCurve(**stored, curve=curve)


def read_readings(value: Any, rounds: int) -> dict[str, AccuracyCurve]:
    """Not every method has readings, nor have records from before they were stored."""
    curves = {}
    for name, stored in mapping(value, "accuracy.readings").items():
        what = f"accuracy.readings.{short(text(name, 'the name of a reading'))}"
        curves[name] = read_curve(stored, what)
        _check_length(f"{what}.rounds", curves[name].curve, rounds)
    return curves


def read_targets(value: Any, rounds: int) -> tuple[float | None, ...]:
    targets = tuple(check(value, ACCURACIES, "accuracy.targets"))
    if targets:
        _check_length("accuracy.targets", targets, rounds)
    return targets


def read_tests(accuracy: Mapping[str, Any], clients: int | None) -> dict[str, dict[str, float]]:
    """Table II's accuracies; records from before it was stored have the two that do not depend on "unknown"."""
    old = {"local": accuracy.get("local", {}), "global": accuracy.get("clients", {})}
    stored = old if accuracy.get("table2") is None else mapping(accuracy["table2"], "accuracy.table2")
    tests = {}
    for test in (test for test, values in stored.items() if test in LOCAL_TESTS and values):
        values = check(stored[test], {str: optional(ACCURACY)}, f"accuracy.table2.{test}")
        tests[test] = {client: v for client, v in values.items() if v is not None}
        _check_clients(tests[test], f"accuracy.table2.{test}", clients)
    for test, key in (("local", "local"), ("global", "clients")):
        if key in accuracy:
            agree(f"accuracy.{key}", old[test], f"accuracy.table2.{test}", stored.get(test, {}))
    return tests


def read_log(value: Any, rounds: int, clients: int | None, where: str = "log") -> Log:
    log: Log = check(value, {str: {str: [optional(number)]}}, where)
    for name, series in log.items():
        _check_clients(series, f"{where}.{text(name, f'a name in {where}')}", clients)
        for client, values in series.items():
            _check_length(f"{where}.{name}.{client}", values, rounds)
    return log


def read_warnings(value: Any) -> tuple[str, ...]:
    found = check(value, [{"round": partial(whole, low=1), "client": short_text, "reason": short_text}], "warnings")
    return tuple(f"round {w['round']}, client {w['client']}: {w['reason']}" for w in found)


def read_counts(value: Any, clients: int | None) -> tuple[tuple[int, ...], ...]:
    stored = check(value, {str: [whole]}, "counts")
    rows = tuple(tuple(stored[client]) for client in sorted(stored, key=natural))
    if len({len(row) for row in rows}) > 1 or (rows and not rows[0]):
        raise InvalidRecord("counts must have one entry a class for every client")
    if rows and clients is not None:
        agree("the number of counts", len(rows), "experiment.clients", clients)
    return rows


def read_traffic(value: Any, rounds: int) -> Traffic:
    stored = check(value, BYTES, "bytes")
    by_round = stored["rounds"] or {}
    for way, values in by_round.items():
        _check_length(f"bytes.rounds.{way}", values, rounds)
        agree(f"bytes.{way}", stored[way], f"the sum of bytes.rounds.{way}", sum(values))
    sums = tuple(map(sum, zip(*by_round.values(), strict=True)))
    return Traffic(stored["up"] + stored["down"], sums, stored["models"] or 0)


def read_work(value: Any, rounds: int) -> Work:
    """Federations across machines and older records do not have it."""
    if value is None:
        return Work()
    stored = check(value, IMAGES, "images")
    by_round = stored["rounds"]
    sums = {"trained": sum(stored["trained"].values()), "predicted": stored["predicted"]}
    for kind, values in by_round.items():
        _check_length(f"images.rounds.{kind}", values, rounds)
        agree(f"images.{kind}", sums[kind], f"the sum of images.rounds.{kind}", sum(values))
    return Work(tuple(by_round["trained"]), tuple(by_round["predicted"]), stored["counted"] is not None)


def read_known(value: Any, clients: int | None) -> dict[str, tuple[float | None, ...]]:
    """The mean of 1 - p(unknown) by client and label."""
    stored = check(value, {str: [optional(partial(number, low=0, high=1))]}, "known")
    _check_clients(stored, "known", clients)
    if len({len(row) for row in stored.values()}) > 1 or any(not row for row in stored.values()):
        raise InvalidRecord("known must have one entry a class for every client")
    return {client: tuple(stored[client]) for client in sorted(stored, key=natural)}


def _check_length(what: str, values: Sequence[Any], rounds: int) -> None:
    agree(f"the number of {what}", len(values), "that of accuracy.rounds", rounds)


def _check_clients(names: Iterable[str], what: str, clients: int | None) -> None:
    """Clients are named by their numbers."""
    for name in names:
        if clients is not None and not (name.isdecimal() and name.isascii() and int(name) < clients):
            raise Contradiction(f"contradicts itself: {what} has client {short(name)}, but there are {clients} clients")
