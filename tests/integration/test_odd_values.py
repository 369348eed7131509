"""Values, files and paths that nobody should write: one line that names them, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import fedcc
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.store import RunFolder
from program import QUICK, call
from tiny import finished

Capsys = pytest.CaptureFixture[str]
HUGE = "1" + "0" * 400
NESTED = "[" * 5000 + "]" * 5000
RUN = ("run", "local", *QUICK, "--epochs", 0, "--no-save-models", "--out")
SWEEP = "methods = ['local']\nrounds = 1\nepochs = 0\nfraction = 0.2\nmodels = 'resnet8'\ndevice = 'cpu'\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDCC_DATA", raising=False)


# ----------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    "words",
    [
        ("--rounds", HUGE),
        ("--epochs", f"-{HUGE}"),
        ("--seed", HUGE),
        ("--resize", HUGE),
        ("--set", f"trust={HUGE}"),
        ("--set", f"lam={HUGE}"),
        ("--models", "resnet20000000000000"),
    ],
    ids=lambda words: words[1][:12],
)
def test_a_huge_number_is_refused_with_its_rule(words: tuple[str, str], capsys: Capsys) -> None:
    done = call(capsys, "run", "fedcc", f"{words[0]}={words[1]}")
    done.refused("got")
    assert len(done.err) < 400


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"lr = {HUGE}", "lr must be a finite number"),
        (f"rounds = {HUGE}", "rounds must be at most"),
        (f"lr = 0x{'f' * 5000}", "lr must be a finite number, got an integer of 20,000 bits"),
        (f"[settings]\nlam = {HUGE}", "lam must be a finite number"),
        (f"[settings]\ntrust = {HUGE}", "trust must be a finite number"),
        (f"lr = {NESTED}", "nested more than 32 levels deep"),
        (f"skew = {'{a=' * 3000}1{'}' * 3000}", "nested more than 32 levels deep"),
        (f"settings.lam{'.b' * 3000} = 1", "nested more than 32 levels deep"),
        ("settings = []", "settings must be a table"),
    ],
    ids=lambda text: text[:20],
)
def test_an_odd_experiment_toml_is_refused_by_its_name(text: str, said: str, capsys: Capsys) -> None:
    Path("r").mkdir()
    Path("r/experiment.toml").write_text(f"method = 'fedcc'\n{text}")
    call(capsys, "run", "--config", "r/experiment.toml", "--out", "x").refused("r/experiment.toml", said)
    call(capsys, "resume", "r").refused("r/experiment.toml", said)
    assert not Path("x").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"lr = {HUGE}", "lr must be a finite number"),
        (f"seeds = [{HUGE}]", "seed must be at most"),
        (f"rounds = {NESTED}", "nested more than 32 levels deep"),
        ("seeds = []", "must not be empty"),
        ("skew = []", "must not be empty"),
        ("[[variant]]\nmethod = 3\nname = 'x'", "method must be a text, got 3"),
        ("threads = 1000", "threads must be at most"),
    ],
    ids=lambda text: text[:20],
)
def test_an_odd_sweep_file_is_refused_by_its_name(text: str, said: str, capsys: Capsys) -> None:
    Path("s.toml").write_text(f"methods = ['fedcc']\n{text}")
    call(capsys, "sweep", "s.toml").refused("s.toml", said)
    assert not Path("runs").exists()


@pytest.mark.parametrize("value", [f"lr={HUGE}", f"lr={NESTED}", "lr=1\nrounds=2"], ids=lambda text: text[:12])
def test_an_odd_value_of_a_sweep(value: str, capsys: Capsys) -> None:
    Path("s.toml").write_text(SWEEP)
    call(capsys, "sweep", "s.toml", "--dry-run", "--with", value).refused("s.toml", "lr must be")


def test_a_federation_folder_is_read_with_the_same_care(capsys: Capsys) -> None:
    Path("f").mkdir()
    Path("f/federation.toml").write_text(f"x = {NESTED}")
    call(capsys, "federation", "server", "f").refused("federation.toml", "nested more than 32 levels deep")


def test_options_that_contradict_each_other(capsys: Capsys) -> None:
    for words in (("run", "local"), ("resume", "r"), ("sweep", "s.toml")):
        Path("s.toml").write_text(SWEEP)
        call(capsys, *words, "--no-checkpoint", "--checkpoint-every", 3).refused("contradict", "--checkpoint-every 3")


# ---------------------------------------------------------------------------------------------------------- threads


def test_more_threads_than_the_machine_serves_are_refused_when_a_run_starts(capsys: Capsys) -> None:
    from fedcc.engine.threads import cores

    rule = f"threads must be at most {4 * cores()}, 4 for each core of this machine"
    call(capsys, *RUN, "r", "--threads", 1024).refused(rule, "got 1024")
    with pytest.raises(ValueError, match=rule):
        fedcc.run("local", fedcc.Federation.named("digits", models="resnet8"), rounds=1, epochs=0, threads=1024)
    Path("s.toml").write_text(SWEEP)
    call(capsys, "sweep", "s.toml", "--threads", 1024).refused(rule)
    call(capsys, "bench", "--threads", 1024).refused(rule)
    assert not Path("r").exists()
    assert not Path("runs").exists()
    assert Experiment.resolve("local", threads=1024, device="cpu").machine.threads == 1024  # of another machine
    Path("r").mkdir()
    Path("r/experiment.toml").write_text(Experiment.resolve("local", threads=1024, device="cpu").toml())
    call(capsys, "resume", "r").refused(rule)


def test_more_threads_than_cores_are_warned_of_once(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcc.engine.threads import ThreadsWarning

    monkeypatch.setattr("fedcc.engine.threads.cores", lambda: 1)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)  # two threads on a busy core take minutes
    done = call(capsys, *RUN, "r", "--threads", 2)
    assert done.code == 0
    assert done.err == (
        "fedcc: warning: 2 threads on 1 cores: they wait for each other, and a run takes longer than with fewer\n"
    )
    federation = fedcc.Federation.named("digits", models="resnet8", fraction=0.2)
    with pytest.warns(ThreadsWarning, match="2 threads on 1 cores"):
        fedcc.run("local", federation, rounds=1, epochs=0, threads=2, client_accuracy=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedcc.run("local", federation, rounds=1, epochs=0, threads=1, client_accuracy=False)


def test_a_record_of_a_larger_machine_is_read(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setattr("fedcc.engine.threads.cores", lambda: 256)
    assert call(capsys, "run", "fedavg", *QUICK, "--epochs", 0, "--out", "r", "--threads", 1000).code == 0
    monkeypatch.setattr("fedcc.engine.threads.cores", lambda: 1)
    assert fedcc.load("r").method.name == "FedAvg"
    assert call(capsys, "report", "r", "--out", "page", "--no-figures").code == 0
    assert "nothing to do" in call(capsys, "resume", "r").out


# -------------------------------------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", "null", "", "[1", "[" * 100_000, f'{{"accuracy": {{"final": {HUGE}}}, "experiment": {{}}}}'],
    ids=lambda text: text[:12] or "empty",
)  # fmt: skip
def test_a_damaged_summary_is_refused_by_its_name(text: str, capsys: Capsys) -> None:
    place = Path("runs/digits_classes-1/local/seed0")
    Path("s.toml").write_text(SWEEP)
    assert call(capsys, *RUN, place).code == 0
    (place / "summary.json").write_text(text)
    before = {p.name: p.read_bytes() for p in place.iterdir()}
    call(capsys, "resume", place).refused("summary.json is damaged", "fedcc resume")
    call(capsys, "analyse", place).refused("summary.json is damaged")
    shown = call(capsys, "sweep", "s.toml", "--dry-run")
    assert shown.code == 0
    assert "blocked" in shown.out
    assert "summary.json is damaged" in shown.out
    call(capsys, "run", "local", *QUICK, "--epochs", 0, "--out", place).refused("holds this run already")
    assert {p.name: p.read_bytes() for p in place.iterdir()} == before


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", '{"tensorboard": 3}', '{"tensorboard": {"step": "x"}}', "[" * 100_000],
    ids=lambda text: text[:20] or "empty",
)  # fmt: skip
def test_a_damaged_tracking_file_is_named_and_tracking_continues(text: str, tmp_path: Path) -> None:
    from fedcc.experiments.tracking import Trackers

    experiment = Experiment.resolve("local", device="cpu")
    (tmp_path / "tracking.json").write_text(text)
    said: list[str] = []
    trackers = Trackers(("tensorboard",), experiment, tmp_path, said.append)
    trackers.round(finished(round=1, accuracy=50.0))
    trackers.end(None)
    assert len(said) == 1
    assert str(tmp_path / "tracking.json") in said[0]
    assert "\n" not in said[0]
    assert list((tmp_path / "tensorboard").iterdir())
    Trackers((), experiment, tmp_path, said.append).round(finished(round=2, accuracy=50.0))  # nobody asks for it
    assert len(said) == 1


# ------------------------------------------------------------------------------------------------------------ paths


def test_a_folder_of_two_thousand_levels(capsys: Capsys) -> None:
    done = call(capsys, *RUN, "a/" * 2000)
    done.refused("--out must be at most 3,900 bytes long")
    assert len(done.err) < 400
    assert list(Path().iterdir()) == []
    try:
        assert call(capsys, *RUN, "a/" * 1500).code == 0  # deeper than Python's own limit
        assert RunFolder(Path("a/" * 1500)).summary() is not None
        assert call(capsys, "skew", "--out", "b/" * 1500 + "x.png").code == 0
    finally:
        subprocess.run(["rm", "-rf", "a", "b"], check=True)  # pytest cannot, for the same limit


@pytest.mark.slow
def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    """In a real process: its streams are strict, those of a test are not."""
    odd = os.fsdecode(b"\xff")
    Path(f"{odd}.toml").write_text(SWEEP)

    def program(*words: Any) -> subprocess.CompletedProcess[bytes]:
        line = [sys.executable, "-m", "fedcc", *map(str, words)]
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, check=False, env=environment)
        assert b"Traceback" not in done.stderr
        assert b"should not happen" not in done.stderr
        assert b"codec" not in done.stderr
        return done

    done = program(*RUN, odd)
    assert done.returncode == 0, done.stderr
    assert b"\\udcff" in done.stdout
    assert (tmp_path / odd / "summary.json").is_file()
    assert program("report", odd, "--out", f"{odd}page", "--no-figures").returncode == 0
    assert (tmp_path / f"{odd}page" / "index.html").is_file()
    assert program("sweep", f"{odd}.toml", "--dry-run").returncode == 0
    missing = program("run", "--config", f"{odd}{odd}")
    assert (missing.returncode, missing.stderr) == (2, b"fedcc: \\udcff\\udcff does not exist\n")
    absent = program("run", "local", "--data", "cifar10", "--data-dir", odd + odd)
    assert absent.returncode == 1
    assert absent.stderr.startswith(b"fedcc: \\udcff\\udcff: no such data folder")


def test_json_of_an_odd_place(capsys: Capsys) -> None:
    odd = os.fsdecode(b"\xff")
    assert json.loads(call(capsys, *RUN, odd, "--json").out)["method"] == "Local"
