"""The gate's rules, one by one; with real Flower behind it: integration/test_flower_gate.py."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from fedcc.flower import door, gate
from fedcc.flower.address import is_host, parse_address, write_address
from fedcc.flower.fleet import ROUTES
from fedcc.flower.gate import Gate, is_owned_by

PUBLIC, PRIVATE = ("10.0.0.1", 9092), ("127.0.0.1", 4444)
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux's kernel")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """All callers are registered clients, node 7, but for those whose header says otherwise."""
    monkeypatch.setattr(Gate, "state", None)
    monkeypatch.setattr(gate, "authenticated_node", lambda headers, _: None if b"stranger" in headers else 7)


def answer(scope: dict[str, Any], body: bytes = b"") -> tuple[int, str]:
    """What the gate says, or (200, "passed") and what the application received."""
    told: list[Any] = []
    chunks = [body[:3], body[3:]]

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert message == {"type": "http.request", "body": body, "more_body": False} or scope["server"] == PRIVATE
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"passed"})

    async def receive() -> Any:
        return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

    async def send(message: Any) -> None:
        told.append(message)

    asyncio.run(Gate(app, PRIVATE[1])(scope, receive, send))
    return told[0]["status"], told[1]["body"].decode()


def request(path: str, length: str | None = "0", **changes: Any) -> dict[str, Any]:
    headers = [] if length is None else [(b"content-length", length.encode())]
    about = {"type": "http", "method": "POST", "path": path, "headers": headers, "server": PUBLIC,
             "client": ("10.0.0.7", 5555)}  # fmt: skip
    return about | changes


def test_a_clients_request_passes_as_it_is() -> None:
    body = b"\x0a\x02\x08\x07"  # node 7
    assert answer(request("/v1/fleet/pull-messages", "4"), body) == (200, "passed")
    assert answer(request("/v1/fleet/activate-node", "4"), body) == (200, "passed")


def test_nothing_is_read_without_a_registered_key() -> None:
    read: list[int] = []

    async def receive() -> Any:
        read.append(1)
        return {"type": "http.request", "body": b"x"}

    async def send(message: Any) -> None:
        told.append(message)

    for path in ROUTES:
        told: list[Any] = []
        scope = request(path, headers=[(b"content-length", b"1"), (b"stranger", b"")])
        asyncio.run(Gate(None, PRIVATE[1])(scope, receive, send))  # type: ignore[arg-type]
        assert told[0]["status"] == (412 if path == "/v1/fleet/activate-node" else 401)
    assert read == []


def test_what_is_not_the_clients_own_business_does_not_pass() -> None:
    assert answer(request("/v1/fleet/pull-messages", "4"), b"\x0a\x02\x08\x08")[0] == 401
    assert answer(request("/v1/fleet/push-messages", "4"), b"\x0a\x02\x08\x07")[0] == 403


def test_a_body_has_the_length_that_its_header_states() -> None:
    assert answer(request("/v1/fleet/activate-node", "5"), b"abcd")[0] == 400


def test_a_body_beyond_its_stated_length_is_not_read() -> None:
    """HTTP lets chunks count instead of the length that a header states: a client could fill the memory with them."""
    read: list[int] = []

    async def receive() -> Any:
        read.append(1)
        assert len(read) < 10, "it reads on and on"
        return {"type": "http.request", "body": bytes(1000), "more_body": True}

    async def send(message: Any) -> None:
        told.append(message)

    told: list[Any] = []
    asyncio.run(Gate(None, PRIVATE[1])(request("/v1/fleet/push-object", "1500"), receive, send))  # type: ignore[arg-type]
    assert (told[0]["status"], len(read)) == (400, 2)
    chunked = [(b"content-length", b"4"), (b"transfer-encoding", b"chunked")]
    assert answer(request("/v1/fleet/activate-node", headers=chunked), b"abcd")[0] == 411


def test_a_body_comes_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends it slowly would keep the memory that it was given."""
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.05)
    told: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(10)

    async def send(message: Any) -> None:
        told.append(message)

    async def scene() -> None:
        own = Gate(None, PRIVATE[1])  # type: ignore[arg-type]
        await own(request("/v1/fleet/push-object", "1000"), receive, send)
        assert own.line.bytes.total() == own.line.requests.total() == 0, "others have the room again"
        assert own.counts.refused == {"slow": 1}

    asyncio.run(scene())
    assert told[0]["status"] == 408
    assert told[1]["body"] == b"a request of 1,000 bytes must arrive within 0 s"


