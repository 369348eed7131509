"""Those who have no business with a federation, at the door of a real ``fedcc federation server``.

``test_flower_gate.py`` goes through every route; here is what an outsider would try with the programs there are.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx

from fedcc.flower.programs import FlowerError, environment, flwr, is_listening
from federation import Real, make, real
from program import descendants, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder = tmp_path_factory.mktemp("outsiders")
    made = make(folder / "f", "fedcc", ("north", "east"), skew="iid")
    make(folder / "other", "fedcc", ("north", "east"), skew="iid")
    with real(made, folder / "programs") as running:
        running.server()
        yield running


def copied(federation: Real, path: Path, **other: str) -> Path:
    """The folder of north's site; these files are another federation's, or missing."""
    made = federation.folder.path
    shutil.copytree(made / "sites" / "north", path, ignore=shutil.ignore_patterns("state"))
    for name, origin in other.items():
        file = path / name.replace("_", ".")
        file.unlink()
        if origin == "other":
            shutil.copy(made.parent / "other" / "sites" / "north" / file.name, file)
    return path


def client(federation: Real, site: Path) -> Any:
    return federation.start(f"outsider-{site.name}", "client", site, "--data", site / "data.npz", "--device", "cpu")


def operators(federation: Real, *words: str) -> dict[str, Any]:
    """What the operator is told, who alone may ask."""
    return flwr([*words, "fedcc"], environment(federation.folder.operator / "home"))


def test_without_the_cas_certificate_nobody_connects(federation: Real, tmp_path: Path) -> None:
    url = f"https://localhost:{federation.folder.port}/v1/fleet/activate-node"
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.post(url)
    with pytest.raises(httpx.HTTPError):  # nor without TLS
        httpx.post(url.replace("https", "http"))
    done = client(federation, copied(federation, tmp_path / "north", ca_crt="missing")).end(60)
    done.failed("ca.crt", code=2)


def test_a_server_of_another_ca_is_refused_by_the_client(federation: Real, tmp_path: Path) -> None:
    done = client(federation, copied(federation, tmp_path / "north", ca_crt="other")).end(60)
    done.failed("does not show a certificate of this federation")


def test_a_key_that_is_not_registered_does_not_take_part(federation: Real, tmp_path: Path) -> None:
    running = client(federation, copied(federation, tmp_path / "north", site_key="other"))
    wait_until(lambda: "the server does not know this site's key" in federation.said(running))
    federation.end(running)
    assert "connected" not in federation.said(running)
    assert {n["status"] for n in operators(federation, "supernode", "list")["nodes"]} <= {"registered"}


def test_with_the_cas_certificate_alone_nobody_starts_a_run_or_registers_a_client(
    federation: Real, tmp_path: Path
) -> None:
    made = federation.folder
    before = operators(federation, "supernode", "list")["nodes"], operators(federation, "list")["runs"]
    assert len(before[0]) == 2
    home = tmp_path / "home"
    home.mkdir()
    authority = made.path / "sites" / "north" / "ca.crt"
    (home / "config.toml").write_text(
        f'[superlink.fedcc]\naddress = "localhost:{made.port}"\nroot-certificates = "{authority}"\n'
    )
    key = made.path.parent / "other" / "operator" / "keys" / "north.pub"
    for words in (
        ("run", str(made.operator / "app"), "fedcc"),  # the very app that sites run
        ("supernode", "register", str(key), "fedcc"),
        ("supernode", "list", "fedcc"),
        ("list", "fedcc"),
    ):
        with pytest.raises(FlowerError, match="403"):
            flwr([*words], environment(home))
    context = ssl.create_default_context(cafile=str(authority))
    for path in ("control/start-run", "control/register-node", "runtime/acquire-task"):
        answer = httpx.post(f"https://localhost:{made.port}/v1/{path}", verify=context)
        assert (answer.status_code, "only routes of the fleet" in answer.text) == (403, True)
    assert (operators(federation, "supernode", "list")["nodes"], operators(federation, "list")["runs"]) == before


def test_and_a_client_of_the_federation_is_let_in(federation: Real) -> None:
    """Last: none of the above was refused because nobody is."""
    running = federation.client("north")
    wait_until(lambda: "connected" in federation.said(running), 90)
    assert "online" in {n["status"] for n in operators(federation, "supernode", "list")["nodes"]}


def test_who_takes_a_sites_port_gets_no_request_of_its_processes(federation: Real) -> None:
    """When a SuperNode ends, any user can take its port; Flower's processes would run the app that they get there."""
    site = federation.client("east")
    wait_until(lambda: "connected" in federation.said(site), 90)
    for pid in descendants(site.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"supernode" in words:
            break
    port = int(words[words.index(b"--port") + 1])
    os.kill(pid, signal.SIGKILL)
    heard, end = list[bytes](), time.monotonic() + 5
    wait_until(lambda: not is_listening("127.0.0.1", port), 10)
    with socket.create_server(("127.0.0.1", port)) as thief:
        thief.settimeout(0.2)
        while time.monotonic() < end:
            with suppress(TimeoutError):
                caller, _ = thief.accept()
                with caller:
                    caller.settimeout(2)
                    heard.append(caller.recv(1000))
    assert not [said for said in heard if b"/v1/" in said], heard
    print(f"{len(heard)} calls")
