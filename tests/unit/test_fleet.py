"""What a registered client may send through the gate, and what it costs; with real Flower behind it:
integration/test_federation_commands.py and integration/test_federation_flood.py."""

from __future__ import annotations

from base64 import b64encode
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.proto.fleet_pb2 import DeactivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Message,
    Metadata,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message

from fedcc.flower.fleet import KEPT, ROUTES, OtherNode, RefusedRequest, Replies, authenticated_node, write_budget

NODE, OTHER = 77, 78
QUESTION, ANSWER, ARRAY, FOREIGN = ("a" * 64, "b" * 64, "c" * 64, "d" * 64)


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


def object_(size: int, name: str = ARRAY) -> bytes:
    return bytes(
        PushObjectRequest(node=Node(node_id=NODE), object_id=name, object_content=bytes(size)).SerializeToString()
    )


def reply(replies: Replies, body: bytes, node: int = NODE) -> None:
    replies.check("/v1/fleet/push-messages", body, node)


def push(replies: Replies, body: bytes) -> None:
    replies.check("/v1/fleet/push-object", body, NODE)


def test_a_reply_to_the_server_passes_and_may_be_sent_again(replies: Replies) -> None:
    reply(replies, answer())
    reply(replies, answer())
    push(replies, object_(900))


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
    replies.expect(asked(OTHER, FOREIGN))
    with pytest.raises(RefusedRequest, match="has sent node 77 no message"):
        reply(replies, answer(reply_to_message_id=FOREIGN))


def test_trees_are_bounded(replies: Replies) -> None:
    deep = ObjectTree(object_id=ANSWER)
    for _ in range(10):
        deep = ObjectTree(object_id=ANSWER, children=[deep])
    with pytest.raises(RefusedRequest, match="8 levels"):
        reply(replies, answer(of=deep))
    with pytest.raises(RefusedRequest, match="10,000 objects"):
        reply(replies, answer(of=tree(ANSWER, *[ARRAY] * 10_000)))


def test_a_reply_has_a_budget_of_bytes(replies: Replies) -> None:
    reply(replies, answer())
    push(replies, object_(600))
    push(replies, object_(600))  # again, after a lost connection: it is one object
    push(replies, object_(400, ANSWER))
    with pytest.raises(RefusedRequest, match="1,000 bytes in this round, got at least 1,001"):
        push(replies, object_(601))
    with pytest.raises(RefusedRequest, match="belongs to no reply"):
        push(replies, object_(1, FOREIGN))


def test_without_a_stated_budget_there_is_none() -> None:
    replies = Replies()
    replies.expect(asked(group="1"))
    reply(replies, answer())
    with pytest.raises(RefusedRequest, match="may have 0 bytes"):
        push(replies, object_(1))


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
