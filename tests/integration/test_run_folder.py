"""What a run leaves behind, whether it ends by itself or is stopped; and that a seed decides its numbers."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcc
import fedcc.data
from fedcc.data.partition import Partition
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.store import RunFolder
from program import QUICK, Running, call, wait_until

Capsys = pytest.CaptureFixture[str]
FILES = {"experiment.toml", "environment.json", "partition.npz", "metrics.jsonl", "summary.json"}
CLIENTS = [str(k) for k in range(10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run of FedCC."""
    from fedcc.experiments.run import execute

    place = tmp_path_factory.mktemp("runs") / "r"
    settings = {"lam": 0.3, "probe_kind": "black"}
    quick: dict[str, Any] = {"rounds": 2, "epochs": 1, "models": "resnet8", "fraction": 0.2, "device": "cpu"}
    execute(Experiment.resolve("fedcc", settings=settings, **quick), place)
    return place


def timeless(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without times and how many runs were beside it."""
    return [
        {k: v for k, v in record.items() if k not in ("seconds", "sharing")} for record in RunFolder(folder).metrics()
    ]


def percentage(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value <= 100


# -------------------------------------------------------------------------------------------------------- contents


def test_the_files(folder: Path) -> None:
    files = {p.name for p in folder.iterdir()}
    (checkpoint,) = [name for name in files if name.startswith("checkpoint-000002-")]  # from which it can be extended
    assert files == FILES | {"models.json", "models.safetensors", checkpoint}


def test_experiment_toml_holds_every_value(folder: Path) -> None:
    table = tomllib.loads((folder / "experiment.toml").read_text())
    experiment = Experiment.read(folder / "experiment.toml")
    assert table.keys() == experiment.values().keys()
    assert (table["method"], table["data"], table["skew"], table["clients"]) == ("fedcc", "digits", "classes:1", 10)
    assert (table["rounds"], table["epochs"], table["threads"], table["engine"]) == (2, 1, 1, "plain")
    unset = {name for name, value in experiment.settings.items() if value is None}  # TOML has no such value
    assert table["settings"].keys() == experiment.settings.keys() - unset
    assert (table["settings"]["lam"], table["settings"]["probe_kind"]) == (0.3, "black")


def test_environment_json(folder: Path) -> None:
    found = json.loads((folder / "environment.json").read_text())
    assert found.keys() >= {"fedcc", "commit", "python", "torch", "numpy", "platform", "processor", "cores", "threads"}
    assert (found["fedcc"], found["torch"], found["threads"]) == (fedcc.__version__, torch.__version__, 1)
    assert found["gpu"] is None


def test_partition_npz_is_the_split(folder: Path) -> None:
    split = Partition.load(folder / "partition.npz")
    federation = Experiment.read(folder / "experiment.toml").federation()
    assert federation.partition is not None
    assert split.sha256 == federation.partition.sha256
    positions = np.concatenate([split.public, *split.clients])
    assert sorted(positions) == list(range(len(positions)))


def test_metrics_jsonl_has_a_line_a_round(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]
    for record in map(json.loads, lines):
        assert record.keys() == {
            "round", "accuracy", "clients", "local", "valid", "valid_labels", "local_full", "targets", "majority",
            "log", "present", "bytes", "seconds", "readings", "images", "sharing", "uploads",
        } | ({"confusion", "known"} if record["round"] == 2 else set())  # fmt: skip
        assert percentage(record["accuracy"])
        assert percentage(record["targets"])
        assert list(record["readings"]) == ["trust=2", "trust=4", "mirror", "mirror,trust=4"]
        assert all(map(percentage, record["readings"].values()))
        for part in ("clients", "local", "valid", "valid_labels", "local_full"):
            assert list(record[part]) == CLIENTS
            assert all(map(percentage, record[part].values()))
        assert list(record["log"]) == CLIENTS
        assert list(record["majority"]) == CLIENTS
        for k, log in record["log"].items():
            assert len(record["majority"][k]) == log["majority"]
            assert set(record["majority"][k]) <= set(range(10))
            assert log.keys() >= {"majority", "w_l", "w_u", "alpha", "unknown"}
            assert 1 <= log["majority"] <= 10
            assert 0 <= log["w_l"] <= math.log(10) + 1e-6
            assert log["w_u"] == pytest.approx(math.log(10 - log["majority"] + 1), abs=1e-6)
            assert 0 <= log["alpha"] <= 1
            assert 0 <= log["unknown"] <= 1
        assert record["present"] == list(range(10))
        phases = {"fit", "refine", "predict", "evaluate"} | ({"init"} if record["round"] == 1 else {"sync"})
        assert record["seconds"].keys() == phases
        assert all(isinstance(s, float) and s >= 0 for s in record["seconds"].values())


def test_the_last_round_says_what_was_taken_for_what_and_what_clients_know(folder: Path) -> None:
    summary, last = RunFolder(folder).summary(), RunFolder(folder).metrics()[-1]
    assert summary is not None
    assert (summary["confusion"], summary["known"]) == (last["confusion"], last["known"])
    right, tested = (sum(summary["confusion"][c][c] for c in range(10)), sum(map(sum, summary["confusion"])))
    assert round(100 * right / tested, 4) == summary["accuracy"]["final"]
    assert list(summary["known"]) == CLIENTS
    assert all(len(row) == 10 and all(0 <= v <= 1 for v in row) for row in summary["known"].values())


def test_images_processed_are_steps_times_batches(folder: Path) -> None:
    summary, records = RunFolder(folder).summary(), RunFolder(folder).metrics()
    assert summary is not None
    split = Partition.load(folder / "partition.npz")
    epochs, batch = summary["epochs"], 64
    private = [epochs * math.ceil(len(rows) / batch) for rows in split.clients]
    public = epochs * math.ceil(len(split.public) / batch)
    fit, sync = batch * sum(private), batch * public * len(split.clients)
    refine = 2 * batch * sum(max(steps, public) for steps in private)  # a batch of each stream
    assert [r["images"]["trained"] for r in records] == [
        {"fit": fit, "refine": refine},
        {"sync": sync, "fit": fit, "refine": refine},
    ]
    predicted = len(split.clients) * (1 + 2 * len(split.public))  # the probe, pseudo labels, the upload
    assert [r["images"]["predicted"] for r in records] == [predicted, predicted]
    assert summary["images"] == {
        "trained": {"fit": 2 * fit, "refine": 2 * refine, "sync": sync},
        "predicted": 2 * predicted,
        "rounds": {"trained": [fit + refine, sync + fit + refine], "predicted": [predicted, predicted]},
    }


def test_bytes_are_those_of_the_messages(folder: Path) -> None:
    first, second = RunFolder(folder).metrics()
    public, clients, fp32 = len(Partition.load(folder / "partition.npz").public), 10, 4
    assert first["bytes"] == {"up": clients * public * 11 * fp32, "down": 0}
    assert second["bytes"] == {"up": clients * public * 11 * fp32, "down": clients * public * 10 * fp32}


def test_summary_json_is_complete_in_itself(folder: Path) -> None:
    summary, records = RunFolder(folder).summary(), RunFolder(folder).metrics()
    assert summary is not None
    assert (summary["method"], summary["data"], summary["skew"]) == ("FedCC", "digits", "classes:1")
    assert (summary["seed"], summary["rounds"], summary["engine"], summary["clients"]) == (0, 2, "plain", 10)
    assert summary["settings"]["lam"] == 0.3
    accuracies = [r["accuracy"] for r in records]
    accuracy = summary["accuracy"]
    assert accuracy["rounds"] == accuracies
    assert accuracy["final"] == accuracies[-1]
    assert accuracy["best"] == max(accuracies)
    assert accuracy["best_round"] == 1 + accuracies.index(max(accuracies))
    for way in ("up", "down"):
        assert summary["bytes"][way] == sum(r["bytes"][way] for r in records)
        assert summary["bytes"]["rounds"][way] == [r["bytes"][way] for r in records]
    parts = {"local": "local", "global": "clients", "valid": "valid", "valid_labels": "valid_labels"}
    for part, name in (parts | {"local_full": "local_full"}).items():
        assert accuracy["table2"][part] == records[-1][name]
    for name in ("majority", "w_l", "w_u", "alpha", "unknown"):
        assert summary["log"][name] == {k: [r["log"][k][name] for r in records] for k in CLIENTS}
    split = Partition.load(folder / "partition.npz")
    assert summary["counts"] == {str(k): row for k, row in enumerate(split.counts.tolist())}
    assert summary["public"] == len(split.public)
    one = sum(p.numel() for p in fedcc.load(folder).trained.clients[0].floating.values()) * 4
    assert summary["bytes"]["models"] == 10 * one
    assert summary["seconds"] > 0
    assert summary["device"]
    assert summary["versions"].keys() == {"fedcc", "python", "torch", "numpy"}
    assert "commit" in summary
    assert Experiment.stored(summary["experiment"]) == Experiment.read(folder / "experiment.toml")
    assert summary["partition_sha256"] == Partition.load(folder / "partition.npz").sha256
    assert "NaN" not in (folder / "summary.json").read_text()


def test_its_command_makes_the_run_again(folder: Path, tmp_path: Path, capsys: Capsys) -> None:
    summary = RunFolder(folder).summary()
    assert summary is not None
    program, *words = shlex.split(summary["command"])
    assert program == "fedcc"
    assert call(capsys, *words, "--out", tmp_path / "again").code == 0
    assert timeless(tmp_path / "again") == timeless(folder)
    assert Experiment.read(tmp_path / "again" / "experiment.toml") == Experiment.read(folder / "experiment.toml")


@pytest.mark.parametrize("method", list(fedcc.METHODS))
def test_a_command_says_every_value(method: str) -> None:
    """The command line of an experiment that differs from the defaults wherever it can."""
    from typer.testing import CliRunner

    from fedcc import cli
    from fedcc.experiments import run as module

    given: dict[str, Any] = {
        "skew": "dirichlet:0.5,minimum=1", "clients": 7, "models": "resnet8", "rounds": 2, "epochs": 3, "public": 0.2,
        "assignment": "halves", "stratified": True, "fraction": 0.5, "lr": 2e-5, "batch": 16, "reset": "round",
        "participation": 0.5, "wire": "fp16", "client_accuracy": False, "seed": 9, "device": "cpu",
        "precision": "bf16", "threads": 2, "augment": "hole=0.25,shift=0.1", "validation": 0.2,
        "schedule": "cosine", "decay": 0.9, "evaluate_every": 3, "readings": False,
    }  # fmt: skip
    settings = {"fedcc": {"lam": 0.1, "delta": 0, "probe_kind": "white", "refine_joint_batch": False}}
    experiment = Experiment.resolve(method, settings=settings.get(method), **given)
    asked: list[Experiment] = []

    def remember(experiment: Experiment, *_: Any, **__: Any) -> None:
        asked.append(experiment)
        raise ValueError("enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "prepare", remember)
        CliRunner().invoke(cli.app, shlex.split(experiment.command())[1:])
    assert asked == [experiment]


def test_other_methods_leave_out_what_they_do_not_have(tmp_path: Path, capsys: Capsys) -> None:
    assert call(capsys, "run", "fedavg", *QUICK, "--out", tmp_path / "r").code == 0
    (record,) = RunFolder(tmp_path / "r").metrics()
    assert percentage(record["readings"].pop("re-estimated"))
    assert percentage(record["readings"].pop("mirror"))  # of the last round, which this is
    assert record["readings"] == {}
    assert (record["targets"], record["log"]) == (None, {})
    assert record["bytes"]["up"] == record["bytes"]["down"] > 0
    summary = RunFolder(tmp_path / "r").summary()
    assert summary is not None
    assert summary["bytes"]["models"] == 0  # the server predicts by itself


# ----------------------------------------------------------------------------------------------------- determinism


def test_a_seed_decides_every_number(folder: Path, tmp_path: Path, capsys: Capsys) -> None:
    """Beside a busy process, too: those that burn here begin before the run and end after it."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        again = call(capsys, "run", "--config", folder / "experiment.toml", "--out", tmp_path / "again")
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert again.code == 0
    assert timeless(tmp_path / "again") == timeless(folder)
    one = ("--rounds", 1, "--epochs", 1)
    for seed in (0, 1):
        call(capsys, "run", "--config", folder / "experiment.toml", *one, "--seed", seed, "--out", tmp_path / str(seed))
    (only,) = timeless(tmp_path / "0")
    last = {name: only.pop(name) for name in ("confusion", "known")}  # its first round is its last one
    assert only == timeless(folder)[0]
    assert all(last.values())
    assert timeless(tmp_path / "1") != timeless(tmp_path / "0")


def test_poisoned_public_labels_change_one_diagnostic_alone(
    folder: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every label that becomes public is changed in the data set itself, before anything is split."""
    digits, split = fedcc.data.load("digits"), Partition.load(folder / "partition.npz")
    kept = np.sort(np.random.default_rng([0, 3]).permutation(1442)[: round(0.2 * 1442)])  # --fraction 0.2
    labels = digits.train_y.copy()
    labels[kept[split.public]] = (labels[kept[split.public]] + 1) % 10
    monkeypatch.setattr("fedcc.federation.load", lambda *_, **__: replace(digits, train_y=labels))
    assert call(capsys, "run", "--config", folder / "experiment.toml", "--out", tmp_path / "r").code == 0
    clean, poisoned = timeless(folder), timeless(tmp_path / "r")
    assert [r.pop("targets") for r in clean] != [r.pop("targets") for r in poisoned]
    assert clean == poisoned
    assert fedcc.load(folder).predict(digits.test_x).equal(fedcc.load(tmp_path / "r").predict(digits.test_x))


# ----------------------------------------------------------------------------------------------------- being stopped


@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_in_mid_run_leaves_a_valid_folder(number: str, code: int, word: str, tmp_path: Path) -> None:
    run = Running(tmp_path, ("run", "fedcc", *QUICK, "--rounds", 500, "--checkpoint-every", 1, "--out", "r"))
    folder = RunFolder(tmp_path / "r")
    wait_until(folder.metrics)
    os.kill(run.pid, getattr(signal, number))
    done = run.end(20)
    done.failed(word, "see r; resume with `fedcc resume r`", code=code)
    assert done.err.count("\n") == 1
    records = folder.metrics()
    assert [r["round"] for r in records] == list(range(1, len(records) + 1))
    assert (folder.path / "metrics.jsonl").read_bytes().endswith(b"\n")
    checkpoints = {p.name for p in folder.path.glob("checkpoint-*.safetensors")}
    assert len(checkpoints) == min(2, len(records)) or len(records) == 1  # whose checkpoint was not begun yet
    assert {p.name for p in folder.path.iterdir()} == FILES - {"summary.json"} | checkpoints
    assert Experiment.read(folder.path / "experiment.toml").training.rounds == 500
    again = Running(tmp_path, ("run", "fedcc", *QUICK, "--epochs", 0, "--out", "r", "--overwrite")).end()
    assert again.code == 0
