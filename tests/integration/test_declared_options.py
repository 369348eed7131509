"""A run option is declared once and reaches the command line, TOML, sweeps, federations, records and help."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedcc
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.options import GROUPS, OPTIONS, Split
from fedcc.experiments.store import RunFolder
from fedcc.experiments.sweep import planned
from fedcc.flower.folder import terms
from program import call

Capsys = pytest.CaptureFixture[str]

QUICK = (
    "--data",
    "digits",
    "--skew",
    "iid",
    "--fraction",
    0.1,
    "--clients",
    2,
    "--models",
    "resnet8",
    "--epochs",
    1,
    "--device",
    "cpu",
)
OTHER = {
    "optimizer": "sgd",
    "momentum": 0.5,
    "schedule": "cosine",
    "decay": 0.5,
    "evaluate_every": 2,
    "readings": False,
    "augment": "none",
}


def flags(values: dict[str, Any]) -> list[Any]:
    words: list[Any] = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", value]
    return words


def test_from_the_command_line_to_the_record_and_back(tmp_path: Path, capsys: Capsys) -> None:
    done = call(capsys, "run", "fedavg", *QUICK, "--rounds", 3, *flags(OTHER), "--out", tmp_path / "r")
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert {name: summary["experiment"][name] for name in OTHER} == OTHER
    again = Experiment.read(tmp_path / "r" / "experiment.toml")
    assert {name: again.values()[name] for name in OTHER} == OTHER
    evaluated = [r["round"] for r in RunFolder(tmp_path / "r").metrics() if r["accuracy"] is not None]
    assert evaluated == [2, 3]  # every second round, and the last
    assert "readings" not in summary["accuracy"]


def test_a_sweep_takes_every_option() -> None:
    for name, value in OTHER.items():
        (run,) = planned({"methods": ["fedavg"], name: value}, {})
        assert run.experiment().values()[name] == value
        (run,) = planned({"methods": ["fedavg"]}, {name: value})
        assert run.experiment().values()[name] == value


def test_sites_agree_on_how_they_train() -> None:
    def agreed(**options: Any) -> set[str]:
        from fedcc.flower.folder import Task

        task = Task(2, ("a", "b"), (1, 8, 8), 1, "0" * 64)
        return set(terms(Experiment.resolve("fedavg", device="cpu", **options), task, 0, "resnet8"))

    assert {
        "optimizer",
        "momentum",
        "schedule",
        "decay",
        "rounds",
        "epochs",
        "lr",
        "batch",
        "reset",
        "wire",
        "seed",
    } <= agreed()
    assert not {"device", "participation", "evaluate_every", "threads"} & agreed()


def test_help_explains_every_option(capsys: Capsys) -> None:
    text = " ".join(call(capsys, "run", "--help").out.split())
    for name, declared in OPTIONS.items():
        assert f"--{name.replace('_', '-')}" in text
        assert declared.marks["meaning"] in text


def test_python_has_every_option_of_training() -> None:
    keywords = inspect.signature(fedcc.run).parameters
    for group in GROUPS:
        if group is not Split:  # which is the federation's
            assert set(inspect.signature(group).parameters) <= set(keywords)


@pytest.mark.parametrize(
    "line", ["--help", "--version", "run --help", "sweep --help", "data --help", "report --help", "federation --help"]
)
def test_help_imports_neither_torch_nor_numpy(line: str) -> None:
    script = (
        "import sys\nfrom fedcc.cli import main\nsys.argv[1:] = " + repr(line.split()) + "\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "loaded = {'torch', 'numpy', 'sklearn', 'flwr'} & sys.modules.keys()\nassert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_are_imported_when_they_are_used() -> None:
    script = (
        "import sys, fedcc\nassert 'torch' not in sys.modules\nassert set(fedcc.__all__) <= set(dir(fedcc))\n"
        "for name in fedcc.__all__:\n    getattr(fedcc, name)\nassert callable(fedcc.run)\n"
        "import fedcc.experiments.run\nassert callable(fedcc.run)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
