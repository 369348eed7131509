"""What comes to the server's public port, as bytes of HTTP, and what comes to a site, as messages of Flower's."""

from __future__ import annotations

import asyncio
import json
import random
from base64 import b64encode
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flwr.supercore.date
import torch
import uvicorn
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.proto import fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, run_pb2
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from fedcc.core.messages import Predictions
from fedcc.experiments.experiment import Experiment
from fedcc.flower import client_app
from fedcc.flower.codec import encode
from fedcc.flower.command import CommandSigner
from fedcc.flower.door import HEADER_BYTES, PER_NODE
from fedcc.flower.fleet import ROUTES, write_budget
from fedcc.flower.folder import Site
from fedcc.flower.gate import Gate
from fedcc.flower.keys import make_command_key
from fedcc.flower.site_error import CODES
from fuzz.federations import the_task
from fuzz.harness import Case, Target, Wrong
from fuzz.mutate import VALUES, mutated_bytes
from fuzz.texts import decoded, encoded

NODE, OTHER, BUDGET = 7, 8, 5000
QUESTION, OTHERS, ANSWER, ARRAY = "a" * 64, "b" * 64, "c" * 64, "d" * 64
IDS = (QUESTION, OTHERS, ANSWER, ARRAY, "", "x", "A" * 64, "a" * 63, "\u0661" * 64)
NUMBERS = (NODE, OTHER, 0, 1, 2, 2**64 - 1)


class Transport:
    """The network's end of a connection, for the HTTP server: keeps what is written."""

    def __init__(self) -> None:
        self.written, self.closed = bytearray(), False

    def get_extra_info(self, name: str) -> Any:
        return {"peername": ("10.0.0.7", 5555), "sockname": ("10.0.0.1", 9092), "sslcontext": object()}.get(name)

    def write(self, data: bytes) -> None:
        self.written.extend(data)

    def close(self) -> None:
        self.closed = True

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        """There is no more to read than was sent at once."""

    def resume_reading(self) -> None:
        """The same."""

    def set_protocol(self, _: Any) -> None:
        raise Wrong("another protocol was begun")


