"""The gate: who may call which of Flower's routes, and why, is in docs/protocol.md, "Who may do what".

This module starts Flower's SuperLink on two addresses: the public one serves the fleet's routes and nothing else, the
private one, on loopback, serves everything to processes of the user who started it. A SuperNode gets the same gate on
its loopback port. At the public port a request is read only after its key was checked and when there is memory for it
(:mod:`fedcc.flower.door`), and passed on only if it is the caller's own business (:mod:`fedcc.flower.fleet`). The gate
also adds the signature of the one app that sites run (:mod:`fedcc.flower.keys`).

This file runs by itself and imports nothing of the project that loads torch.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedcc.flower.address import parse_address
from fedcc.flower.door import BODY_SECONDS, HEADER_BYTES, SLOWEST, Busy, Door, Line, PrivateDoor, Refusals, Waits
from fedcc.flower.fleet import ROUTES, RefusedRequest, Replies, authenticated_node
from fedcc.flower.gate_report import PATH, GateCounts
from fedcc.flower.loopback import TABLES, check_loopback, is_owned_by

SUCCESSION = "/v1/federation/succession"
EXPECT = "/v1/runtime/push-messages"  # how the server's own app sends messages
START_SECONDS = 120

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Address = tuple[str, int]


class Gate:
    """An ASGI application in front of another: passes on what its rules allow and refuses the rest."""

    def __init__(
        self, app: App, private: int, signature: Mapping[str, str] | None = None, door: Door | None = None,
        succession: Path | None = None,
    ):  # fmt: skip
        self.app, self.private, self.signature = app, private, signature  # private: a port, for its owner alone
        self.succession = succession  # what everybody may read
        self.replies, self.door, self.line = Replies(), door or Door(), Line()
        self.private_door, self.counts, self.refusals = PrivateDoor(), GateCounts(), Refusals()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("lifespan", "http"):
            raise PermissionError(f"the gate passes no {scope['type']} connections")
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            if scope["server"][1] == self.private:
                received = await self.private_request(scope, receive)
                await (self.report if scope["path"] == PATH else self.app)(scope, received, send)
            elif (scope["method"], scope["path"]) == ("GET", SUCCESSION):
                await self.show_succession(scope, receive, send)
            else:
                await self.public_request(scope, receive, send)
        except Refusal as refusal:
            self.counts.refuse(refusal.status, refusal.kind)
            from starlette.responses import PlainTextResponse

            response = PlainTextResponse(refusal.reason, refusal.status, {"connection": "close"})
            await response(scope, receive, send)
            self.door.refuse((str(scope["client"][0]), int(scope["client"][1])))

    async def show_succession(self, scope: Message, receive: Receive, send: Send) -> None:
        """Show anybody the statements about new CAs and command keys: a site may need them to trust this server."""
        from starlette.responses import Response

        text = self.succession.read_bytes() if self.succession and self.succession.exists() else b"[]"
        await Response(text, 200, {"connection": "close"}, "application/json")(scope, receive, send)
        self.door.refuse((str(scope["client"][0]), int(scope["client"][1])))

    async def private_request(self, scope: Message, receive: Receive) -> Receive:
        """What the application receives at the private port, from its owner; the server's messages are noted."""
        if not self.is_owners(scope):
            raise Refusal(403, "this port is for processes of the user who runs the server")
        if scope["path"] != EXPECT:
            return receive
        body = await read_body(receive)
        self.replies.expect(body)
        return replayed(body, receive)

    async def report(self, scope: Message, receive: Receive, send: Send) -> None:
        """Tell the operator who is connected and what was counted."""
        from starlette.responses import Response

        content = self.counts.report(self.state, self.refusals.total, self.door.ended, len(self.door.connections))
        await Response(content, 200, None, "application/json")(scope, receive, send)

    def is_owners(self, scope: Message) -> bool:
        """Whether the caller is the user who runs this; asked once per connection, since the kernel's table is long."""
        connection = self.private_door.connections.get((str(scope["client"][0]), int(scope["client"][1])))
        owned = None if connection is None else connection.owned
        if owned is None:
            owned = is_owned_by(scope["client"], scope["server"], os.getuid())
            if connection is not None:
                connection.owned = owned
        return owned

    async def public_request(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass on a request at the public port, if it is a registered client's and its own business.

        Reading what is refused costs time, which all clients share: who is refused again and again has to wait.
        """
        length = self.check_head(scope)
        if (node := authenticated_node(dict(scope["headers"]), self.state)) is None:
            # at 401 a SuperNode ends without a word, at 403 it takes the run for stopped; 412 is Flower's own answer
            status = 412 if scope["path"].endswith("/activate-node") else 401
            raise Refusal(status, "a request must be signed with the key of a registered client")
        address = (str(scope["client"][0]), int(scope["client"][1]))
        self.door.begin(address, node)
        answered = 0

        async def counting(message: Message) -> None:
            nonlocal answered
            answered += len(message.get("body", b""))
            await send(message)

        try:
            self.refusals.check(node)
            async with self.line.room(node, length):
                body = await self.body(receive, length)
                self.refusals.check(node)  # of others that were read at the same time
                self.replies.check(scope["path"], body, node)
                if scope["path"] == "/v1/fleet/push-object":
                    self.counts.uploaded[node] += length
                signs = self.signature and scope["path"] == "/v1/fleet/get-fab"
                await self.app(scope, replayed(body, receive), self.signer(counting) if signs else counting)
        except RefusedRequest as error:
            self.refusals.note(node)
            raise Refusal(error.status, str(error)) from None
        except Busy as error:  # at 503 a SuperNode tries again; at 429 it would end
            raise Refusal(503, str(error), "repeated" if isinstance(error, Waits) else "") from None
        finally:
            self.door.finish(address, answered)

    async def body(self, receive: Receive, length: int) -> bytes:
        """A request's body, if it comes in time and has the length that its header states."""
        seconds = BODY_SECONDS + length / SLOWEST
        try:
            async with asyncio.timeout(seconds):
                body = await read_body(receive, length)
        except TimeoutError:
            raise Refusal(408, f"a request of {length:,} bytes must arrive within {seconds:.0f} s") from None
        if len(body) != length:
            raise Refusal(400, f"the request has at least {len(body):,} bytes, its header says {length:,}")
        return body

    @property
    def state(self) -> Any:
        """Flower's state, which knows the registered keys."""
        return self.app.state.linkstate_factory.state()  # type: ignore[attr-defined]

    def check_head(self, scope: Message) -> int:
        """The length of a request at the public port, if its head is that of the fleet's."""
        if scope["method"] != "POST" or scope["path"] not in ROUTES:
            raise Refusal(
                403, "only routes of the fleet are served here; the operator's are on the server's own machine"
            )
        names = Counter(name for name, _ in scope["headers"])
        if twice := [name for name, number in names.items() if number > 1]:  # which one counts is a matter of taste
            raise Refusal(400, f"a request must have each header once, {twice[0][:64]!r} is there twice")
        text = dict(scope["headers"]).get(b"content-length", b"")
        if not text.isdigit() or len(text) > 15 or b"transfer-encoding" in names:  # which would count instead
            raise Refusal(411, "a request must state its length, and have no transfer encoding")
        if (length := int(text)) > (largest := ROUTES[scope["path"]]):
            raise Refusal(413, f"a request may have at most {largest:,} bytes here, got {length:,}")
        return length

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


class Refusal(Exception):
    """Why a request does not pass, and the status of the response."""

    def __init__(self, status: int, reason: str, kind: str = ""):
        super().__init__(reason)
        self.status, self.reason, self.kind = status, reason, kind  # kind: where the status does not say it


async def read_body(receive: Receive, most: float = math.inf) -> bytes:
    """The whole body of a request; nothing of it if the caller has gone. Beyond ``most`` bytes, no more is read."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if not message.get("more_body") or size > most:
            return b"".join(parts)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that begins with a body that was read before."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


def superlink_command(
    public: str, *arguments: str, signature: Path | None = None, succession: Path | None = None
) -> list[str]:
    """The command of a SuperLink: the fleet's routes at ``public``, HOST:PORT, all routes at a loopback ``--host``."""
    parse_address(public)
    options = ["--signature", str(signature)] if signature else []
    options += ["--succession", str(succession)] if succession else []
    return [sys.executable, "-P", __file__, "superlink", "--public", public, *options, *arguments]


def supernode_command(*arguments: str) -> list[str]:
    """The command of a SuperNode; its ``--host`` is a loopback address."""
    return [sys.executable, "-P", __file__, "supernode", *arguments]


def superlink(
    public: Address, arguments: list[str], signature: Mapping[str, str] | None, succession: Path | None
) -> None:
    """Run Flower's SuperLink with these arguments behind the gate; its ``--host`` is a loopback address."""
    import uvicorn
    from flwr.supercore.corestate import in_memory_corestate
    from flwr.superlink.cli.flower_superlink import flower_superlink

    from fedcc.flower.mends import mend_flower

    def run(app: Any, *, host: str, port: int, **options: Any) -> None:
        check_loopback(host)
        if port == public[1]:
            raise ValueError(f"the private and the public port must differ, both are {port}")
        door = Door()
        # no proxy headers: with them a caller could claim any address. asyncio's loop accepts connections through the
        # listener's own method, and h11 bounds a header
        gate = Gate(app, port, signature, door, succession)
        config = uvicorn.Config(gate, proxy_headers=False, loop="asyncio", http="h11", ws="none",
                                h11_max_incomplete_event_size=HEADER_BYTES, **options)  # fmt: skip
        config.load()
        if config.ssl is not None:
            RenewedCertificate(config.ssl, Path(options["ssl_certfile"]), Path(options["ssl_keyfile"]))
        server = uvicorn.Server(config)
        server.run([gate.private_door.listen(listen((host, port))), door.listen(listen(public))])
        if not server.started:
            sys.exit("the SuperLink did not start")

    mend_flower()
    uvicorn.run = run  # type: ignore[assignment] # Flower builds the application and passes it to this function
    # a run's process has this long to start; Flower's 30 s are too few for one that imports torch on a loaded machine
    in_memory_corestate.HEARTBEAT_DEFAULT_INTERVAL = START_SECONDS  # type: ignore[attr-defined]
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


class RenewedCertificate:
    """Has new connections use the server's certificate as soon as it is renewed; those of a new CA, after a restart.

    The first handshake after a renewal notices it; the next one shows the new certificate. The processes that this one
    has started know the CA of the start only.
    """

    def __init__(self, context: ssl.SSLContext, certificate: Path, key: Path):
        self.certificate, self.key, self.authority = certificate, key, certificate.with_name("ca.crt")
        self.first = self.authority.read_bytes() if self.authority.exists() else b""
        self.time = certificate.stat().st_mtime_ns
        context.sni_callback = self.check  # called at each handshake

    def check(self, _connection: Any, _name: str | None, context: ssl.SSLContext) -> None:
        now = self.certificate.stat().st_mtime_ns
        if now == self.time or not self.authority.exists() or self.authority.read_bytes() != self.first:
            return
        with suppress(ssl.SSLError, OSError):  # the key is another one, half of a renewal: look again
            context.load_cert_chain(self.certificate, self.key)
            self.time = now


def supernode(arguments: list[str]) -> None:
    """Run Flower's SuperNode with these arguments; the port for its own processes is behind the gate."""
    import uvicorn
    from flwr.supernode.cli.flower_supernode import flower_supernode

    from fedcc.flower.mends import mend_flower

    class Config(uvicorn.Config):
        def __init__(self, app: Any, *, host: str, port: int, **options: Any):
            check_loopback(host)
            if not options.get("ssl_certfile"):  # Flower's own processes would run an app of whoever takes the port
                raise ValueError("a SuperNode needs a certificate: --ssl-ca-certfile, --ssl-certfile, --ssl-keyfile")
            super().__init__(Gate(app, port), host=host, port=port, proxy_headers=False, **options)

    mend_flower()
    uvicorn.Config = Config  # type: ignore[assignment,misc]
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family, backlog=2048)


def main(arguments: list[str]) -> None:
    if not TABLES[0].exists():
        raise SystemExit(f"the gate reads who calls from {TABLES[0]}: it needs Linux")
    match arguments:
        case ["superlink", "--public", address, "--signature", file, "--succession", other, *rest]:
            superlink(parse_address(address), rest, json.loads(Path(file).read_text()), Path(other))
        case ["superlink", "--public", address, "--signature", file, *rest]:
            superlink(parse_address(address), rest, json.loads(Path(file).read_text()), None)
        case ["superlink", "--public", address, *rest]:
            superlink(parse_address(address), rest, None, None)
        case ["supernode", *rest]:
            supernode(rest)
        case _:
            raise SystemExit("usage: gate.py superlink --public HOST:PORT [--signature FILE] ... | supernode ...")


if __name__ == "__main__":
    main(sys.argv[1:])
