"""What a registered client may send through the gate, and what it costs; with real Flower behind it:
integration/test_federation_commands.py and integration/test_federation_flood.py."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from datetime import timedelta
from hashlib import sha256
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import DeactivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Message,
    Metadata,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message

from fedcc.flower.fleet import (
    ANNOUNCEMENTS,
    KEPT,
    ROUTES,
    OtherNode,
    RefusedRequest,
    Replies,
    authenticated_node,
    write_budget,
)

NODE, OTHER = 77, 78
QUESTION, ANSWER, ARRAY, FOREIGN = ("a" * 64, "b" * 64, "c" * 64, "d" * 64)
CHUNK = bytes(600)


def tree(root: str, *children: str) -> ObjectTree:
    return ObjectTree(object_id=root, children=[ObjectTree(object_id=c) for c in children])


def asked(node: int = NODE, question: str = QUESTION, budget: int = 1000, group: str | None = None) -> bytes:
    """The server's own request to send a node a message."""
    about = Metadata(message_id=question, src_node_id=1, dst_node_id=node, group_id=group or write_budget(1, budget))
    return bytes(
        PushAppMessagesRequest(
            messages_list=[Message(metadata=about)], message_object_trees=[tree(question, FOREIGN)]
        ).SerializeToString()
    )


@pytest.fixture
def replies() -> Replies:
    found = Replies()
    found.expect(asked())
    return found


def answer(node: int = NODE, copies: int = 1, of: ObjectTree | None = None, **about: Any) -> bytes:
    given = {"message_id": ANSWER, "src_node_id": NODE, "dst_node_id": 1, "reply_to_message_id": QUESTION}
    message = Message(metadata=Metadata(**{**given, **about}))
    return bytes(
        PushMessagesRequest(
            node=Node(node_id=node),
            messages_list=[message] * copies,
            message_object_trees=[of or tree(ANSWER, ARRAY)] * copies,
        ).SerializeToString()
    )


def name_of(content: bytes) -> str:
    return sha256(content).hexdigest()


def object_(content: bytes, name: str | None = None, node: int = NODE) -> bytes:
    return bytes(
        PushObjectRequest(
            node=Node(node_id=node), object_id=name or name_of(content), object_content=content
        ).SerializeToString()
    )


def array(*chunks: int) -> bytes:
    """An array as Flower describes it, with these of its chunks."""
    body = json.dumps({"dtype": "float32", "shape": [1], "stype": "fedcc", "arraychunk_ids": chunks}).encode()
    return f"Array {name_of(CHUNK)} {len(body)}".encode() + b"\0" + body


def reply(replies: Replies, body: bytes, node: int = NODE) -> None:
    replies.check("/v1/fleet/push-messages", body, node)


def push(replies: Replies, body: bytes) -> None:
    replies.check("/v1/fleet/push-object", body, NODE)


def test_a_reply_to_the_server_passes_and_may_be_sent_again(replies: Replies) -> None:
    for _ in range(2):
        reply(replies, answer(of=tree(ANSWER, name_of(bytes(900)))))
    push(replies, object_(bytes(900)))


@pytest.mark.parametrize(("body", "reason"), [
    (answer(src_node_id=1), "must name it as its source, got 1"),
    (answer(src_node_id=OTHER), "must name it as its source"),
    (answer(node=OTHER), "the key belongs to node 77, the request names node 78"),
    (answer(dst_node_id=OTHER), "must be for the server, node 1, got 78"),
    (answer(reply_to_message_id=""), "must be a reply"),
    (answer(reply_to_message_id="e" * 64), "has sent node 77 no message"),
    (answer(copies=2), "one message and its object tree, got 2 messages"),
    (answer(copies=0), "got 0 messages"),
    (answer(of=tree(FOREIGN)), "its root is another object"),
    (answer(of=tree(ANSWER, "x")), "an object's id is a sha256, got 'x'"),
    (b"\xff\xff", "is not a PushMessagesRequest"),
])  # fmt: skip
def test_anything_else_does_not(replies: Replies, body: bytes, reason: str) -> None:
    with pytest.raises(RefusedRequest, match=reason):
        reply(replies, body)


def test_a_node_of_an_earlier_server_is_told_to_start_again(replies: Replies) -> None:
    """At 403 a SuperNode would ignore the message and ask again, forever."""
    request = PullMessagesRequest(node=Node(node_id=OTHER)).SerializeToString()
    with pytest.raises(OtherNode, match="the key belongs to node 77, the request names node 78") as error:
        replies.check("/v1/fleet/pull-messages", request, NODE)
    assert (error.value.status, RefusedRequest.status) == (401, 403)


