"""Records as plain values: a round's (a line of ``metrics.jsonl``) and a finished run's (``summary.json``).

docs/run-folder.md says what each key means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedcc.evaluate import Evaluation
from fedcc.evaluate.uploads import Signs, upload_warnings
from fedcc.experiments.environment import environment
from fedcc.federate import RoundMessages

if TYPE_CHECKING:
    from fedcc.experiments.experiment import Experiment
    from fedcc.experiments.result import Result

Record = dict[str, Any]
"""One round as a line of ``metrics.jsonl``."""

SUMMARY_FORMAT = 1
LAST = ("confusion", "known")  # what only the last round's record has
BY_CLIENT = ("clients", "local", "valid", "valid_labels", "local_full")


def round_record(
    messages: RoundMessages,
    evaluation: Evaluation,
    seconds: Mapping[str, float],
    details: Mapping[str, Any],
    signs: Signs | None = None,
) -> Record:
    """A round's record; ``details`` are the entries that only those who ran the round know."""
    record: Record = {
        "round": messages.t,
        "accuracy": evaluation.accuracy,
        "readings": evaluation.readings,
        **{name: {str(k): v for k, v in getattr(evaluation, name).items()} for name in BY_CLIENT},
        "targets": evaluation.targets,
        "majority": {},
        "log": {},
        "present": list(messages.ups),
        "bytes": {"up": messages.bytes_up, "down": messages.bytes_down},
        "seconds": {phase: round(value, 4) for phase, value in seconds.items()},
        **details,
    }
    if signs:
        record["uploads"] = signs
    if signs and (warnings := upload_warnings(signs)):
        record["warnings"] = warnings
    if evaluation.metrics:
        record["metrics"] = evaluation.metrics
    if evaluation.confusion:
        record["confusion"] = evaluation.confusion
    if evaluation.known:
        record["known"] = {str(k): row for k, row in evaluation.known.items()}
    return record


def earlier_round(record: Record, *, evaluated: bool, extra: Collection[str]) -> Record:
    """A last round's record as that of an earlier round: without what only the last one has, such as these readings."""
    record = {name: value for name, value in record.items() if name not in LAST}
    record["readings"] = {name: value for name, value in record["readings"].items() if name not in extra}
    if not evaluated:
        record |= {"accuracy": None, "readings": {}, "targets": None, **{name: {} for name in BY_CLIENT}}
        record.pop("metrics", None)
    return record


def summary(experiment: Experiment, result: Result, seconds: float) -> dict[str, Any]:
    """The record that tables are made from, complete in itself."""
    options, rounds, last = experiment.values(), result.rounds, result.rounds[-1]
    machine = environment(options["device"], options["threads"])
    best_round, best = result.best if result.curve else (None, None)  # a federation may have no test set
    return {
        "format": SUMMARY_FORMAT,
        "method": result.method.name,
        "family": result.method.family,
        "note": result.method.note,
        **{name: options[name] for name in ("settings", "data", "skew", "seed", "clients", "models", "epochs")},
        "rounds": len(rounds),
        **({"stopped": result.stopped} if result.stopped else {}),
        "accuracy": {
            "final": result.accuracy if result.curve else None,
            "best": best,
            "best_round": best_round,
            "rounds": [r.get("accuracy") for r in rounds],
            "targets": [r.get("targets") for r in rounds],
            "clients": last["clients"],
            "local": last["local"],
            **table2(last),
            **readings(rounds),
            **by_class(last),
        },
        **metrics(rounds),
        **{name: last[name] for name in LAST if name in last},
        "log": logs(rounds),
        **({"uploads": signs} if (signs := logs(rounds, "uploads")) else {}),
        **({"warnings": warnings} if (warnings := upload_warnings_of(rounds)) else {}),
        **images(rounds),
        "bytes": {
            **{way: sum(r["bytes"][way] for r in rounds) for way in ("up", "down")},
            "models": result.model_bytes if options["share"] == "predictions" else 0,
            "rounds": {way: [r["bytes"][way] for r in rounds] for way in ("up", "down")},
        },
        "seconds": round(seconds, 3),
        **({"noise": "the operating system's: another run gives other numbers"} if options["share"] == "noisy" else {}),
        **sharing(rounds),
        **{name: options[name] for name in ("engine", "precision", "threads")},
        "device": machine["gpu"] or machine["processor"],
        "versions": {name: machine[name] for name in ("fedcc", "python", "torch", "numpy")},
        "commit": machine["commit"],
        "command": experiment.command(),
        "experiment": options,
        **({"code": code} if (code := experiment.code_digests()) else {}),
        **({"defaults": defaults} if (defaults := experiment.foreign_defaults()) else {}),
    }


