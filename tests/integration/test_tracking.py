"""The real trackers, offline: what they are told, once each, also over a resume; and one that fails ends nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedcc.experiments.tracking
from fedcc.core.method import Trained
from fedcc.core.samples import View
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.result import Result
from fedcc.experiments.store import RunFolder
from fedcc.experiments.tracking import Trackers, flat, numbers
from fedcc.methods import make
from program import QUICK, call
from tiny import finished

Capsys = pytest.CaptureFixture[str]
ROUNDS = 3
RUN = ("run", "fedcc", *QUICK, "--fraction", 0.05, "--rounds", ROUNDS, "--checkpoint-every", 1, "--out", "r")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-own"))


def recorded() -> dict[str, list[tuple[int, float]]]:
    """What the run folder holds, as trackers see it."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in RunFolder(Path("r")).metrics():
        for name, value in numbers(record).items():
            found.setdefault(name, []).append((record["round"], value))
    return found


def in_tensorboard() -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("r/tensorboard")
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def in_mlflow() -> tuple[dict[str, list[tuple[int, float]]], Any]:
    client, experiment = fedcc.experiments.tracking.mlflow_store()
    (run,) = client.search_runs([experiment])
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [(m.step, m.value) for m in values] for name, values in history.items()}, run


def in_wandb() -> dict[str, list[tuple[int, float]]]:
    """From the files that a later `wandb sync` would send, the older first."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(Path("r/wandb").glob("offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime_ns):
        for content in logged(path.read_bytes()):
            record: Any = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(content)
            items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            for name, value in items.items():
                if not name.startswith("_"):
                    found.setdefault(name, []).append((items["_step"], value))
    return found


def logged(content: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log behind a header of 7 bytes: blocks of 32 KiB, records cut at their ends."""
    at, whole = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # all of it, or its last part
            yield whole
            whole = b""


def close(found: dict[str, list[tuple[int, float]]], relative: float = 1e-12) -> bool:
    expected = recorded()
    assert found.keys() == expected.keys()
    assert [step for step, _ in expected["accuracy"]] == list(range(1, ROUNDS + 1))
    for name, values in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in values], name
        if not name.startswith("seconds/"):  # a round that is made again takes another time
            assert [v for _, v in found[name]] == pytest.approx([v for _, v in values], rel=relative), name
    return True


def a_result() -> Result:
    return Result(make("local"), Trained(2), View())


def half_done() -> None:
    """The folder of a process that was killed after it had told the last round, before its checkpoint."""
    folder = Path("r")
    for name in ("summary.json", "models.json", "models.safetensors"):
        (folder / name).unlink()
    (latest,) = folder.glob(f"checkpoint-{ROUNDS:06d}-*")
    latest.unlink()


def test_tensorboard(capsys: Capsys) -> None:
    pytest.importorskip("tensorboard")
    done = call(capsys, *RUN, "--track", "tensorboard", "--keep-checkpoints")
    assert (done.code, done.err) == (0, "")
    assert close(in_tensorboard(), 1e-6)
    half_done()
    done = call(capsys, "resume", "r", "--track", "tensorboard")
    assert (done.code, done.err) == (0, "")
    assert close(in_tensorboard(), 1e-6)


def test_mlflow(capsys: Capsys) -> None:
    pytest.importorskip("mlflow")
    done = call(capsys, *RUN, "--track", "mlflow", "--keep-checkpoints")
    assert done.code == 0, done
    found, run = in_mlflow()
    assert close(found)
    assert run.info.status == "FINISHED"
    assert run.data.params["settings.lam"] == "0.2"
    assert run.data.params["rounds"] == str(ROUNDS)
    half_done()
    assert call(capsys, "resume", "r", "--track", "mlflow").code == 0
    found, again = in_mlflow()
    assert close(found)
    assert (again.info.run_id, again.info.status) == (run.info.run_id, "FINISHED")


@pytest.mark.slow
def test_wandb(capsys: Capsys) -> None:
    pytest.importorskip("wandb")
    done = call(capsys, *RUN, "--track", "wandb", "--keep-checkpoints")
    assert done.code == 0, done
    assert close(in_wandb())
    name = json.loads(Path("r/tracking.json").read_text())["wandb"]["run"]
    half_done()
    assert call(capsys, "resume", "r", "--track", "wandb").code == 0
    assert close(in_wandb())
    assert {p.name.rpartition("-")[2] for p in Path("r/wandb").glob("offline-run-*")} == {name}