def test_content_in_the_message_itself_does_not_pass(replies: Replies) -> None:
    request = PushMessagesRequest.FromString(answer())
    request.messages_list[0].content.items.add(key="fedcc")
    with pytest.raises(RefusedRequest, match="must be sent as objects"):
        reply(replies, request.SerializeToString())


def test_a_message_is_replied_to_once(replies: Replies) -> None:
    reply(replies, answer())
    with pytest.raises(RefusedRequest, match="has been replied to"):
        reply(replies, answer(message_id=FOREIGN, of=tree(FOREIGN)))
    with pytest.raises(RefusedRequest, match="the same objects"):
        reply(replies, answer(of=tree(ANSWER, FOREIGN)))


def test_a_client_replies_to_its_own_messages_only(replies: Replies) -> None:
    replies.expect(asked(OTHER, "e" * 64))
    with pytest.raises(RefusedRequest, match="has sent node 77 no message"):
        reply(replies, answer(reply_to_message_id="e" * 64))


def test_trees_are_bounded(replies: Replies) -> None:
    deep = ObjectTree(object_id=ANSWER)
    for _ in range(10):
        deep = ObjectTree(object_id=ANSWER, children=[deep])
    with pytest.raises(RefusedRequest, match="8 levels"):
        reply(replies, answer(of=deep))
    with pytest.raises(RefusedRequest, match="10,000 objects"):
        reply(replies, answer(of=tree(ANSWER, *[f"{n:064x}" for n in range(10_000)])))


def test_an_object_has_the_same_parts_wherever_it_is(replies: Replies) -> None:
    """Flower takes what is first said of an object for all places where it is, so a few objects could become many."""
    root = ObjectTree(object_id=ANSWER, children=[tree(ARRAY, FOREIGN), tree(QUESTION, FOREIGN), tree(FOREIGN)])
    twice = tree(ANSWER, ARRAY, ARRAY)
    later = ObjectTree(object_id=ANSWER, children=[tree(ARRAY, FOREIGN), tree(FOREIGN, QUESTION)])
    first = ObjectTree(object_id=ANSWER, children=[tree(FOREIGN, ARRAY), tree(QUESTION, FOREIGN)])
    for wrong in (twice, later, first):
        with pytest.raises(RefusedRequest, match="same parts everywhere, each of them once"):
            reply(replies, answer(of=wrong))
    reply(replies, answer(of=root))


def test_a_reply_has_a_budget_of_bytes(replies: Replies) -> None:
    first, second, third = bytes(600), bytes(400), bytes(401)
    reply(replies, answer(of=tree(ANSWER, *map(name_of, (first, second, third)))))
    push(replies, object_(first))
    push(replies, object_(first))  # again, after a lost connection: it is one object
    with pytest.raises(RefusedRequest, match="1,000 bytes in this round, got at least 1,001"):
        push(replies, object_(third))
    push(replies, object_(second))
    with pytest.raises(RefusedRequest, match="belongs to no reply"):
        push(replies, object_(b"x"))


def test_an_object_counts_as_often_as_the_server_reads_it(replies: Replies) -> None:
    content = bytes(400)
    parts = [tree(f"{n:064x}", name_of(content)) for n in range(3)]
    reply(replies, answer(of=ObjectTree(object_id=ANSWER, children=parts)))
    with pytest.raises(RefusedRequest, match="got at least 1,200"):
        push(replies, object_(content))


def test_an_objects_content_is_what_its_id_says(replies: Replies) -> None:
    """Its size counts for other replies with this object, also those of other clients."""
    reply(replies, answer())
    with pytest.raises(RefusedRequest, match="must have the content with this sha256"):
        push(replies, object_(b"x", ARRAY))


def test_chunks_that_an_array_names_many_times_are_bounded() -> None:
    """Flower has them in memory as often as they are named: a small reply would fill the server's."""
    replies = Replies()
    replies.expect(asked(budget=15 * 2**20))
    fine, large, odd = (
        array(*[0] * 8),
        array(*[0] * 12),
        [b"Array  2\0[]", b"Array  1\0{", b"Array  0\0" + b"[" * 50_000],
    )
    reply(replies, answer(of=tree(ANSWER, *map(name_of, (fine, large, CHUNK, *odd)))))
    for content in (fine, CHUNK):
        push(replies, object_(content))
    with pytest.raises(RefusedRequest, match="may have 11 chunks in this round, got 20"):
        push(replies, object_(large))
    for content in odd:
        with pytest.raises(RefusedRequest, match="described as Flower does it"):
            push(replies, object_(content))


