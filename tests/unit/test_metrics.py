"""``/healthz`` and ``/metrics`` over real sockets; with a real server: integration/test_federation_operate.py."""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from prometheus_client.parser import text_string_to_metric_families

from fedcc.flower import metrics as module
from fedcc.flower.folder import FederationFolder
from fedcc.flower.gate_report import Report
from fedcc.flower.keys import public_bytes
from fedcc.flower.metrics import MetricsListener, Watch
from fedcc.flower.programs import close_to_others, free_port
from federation import make
from program import call

ODD = 'n"or\\th'  # not a name that `init` accepts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> FederationFolder:
    made = make(tmp_path_factory.mktemp("metrics") / "f", names=("north", "east"), skew="iid")
    made.run.mkdir()
    line = {"round": 1, "present": [0], "seconds": {"clients": 2.5}, "bytes": {"up": 300, "down": 200},
            "federation": {"failed": {"east": "x"}, "refused": {}}}  # fmt: skip
    (made.run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return made


@pytest.fixture
def watch(folder: FederationFolder, monkeypatch: pytest.MonkeyPatch) -> Watch:
    status = {"state": "running", "round": 1, "rounds": 3, "accuracy": None, "clients": {ODD: {"aside": True}}}
    key = public_bytes(folder.key("north"))
    report = Report(frozenset({key}), {key: 4096}, {key: 3}, {"key": 7}, {"slow": 2}, 5)
    monkeypatch.setattr(module.Report, "fetch", lambda *_: report)
    monkeypatch.setattr(module, "FRESH_SECONDS", -1.0)
    return Watch(folder, 1, lambda: status, os.getpid())


@pytest.fixture
def port(watch: Watch) -> Iterator[int]:
    port = free_port()
    listener = MetricsListener(f"127.0.0.1:{port}", watch)
    try:
        yield port
    finally:
        listener.close()


def ask(port: int, request: bytes) -> tuple[int, str]:
    """The status and body of the response to a request."""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(request)
        text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    return int(text.split()[1]), text.partition("\r\n\r\n")[2]


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    return ask(port, f"{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())


def samples(text: str) -> dict[tuple[str, str], float]:
    """Prometheus' own parser reads the text: name and label of each value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, "".join(sample.labels.values())] = sample.value
    return found


def test_metrics_are_what_prometheus_reads(port: int) -> None:
    status, text = get(port, "/metrics")
    values = samples(text)
    assert status == 200
    assert (values["fedcc_run_state", "running"], values["fedcc_run_state", "finished"]) == (1, 0)
    assert (values["fedcc_round", ""], values["fedcc_rounds", ""]) == (1, 3)
    assert values["fedcc_round_seconds", ""] == 2.5
    assert values["fedcc_round_bytes_total", "up"] == 300
    assert (values["fedcc_client_failures_total", "east"], values["fedcc_client_failures_total", "north"]) == (1, 0)
    assert (values["fedcc_client_connected", "north"], values["fedcc_client_connected", "east"]) == (1, 0)
    assert values["fedcc_upload_bytes_total", "north"] == 4096
    assert values["fedcc_client_refused_requests_total", "north"] == 3
    assert values["fedcc_client_refused_requests_total", "east"] == 0
    assert (values["fedcc_refused_requests_total", "key"], values["fedcc_ended_connections_total", "slow"]) == (7, 2)
    assert values["fedcc_client_aside", ODD] == 1
    assert values["fedcc_process_resident_memory_bytes", "server"] > 2**20
    assert values["fedcc_certificate_expiry_timestamp_seconds", "server"] > time.time() + 180 * 86_400
    assert values["fedcc_superlink_up", ""] == 1


def test_health_names_what_is_wrong(port: int, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    assert get(port, "/healthz") == (200, "healthy\n")
    assert not (watch.folder.operator / ".healthz").exists()

    def silent(*_: Any) -> Report:
        raise ConnectionRefusedError(111, "Connection refused")

    def full(_: Path) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.Report, "fetch", silent)
    status, text = get(port, "/healthz")
    assert (status, text) == (503, "SuperLink does not answer: [Errno 111] Connection refused\n")
    assert samples(get(port, "/metrics")[1])["fedcc_superlink_up", ""] == 0
    monkeypatch.setattr(module, "open_whole", full)
    status, text = get(port, "/healthz")
    assert status == 503
    assert "operator/ is not writable: No space left on device\n" in text


def test_the_listener_only_reads(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "x"):
        assert get(port, "/metrics", method)[0] == 405
    assert get(port, "/healthz", "HEAD") == (200, "")
    for path in ("/", "/v1/fleet/pull-object", "/metrics/../x", "//metrics"):
        assert get(port, path)[0] == 404
    assert ask(port, b"hello\r\n\r\n")[0] == 400
    assert ask(port, b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 4000)[0] == 431
    monkeypatch.setattr(module, "HEAD_SECONDS", 0.2)
    assert ask(port, b"GET /metrics HTTP/1.1\r\n")[0] == 408


def test_there_is_a_limit_of_connections(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECTIONS", 2)
    held = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(2)]
    with socket.create_connection(("127.0.0.1", port), 10) as more:
        assert more.recv(10) == b""
    for connection in held:
        connection.close()


def test_a_port_that_is_taken_is_an_error(port: int, watch: Watch) -> None:
    with pytest.raises(ValueError, match=f"--metrics cannot listen on 127.0.0.1:{port}"):
        MetricsListener(f"127.0.0.1:{port}", watch)


def test_what_a_federations_programs_write_is_closed_to_others(tmp_path: Path) -> None:
    folder, before = tmp_path / "state", os.umask(0o022)
    try:
        folder.mkdir()
        close_to_others(folder, tmp_path / "not there")
        (folder / "file").write_text("")
        (tmp_path / "new").mkdir()
    finally:
        os.umask(before)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (folder, folder / "file", tmp_path / "new")] == [
        0o700,
        0o600,
        0o700,
    ]


def test_status_names_clients_whose_requests_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "f", names=("north", "east"), skew="iid", models="mlp")
    keys = {name: public_bytes(folder.key(name)) for name in ("north", "east")}
    (folder.operator / "server.json").write_text(json.dumps({"pid": 1, "port": 1, "inner": 1}))
    report = Report(frozenset({keys["north"]}), {}, {keys["north"]: 29, keys["east"]: 4000}, {}, {}, 5)
    monkeypatch.setattr(module.Report, "fetch", lambda *_: report)
    monkeypatch.setattr("fedcc.flower.superlink.is_serving", lambda _: True)
    said = call(capsys, "federation", "status", folder.path).out
    assert "warning: east: 4,000 of its requests were refused since the server started" in said
    assert "north:" not in said, "an honest client is refused now and then"
    state = json.loads(call(capsys, "federation", "status", folder.path, "--json").out)
    assert (state["connected"], state["refusals"]) == (["north"], {"north": 29, "east": 4000})
