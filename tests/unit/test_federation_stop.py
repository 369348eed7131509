"""What the server's app leaves behind when it ends early."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedcc.flower import server_app
from fedcc.flower.folder import ENVIRONMENT
from federation import make


@pytest.mark.parametrize(
    ("error", "problem", "level"),
    [
        (SystemExit(0), "it was asked to stop", "INFO"),  # so Flower ends a run on Ctrl-C
        (SystemExit(7), "SystemExit: 7", "ERROR"),
        (ValueError("no disk"), "ValueError: no disk", "ERROR"),
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