def test_a_new_run_in_the_folder_is_a_new_run_at_the_tracker(capsys: Capsys) -> None:
    pytest.importorskip("mlflow")
    short = ("run", "local", *QUICK, "--epochs", 0, "--out", "r", "--track", "mlflow")
    assert call(capsys, *short).code == 0
    first = json.loads(Path("r/tracking.json").read_text())
    assert call(capsys, *short, "--overwrite", "--seed", 1).code == 0
    assert json.loads(Path("r/tracking.json").read_text())["mlflow"]["run"] != first["mlflow"]["run"]
    assert call(capsys, *short[:-2], "--overwrite").code == 0
    assert not Path("r/tracking.json").exists()


# ---------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_a_missing_package_is_said_before_training(
    name: str, package: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedcc.experiments.tracking, "find_spec", lambda asked: None if asked == package else object())
    call(capsys, *RUN, "--track", name).refused(
        f"--track {name} needs {package}: pip install '.[{name}]' in fedcc's checkout"
    )
    assert not Path("r").exists()


class Broken:
    """A tracker that fails in the second round."""

    def __init__(self, *_: Any):
        self.told: list[int] = []

    def log(self, step: int, values: Any) -> None:
        if step == 2:
            raise ConnectionError("the server\nis gone")
        self.told.append(step)

    def close(self, finished: bool) -> None:
        raise AssertionError("it was given up before")


def test_a_tracker_that_fails_ends_no_run(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fedcc.experiments.tracking.TRACKERS, "wandb", (Broken, ()))
    done = call(capsys, *RUN, "--track", "wandb")
    assert done.code == 0
    assert done.err == "fedcc: warning: no longer logging to wandb: ConnectionError: the server is gone\n"
    assert len(RunFolder(Path("r")).metrics()) == ROUNDS


def test_a_tracker_that_cannot_be_opened_ends_no_run_either(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    Path("file").touch()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    done = call(capsys, "run", "local", *QUICK, "--epochs", 0, "--out", "r", "--track", "mlflow")
    assert done.code == 0
    assert done.err.count("warning: no longer logging to mlflow") == 2
    assert (Path("r") / "summary.json").is_file()


def test_a_run_that_is_stopped_is_closed_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    class Told(Broken):
        def close(self, finished: bool) -> None:
            closed.append(finished)

    monkeypatch.setitem(fedcc.experiments.tracking.TRACKERS, "wandb", (Told, ()))
    experiment = Experiment.resolve("local", device="cpu")

    interrupted, whole = (Trackers(("wandb",), experiment, tmp_path, print) for _ in range(2))
    interrupted.round(finished(round=1))
    interrupted.end(None)
    whole.round(finished(round=1))
    whole.round(finished(round=3))
    whole.end(a_result())
    assert closed == [False, True]
    found = json.loads((tmp_path / "tracking.json").read_text())
    assert found == {"wandb": {"step": 3}, "sha256": found["sha256"]}


def test_a_damaged_memory_is_said_and_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Quiet(Broken):
        def close(self, finished: bool) -> None: ...

    monkeypatch.setitem(fedcc.experiments.tracking.TRACKERS, "wandb", (Quiet, ()))
    experiment, said = Experiment.resolve("local", device="cpu"), list[str]()
    path = tmp_path / "tracking.json"
    for content in ('{"wandb": {"step": 7', '{"wandb": {"step": 9}, "sha256": "0"}', "[]"):
        path.write_text(content)
        trackers = Trackers(("wandb",), experiment, tmp_path, said.append)
        trackers.round(finished(round=1))
        trackers.end(None)
        assert f"{path} is damaged" in said.pop()
        assert json.loads(path.read_text())["wandb"] == {"step": 1}
    assert said == []


def test_flat() -> None:
    assert flat({"a": 1, "b": {"c": None, "d": [2]}}) == {"a": 1, "b.c": None, "b.d": [2]}
