"""Run an experiment into its folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedcc.engine.plain import Monitor
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.store import RunFolder, environment
from fedcc.federation import Federation
from fedcc.run import Record, Result, rehearse, run

SUMMARY_FORMAT = 1


def prepare(experiment: Experiment, out: Path, *, data_dir: Path | None = None, overwrite: bool = False) -> Federation:
    """The data, read and split; whatever is wrong with the call is found here, before anything is written."""
    RunFolder(out).check(experiment, overwrite)
    federation = experiment.federation(data_dir)
    rehearse(experiment.made(), federation)
    return federation


def execute(
    experiment: Experiment,
    out: Path,
    federation: Federation | None = None,
    *,
    overwrite: bool = False,
    save_models: bool = True,
    on_round: Callable[[Record], None] | None = None,
    monitor: Monitor | None = None,
) -> Result:
    """Run an experiment (prepared already, if its federation is given); its folder is valid whenever it is stopped."""
    if federation is None:
        federation = prepare(experiment, out, overwrite=overwrite)
    folder = RunFolder(out)
    folder.begin(experiment, federation.partition)
    begun = time.perf_counter()

    def told(record: Record) -> None:
        folder.add(record)
        if on_round:
            on_round(record)

    result = run(
        experiment.made(),
        federation,
        experiment.rounds,
        epochs=experiment.epochs,
        lr=experiment.lr,
        batch=experiment.batch,
        participation=experiment.participation,
        seed=experiment.seed,
        device=experiment.device,
        precision=experiment.precision,  # type: ignore[arg-type]
        engine=experiment.engine,
        deterministic=experiment.deterministic,
        threads=experiment.threads,
        wire=experiment.wire,
        reset=experiment.reset,
        client_accuracy=experiment.client_accuracy,
        on_round=told,
        monitor=monitor,
    )
    if save_models:
        result.save(out)
    partition = federation.partition
    facts = {"data_sha256": federation.fingerprint, "partition_sha256": partition.sha256 if partition else None}
    folder.write("summary.json", summary(experiment, result, time.perf_counter() - begun) | facts)
    return result


def summary(experiment: Experiment, result: Result, seconds: float) -> dict[str, Any]:
    """The record that tables are made from, complete in itself."""
    best_round, best = result.best
    machine = environment(experiment)
    return {
        "format": SUMMARY_FORMAT,
        "method": result.method.name,
        "family": result.method.family,
        "settings": dict(experiment.settings),
        "data": experiment.data,
        "skew": experiment.skew,
        "seed": experiment.seed,
        "clients": experiment.clients,
        "models": experiment.models,
        "rounds": len(result.rounds),
        "epochs": experiment.epochs,
        "accuracy": {
            "final": result.accuracy,
            "best": best,
            "best_round": best_round,
            "rounds": [r.get("accuracy") for r in result.rounds],
            "targets": [r.get("targets") for r in result.rounds],
            "clients": result.rounds[-1]["clients"],
            "local": result.rounds[-1]["local"],
        },
        "bytes": {
            "up": sum(r["bytes"]["up"] for r in result.rounds),
            "down": sum(r["bytes"]["down"] for r in result.rounds),
            "models": result.model_bytes,
        },
        "seconds": round(seconds, 3),
        "engine": experiment.engine,
        "device": machine["gpu"] or machine["processor"],
        "precision": experiment.precision,
        "threads": experiment.threads,
        "versions": {name: machine[name] for name in ("fedcc", "python", "torch", "numpy")},
        "commit": machine["commit"],
        "command": experiment.command(),
        "experiment": asdict(experiment),
    }
