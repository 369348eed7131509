"""Run an experiment into its folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedcc.core.options import check_value
from fedcc.engine.plain import Monitor
from fedcc.experiments.checkpoint import Checkpoint, Checkpoints
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.sharing import shared
from fedcc.experiments.store import RunFolder, environment
from fedcc.federate import Snapshot
from fedcc.federation import Federation
from fedcc.run import Record, Result, rehearse, run
from fedcc.threads import check_threads

SUMMARY_FORMAT = 1


class Halted(Exception):
    """The run was asked to stop between two rounds; its checkpoint is written."""


def prepare(experiment: Experiment, out: Path, *, data_dir: Path | None = None, overwrite: bool = False) -> Federation:
    """The data, read and split; whatever is wrong with the call is found here, before anything is written."""
    check_threads(experiment.machine.threads)
    RunFolder(out).check(experiment, overwrite)
    federation = experiment.federation(data_dir)
    rehearse(experiment.build_method(), federation)
    return federation


def unfinished(out: Path, data_dir: Path | None = None) -> tuple[Experiment, Federation, Checkpoint | None, list[str]]:
    """What :func:`execute` needs to go on with a folder's run, and what is wrong with files that cannot be used.

    Without a checkpoint the run starts anew.
    """
    notes = RunFolder(out).check_start()
    experiment = Experiment.read(out / "experiment.toml")
    check_threads(experiment.machine.threads)
    federation = experiment.federation(data_dir)
    start, problems = Checkpoints(out, experiment, federation).latest()
    return experiment, federation, start, notes + problems


def execute(
    experiment: Experiment,
    out: Path,
    federation: Federation | None = None,
    *,
    overwrite: bool = False,
    save_models: bool = True,
    start: Checkpoint | None = None,
    checkpoint_every: int | None = None,
    keep_checkpoints: bool = False,
    halt: Callable[[], bool] | None = None,
    on_round: Callable[[Record], None] | None = None,
    monitor: Monitor | None = None,
) -> Result:
    """Run an experiment (prepared already, if its federation is given); its folder is valid whenever it is stopped.

    With ``start`` the run goes on behind that checkpoint of its folder. There is a checkpoint after every so many
    rounds, none with 0; by default after every round, but for those so short that writing would take over a twentieth
    of the time. A finished run needs them no longer. ``halt`` is asked between rounds; if it says so, a checkpoint is
    written and :class:`Halted` raised.
    """
    check_value("checkpoint_every", checkpoint_every, int | None, 0)
    if federation is None:
        federation = prepare(experiment, out, overwrite=overwrite)
    folder, checkpoints = RunFolder(out), Checkpoints(out, experiment, federation)
    if start is None:
        folder.begin(experiment, federation.partition)
    else:
        folder.restore(experiment, federation.partition, start.records)
        checkpoints.remove(after=start.snapshot.t)
        checkpoints.size = start.size
    total = experiment.build_method().rounds(experiment.training.rounds)
    begun = time.perf_counter() - (start.seconds if start else 0.0)

    records = list(start.records) if start else []

    def told(record: Record) -> None:
        record["sharing"] = others()
        folder.add(record)
        records.append(record)
        if on_round:
            on_round(record)

    def keep(snapshot: Snapshot) -> None:
        if checkpoint_every is None:
            due = checkpoints.affordable()
        else:
            due = checkpoint_every > 0 and snapshot.t % checkpoint_every == 0
        halted = halt is not None and snapshot.t < total and halt()
        if due or halted:
            checkpoints.write(snapshot, records, time.perf_counter() - begun)
        if halted:
            raise Halted(f"stopped after round {snapshot.t} of {total}")

    with shared(experiment.machine.device) as others:
        result = run(
            experiment.build_method(),
            federation,
            experiment.training.rounds,
            epochs=experiment.training.epochs,
            lr=experiment.training.lr,
            batch=experiment.training.batch,
            participation=experiment.training.participation,
            seed=experiment.training.seed,
            device=experiment.machine.device,
            precision=experiment.machine.precision,
            engine=experiment.machine.engine,
            deterministic=experiment.machine.deterministic,
            threads=experiment.machine.threads,
            wire=experiment.training.wire,
            reset=experiment.training.reset,
            client_accuracy=experiment.measurement.client_accuracy,
            on_round=told,
            monitor=monitor,
            start=start.snapshot if start else None,
            on_snapshot=keep,
        )
    if start is not None:
        result = replace(result, rounds=records, seconds=start.seconds + result.seconds)
    if save_models:
        result.save(out)
    partition = federation.partition
    facts: dict[str, Any] = {
        "counts": {str(k): row for k, row in enumerate(federation.counts().tolist())},
        "public": len(federation.public),
        "data_sha256": federation.fingerprint,
        "partition_sha256": partition.sha256 if partition else None,
    }
    facts["checkpoint_bytes"] = checkpoints.size
    kept = checkpoints.paths() if keep_checkpoints else []
    folder.finish(summary(experiment, result, time.perf_counter() - begun) | facts, result.rounds, kept)
    if not keep_checkpoints:
        checkpoints.remove()
    return result


def summary(experiment: Experiment, result: Result, seconds: float) -> dict[str, Any]:
    """The record that tables are made from, complete in itself."""
    best_round, best = result.best if result.curve else (None, None)  # a federation may have no test set
    machine = environment(experiment.machine.device, experiment.machine.threads)
    return {
        "format": SUMMARY_FORMAT,
        "method": result.method.name,
        "family": result.method.family,
        "note": result.method.note,
        "settings": dict(experiment.settings),
        "data": experiment.split.data,
        "skew": experiment.split.skew,
        "seed": experiment.training.seed,
        "clients": experiment.split.clients,
        "models": experiment.split.models,
        "rounds": len(result.rounds),
        "epochs": experiment.training.epochs,
        "accuracy": {
            "final": result.accuracy if result.curve else None,
            "best": best,
            "best_round": best_round,
            "rounds": [r.get("accuracy") for r in result.rounds],
            "targets": [r.get("targets") for r in result.rounds],
            "clients": result.rounds[-1]["clients"],
            "local": result.rounds[-1]["local"],
            **table2(result.rounds[-1]),
            **readings(result.rounds),
        },
        **{name: result.rounds[-1][name] for name in ("confusion", "known") if name in result.rounds[-1]},
        "log": logs(result.rounds),
        **images(result.rounds),
        "bytes": {
            "up": sum(r["bytes"]["up"] for r in result.rounds),
            "down": sum(r["bytes"]["down"] for r in result.rounds),
            "models": result.model_bytes,
            "rounds": {way: [r["bytes"][way] for r in result.rounds] for way in ("up", "down")},
        },
        "seconds": round(seconds, 3),
        **sharing(result.rounds),
        "engine": experiment.machine.engine,
        "device": machine["gpu"] or machine["processor"],
        "precision": experiment.machine.precision,
        "threads": experiment.machine.threads,
        "versions": {name: machine[name] for name in ("fedcc", "python", "torch", "numpy")},
        "commit": machine["commit"],
        "command": experiment.command(),
        "experiment": experiment.values(),
    }


def table2(last: Record) -> dict[str, dict[str, dict[str, float]]]:
    """The clients' own accuracies as the paper's Table II has them, from the last round; nothing where there are none.

    A round of an earlier version, from a checkpoint, lacks what needs the answer "unknown".
    """
    found = {"local": last["local"], "global": last["clients"]}
    found |= {name: last.get(name, {}) for name in ("valid", "valid_labels", "local_full")}
    return {"table2": {name: values for name, values in found.items() if values}} if last["clients"] else {}


def readings(rounds: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """The accuracies of the models read in other ways, by name; nothing where there are none.

    A round that is not evaluated, or that an earlier version left in a checkpoint, has none.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for r in rounds for name in r.get("readings", {})):
        curve = [r.get("readings", {}).get(name) for r in rounds]
        known = [v for v in curve if v is not None]
        first = rounds[curve.index(max(known))]["round"]
        found[name] = {"final": known[-1], "best": max(known), "best_round": first, "rounds": curve}
    return {"readings": found} if found else {}