def test_a_client_that_is_refused_again_and_again_has_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading large requests only to refuse them would keep the server from others."""
    passed, read, told = list[int](), list[int](), list[Any]()
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(door, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(gate, "authenticated_node", lambda headers, _: 8 if b"other" in headers else 7)

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        passed.append(1)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        told.append(message)

    async def scene() -> None:
        own = Gate(app, PRIVATE[1])

        async def status(path: str, body: bytes, **changes: Any) -> int:
            async def receive() -> Any:
                read.append(1)
                return {"type": "http.request", "body": body}

            told.clear()
            clock.now += 0.1
            await own(request(f"/v1/fleet/{path}", "4", **changes), receive, send)
            return int(told[0]["status"])

        bad, good, other = b"\x0a\x02\x08\x09", b"\x0a\x02\x08\x07", [(b"content-length", b"4"), (b"other", b"")]
        for n in range(3 * door.REFUSALS):  # an honest client is refused now and then
            clock.now += door.REFUSALS_SECONDS / (door.REFUSALS - 2)
            assert await status("pull-messages", bad) == 401, n
        assert await status("pull-messages", good) == 200
        clock.now += door.REFUSALS_SECONDS
        for _ in range(door.REFUSALS):
            last = await status("pull-messages", bad)
        assert last == 401
        read.clear()
        for _ in range(3):
            assert await status("pull-messages", bad) == 503, "a SuperNode would end at 429"
            assert await status("pull-messages", good) == 503
        assert told[1]["body"] == b"30 requests of this client were refused in a minute; try again in 59 s"
        assert read == []
        assert await status("activate-node", b"abcd", headers=other) == 200, "others do not wait"
        clock.now += door.REFUSALS_SECONDS
        assert await status("pull-messages", good) == 200
        assert await status("pull-messages", bad) == 401
        assert await status("pull-messages", good) == 200
        assert own.counts.refused["repeated"] == 6
        assert own.refusals.total == {7: 4 * door.REFUSALS + 1}

    asyncio.run(scene())


def test_a_header_that_is_there_twice_is_refused() -> None:
    """The gate reads the last one, Flower the first."""
    twice = [(b"content-length", b"4"), (b"flwr-public-key", b"one"), (b"flwr-public-key", b"other")]
    status, reason = answer(request("/v1/fleet/activate-node", headers=twice), b"abcd")
    assert (status, "each header once" in reason) == (400, True)


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/fleet/register-node", "/v1/fleet/unregister-node",
                                  "/v1/runtime/acquire-task", "/v1/fleet", "/v1/fleet/", "", "/v1/fleet/get-run/",
                                  "/v1/fleet//get-run", "/v1/fleet/get-run/../../control/start-run", "*"])  # fmt: skip
def test_all_others_do_not(path: str) -> None:
    status, reason = answer(request(path))
    assert (status, "only routes of the fleet" in reason) == (403, True)


def test_only_posts_of_a_known_and_bounded_length() -> None:
    assert answer(request("/v1/fleet/get-run", method="GET"))[0] == 403
    assert answer(request("/v1/fleet/push-object", str(6 * 2**20 + 1))) == (
        413, "a request may have at most 6,291,456 bytes here, got 6,291,457")  # fmt: skip
    assert answer(request("/v1/fleet/get-run", str(2**16 + 1)))[0] == 413
    for length in (None, "", "-1", "1e3", "many", "9" * 5000):
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
    for host in ("localhost", "fed.example.org", "my_server", "1password.com", "10.0.0.1", "::1", "fe80::1"):
        assert is_host(host)
        assert parse_address(write_address(host, 9092)) == (host, 9092)
    assert parse_address("::1:9092") == ("::1", 9092), "as older versions wrote it"
    for wrong in (
        *("9092", ":9092", "host:", "host:0", "host:65536", "host:port", "host", "fed.example.org", "::1", "[]:1"),
        *("https://host:9092", "host/:9092", "ho st:9092", "host:9092:9092", "host:\u0661", "10.0.0.256:1"),
    ):
        with pytest.raises(ValueError, match="HOST:PORT"):
            parse_address(wrong)
    for wrong in (
        *("", "host:9092", "[::1]", "[::1", "-host", "a..b", "host.", "10.0.0", "*.example.org", "fed\u00e9.org"),
        *("fe80::1%eth0", "a" * 64, "a." * 127 + "bc"),
    ):
        assert not is_host(wrong)


def test_commands_start_the_file_itself() -> None:
    command = gate.superlink_command("0.0.0.0:9092", "--host", "127.0.0.1")
    assert command[1:] == ["-P", gate.__file__, "superlink", "--public", "0.0.0.0:9092", "--host", "127.0.0.1"]


def test_a_supernodes_port_has_a_certificate_or_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one its own processes would take an app from whoever takes the port when the SuperNode has ended."""
    flower = pytest.importorskip("flwr.supernode.cli.flower_supernode")
    uvicorn = pytest.importorskip("uvicorn")
    mends = pytest.importorskip("fedcc.flower.mends")
    monkeypatch.setattr(uvicorn, "Config", uvicorn.Config)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(mends, "mend_flower", lambda: None)
    for options in ({}, {"ssl_certfile": None, "ssl_keyfile": None}):
        monkeypatch.setattr(
            flower, "flower_supernode", lambda o=options: uvicorn.Config(None, host="127.0.0.1", port=1, **o)
        )
        with pytest.raises(ValueError, match="a SuperNode needs a certificate"):
            gate.supernode([])
