"""The parts of a record, each checked; what a record says twice has to agree, or nothing of it counts."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fedcc.core.options import check_value, setting_text
from fedcc.experiments.options import OPTIONS, current_values, current_words
from fedcc.methods import METHODS, make
from fedcc.report.values import (
    Disagreement,
    Odd,
    agree,
    items,
    mapping,
    natural,
    number,
    plain,
    series,
    short,
    text,
    whole,
)

TWICE = ("data", "skew", "seed", "clients", "models", "epochs", "settings", "engine", "precision", "threads")
LOCAL_TESTS = ("local", "global", "valid", "valid_labels", "local_full")
Sent = tuple[int | None, tuple[int, ...], int]  # bytes in all, by round, of models at the end


@dataclass(frozen=True)
class Scored:
    """The accuracies of a run's models read in another way."""

    final: float
    best: float
    best_round: int
    curve: tuple[float | None, ...]


def read_experiment(value: Any) -> dict[str, Any]:
    """All values of the run but the settings, those that this version knows in their own types."""
    values = current_values(mapping(value, "experiment"))
    stored = {k: plain(v, f"experiment.{k}") for k, v in values.items() if k != "settings"}
    hints = {"method": str} | {name: str if o.choices else o.hint for name, o in OPTIONS.items()}  # of any version
    for name in stored.keys() & hints.keys():
        try:
            check_value(f"experiment.{name}", stored[name], hints[name])
        except ValueError as error:
            raise Odd(str(error)) from None
    return stored


def check_twice(record: Mapping[str, Any], scored: Scored, method: str, settings: Mapping[str, Any]) -> None:
    """What stands in a record and again in its experiment, or follows from its method."""
    experiment = record["experiment"]
    for name in TWICE:
        if name in record and name in experiment:
            agree(name, record[name], f"experiment.{name}", experiment[name])
    agree("method", record["method"].lower(), "experiment.method", method)
    rounds = len(scored.curve)
    if "rounds" in record:
        agree("rounds", record["rounds"], "the number of accuracy.rounds", rounds)
    if method not in METHODS:
        return
    agree("family", record["family"], f"that of {method}", METHODS[method].family)
    try:
        needed = make(method, settings).rounds(experiment["rounds"])
    except (KeyError, ValueError):  # settings of another version
        return
    agree("rounds", rounds, f"the number that {method} needs for T={experiment['rounds']}", needed)


