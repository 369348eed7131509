"""The parts of ``fedcc bench``."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedcc.experiments import bench


def test_busy_is_read_after_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool reads 5 % until the third call of an engine has begun, then 90 %, of the device that is measured."""
    warm, tool = tmp_path / "warm", tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\n[ "$1" = --id=GPU-7 ] || exit 1\n[ -e {warm} ] && echo 90 || echo 5\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="7"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 2**30)
    calls = []

    class Engine:
        def serve(self, requests: list[object]) -> None:
            calls.append(len(requests))
            if len(calls) > 2:
                warm.touch()

    monkeypatch.setattr(bench, "engines", lambda _: {"plain fp32": Engine})
    monkeypatch.setattr(bench, "work", lambda *_: [None])
    row = next(bench.bench(torch.device("cuda"), [1], 1, "resnet8", 4, "none"))
    assert (row.busy, row.memory) == (90, 1)
