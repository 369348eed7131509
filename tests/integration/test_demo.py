"""The demonstration: its smallest form, being stopped, and (slow) the numbers it promises."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcc.cli import demo
from fedcc.data.partition import Partition
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.run import execute
from fedcc.experiments.store import RunFolder
from fedcc.report import figures
from fedcc.report.style import look
from program import alive, call, descendants, started, wait_until

Capsys = pytest.CaptureFixture[str]
METHODS = ("fedcc", "fedmd", "fedavg", "local", "centralized")
SMALLEST = ("demo", "--rounds", 1, "--epochs", 1)


def test_the_smallest_form_in_place_of_an_earlier_one(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "runs" / "demo"
    for name in METHODS:
        execute(Experiment.resolve(name, device="cpu", rounds=2, epochs=0, seed=1), out / name)
    done = call(capsys, *SMALLEST, "--jobs", 1)
    assert (done.code, done.err) == (0, "")
    assert "10 clients with one digit each, T=1, E=1; 5 methods, 1 at a time" in done.out
    for name in ("FedCC", "FedMD", "FedAvg", "Local", "Centralized"):
        assert re.search(rf"^{name} +[\d.]+ +[\d.]+ \(1\) ", done.out, re.M), done.out
    for name in METHODS:
        assert re.search(rf"^{name} +round 1/1  accuracy +[\d.]+ %", done.out, re.M), done.out
        summary = RunFolder(out / name).summary()
        assert summary is not None
        assert (summary["seed"], summary["rounds"], summary["epochs"]) == (0, 1, 1)
    for picture in ("curves.png", "partition.png"):
        assert f"runs/demo/{picture}" in done.out
        assert (out / picture).read_bytes().startswith(b"\x89PNG")


def test_methods_are_drawn_as_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Any] = {}
    split = Partition(np.arange(2), [np.arange(2, 4)], np.array([[2]]), "classes:1", 0)
    monkeypatch.setattr(Partition, "load", lambda _: split)
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.setdefault(path.stem, figure) and path)
    demo.draw({name: {"method": name, "accuracy": {"rounds": [50.0]}} for name in METHODS}, tmp_path)
    lines = {line.get_label().split()[0]: line for line in drawn["curves"].axes[0].get_lines()}
    for name in METHODS:
        wanted = look(name).print
        assert (lines[name].get_color(), lines[name].get_linewidth()) == (wanted["color"], wanted["linewidth"]), name


@pytest.mark.slow
def test_twice_as_json(tmp_path: Path, capsys: Capsys) -> None:
    first, again = (json.loads(call(capsys, *SMALLEST, "--json", "--out", tmp_path).out) for _ in range(2))
    assert list(first["runs"]) == list(METHODS)
    for name in METHODS:
        assert first["runs"][name]["accuracy"] == again["runs"][name]["accuracy"]
    assert all(Path(p).is_file() for p in again["pictures"])


def test_other_runs_are_not_replaced(tmp_path: Path, capsys: Capsys) -> None:
    own = ("run", "local", "--epochs", 0, "--rounds", 1, "--batch", 32, "--device", "cpu", "--out")
    assert call(capsys, *own, tmp_path / "local").code == 0
    before = (tmp_path / "local" / "summary.json").read_bytes()
    call(capsys, *SMALLEST, "--out", tmp_path).refused("local holds another run (finished)")
    (tmp_path / "local").rename(tmp_path / "mine")
    (tmp_path / "fedavg").mkdir()
    (tmp_path / "fedavg" / "thesis.tex").write_text("years of work")
    call(capsys, *SMALLEST, "--out", tmp_path).refused("fedavg holds other files (thesis.tex)")
    assert (tmp_path / "mine" / "summary.json").read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"mine", "fedavg"}


@pytest.mark.parametrize(
    ("number", "everyone", "code"),
    [
        pytest.param("SIGINT", True, 130, id="Ctrl-C reaches the workers too"),
        pytest.param("SIGTERM", False, 143, id="SIGTERM reaches the program alone", marks=pytest.mark.slow),
        pytest.param("SIGKILL", False, -9, id="SIGKILL leaves no worker either", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_everything(number: str, everyone: bool, code: int, tmp_path: Path) -> None:
    demo = started(tmp_path, "demo", "--rounds", 500, "--out", "d", "--jobs", 1)
    workers: list[int] = []
    try:
        workers = wait_until(lambda: [p for p in descendants(demo.pid) if "spawn_main" in command(p)])
        if number != "SIGINT":  # Ctrl-C comes while the worker is still importing
            wait_until((tmp_path / "d" / "fedcc" / "experiment.toml").exists)
        (os.killpg if everyone else os.kill)(demo.pid, getattr(signal, number))
        _, err = demo.communicate(timeout=120)
        assert demo.returncode == code, err
        if code > 0:
            word = {130: "interrupted", 143: "terminated"}[code]
            assert err == f"fedcc: {word} (see d)\n"
        wait_until(lambda: not any(map(alive, workers)))
        assert not list((tmp_path / "d").rglob("summary.json"))
    finally:
        for pid in [demo.pid, *workers]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        demo.wait()


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def resident(pid: int) -> int:
    """Bytes of memory that a process has; what several share is counted for each."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (FileNotFoundError, ProcessLookupError):
        return 0


@pytest.mark.slow
def test_the_full_form_keeps_its_promises(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fedcc", "demo", "--out", "d", "--jobs", "2", "--json"]
    demo = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak = 0
    while demo.poll() is None:
        # a child that has not begun its own program yet has its parent's command line, and shares its memory
        processes = {command(pid): pid for pid in [demo.pid, *descendants(demo.pid)]}
        peak = max(peak, sum(map(resident, processes.values())))
        time.sleep(0.2)
    out, err = demo.communicate()
    assert demo.returncode == 0, err
    found = json.loads(out)
    final = {name: run["accuracy"]["final"] for name, run in found["runs"].items()}
    assert final["fedcc"] >= 90
    assert final["fedavg"] <= 40
    assert final["fedmd"] <= 40
    assert final["local"] < final["fedcc"] <= final["centralized"] + 2
    assert 3e8 < peak < 1.5e9  # less would mean that nothing was measured
    assert {Path(p).name for p in found["pictures"]} == {"curves.png", "partition.png"}
    assert all((tmp_path / p).stat().st_size > 10_000 for p in found["pictures"])