class PublicPort(Target):
    """Requests at the public port of a client with a registered key: nothing but its own replies may pass."""

    name, names_files = "public-port", False

    def prepare(self, folder: Path) -> None:
        private = ec.derive_private_key(12345, ec.SECP384R1())  # the same for every process
        self.key, self.now = public_key_to_bytes(private.public_key()), datetime(2026, 1, 1, tzinfo=UTC)
        stamp = self.now.isoformat()
        algorithm = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
        signature = b64encode(private.sign(stamp.encode(), algorithm)).decode()
        self.head = (
            f"host: x\r\ncontent-type: application/protobuf\r\nflwr-public-key: {b64encode(self.key).decode()}\r\n"
            f"flwr-timestamp: {stamp}\r\nflwr-signature: {signature}\r\n"
        )
        node, tree = Node(node_id=NODE), message_pb2.ObjectTree(object_id=ANSWER)
        tree.children.add(object_id=ARRAY)
        about = message_pb2.Metadata(message_id=ANSWER, src_node_id=NODE, dst_node_id=1, reply_to_message_id=QUESTION)
        self.kinds: dict[str, Any] = {
            "push-messages": fleet_pb2.PushMessagesRequest(
                node=node, messages_list=[message_pb2.Message(metadata=about)], message_object_trees=[tree]
            ),
            "push-object": message_pb2.PushObjectRequest(node=node, object_id=ARRAY, object_content=bytes(2000)),
            "pull-object": message_pb2.PullObjectRequest(node=node, object_id=QUESTION),
            "confirm-message-received": message_pb2.ConfirmMessageReceivedRequest(
                node=node, message_object_id=QUESTION
            ),
            "pull-messages": fleet_pb2.PullMessagesRequest(node=node),
            "deactivate-node": fleet_pb2.DeactivateNodeRequest(node_id=NODE),
            "send-node-heartbeat": heartbeat_pb2.SendNodeHeartbeatRequest(node=node, heartbeat_interval=30.0),
            "get-run": run_pb2.GetRunRequest(node=node, run_id=1),
            "get-fab": fab_pb2.GetFabRequest(node=node, run_id=1, hash_str="x"),
        }
        self.bodies = [kind.SerializeToString() for kind in self.kinds.values()]

    def begin(self, folder: Path) -> None:
        flwr.supercore.date.now = lambda: self.now  # a signature is good for minutes
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)

    def make(self, rng: random.Random) -> Case:
        kind = rng.choice((*self.kinds, "push-messages", "push-object", "push-messages"))
        request = self.kinds[kind]
        if rng.random() < 0.6:
            request = type(request).FromString(request.SerializeToString())
            for _ in range(rng.choice((1, 1, 2, 3))):
                self.change(rng, request)
        body = request.SerializeToString()
        if rng.random() < 0.4:
            body = mutated_bytes(rng, body, self.bodies)
        path = f"/v1/fleet/{kind}" if rng.random() < 0.95 else rng.choice((*ROUTES, "/v1/control/start-run", "*", "//"))
        whole = f"POST {path} HTTP/1.1\r\n{self.head}content-length: {len(body)}\r\n\r\n".encode() + body
        if rng.random() < 0.4:
            whole = mutated_bytes(rng, whole)
        return {"first": self.kinds["push-messages"].SerializeToString() if rng.random() < 0.5 else b"", "bytes": whole}

    def change(self, rng: random.Random, request: Any) -> None:
        """Set a field somewhere in a request."""
        fields = [(request, f) for f in request.DESCRIPTOR.fields]
        while fields:
            owner, field = rng.choice(fields)
            if field.message_type is None:
                break
            below = getattr(owner, field.name)
            if field.label == field.LABEL_REPEATED:
                if rng.random() < 0.4 or not below:
                    below.add() if rng.random() < 0.5 or not below else below.pop()
                    return
                below = rng.choice(below)
            fields = [(below, f) for f in below.DESCRIPTOR.fields]
        if field.label == field.LABEL_REPEATED:
            return
        choices: dict[int, tuple[Any, ...]] = {
            field.CPPTYPE_STRING: (IDS if field.type == field.TYPE_STRING else (b"", bytes(BUDGET), bytes(BUDGET + 1))),
            field.CPPTYPE_DOUBLE: (0.0, float("nan"), 1e308),
        }
        numbers = tuple(n for n in NUMBERS if n < 2**63 or field.cpp_type == field.CPPTYPE_UINT64)
        small = tuple(n for n in numbers if n < 2**31)
        value = rng.choice(choices.get(field.cpp_type, small if "INT32" in str(field.cpp_type) else numbers))
        try:
            setattr(owner, field.name, value)
        except (ValueError, TypeError):
            owner.ClearField(field.name)

    def check(self, case: Case, folder: Path) -> bool:
        passed: list[tuple[str, bytes]] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            passed.append((scope["path"], (await receive())["body"]))
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"passed"})

        class App:
            """Flower's application, as far as the gate looks at it."""

            state = SimpleNamespace(linkstate_factory=SimpleNamespace(state=lambda: self))

            def __call__(self, *arguments: Any) -> Any:
                return app(*arguments)

        gate = Gate(App(), 4444)
        for node, question in ((NODE, QUESTION), (OTHER, OTHERS)):
            about = message_pb2.Metadata(message_id=question, dst_node_id=node, group_id=write_budget(1, BUDGET))
            tree = message_pb2.ObjectTree(object_id=question)
            sent = PushAppMessagesRequest(
                messages_list=[message_pb2.Message(metadata=about)], message_object_trees=[tree]
            )
            gate.replies.expect(sent.SerializeToString())
        if first := case["first"]:
            gate.replies.check("/v1/fleet/push-messages", first, NODE)
        answer = self.loop.run_until_complete(self.answered(gate, case["bytes"] or b""))
        if answer.startswith(b"HTTP/1.1 5"):
            raise Wrong("the gate has failed")
        if len(gate.door.connections) > PER_NODE or gate.line.bytes.total() or gate.line.requests.total():
            raise Wrong("something of a request is left")
        for path, body in passed:
            self.own(path, body, bool(first))
        return bool(passed)

    async def answered(self, gate: Gate, content: bytes) -> bytes:
        config = uvicorn.Config(gate, h11_max_incomplete_event_size=HEADER_BYTES, ws="none", log_config=None)
        config.load()
        state, transport = ServerState(), Transport()
        protocol = H11Protocol(config, state, {}, self.loop)
        protocol.connection_made(transport)  # type: ignore[arg-type]
        if content:  # asyncio calls it with some bytes only
            protocol.data_received(content)
        await asyncio.sleep(0)
        protocol.connection_lost(None)
        while state.tasks:
            await asyncio.gather(*state.tasks)
            await asyncio.sleep(0)
        return bytes(transport.written)

    def get_node_id_by_public_key(self, key: bytes) -> int | None:
        return NODE if key == self.key else None

    def own(self, path: str, body: bytes, announced: bool) -> None:
        """Whether what has passed is the client's own business, as Flower will read it."""
        if path not in ROUTES:
            raise Wrong(f"{path} is open")
        kind = path.rpartition("/")[2]
        if kind not in self.kinds:
            return
        request = type(self.kinds[kind]).FromString(body)
        if (request.node_id if kind == "deactivate-node" else request.node.node_id) != NODE:
            raise Wrong("a request in another node's name has passed")
        if kind == "push-messages":
            about = [m.metadata for m in request.messages_list]
            named = [(a.src_node_id, a.dst_node_id, a.reply_to_message_id) for a in about]
            if named != [(NODE, 1, QUESTION)] or request.message_object_trees[0].object_id != about[0].message_id:
                raise Wrong("a message that is no reply of the client's has passed")
        if kind == "push-object" and not (
            announced and request.object_id in (ANSWER, ARRAY) and len(request.object_content) <= BUDGET
        ):
            raise Wrong("an object that is not part of a reply, or too large, has passed")
        named = {"pull-object": "object_id", "confirm-message-received": "message_object_id"}
        if kind in named and getattr(request, named[kind]) != QUESTION:
            raise Wrong("another client's message was named")