def test_the_description_of_an_array_is_bounded() -> None:
    replies, long = Replies(), array(*[0] * 22_000)
    replies.expect(asked(budget=10**13))
    reply(replies, answer(of=tree(ANSWER, name_of(long))))
    with pytest.raises(RefusedRequest, match="description of an array may have 65,536 bytes"):
        push(replies, object_(long))


def test_objects_that_flower_has_already_count_too() -> None:
    """It does not ask for them again, whoever has sent them."""
    replies, named = Replies(), array(*[0] * 8)
    for node, question in ((NODE, QUESTION), (NODE, "9" * 64), (OTHER, "e" * 64)):
        replies.expect(asked(node, question))
    other = PushMessagesRequest.FromString(answer(OTHER, of=tree(ANSWER, name_of(named)), reply_to_message_id="e" * 64))
    other.messages_list[0].metadata.src_node_id = OTHER
    reply(replies, other.SerializeToString(), OTHER)
    replies.check("/v1/fleet/push-object", object_(named, node=OTHER), OTHER)
    reply(replies, answer(of=tree(ANSWER, name_of(named), name_of(array(0)))))
    with pytest.raises(RefusedRequest, match="8 chunks in this round, got 9"):
        push(replies, object_(array(0)))
    reply(replies, answer(message_id="f" * 64, of=tree("f" * 64, name_of(CHUNK)), reply_to_message_id="9" * 64))
    push(replies, object_(CHUNK))


def test_an_object_of_two_replies_counts_for_both() -> None:
    replies, shared = Replies(), bytes(600)
    own = {QUESTION: b"1" * 500, "9" * 64: b"2" * 500}
    for question, content in own.items():
        replies.expect(asked(question=question))
        root = name_of(content + b"root")
        of = tree(root, name_of(shared), name_of(content))
        reply(replies, answer(message_id=root, of=of, reply_to_message_id=question))
    push(replies, object_(shared))
    for content in own.values():
        with pytest.raises(RefusedRequest, match="got at least 1,100"):
            push(replies, object_(content))


def test_a_reply_is_announced_a_hundred_times_at_most(replies: Replies) -> None:
    """Flower begins a session each time, and keeps those of replies that it does not accept."""
    for _ in range(ANNOUNCEMENTS):
        reply(replies, answer())
    with pytest.raises(RefusedRequest, match="announced 100 times"):
        reply(replies, answer())


def test_what_flower_writes_to_its_log_is_a_digest(replies: Replies) -> None:
    def fab(name: str) -> bytes:
        return bytes(GetFabRequest(node=Node(node_id=NODE), hash_str=name).SerializeToString())

    replies.check("/v1/fleet/get-fab", fab("a" * 64), NODE)
    with pytest.raises(RefusedRequest, match=r"an app's id is a sha256, got '\\x1b\[2J\\nINFO forged'"):
        replies.check("/v1/fleet/get-fab", fab("\x1b[2J\nINFO forged"), NODE)


def test_without_a_stated_budget_there_is_none() -> None:
    replies = Replies()
    replies.expect(asked(group="1"))
    reply(replies, answer(of=tree(ANSWER, name_of(b"x"))))
    with pytest.raises(RefusedRequest, match="may have 0 bytes"):
        push(replies, object_(b"x"))


def test_objects_and_confirmations_are_the_clients_own(replies: Replies) -> None:
    replies.expect(asked(OTHER, "e" * 64))
    node = Node(node_id=NODE)
    for name, fine in ((QUESTION, True), (FOREIGN, True), ("e" * 64, False), ("f" * 64, False)):
        body = PullObjectRequest(node=node, object_id=name).SerializeToString()
        if fine:
            replies.check("/v1/fleet/pull-object", body, NODE)
        else:
            with pytest.raises(RefusedRequest, match="no message to node 77 has object"):
                replies.check("/v1/fleet/pull-object", body, NODE)
    body = ConfirmMessageReceivedRequest(node=node, message_object_id=QUESTION).SerializeToString()
    replies.check("/v1/fleet/confirm-message-received", body, NODE)
    body = ConfirmMessageReceivedRequest(node=node, message_object_id="e" * 64).SerializeToString()
    with pytest.raises(RefusedRequest, match="no message to node 77 has the id"):
        replies.check("/v1/fleet/confirm-message-received", body, NODE)
    with pytest.raises(RefusedRequest, match="names node 78"):
        replies.check("/v1/fleet/deactivate-node", DeactivateNodeRequest(node_id=OTHER).SerializeToString(), NODE)


