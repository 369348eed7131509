"""Whole sweeps: the same numbers however they are run, whatever stops them, and nothing done twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedcc.experiments.store import InUse, RunFolder
from fedcc.experiments.workers import ProcessPool, WorkerDeath
from program import QUICK, Running, alive, call, descendants, started, wait_until

Capsys = pytest.CaptureFixture[str]
FILE = """
methods = ["local", "fedmd"]
seeds = [0, 1]
rounds = 3
epochs = 1
fraction = 0.1
clients = 4
skew = "classes:3"
models = "resnet8"
device = "cpu"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "s.toml"
    path.write_text(FILE)
    return path


def numbers(root: Path) -> dict[str, Any]:
    """All that the runs below a folder say, but for times and where they were made."""
    found = {}
    for path in sorted(root.rglob("summary.json")):
        summary = json.loads(path.read_text())
        for name in ("seconds", "sharing", "commit", "checkpoint_bytes", "checkpoints", "sha256", "files"):
            summary.pop(name)
        records = [
            {k: v for k, v in r.items() if k not in ("seconds", "sharing")} for r in RunFolder(path.parent).metrics()
        ]
        models = path.with_name("models.safetensors").read_bytes()
        found[str(path.parent.relative_to(root))] = (summary, records, models)
    return found


