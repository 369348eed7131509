"""A federation as an operator watches it: /healthz, /metrics, JSON logs, who is connected; and many clients at once."""

from __future__ import annotations

import json
import os
import signal
import stat
import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import pytest

pytest.importorskip("flwr")

from prometheus_client.parser import text_string_to_metric_families

from fedcc.flower.programs import free_port
from fedcc.flower.superlink import read_status
from federation import make, real
from load import light_clients, processes, spread, starts
from program import wait_until

pytestmark = pytest.mark.slow

LIGHT = 20


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def value(port: int, name: str, **labels: str) -> float:
    """A metric; -1 if it is missing, as while SuperLink is too busy to answer."""
    status, text = get(port, "/metrics")
    if status != 200:
        return -1
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    return -1


def test_a_run_with_many_clients_can_be_watched(tmp_path: Path) -> None:
    """Twenty light clients: nobody waits long for a message, and monitoring sees the run and a SuperLink that dies."""
    names = [f"light{n}" for n in range(LIGHT)]
    folder, port = make(tmp_path / "f", "fedcc", names, rounds=3, skew="iid", fraction=1.0), free_port()
    with real(folder, tmp_path / "programs") as federation:
        server = federation.start("server", "server", folder.path, "--bind", "127.0.0.1", "--metrics",
                                  f"127.0.0.1:{port}", "--log-format", "json")  # fmt: skip
        wait_until(lambda: "ready" in federation.said(server), 120)
        assert get(port, "/healthz") == (200, "healthy\n")
        assert read_status(folder)["connected"] == []
        with light_clients(folder, names) as clients:
            wait_until(lambda: value(port, "fedcc_clients_connected") == LIGHT, 120)
            assert read_status(folder)["connected"] == sorted(names)  # without a run
            run = federation.start("run", "run", folder.path, "--log-format", "json")
            assert run.process.is_alive()
            wait_until(lambda: value(port, "fedcc_round") == 3, 120)
            # all answer the same, and Flower takes an array that the server has from nobody else
            wait_until(lambda: value(port, "fedcc_upload_bytes_total", client="light0") > 0, 30)
            wait_until(lambda: value(port, "fedcc_client_failures_total", client="light0") == 0, 30)
            wait_until(lambda: not run.process.is_alive(), 120)
        lines = [json.loads(line) for line in federation.said(run).splitlines()]
        assert any("round 3 of 3 is done" in line["message"] for line in lines)
        began = [*starts(folder).values()]
        dispatch = spread([at - began[t - 1] for c in clients for t, at in c.received.items()])
        seconds = [json.loads(line)["seconds"]["clients"] for line in (folder.run / "metrics.jsonl").open()]
        print(f"dispatch {dispatch}, rounds {[round(s, 1) for s in seconds]}")
        assert not [problem for client in clients for problem in client.problems]
        assert len(seconds) == 3
        for path in (folder.operator, folder.run):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (superlink,) = processes(federation, b"superlink\0--public")
        os.kill(superlink, signal.SIGSTOP)
        try:
            assert get(port, "/healthz")[0] == 503
        finally:
            os.kill(superlink, signal.SIGCONT)