def table2(last: Record) -> dict[str, dict[str, dict[str, float]]]:
    """The clients' own accuracies in the last round, as in the paper's Table II; older versions recorded fewer."""
    tests = {"local": last["local"], "global": last["clients"]}
    tests |= {name: last.get(name, {}) for name in ("valid", "valid_labels", "local_full")}
    return {"table2": {name: values for name, values in tests.items() if values}} if last["clients"] else {}


def readings(rounds: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """The accuracies of the models read in other ways, by name; rounds that were not evaluated have none."""
    scores: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for r in rounds for name in r.get("readings", {})):
        curve = [r.get("readings", {}).get(name) for r in rounds]
        known = [v for v in curve if v is not None]
        first = rounds[curve.index(max(known))]["round"]
        scores[name] = {"final": known[-1], "best": max(known), "best_round": first, "rounds": curve}
    return {"readings": scores} if scores else {}


def by_class(last: Record) -> dict[str, list[float | None]]:
    """The accuracy on the test samples of each class in the last round, in percent; null for a class without any."""
    rows = last.get("confusion", [])
    shares = [round(100 * row[c] / sum(row), 4) if sum(row) else None for c, row in enumerate(rows)]
    return {"classes": shares} if rows else {}


def metrics(rounds: Sequence[Record]) -> dict[str, dict[str, list[float | None]]]:
    """Metrics of the caller's own by name, one value a round; null where there is none."""
    names = dict.fromkeys(name for r in rounds for name in r.get("metrics", {}))
    return {"metrics": {name: [r.get("metrics", {}).get(name) for r in rounds] for name in names}} if names else {}


def images(rounds: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """The images that networks processed in training, by phase and by round; empty unless all rounds counted them."""
    if not all("images" in r for r in rounds):
        return {}
    trained = Counter[str]()
    for r in rounds:
        trained.update(r["images"]["trained"])
    by_round = {
        "trained": [sum(r["images"]["trained"].values()) for r in rounds],
        "predicted": [r["images"]["predicted"] for r in rounds],
    }
    return {"images": {"trained": dict(trained), "predicted": sum(by_round["predicted"]), "rounds": by_round}}


def sharing(rounds: Sequence[Record]) -> dict[str, dict[str, float]]:
    """How many other runs shared the device, at most and on average over the rounds; empty where that is unknown."""
    others = [r["sharing"] for r in rounds if r.get("sharing") is not None]
    return {"sharing": {"most": max(others), "mean": round(sum(others) / len(others), 2)}} if others else {}


def upload_warnings_of(rounds: Sequence[Record]) -> list[dict[str, Any]]:
    """The warnings about clients' uploads over the rounds."""
    return [
        {"round": r["round"], "client": k, "reason": reason}
        for r in rounds
        for k, reason in r.get("warnings", {}).items()
    ]


def logs(rounds: Sequence[Record], key: str = "log") -> dict[str, dict[str, list[float | None]]]:
    """What clients logged (or what their uploads say) over the rounds, by name and client; null where it is missing."""
    values: dict[str, dict[str, list[float | None]]] = {}
    for t, record in enumerate(rounds):
        for k, log in record.get(key, {}).items():
            for name, value in log.items():
                values.setdefault(name, {}).setdefault(k, [None] * len(rounds))[t] = value
    return values
