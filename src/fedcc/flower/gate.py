"""The gate: who may call which of Flower's routes, and why, is in docs/federation.md, "Who may do what".

This module starts Flower's SuperLink on two addresses: the public one serves the fleet's routes and nothing else, the
private one, on loopback, serves everything to processes of the user who started it. A SuperNode gets the same gate on
its loopback port. The gate also adds the signature of the one app that sites run (:mod:`fedcc.flower.keys`).

This file runs by itself and imports nothing of the project, so that Flower's processes do not load torch.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

FLEET = frozenset(
    f"/v1/fleet/{name}"
    for name in ("activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages",
                 "confirm-message-received", "pull-object", "push-object", "get-run", "get-fab")
)  # fmt: skip
"""What a registered client calls; only the operator registers clients."""

LARGEST = 32 * 2**20
"""Bytes of a request. Flower splits arrays into objects of 5 MiB, and reads requests before it checks their keys."""

ESTABLISHED = "01"
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Address = tuple[str, int]


class Gate:
    """An ASGI application in front of another: passes on what its rules allow and refuses the rest."""

    def __init__(self, app: App, private: int, signature: Mapping[str, str] | None = None):
        self.app, self.private, self.signature = app, private, signature  # private: a port, for its owner alone

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("lifespan", "http"):
            raise PermissionError(f"the gate passes no {scope['type']} connections")
        if scope["type"] == "http" and (refusal := self.refusal(scope)):
            from starlette.responses import PlainTextResponse

            status, reason = refusal
            await PlainTextResponse(reason, status, {"connection": "close"})(scope, receive, send)
            return
        signs = self.signature and scope.get("path") == "/v1/fleet/get-fab"
        await self.app(scope, receive, self.signer(send) if signs else send)

    def signer(self, send: Send) -> Send:
        """A ``send`` that adds the signature to the response with the app."""
        from flwr.proto.fab_pb2 import GetFabResponse

        start: list[Message] = []
        body = bytearray()

        async def send_signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.append(message)
                return
            body.extend(message.get("body", b""))
            if message.get("more_body"):
                return
            content = bytes(body)
            if start[0]["status"] == 200:
                answer = GetFabResponse.FromString(content)
                answer.fab.verifications.update(self.signature)
                content = answer.SerializeToString()
            headers = [(n, v) for n, v in start[0]["headers"] if n.lower() != b"content-length"]
            headers.append((b"content-length", str(len(content)).encode()))
            await send({**start[0], "headers": headers})
            await send({"type": "http.response.body", "body": content})

        return send_signed

    def refusal(self, scope: Message) -> tuple[int, str] | None:
        """The status and reason of a refusal, or None."""
        if scope["server"][1] == self.private:
            if is_owned_by(scope["client"], scope["server"], os.getuid()):
                return None
            return 403, "this port is for processes of the user who runs the server"
        if scope["method"] != "POST" or scope["path"] not in FLEET:
            return 403, "only routes of the fleet are served here; the operator's are on the server's own machine"
        length = dict(scope["headers"]).get(b"content-length", b"")
        if not length.isdigit():
            return 411, "a request must state its length"
        if int(length) > LARGEST:
            return 413, f"a request may have at most {LARGEST:,} bytes, got {int(length):,}"
        return None


def is_owned_by(client: Address, server: Address, user: int) -> bool:
    """Whether the client's end of a connection on this machine belongs to the user.

    The kernel's tables list it with its owner while it is open. A closed one would be listed as root's, so its state
    is checked too, and its inode, which is 0 once no process holds it.
    """
    ends = [f"{_hex(host)}:{port:04X}" for host, port in (client[:2], server[:2])]
    mapped_ends = [f"0000000000000000FFFF0000{end}" for end in ends]  # an IPv4 connection through an IPv6 socket
    for table in TABLES:
        for line in table.read_text().splitlines()[1:] if table.exists() else ():  # there may be no IPv6
            column = line.split()
            if column[1:3] in (ends, mapped_ends):
                return column[3] == ESTABLISHED and int(column[7]) == user and column[9] != "0"
    return False


def _hex(host: str) -> str:
    """An address as the kernel's tables write it: words of the machine's own byte order.

    >>> _hex("127.0.0.1") if sys.byteorder == "little" else "0100007F"
    '0100007F'
    """
    packed = ipaddress.ip_address(host.partition("%")[0]).packed
    words = (packed[i : i + 4] for i in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


def parse_address(text: str) -> Address:
    """HOST:PORT.

    >>> parse_address("[::]:9092")
    ('::', 9092)
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"an address is HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)


def superlink_command(public: str, *arguments: str, signature: Path | None = None) -> list[str]:
    """The command of a SuperLink: the fleet's routes at ``public``, HOST:PORT, all routes at a loopback ``--host``."""
    parse_address(public)
    options = ["--signature", str(signature)] if signature else []
    return [sys.executable, "-P", __file__, "superlink", "--public", public, *options, *arguments]


def supernode_command(*arguments: str) -> list[str]:
    """The command of a SuperNode; its ``--host`` is a loopback address."""
    return [sys.executable, "-P", __file__, "supernode", *arguments]


def superlink(public: Address, arguments: list[str], signature: Mapping[str, str] | None) -> None:
    """Run Flower's SuperLink with these arguments behind the gate; its ``--host`` is a loopback address."""
    import uvicorn
    from flwr.superlink.cli.flower_superlink import flower_superlink

    def run(app: Any, *, host: str, port: int, **options: Any) -> None:
        check_loopback(host)
        if port == public[1]:
            raise ValueError(f"the private and the public port must differ, both are {port}")
        # no proxy headers: with them a caller could claim any address
        server = uvicorn.Server(uvicorn.Config(Gate(app, port, signature), proxy_headers=False, **options))
        server.run([listen((host, port)), listen(public)])
        if not server.started:
            sys.exit("the SuperLink did not start")

    # Flower builds the application and passes it to this function; nothing else of Flower is changed
    uvicorn.run = run  # type: ignore[assignment]
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def supernode(arguments: list[str]) -> None:
    """Run Flower's SuperNode with these arguments; the port for its own processes is behind the gate."""
    import uvicorn
    from flwr.supernode.cli.flower_supernode import flower_supernode

    class Config(uvicorn.Config):
        def __init__(self, app: Any, *, host: str, port: int, **options: Any):
            check_loopback(host)
            super().__init__(Gate(app, port), host=host, port=port, proxy_headers=False, **options)

    uvicorn.Config = Config  # type: ignore[assignment,misc]
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family, backlog=2048)


def check_loopback(host: str) -> None:
    if not ipaddress.ip_address(host).is_loopback:
        raise ValueError(f"--host must be a loopback address, got {host}")


def main(arguments: list[str]) -> None:
    if not TABLES[0].exists():
        raise SystemExit(f"the gate reads who calls from {TABLES[0]}: it needs Linux")
    match arguments:
        case ["superlink", "--public", address, "--signature", file, *rest]:
            superlink(parse_address(address), rest, json.loads(Path(file).read_text()))
        case ["superlink", "--public", address, *rest]:
            superlink(parse_address(address), rest, None)
        case ["supernode", *rest]:
            supernode(rest)
        case _:
            raise SystemExit("usage: gate.py superlink --public HOST:PORT [--signature FILE] ... | supernode ...")


if __name__ == "__main__":
    main(sys.argv[1:])