PLACES = [f"digits_classes-3/{method}/seed{seed}" for seed in (0, 1) for method in ("local", "fedmd")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same runs one by one, by ``fedcc run``."""
    place = tmp_path_factory.mktemp("alone")
    for name in PLACES:
        method, seed = name.split("/")[1], name[-1]
        split = ("--fraction", 0.1, "--clients", 4, "--skew", "classes:3")
        words = ("run", method, *QUICK, "--rounds", 3, *split, "--seed", seed, "--out", name)
        assert Running(place, words).end(300).code == 0
    return numbers(place)


def test_two_jobs_give_what_single_runs_give_and_nothing_is_done_twice(
    file: Path, alone: dict[str, Any], capsys: Capsys
) -> None:
    done = call(capsys, "sweep", file, "--jobs", 2)
    assert (done.code, done.err) == (0, ""), done
    first, *lines, last = done.out.splitlines()
    assert first == f"{file}: 4 runs, 0 finished before, 4 to do"
    assert sorted(line.split()[1] for line in lines) == sorted(PLACES)
    assert lines[-1].startswith("[4/4] digits_classes-3/")
    assert last.startswith("4 finished; 0:")
    assert numbers(Path("runs")) == alone
    assert not list(Path("runs").rglob(".lock"))

    before = {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*")}
    done = call(capsys, "sweep", file, "--jobs", 2)
    assert done.out.splitlines()[-1].startswith("0 finished, 4 finished before; ")
    assert {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*")} == before

    plan = call(capsys, "sweep", file, "--dry-run")
    assert plan.out.splitlines()[-1] == "4 runs: 4 finished"
    accuracy = alone[PLACES[0]][0]["accuracy"]["final"]
    assert plan.out.splitlines()[0] == f"finished    {PLACES[0]}  {accuracy:.2f} %"

    changed = call(capsys, "sweep", file, "--with", "rounds=4", "--json")
    assert changed.code == 1
    assert changed.err.count("failed: ") >= 4  # each as it ends, and together at the end
    for row in json.loads(changed.out):
        assert (row["state"], "(rounds is 3 there, 4 here)" in row["reason"]) == ("failed", True)
    assert numbers(Path("runs")) == alone


def test_a_sweep_that_is_stopped_goes_on(tmp_path: Path, alone: dict[str, Any]) -> None:
    """SIGTERM in the middle of the second run."""
    (tmp_path / "s.toml").write_text(FILE)
    words = ("sweep", "s.toml", "--checkpoint-every", 1)
    sweep = Running(tmp_path, words)
    second = RunFolder(tmp_path / "runs" / PLACES[1])
    wait_until(lambda: list(second.path.glob("checkpoint-*")), 240)
    os.kill(sweep.pid, signal.SIGTERM)
    done = sweep.end(90)
    done.failed("terminated", "run the same command to continue", code=143)
    assert not descendants(sweep.pid)
    assert "1 finished, 1 stopped, 2 not begun; " in done.out
    assert second.summary() is None
    before = (tmp_path / "runs" / PLACES[0] / "summary.json").stat().st_mtime_ns

    again = Running(tmp_path, words).end(300)
    assert again.code == 0, again
    assert "4 runs, 1 finished before, 3 to do" in again.out
    assert f"{PLACES[0]} " not in again.out
    assert f"{PLACES[1]} " in next(line for line in again.out.splitlines() if "resumed after round" in line)
    assert "3 finished, 1 finished before; " in again.out
    assert numbers(tmp_path / "runs") == alone
    assert (tmp_path / "runs" / PLACES[0] / "summary.json").stat().st_mtime_ns == before


def test_a_time_limit_stops_at_a_checkpoint(file: Path, alone: dict[str, Any], capsys: Capsys) -> None:
    """The limit is over before the first round is; that round counts all the same."""
    done = call(capsys, "sweep", file, "--time-limit", "0.1s", "--no-checkpoint", "--only", "*/fedmd/*")
    assert done.code == 0
    if "not begun; " in done.out and "stopped" not in done.out:
        pytest.fail("nothing was begun")
    assert "stopped after round 1 of 3" in done.out
    assert "1 stopped, 1 not begun; " in done.out
    assert "the time is up, run the same command to continue" in done.out
    assert len(list(Path("runs").rglob("checkpoint-000001-*.safetensors"))) == 1
    done = call(capsys, "sweep", file, "--time-limit", "1h")
    assert (done.code, done.err) == (0, "")
    assert "resumed after round 1" in done.out
    assert numbers(Path("runs")) == alone


def test_it_goes_on_past_failures_and_says_them_at_the_end(file: Path, capsys: Capsys) -> None:
    (file.parent / "runs" / PLACES[1]).mkdir(parents=True)
    (file.parent / "runs" / PLACES[1] / "thesis.tex").touch()
    file.write_text(FILE + "[[scenario]]\n[[scenario]]\nname='odd'\nlr = 1e30\nepochs = 3\n")
    words = ("sweep", file, "--with", "seeds=1", "--with", "rounds=1")
    call(capsys, *words).refused("unknown option of a run 'seeds'")
    done = call(capsys, "sweep", file, "--with", "rounds=1", "--only", "*/seed0", "--jobs", 2)
    assert done.code == 1
    failures = [line for line in done.out.splitlines() if line.startswith("failed: ")]
    assert [("thesis.tex" in f, "the loss is not finite" in f) for f in sorted(failures)].count((True, False)) == 1
    assert any("the loss is not finite" in f for f in failures)
    assert (file.parent / "runs" / PLACES[0] / "summary.json").is_file()
    assert "1 finished, 3 failed; " in done.out.splitlines()[-1]


def test_missing_data_leaves_no_folders(file: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDCC_DATA", raising=False)
    file.write_text('methods = ["local", "fedavg"]\ndata = "cifar10"\nskew = ["iid", "classes:1"]\ndevice = "cpu"')
    done = call(capsys, "sweep", file, "--data-dir", "gone", "--jobs", 2)
    assert done.code == 1
    (failure,) = [line for line in done.out.splitlines() if line.startswith("failed: ")]
    assert all(word in failure for word in ("cifar10_iid/local/seed0", "cifar10_classes-1/fedavg/seed0", "gone"))
    assert not [p for p in Path("runs").rglob("*") if p.is_file()]


def test_wrong_calls(file: Path, capsys: Capsys) -> None:
    for words, said in (
        (("gone.toml",), ("gone.toml does not exist",)),
        ((file, "--on", "rai"), ("unknown place to run on 'rai'", "'ray'")),
        ((file, "--address", "auto"), ("--address goes with --on ray",)),
        ((file, "--jobs", 0), ("jobs must be at least 1, got 0",)),
        ((file, "--shard", "3/2"), ("--shard is i/n", "'3/2'")),
        ((file, "--time-limit", "soon"), ("a time is given as 90m", "'soon'")),
        ((file, "--with", "rounds"), ("--with takes name=value, got 'rounds'",)),
        ((file, "--with", "ronds=1"), ("unknown option of a run 'ronds'", "'rounds'")),
        ((file, "--only", "nothing"), ("none of the 4 runs matches nothing", PLACES[0])),
        ((file, "--device", "cuda:99"), ("'cuda:99' does not exist",)),
        ((file, "--track", "tensorbord"), ("unknown tracker 'tensorbord'", "'tensorboard'")),
    ):
        call(capsys, "sweep", *words).refused(*said)
    assert not Path("runs").exists()


def test_shards_together_are_all(file: Path, capsys: Capsys) -> None:
    parts = [json.loads(call(capsys, "sweep", file, "--dry-run", "--json", "--shard", f"{i}/3").out) for i in (1, 2, 3)]
    assert sorted(row["run"] for part in parts for row in part) == sorted(PLACES)
    assert {row["state"] for part in parts for row in part} == {"missing"}


# ------------------------------------------------------------------------------------------------------------- locks


def test_a_run_in_use_is_left_alone(file: Path, capsys: Capsys) -> None:
    """By another sweep, by ``fedcc run``, by ``fedcc resume``; a lock whose holder was killed stops nobody."""
    words = ("run", "local", *QUICK, "--fraction", 0.1, "--rounds", 500, "--out", Path("runs") / PLACES[0])
    first = Running(file.parent, words)
    folder = RunFolder(file.parent / "runs" / PLACES[0])
    wait_until(lambda: folder.metrics(), 120)
    said = f"{folder.path} is in use by another process ({first.pid} on "
    with pytest.raises(InUse), folder.lock():
        pass
    call(capsys, *words[:-1], folder.path, "--overwrite").refused(said)
    call(capsys, "resume", folder.path).refused(said)
    file.write_text(FILE.replace("rounds = 3", "rounds = 500"))
    done = call(capsys, "sweep", file, "--only", PLACES[0])
    assert (done.code, done.err) == (0, "")
    assert f"{PLACES[0]}  in use elsewhere" in done.out
    assert "0 finished, 1 in use elsewhere; " in done.out
    os.kill(first.pid, signal.SIGKILL)
    first.end()
    assert (folder.path / ".lock").exists()
    with folder.lock():
        pass
    assert not (folder.path / ".lock").exists()
    assert folder.metrics()


def test_a_folder_that_was_held_in_vain_is_gone(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a" / "b" / "c").lock():
        assert (tmp_path / "a" / "b" / "c" / ".lock").is_file()
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------------------- workers


def doubled(number: int) -> int:
    if number == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * number


def test_a_worker_that_dies_takes_only_its_own_piece_with_it() -> None:
    pool = ProcessPool(doubled, 1)
    found: list[Any] = []
    for number in (1, 13, 2):
        pool.give(number)
        while pool.busy:
            found += pool.wait(1)
    pool.close()
    assert found == [(1, 2), (13, WorkerDeath("its process died (signal SIGKILL; is there enough memory?)")), (2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGKILL", -9)])
def test_no_worker_outlives_the_sweep(number: str, code: int, tmp_path: Path) -> None:
    """Ctrl-C reaches the whole group; a kill, the program alone."""
    (tmp_path / "s.toml").write_text(FILE.replace("rounds = 3", "rounds = 500"))
    sweep = started(tmp_path, "sweep", "s.toml", "--jobs", 2)
    wait_until(lambda: all(RunFolder(tmp_path / "runs" / p).metrics() for p in PLACES[:2]), 240)
    workers = descendants(sweep.pid)
    if number == "SIGINT":
        os.killpg(sweep.pid, signal.SIGINT)
    else:
        sweep.kill()
    out, err = sweep.communicate(timeout=90)
    assert sweep.returncode == code
    wait_until(lambda: not any(map(alive, workers)))
    if number == "SIGINT":
        assert "0 finished, 2 stopped, 2 not begun; " in out
        assert err == "fedcc: interrupted (run the same command to continue)\n"


# --------------------------------------------------------------------------------------------------------------- Ray


@pytest.mark.slow
def test_the_same_on_a_ray_cluster(file: Path, alone: dict[str, Any], capsys: Capsys) -> None:
    """A real one, started here; runs that were there already are skipped, one that is half done is resumed."""
    ray = pytest.importorskip("ray")
    temporary = file.parent / "ray"
    here = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    half = ("sweep", file, "--time-limit", "0.1s", "--only", PLACES[1])
    assert "stopped after round 1 of 3" in call(capsys, *half).out
    words = f"import ray; ray.init(address='local', num_cpus=2, include_dashboard=False, _temp_dir={str(temporary)!r});"
    code = words + "print(ray.get_runtime_context().gcs_address, flush=True); input()"
    head = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=here
    )
    try:
        assert head.stdout is not None
        address = head.stdout.readline().strip()
        done = call(capsys, "sweep", file, "--on", "ray", "--address", address)
    finally:
        head.communicate("\n", timeout=60)
    assert done.code == 0, done
    assert "4 finished; " in done.out
    assert "resumed after round 1" in done.out
    assert numbers(Path("runs")) == alone
    assert not ray.is_initialized()


def test_without_ray_it_says_what_to_install(file: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = call(capsys, "sweep", file, "--on", "ray")
    done.failed("--on ray needs Ray: pip install '.[ray]' in fedcc's checkout", code=2)
    assert not Path("runs").exists()


def test_a_part_of_the_smoke_sweep(tmp_path: Path, capsys: Capsys) -> None:
    """All of it takes two cores some minutes: `fedcc sweep experiments/smoke.toml --jobs 2`."""
    path = Path(__file__).parents[2] / "experiments" / "smoke.toml"
    done = call(
        capsys, "sweep", path, "--out", tmp_path, "--only", "*/fedrs/seed0", "--no-save-models", "--device", "cpu"
    )
    assert done.code == 0, done
    assert len(list(tmp_path.rglob("summary.json"))) == 2
