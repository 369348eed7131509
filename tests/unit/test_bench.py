"""The parts of ``fedcc bench``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedcc.experiments import bench
from fedcc.experiments.bench_networks import BENCH_RUNS, BenchNetwork, BenchRun
from fedcc.nets.small import Mlp
from program import call


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

    monkeypatch.setattr(bench, "engines", lambda *_: {"plain fp32": Engine})
    monkeypatch.setattr(bench, "work", lambda *_: [None])
    row = next(
        bench.bench(bench.Setup(torch.device("cuda"), "fp32", 1, 4, "none", 8), [1], BenchNetwork("mlp", Mlp(3072)))
    )
    assert (row.busy, row.memory) == (90, 1)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), ["plain fp32", "fused fp32, library kernels"]),
        ((8, 0), ["plain fp32", "plain bf16", "fused bf16, library kernels", "fused bf16, own kernels"]),
    ],
)
def test_an_old_gpu_is_measured_in_the_format_that_runs_use_there(
    capability: tuple[int, int],
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[str] = []

    def fused(device: object, precision: str, kernels: bool = True) -> SimpleNamespace:  # noqa: ARG001
        return SimpleNamespace(kernels=kernels and precision == "bf16")

    def measure(setup: bench.Setup, *_: object) -> Iterator[bench.Row]:
        found.extend(bench.engines(setup.device, setup.usual))
        return iter(())

    monkeypatch.setattr(bench, "Fused", fused)
    monkeypatch.setattr(bench, "bench", measure)
    monkeypatch.setattr("fedcc.engine.choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("fedcc.experiments.environment.environment", lambda *_: {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    done = call(capsys, "bench", "--json")
    assert found == expected
    assert json.loads(done.out)["settings"]["precision"] == expected[-1][6:10]
    assert ("Tesla T4 has no bf16; fp32 is used" in done.err) == (expected[-1][6:10] == "fp32")


def test_runs_are_timed_and_one_that_is_too_long_for_a_cpu_is_skipped_with_a_word() -> None:
    setup = bench.Setup(torch.device("cpu"), "fp32", 1, 64, "standard", 8)
    small = BenchRun("fedavg", "dirichlet:0.5", clients=20, participation=0.1, epochs=1, model="mlp4", images=400)
    endless = BenchRun("fedcc", "classes:1", images=10**12)
    unknown = BenchRun("fedagv", "classes:1", epochs=0, model="mlp4", images=400)
    done, skipped, failed = bench.bench_runs(setup, [small, endless, unknown])
    assert 0 < (done.round or 0) < (done.total or 0)
    assert not done.reason
    assert str(done.run) == "fedavg, dirichlet:0.5, 20 clients (10% in each round), T=2, E=1"
    assert skipped.reason.startswith("skipped: about")
    assert skipped.total is None
    assert "did you mean 'fedavg'" in failed.reason


def test_the_largest_run_has_samples_for_each_client() -> None:
    largest = max(BENCH_RUNS, key=lambda own: own.clients)
    sizes = [len(samples) for samples in largest.federation("none").private]
    assert (len(sizes), min(sizes), max(sizes)) == (10_000, 4, 6)
