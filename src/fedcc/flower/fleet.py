"""What a registered client may send through the gate: replies to what the server has asked it, and their objects.

Flower checks who calls, not what the caller says in a message: with its own key a client could send a message in the
server's name to another client. So the gate reads each request that carries or names a message. It sees the server's
own messages at the private port; from them it knows which replies are due, from whom, and how large they may be.

This module imports nothing of the project, so that Flower's processes do not load torch.
"""

from __future__ import annotations

import binascii
import json
import re
from base64 import b64decode
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from typing import Any

KIB, MIB = 2**10, 2**20
ROUTES = {
    "/v1/fleet/activate-node": 64 * KIB,
    "/v1/fleet/deactivate-node": 64 * KIB,
    "/v1/fleet/send-node-heartbeat": 64 * KIB,
    "/v1/fleet/pull-messages": 64 * KIB,
    "/v1/fleet/push-messages": MIB,  # a message comes without its content, which follows as objects
    "/v1/fleet/confirm-message-received": 64 * KIB,
    "/v1/fleet/pull-object": 64 * KIB,
    "/v1/fleet/push-object": 6 * MIB,  # Flower splits arrays into objects of 5 MiB
    "/v1/fleet/get-run": 64 * KIB,
    "/v1/fleet/get-fab": 64 * KIB,
}
"""What a registered client calls, with the largest request in bytes; only the operator registers clients."""

SERVER = 1  # the server's node
DEPTH = 8  # levels of an object tree: message, records, record, array, chunk
OBJECTS = 10_000  # in one tree
ARRAYS, CHUNK = 8, 5 * MIB  # arrays of a reply, one for each number format; bytes of a full chunk
DESCRIPTION = 64 * KIB  # of an array
ANNOUNCEMENTS = 100  # of a reply: Flower keeps something of each
KEPT = 8  # messages to a node that may still be replied to; the server asks for one thing at a time


class RefusedRequest(Exception):
    """A request that does not pass; the text names the value and the rule."""

    status = 403


class OtherNode(RefusedRequest):
    """A request in the name of a node that is not the key's; even of a SuperNode that outlived its server.

    A server that starts again gives its nodes new numbers. At 401 a SuperNode ends, and its site starts a new one.
    """

    status = 401


