"""What the server's app leaves behind when it ends early."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedcc.flower import server_app, superlink
from fedcc.flower.folder import ENVIRONMENT
from fedcc.flower.programs import FlowerError
from federation import make


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
    context: Any = SimpleNamespace(run_config={"run": "r", "task": "train"})
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

    monkeypatch.setattr(superlink, "is_serving", lambda _: True)
    monkeypatch.setattr(superlink, "run_name", lambda _: "r")
    monkeypatch.setattr(superlink, "flwr", stopped)
    with pytest.raises(FlowerError, match="no disk") as error:
        superlink._run_app(folder, task, folder.operator, print)
    assert ("resumes" in str(error.value)) == resumes