def images(rounds: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """The images that networks processed in training, by phase and by round; nothing unless all rounds counted them."""
    if not all("images" in r for r in rounds):
        return {}
    trained: dict[str, int] = {}
    for r in rounds:
        for phase, number in r["images"]["trained"].items():
            trained[phase] = trained.get(phase, 0) + number
    by_round = {
        "trained": [sum(r["images"]["trained"].values()) for r in rounds],
        "predicted": [r["images"]["predicted"] for r in rounds],
    }
    return {"images": {"trained": trained, "predicted": sum(by_round["predicted"]), "rounds": by_round}}


def sharing(rounds: Sequence[Record]) -> dict[str, dict[str, float]]:
    """How many other runs were on the device: the most and the mean over the rounds; nothing where it is not known."""
    others = [r["sharing"] for r in rounds if r.get("sharing") is not None]
    return {"sharing": {"most": max(others), "mean": round(sum(others) / len(others), 2)}} if others else {}


def logs(rounds: Sequence[Record]) -> dict[str, dict[str, list[float | None]]]:
    """What clients noted, over the rounds: by name and client, null where a client noted nothing."""
    noted = [
        (t, k, name, value) for t, r in enumerate(rounds) for k, own in r["log"].items() for name, value in own.items()
    ]
    found: dict[str, dict[str, list[float | None]]] = {}
    for t, k, name, value in noted:
        found.setdefault(name, {}).setdefault(k, [None] * len(rounds))[t] = value
    return found
