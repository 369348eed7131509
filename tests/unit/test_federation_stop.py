"""What the server's app leaves behind when it ends early, and what a second run does."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from filelock import FileLock

from fedcc.flower import server_app, superlink
from fedcc.flower.folder import ENVIRONMENT, FederationFolder
from fedcc.flower.members import revoke_client
from fedcc.flower.programs import FlowerError
from federation import make
from program import call


@pytest.mark.parametrize(
    ("error", "problem", "level"),
    [
        (SystemExit(0), "it was asked to stop", "INFO"),  # so Flower ends a run on Ctrl-C
        (SystemExit(7), "SystemExit: 7", "ERROR"),
        (ValueError("no disk"), "no disk", "ERROR"),
        (OSError("no disk"), "OSError: no disk", "ERROR"),
    ],
)
def test_a_run_that_ends_early_says_why(
    error: BaseException, problem: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: Any) -> None:
        raise error

    folder = make(tmp_path / "f")
    monkeypatch.setenv(ENVIRONMENT, str(folder.path))
    monkeypatch.setattr(server_app, "end_with_parent", lambda: None)
    monkeypatch.setattr(server_app, "GridTransport", lambda *_: None)
    monkeypatch.setattr(server_app, "FlowerServer", lambda *_: SimpleNamespace(train=end))
    context: Any = SimpleNamespace(run_id=5, run_config={"run": "r", "task": "train"})
    grid: Any = None
    with pytest.raises(type(error)):
        server_app.main(grid, context)
    status = json.loads((folder.operator / "status.json").read_text())
    assert (status["state"], status["problem"]) == ("stopped", problem)
    assert f" {level} stopped: " in (folder.operator / "run.log").read_text()


@pytest.mark.parametrize(("task", "resumes"), [("train", True), ("predict", False)])
def test_only_a_run_is_said_to_resume(
    task: str, resumes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "f")
    (folder.operator / "home").mkdir()

    def stopped(*_: Any) -> str:
        (folder.operator / "status.json").write_text('{"state": "stopped", "problem": "no disk"}')
        return ""

    monkeypatch.setattr(superlink, "run_name", lambda _: "r")
    monkeypatch.setattr(superlink, "flwr", stopped)
    with pytest.raises(FlowerError, match="no disk") as error:
        superlink._run_app(folder, task, folder.operator, print)
    assert ("resumes" in str(error.value)) == resumes


def finished(path: Path) -> FederationFolder:
    """A federation with the files of a finished run, as far as they matter here."""
    folder = make(path, models="mlp")
    folder.run.mkdir()
    for name in ("summary.json", "models.json", "metrics.jsonl", "experiment.toml", "checkpoint-2-0a.safetensors"):
        (folder.run / name).write_text("{}")
    (folder.operator / "run.json").write_text('{"run": "0123456789abcdef"}')
    return folder


def contents(folder: FederationFolder) -> dict[str, bytes]:
    files = (*folder.run.iterdir(), folder.operator / "run.json", folder.path / "experiment.toml")
    return {path.name: path.read_bytes() for path in files}


def test_a_run_that_cannot_start_replaces_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a server, and with one that serves another account, such as when root forgets whose federation it is."""
    folder = finished(tmp_path / "f")
    before = contents(folder)
    call(capsys, "federation", "run", folder.path, "--overwrite").refused("the server is not running")
    assert contents(folder) == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(superlink, "is_serving", lambda _: True)
        call(capsys, "federation", "run", folder.path, "--overwrite").failed("the server cannot be asked")
    assert contents(folder) == before


@pytest.mark.parametrize(("lock", "overwrite", "said"), [
    ("start.lock", False, "a run or a prediction is in progress"), ("start.lock", True, "is in progress"),
    ("run.lock", True, "an earlier run is still in progress: `fedcc federation run` follows it"),
])  # fmt: skip
def test_a_second_run_is_refused_and_changes_nothing(
    lock: str, overwrite: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the first one's status for its own, and had the last step done again."""
    folder = finished(tmp_path / "f")
    (folder.run / "summary.json").unlink()
    (folder.operator / "status.json").write_text('{"state": "running"}')
    before = contents(folder)
    monkeypatch.setattr(superlink, "check_server", lambda _: None)
    monkeypatch.setattr(superlink, "ENDING_SECONDS", 0.1)
    with FileLock(folder.operator / lock), pytest.raises(FlowerError, match=said):
        superlink.train(folder, overwrite, lambda *_: None)
    assert contents(folder) == before
    assert (folder.operator / "status.json").exists()


@pytest.mark.parametrize("finishes", [False, True])
def test_a_run_whose_program_was_killed_is_followed_and_not_done_again(
    finishes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step would ask the sites again, which uses up their limits. One that ends early is resumed."""
    folder, started, said = make(tmp_path / "f", models="mlp"), list[str](), list[str]()
    summaries = iter([None, {"accuracy": {"final": 7.0}} if finishes else None, {"accuracy": {"final": 7.0}}])
    monkeypatch.setattr(superlink.RunFolder, "summary", lambda _: next(summaries))
    monkeypatch.setattr(superlink, "check_server", lambda _: None)
    monkeypatch.setattr(superlink, "_run_app", lambda _, task, *__: started.append(task))
    running = FileLock(folder.operator / "run.lock", thread_local=False)
    running.acquire()

    def end() -> None:
        (folder.operator / "run.log").write_text("the last round is done\n")
        time.sleep(0.5)
        running.release()

    threading.Timer(0.3, end).start()
    assert superlink.train(folder, False, lambda line, *_: said.append(line)) == 7.0
    assert started == ([] if finishes else ["train"])
    assert said == ["an earlier run is still in progress: waiting for its end", "the last round is done"]


def test_a_signal_stops_a_run_that_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, stopped = make(tmp_path / "f", models="mlp"), list[list[str]]()
    (folder.operator / "status.json").write_text('{"state": "running", "flower_run": 5}')
    monkeypatch.setattr(superlink, "check_server", lambda _: None)
    monkeypatch.setattr(superlink, "flwr", lambda words, _: stopped.append(words))

    def interrupt(line: str, *_: Any) -> None:
        if "still in progress" in line:
            raise KeyboardInterrupt

    with FileLock(folder.operator / "run.lock"), pytest.raises(KeyboardInterrupt):
        superlink.train(folder, False, interrupt)
    assert stopped == [["stop", "5", "fedcc"]]


def test_a_run_whose_folder_is_gone_begins_under_a_new_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the old one the sites have trained models, from which they would start."""
    folder = finished(tmp_path / "f")
    monkeypatch.setattr(superlink, "check_server", lambda _: None)
    monkeypatch.setattr(superlink, "_run_app", lambda *_: None)
    shutil.rmtree(folder.run)
    superlink.train(folder, False, lambda *_: None)
    assert superlink.run_name(folder) != "0123456789abcdef"


def test_a_run_starts_with_the_files_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was changed since its program has read them is not undone."""
    folder = make(tmp_path / "f", models="mlp")
    revoke_client(folder, "east")
    settings = folder.path / "federation.toml"
    settings.write_text(settings.read_text().replace("grace = 5.0", "grace = 7.0"))
    monkeypatch.setattr(superlink, "check_server", lambda _: None)
    monkeypatch.setattr(superlink, "_run_app", lambda *_: None)
    superlink.train(folder, False, lambda *_: None)
    now = FederationFolder.open(folder.path)
    assert (now.revoked, now.rules.grace) == (("east",), 7.0)