@pytest.mark.parametrize("request_", [
    GetRunRequest(node=Node(node_id=OTHER), run_id=1), GetFabRequest(node=Node(node_id=OTHER), hash_str="a" * 64),
    PushObjectRequest(node=Node(node_id=OTHER), object_id=ARRAY), PullObjectRequest(node=Node(node_id=OTHER)),
    PullMessagesRequest(node=Node(node_id=OTHER)), ConfirmMessageReceivedRequest(node=Node(node_id=OTHER)),
    PushMessagesRequest(node=Node(node_id=OTHER)), SendNodeHeartbeatRequest(node=Node(node_id=OTHER)),
    DeactivateNodeRequest(node_id=OTHER),
], ids=lambda request: type(request).__name__)  # fmt: skip
def test_every_request_names_the_keys_own_node(replies: Replies, request_: Any) -> None:
    name = re.sub(r"(?<=.)([A-Z])", r"-\1", type(request_).__name__.removesuffix("Request")).lower()
    assert f"/v1/fleet/{name}" in ROUTES
    with pytest.raises(OtherNode, match="the key belongs to node 77, the request names node 78"):
        replies.check(f"/v1/fleet/{name}", request_.SerializeToString(), NODE)


def test_an_object_of_no_reply_of_its_own_is_refused(replies: Replies) -> None:
    replies.expect(asked(OTHER, "e" * 64))
    theirs = PushMessagesRequest.FromString(
        answer(OTHER, of=tree(ANSWER, name_of(CHUNK)), reply_to_message_id="e" * 64)
    )
    theirs.messages_list[0].metadata.src_node_id = OTHER
    reply(replies, theirs.SerializeToString(), OTHER)
    with pytest.raises(RefusedRequest, match="belongs to no reply that was announced"):
        push(replies, object_(CHUNK))


def test_only_the_last_messages_are_remembered(replies: Replies) -> None:
    for n in range(KEPT):
        replies.expect(asked(question=f"{n:064x}"))
    with pytest.raises(RefusedRequest, match="no message"):
        reply(replies, answer())
    reply(replies, answer(reply_to_message_id=f"{KEPT - 1:064x}"))


# -- keys


class State:
    """Flower's state, with one registered key."""

    def __init__(self, key: bytes):
        self.key = key

    def get_node_id_by_public_key(self, key: bytes) -> int | None:
        return NODE if key == self.key else None


def test_a_signature_by_a_registered_key_names_the_node() -> None:
    (private, public), (_, stranger) = generate_key_pairs(), generate_key_pairs()
    state = State(public_key_to_bytes(public))

    def headers(key: Any = public, seconds: float = 0, stamp: str = "") -> dict[bytes, bytes]:
        stamp = stamp or (now() - timedelta(seconds=seconds)).isoformat()
        return {
            b"flwr-public-key": b64encode(public_key_to_bytes(key)),
            b"flwr-timestamp": stamp.encode(),
            b"flwr-signature": b64encode(sign_message(private, stamp.encode())),
        }

    assert authenticated_node(headers(), state) == NODE
    assert authenticated_node(headers(stranger), state) is None
    assert authenticated_node(headers(seconds=1000), state) is None
    assert authenticated_node(headers(seconds=-1000), state) is None
    assert authenticated_node(headers(stamp="soon"), state) is None
    assert authenticated_node(headers() | {b"flwr-signature": b64encode(b"no")}, state) is None
    assert authenticated_node(headers() | {b"flwr-signature": b"%"}, state) is None
    assert authenticated_node(headers() | {b"flwr-public-key": b"\xff"}, state) is None
    assert authenticated_node({}, state) is None


def test_flower_has_these_routes() -> None:
    from flwr.superlink.routers.fleet.router import router

    assert {route.path for route in router.routes} >= set(ROUTES)  # type: ignore[attr-defined]
    assert len(ROUTES) == 10