class SiteMessages(Target):
    """Messages to a site, changed before or after they were signed: obeyed only as signed, refused by a known code."""

    name, names_files, fast = "site", False, False

    def prepare(self, folder: Path) -> None:
        e = Experiment.resolve("fedcc", data="digits", device="cpu", clients=2, rounds=3)
        self.site = Site(folder, e, the_task(), "north", 0, "resnet8", "localhost:9092", False)
        self.site.write()
        make_command_key(folder / "command.key")
        self.files = {p.name: p.read_bytes() for p in folder.iterdir()}
        self.down = encode(Predictions(torch.full((5, 4), 0.25)), "fp32", run="run1", round=1)

    def begin(self, folder: Path) -> None:
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        self.signer, self.number = CommandSigner(folder / "command.key"), 0
        client_app.SiteClient.round = lambda *_: None  # type: ignore[assignment,method-assign]
        client_app.log_error = lambda _: None

    def make(self, rng: random.Random) -> Case:
        kind, header, array = self.down.kind, self.down.text, self.down.buffers["float32"]
        terms = json.dumps(self.site.terms())
        texts = {"run": "run1", "round": "1", "site": "north", "terms": terms, "kind": kind, "header": header}
        case: dict[str, bytes | None] = {"array float32": array, "purpose": b"train", "signed": b"after"}
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            match rng.randrange(8):
                case 0:
                    case["signed"] = rng.choice((b"before", b"no", b"before"))
                case 1:
                    case["purpose"] = rng.choice((b"query.model", b"query.predict", b"train", b"query", b"evaluate"))
                case 2:
                    case["array float32"] = mutated_bytes(rng, array)
                case 3:
                    case[f"array {rng.choice(('uint8', 'object', '', 'float64'))}"] = rng.randbytes(rng.choice((0, 8)))
                case _:
                    name = rng.choice((*texts, "round", "run", "nonce", "version", "signature", "more"))
                    value = str(rng.choice(VALUES))
                    if name in texts and rng.random() < 0.6:
                        value = mutated_bytes(rng, texts[name].encode()).decode(errors="replace")
                    case[f"text {name}"] = encoded(value)
        return case

    def check(self, case: Case, folder: Path) -> bool:
        self.number += 1
        changed = {n.removeprefix("text "): decoded(v) for n, v in case.items() if n.startswith("text ")}
        arrays = {n.removeprefix("array "): v or b"" for n, v in case.items() if n.startswith("array ")}
        purpose, signed = decoded(case["purpose"]), decoded(case["signed"])
        content = self.signer.content("train", "north", "run1", 1, self.site.terms(), self.down)[1]
        texts: Any = dict(content["fedcc"])
        same = all(texts.get(name) == text for name, text in changed.items())
        whole = arrays == self.down.buffers and purpose == "train" and same and signed == "before"
        if signed == "after":  # whoever has the key made it so
            texts |= {name: text for name, text in changed.items() if name != "signature"}
            from fedcc.flower.command import _signed_bytes

            try:
                covered = _signed_bytes(purpose, {n: v for n, v in texts.items() if n != "signature"}, arrays)
            except UnicodeError:
                return False
            texts["signature"] = self.signer.key.sign(covered).hex()
        else:
            texts |= changed
            if signed == "no":
                texts.pop("signature", None)
        try:
            records = {name: Array(name, (len(v),), "fedcc", v) for name, v in arrays.items()}
            message = self.message(purpose, RecordDict({"fedcc": ConfigRecord(texts), "arrays": ArrayRecord(records)}))
        except (UnicodeError, TypeError, ValueError):
            return False  # Flower cannot send it
        before = self.kept(folder)
        config = {"site": str(folder), "data": str(folder / "none.npz"), "device": "cpu", "threads": 1}
        context = Context(1, 1, node_config=config, state=RecordDict(), run_config={})
        reply: Any = client_app.app(message, context).content["fedcc"]
        code = reply.get("error")
        if code is None and signed != "after" and not whole:
            raise Wrong("a command that was changed after it was signed was obeyed")
        if code is not None and code not in CODES:
            raise Wrong(f"the code {code} is not in the list")
        if code is not None and set(reply) - {"nonce", "error", "field", "value"}:
            raise Wrong("an error tells more than its code")
        if any(str(folder) in str(value) for value in reply.values()):
            raise Wrong("a path has left the site")
        if code == "command" and self.kept(folder) != before:
            raise Wrong("a command that was refused left a file")
        if (made := folder / "state").exists() and [p for p in made.rglob("*") if folder not in p.resolve().parents]:
            raise Wrong("a file outside of the site's folder")
        return code is None

    @staticmethod
    def kept(folder: Path) -> list[str]:
        """The files of a site, but for its audit log, which notes what was refused too."""
        return sorted(str(p) for p in folder.rglob("*") if p.is_file() and p.stem != "audit")

    def message(self, purpose: str, content: RecordDict) -> Any:
        about = Metadata(run_id=1, message_id=str(self.number), src_node_id=1, dst_node_id=2, reply_to_message_id="",
                         group_id="", created_at=1.0, ttl=600.0, message_type=purpose)  # fmt: skip
        return make_message(metadata=about, content=content)
