"""The gate's rules, one by one; with real Flower behind it: integration/test_flower_gate.py."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fedcc.flower import gate
from fedcc.flower.gate import FLEET, LARGEST, Gate, is_owned_by, parse_address

PUBLIC, PRIVATE = ("10.0.0.1", 9092), ("127.0.0.1", 4444)
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux's kernel")


def answer(scope: dict[str, Any]) -> tuple[int, str]:
    """What the gate says, or (200, "passed")."""
    told: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"passed"})

    async def send(message: Any) -> None:
        told.append(message)

    asyncio.run(Gate(app, PRIVATE[1])(scope, None, send))  # type: ignore[arg-type]
    return told[0]["status"], told[1]["body"].decode()


def request(path: str, length: str | None = "0", **changes: Any) -> dict[str, Any]:
    headers = [] if length is None else [(b"content-length", length.encode())]
    about = {"type": "http", "method": "POST", "path": path, "headers": headers, "server": PUBLIC,
             "client": ("10.0.0.7", 5555)}  # fmt: skip
    return about | changes


def test_the_fleets_routes_pass() -> None:
    assert len(FLEET) == 10
    assert {answer(request(path)) for path in FLEET} == {(200, "passed")}


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/fleet/register-node", "/v1/fleet/unregister-node",
                                  "/v1/runtime/acquire-task", "/v1/fleet", "/v1/fleet/", "", "/v1/fleet/get-run/",
                                  "/v1/fleet//get-run", "/v1/fleet/get-run/../../control/start-run", "*"])  # fmt: skip
def test_all_others_do_not(path: str) -> None:
    status, reason = answer(request(path))
    assert (status, "only routes of the fleet" in reason) == (403, True)


def test_only_posts_of_a_known_and_bounded_length() -> None:
    assert answer(request("/v1/fleet/get-run", method="GET"))[0] == 403
    assert answer(request("/v1/fleet/push-object", str(LARGEST)))[0] == 200
    assert answer(request("/v1/fleet/push-object", str(LARGEST + 1))) == (
        413, "a request may have at most 33,554,432 bytes, got 33,554,433")  # fmt: skip
    for length in (None, "", "-1", "1e3", "many"):
        assert answer(request("/v1/fleet/push-object", length))[0] == 411


def test_nothing_but_requests() -> None:
    with pytest.raises(PermissionError, match="no websocket"):
        answer(request("/v1/fleet/get-run", type="websocket"))


@linux
def test_the_private_port_serves_the_owner_everything_and_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = request("/v1/control/start-run", None, method="GET", server=PRIVATE)
    monkeypatch.setattr(gate, "is_owned_by", lambda *given: given == (scope["client"], PRIVATE, os.getuid()))
    assert answer(scope) == (200, "passed")
    monkeypatch.setattr(gate, "is_owned_by", lambda *_: False)
    assert answer(scope)[0] == 403
    assert answer(request("/v1/fleet/get-run", server=PRIVATE))[0] == 403


@contextmanager
def connected(family: int, host: str, target: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.socket(family if ":" in host else socket.AF_INET) as listener, socket.socket(family) as client:
        listener.bind((host, 0))
        listener.listen()
        client.connect((target, listener.getsockname()[1]))
        server, _ = listener.accept()
        with server:
            yield client, server


@linux
@pytest.mark.parametrize(("family", "host", "target"), [
    (socket.AF_INET, "127.0.0.1", "127.0.0.1"), (socket.AF_INET6, "::1", "::1"),
    (socket.AF_INET6, "127.0.0.1", "::ffff:127.0.0.1"),
])  # fmt: skip
def test_whose_connection_it_is(family: int, host: str, target: str) -> None:
    try:
        with connected(family, host, target) as (client, server):
            ends = server.getpeername(), server.getsockname()
            assert is_owned_by(*ends, os.getuid())
            assert not is_owned_by(*ends, os.getuid() + 1)
            assert not is_owned_by(("127.0.0.1", 1), ends[1], os.getuid())
            client.close()  # the kernel lists it as root's now
            assert not is_owned_by(*ends, os.getuid())
            assert not is_owned_by(*ends, 0)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


def test_addresses() -> None:
    assert parse_address("localhost:9092") == ("localhost", 9092)
    for wrong in ("9092", ":9092", "host:", "host:0", "host:65536", "host:port"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            parse_address(wrong)


def test_commands_start_the_file_itself() -> None:
    command = gate.superlink_command("0.0.0.0:9092", "--host", "127.0.0.1")
    assert command[1:] == ["-P", gate.__file__, "superlink", "--public", "0.0.0.0:9092", "--host", "127.0.0.1"]