@dataclass(eq=False)
class Expected:
    """A message of the server to a node, and the reply to it."""

    objects: frozenset[str]  # those of the message, which the node pulls
    budget: int  # bytes of the reply's objects
    reply: str | None = None  # its id
    announced: int = 0  # how often
    copies: Counter[str] = field(default_factory=Counter)  # how often each object is in the reply's tree
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of the reply's objects so far
    chunks: dict[str, int] = field(default_factory=dict)  # how many the reply's arrays name so far

    def note(self, sizes: dict[str, int], chunks: dict[str, int]) -> None:
        """Note objects of the reply; refused if it then has more than it may have.

        The server reads an object as often as it is in the tree, and an array may name the same chunk many times: both
        count as often as that.
        """
        sizes, chunks = self.sizes | sizes, self.chunks | chunks
        if (total := sum(self.copies[name] * size for name, size in sizes.items())) > self.budget:
            raise RefusedRequest(f"a reply may have {self.budget:,} bytes in this round, got at least {total:,}")
        if (named := sum(chunks.values())) > (most := ARRAYS + self.budget // CHUNK):
            raise RefusedRequest(f"the arrays of a reply may have {most:,} chunks in this round, got {named:,}")
        self.sizes, self.chunks = sizes, chunks


class Replies:
    """Which replies the server waits for: what it has sent to each node, in memory, as in Flower's own state."""

    def __init__(self) -> None:
        self.expected: defaultdict[int, OrderedDict[str, Expected]] = defaultdict(OrderedDict)  # by node, message

    def expect(self, body: bytes) -> None:
        """Note the messages in a request of the server's own app."""
        from flwr.proto.runtime_pb2 import PushAppMessagesRequest

        request = PushAppMessagesRequest.FromString(body)
        for message, tree in zip(request.messages_list, request.message_object_trees, strict=False):
            about = message.metadata
            sent = self.expected[about.dst_node_id]
            sent.setdefault(about.message_id, Expected(frozenset(_object_ids(tree)), read_budget(about.group_id)))
            while len(sent) > KEPT:
                sent.popitem(last=False)

    def check(self, path: str, body: bytes, node: int) -> None:
        """Refuse a request of this node that is not the node's own business."""
        kind = path.rpartition("/")[2]
        request = _parse(kind, body)
        if request is None:
            return
        if (claimed := request.node_id if hasattr(request, "node_id") else request.node.node_id) != node:
            raise OtherNode(f"the key belongs to node {node}, the request names node {claimed}")
        sent = self.expected.get(node, OrderedDict())
        if kind == "push-messages":
            self._check_reply(request, node, sent)
        elif kind == "push-object":
            _count_object(request, sent)
        elif kind == "get-fab":
            _check_digest("an app", request.hash_str)  # Flower writes it to its log
        elif kind == "pull-object":
            if not any(request.object_id in expected.objects for expected in sent.values()):
                raise RefusedRequest(f"no message to node {node} has object {request.object_id[:64]!r}")
        elif kind == "confirm-message-received" and request.message_object_id not in sent:
            raise RefusedRequest(f"no message to node {node} has the id {request.message_object_id[:64]!r}")

    def _check_reply(self, request: Any, node: int, sent: MutableMapping[str, Expected]) -> None:
        """Refuse all but one reply of the node to the server, to a message that the server has sent to it."""
        if (messages := len(request.messages_list)) != 1 or len(request.message_object_trees) != 1:
            raise RefusedRequest(f"a request must hold one message and its object tree, got {messages} messages")
        message, tree = request.messages_list[0], request.message_object_trees[0]
        about = message.metadata
        if about.src_node_id != node:
            raise RefusedRequest(f"a message of node {node} must name it as its source, got {about.src_node_id}")
        if about.dst_node_id != SERVER:
            raise RefusedRequest(f"a message must be for the server, node {SERVER}, got {about.dst_node_id}")
        if not about.reply_to_message_id:
            raise RefusedRequest("a message must be a reply: reply_to_message_id is empty")
        if (expected := sent.get(about.reply_to_message_id)) is None:
            raise RefusedRequest(f"the server has sent node {node} no message {about.reply_to_message_id[:64]!r}")
        if expected.reply not in (None, about.message_id):
            raise RefusedRequest(f"message {about.reply_to_message_id[:64]!r} has been replied to")
        if message.content.ByteSize():
            raise RefusedRequest("the content of a message must be sent as objects")
        if tree.object_id != about.message_id:
            raise RefusedRequest("the object tree must be the message's own: its root is another object")
        copies = Counter(_object_ids(tree))
        if expected.reply is not None and copies != expected.copies:
            raise RefusedRequest("a reply that is sent again must have the same objects")
        if expected.announced >= ANNOUNCEMENTS:
            raise RefusedRequest(f"a reply may be announced {ANNOUNCEMENTS} times")
        if expected.reply is None:
            expected = replace(expected, reply=about.message_id, copies=copies, sizes=dict.fromkeys(copies, 0))
            expected.note(*self._known(copies.keys()))
            sent[about.reply_to_message_id] = expected
        expected.announced += 1

    def _known(self, names: Set[str]) -> tuple[dict[str, int], dict[str, int]]:
        """Sizes and chunks of those of the objects that are in other replies: Flower has them, and asks for no more."""
        sizes, chunks = dict[str, int](), dict[str, int]()
        for sent in self.expected.values():
            for expected in sent.values():
                sizes |= {n: expected.sizes[n] for n in expected.sizes.keys() & names if expected.sizes[n]}
                chunks |= {n: expected.chunks[n] for n in expected.chunks.keys() & names}
        return sizes, chunks


def _count_object(request: Any, sent: Mapping[str, Expected]) -> None:
    """Count an object of a reply; one that is sent again counts once, and one of no reply is refused."""
    name, content = request.object_id, request.object_content
    waiting = [expected for expected in sent.values() if name in expected.sizes]
    if not waiting:
        raise RefusedRequest(f"object {name[:64]!r} belongs to no reply that was announced")
    if sha256(content).hexdigest() != name:  # its size counts for every reply that has it
        raise RefusedRequest(f"object {name} must have the content with this sha256")
    chunks = {name: number} if (number := _count_chunks(content)) else {}
    for expected in waiting:
        expected.note({name: len(content)}, chunks)


def _count_chunks(content: bytes) -> int:
    """How many chunks an array has in the server's memory; an object of another kind has none."""
    from flwr.supercore.constant import HEAD_BODY_DIVIDER

    head, _, body = content.partition(HEAD_BODY_DIVIDER)
    if not head.startswith(b"Array "):
        return 0
    if (size := len(content)) > DESCRIPTION:
        raise RefusedRequest(f"the description of an array may have {DESCRIPTION:,} bytes, got {size:,}")
    try:
        return len(json.loads(body.decode())["arraychunk_ids"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RefusedRequest("an array must be described as Flower does it") from None


def _parse(kind: str, body: bytes) -> Any:
    """A request that names a node, or None; Flower reads the same bytes in the same way."""
    from flwr.proto import fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, run_pb2
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    kinds: dict[str, Any] = {
        "deactivate-node": fleet_pb2.DeactivateNodeRequest,
        "send-node-heartbeat": heartbeat_pb2.SendNodeHeartbeatRequest,
        "pull-messages": fleet_pb2.PullMessagesRequest,
        "push-messages": fleet_pb2.PushMessagesRequest,
        "confirm-message-received": message_pb2.ConfirmMessageReceivedRequest,
        "pull-object": message_pb2.PullObjectRequest,
        "push-object": message_pb2.PushObjectRequest,
        "get-run": run_pb2.GetRunRequest,
        "get-fab": fab_pb2.GetFabRequest,
    }
    try:
        return kinds[kind].FromString(body) if kind in kinds else None
    except DecodeError:
        raise RefusedRequest(f"the request is not a {kinds[kind].DESCRIPTOR.name}") from None


def _object_ids(tree: Any) -> Iterator[str]:
    """The ids of a tree's objects, each a sha256. An object has the same parts wherever it is, each of them once."""
    level, count, parts = [tree], 0, dict[str, list[str]]()
    for _ in range(DEPTH):
        count += len(level)
        if count > OBJECTS:
            raise RefusedRequest(f"an object tree may have {OBJECTS:,} objects")
        for node in level:
            _check_digest("an object", node.object_id)
            names = [child.object_id for child in node.children]
            if len(set(names)) < len(names) or parts.setdefault(node.object_id, names) != names:
                raise RefusedRequest(f"object {node.object_id} must have the same parts everywhere, each of them once")
            yield node.object_id
        level = [child for node in level for child in node.children]
        if not level:
            return
    raise RefusedRequest(f"an object tree may have {DEPTH} levels")


def _check_digest(what: str, name: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{64}", name, re.ASCII):
        raise RefusedRequest(f"{what}'s id is a sha256, got {name[:80]!r}")


# A message of the server says in its group how many bytes the reply may have.


def write_budget(t: int, limit: int) -> str:
    """The group of a message of round ``t`` whose reply may have ``limit`` bytes."""
    return f"{t}:{limit}"


def read_budget(group: str) -> int:
    """The bytes that a reply to a message of this group may have; none if it does not say.

    >>> read_budget(write_budget(3, 5000)), read_budget("3")
    (5000, 0)
    """
    match = re.fullmatch(r"\d{1,9}:(\d{1,15})", group, re.ASCII)
    return int(match[1]) if match else 0


# ------------------------------------------------------------------------------------------------------------- the key


def authenticated_node(headers: Mapping[bytes, bytes], state: Any) -> int | None:
    """The node whose registered key has signed a request's time, or None.

    Flower checks this too, but only after it has read the whole request.
    """
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    try:
        key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER.encode()], validate=True)
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.encode()], validate=True)
        stamp = headers[TIMESTAMP_HEADER.encode()]
        age = (now() - datetime.fromisoformat(stamp.decode("ascii"))).total_seconds()
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            return None
        node = state.get_node_id_by_public_key(key)  # before the signature: this is cheap
        if node is None or not verify_signature(bytes_to_public_key(key), stamp, signature):
            return None
        return int(node)
    except (KeyError, ValueError, TypeError, UnicodeError, OverflowError, binascii.Error):
        return None