def check_command(command: str, experiment: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """The options on the command line are the run's values."""
    try:
        words = current_words(shlex.split(command))
    except ValueError as error:
        raise Odd(f"command is not a command line: {error}") from None
    if words[:2] != ["fedcc", "run"]:  # a federation's values are in its folder
        return
    agree("the command's method", "".join(words[2:3]).lower(), "experiment.method", experiment["method"].lower())
    given = dict(pair for pair in pairwise(words) if pair[0].startswith("--"))
    for name, value in experiment.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            for flag, says in ((option, True), (f"--no-{option[2:]}", False)):
                if flag in words:
                    agree(f"the command's {flag}", says, f"experiment.{name}", value)
        elif option in given:
            agree(f"the command's {option}", given[option], f"experiment.{name}", str(value))
    for before, pair in pairwise(words):
        name, equals, value = pair.partition("=")
        if before == "--set" and equals and name in settings:
            agree(f"the command's {name}", value, f"settings.{name}", setting_text(settings[name]))


def read_scored(stored: Mapping[str, Any], what: str) -> Scored:
    """Accuracies over the rounds, the last of them and the best."""
    found = Scored(
        final=number(stored.get("final"), f"{what}.final", 0, 100),
        best=number(stored.get("best"), f"{what}.best", 0, 100),
        best_round=whole(stored.get("best_round"), f"{what}.best_round", 1),
        curve=series(stored.get("rounds"), f"{what}.rounds", 0, 100),
    )
    known = [v for v in found.curve if v is not None]
    agree(f"{what}.final", found.final, f"the last of {what}.rounds", known[-1] if known else None)
    agree(f"{what}.best", found.best, f"the highest of {what}.rounds", max(known))
    agree(f"{what}.best_round", found.best_round, "the first round with it", 1 + found.curve.index(found.best))
    return found


def read_readings(value: Any, rounds: int) -> dict[str, Scored]:
    """Not every method has them, nor have records from before they were stored."""
    found = {}
    for name, one in mapping(value, "accuracy.readings").items():
        what = f"accuracy.readings.{short(text(name, 'the name of a reading'))}"
        found[name] = read_scored(mapping(one, what), what)
        agree(f"the number of {what}.rounds", len(found[name].curve), "that of accuracy.rounds", rounds)
    return found


def read_targets(value: Any, rounds: int) -> tuple[float | None, ...]:
    found = series(value, "accuracy.targets", 0, 100)
    if found:
        agree("the number of accuracy.targets", len(found), "that of accuracy.rounds", rounds)
    return found


def _check_clients(names: Iterable[str], what: str, clients: int | None) -> None:
    """Clients are named by their numbers, of which the experiment has so many."""
    for name in names:
        if clients is not None and not (name.isdecimal() and name.isascii() and int(name) < clients):
            raise Disagreement(f"contradicts itself: {what} has client {short(name)}, but there are {clients} clients")


def read_tests(accuracy: Mapping[str, Any], clients: int | None) -> dict[str, dict[str, float]]:
    """Table II's accuracies; records from before it was stored have the two that are not about "unknown"."""
    plain_tests = {"local": accuracy.get("local", {}), "global": accuracy.get("clients", {})}
    stored = plain_tests if accuracy.get("table2") is None else mapping(accuracy["table2"], "accuracy.table2")
    found = {
        test: {
            client: number(v, f"{test} accuracy", 0, 100)
            for client, v in mapping(values, test).items()
            if v is not None
        }
        for test, values in stored.items()
        if test in LOCAL_TESTS and values
    }
    for test, values in found.items():
        _check_clients(values, f"accuracy.table2.{test}", clients)
    for test, key in (("local", "local"), ("global", "clients")):
        if key in accuracy:
            agree(f"accuracy.{key}", plain_tests[test], f"accuracy.table2.{test}", stored.get(test, {}))
    return found


def read_log(value: Any, rounds: int, clients: int | None) -> dict[str, dict[str, tuple[float | None, ...]]]:
    found = {
        text(name, "a name in log"): {c: series(v, name) for c, v in mapping(own, name).items()}
        for name, own in mapping(value, "log").items()
    }
    for name, own in found.items():
        _check_clients(own, f"log.{name}", clients)
        for client, values in own.items():
            agree(f"the number of log.{name}.{client}", len(values), "that of accuracy.rounds", rounds)
    return found


def read_counts(value: Any, clients: int | None) -> tuple[tuple[int, ...], ...]:
    by_client = sorted(mapping(value, "counts").items(), key=lambda item: natural(item[0]))
    rows = tuple(tuple(whole(n, "counts") for n in items(row, "counts")) for _, row in by_client)
    if len({len(row) for row in rows}) > 1 or (rows and not rows[0]):
        raise Odd("counts must have one entry a class for every client")
    if rows and clients is not None:
        agree("the number of counts", len(rows), "experiment.clients", clients)
    return rows


def read_bytes(value: Any, rounds: int) -> Sent:
    stored = mapping(value, "bytes")
    total = sum(whole(stored.get(way), f"bytes.{way}") for way in ("up", "down"))
    handed = whole(stored.get("models", 0), "bytes.models")
    if "rounds" not in stored:
        return total, (), handed
    by_way = []
    for way in ("up", "down"):
        what = f"bytes.rounds.{way}"
        by_way.append([whole(n, what) for n in items(mapping(stored["rounds"], "bytes.rounds").get(way), what)])
        agree(f"the number of {what}", len(by_way[-1]), "that of accuracy.rounds", rounds)
        agree(f"bytes.{way}", stored[way], f"the sum of {what}", sum(by_way[-1]))
    return total, tuple(map(sum, zip(*by_way, strict=True))), handed
