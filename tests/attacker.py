"""A registered client that breaks the rules: it talks to the server with a site's key and Flower's own client.

Nothing here imports what it attacks, so the same attacks can be tried on an older version.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Metadata, RecordDict
from flwr.app.message import Message, make_message, remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

SERVER = 1


class Attacker:
    """A client with a site's key; it is connected from the start."""

    def __init__(self, site: Path, port: int):
        key: Any = load_ssh_private_key((site / "site.key").read_bytes(), password=None)
        self.key = key
        self.client = FleetHttpClient.from_server_address(
            f"localhost:{port}",
            False,
            str(site / "ca.crt"),
            interceptors=[NodeAuthHttpInterceptor(key, key.public_key())],
        )
        public = public_key_to_bytes(key.public_key())
        answer = self.client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=300.0))
        self.id = int(answer.node_id)
        self.node = Node(node_id=self.id)

    def pull(self, seconds: float = 90) -> Message:
        """The next message for this client, with its content; it stays at the server."""
        end = time.monotonic() + seconds
        while not (answer := self.client.PullMessages(PullMessagesRequest(node=self.node))).messages_list:
            assert time.monotonic() < end, "no message came"
            time.sleep(0.5)
        return self.contents(answer)

    def contents(self, answer: Any) -> Message:
        """The message that was pulled, with its content."""
        about, tree = message_from_proto(answer.messages_list[0]), answer.message_object_trees[0]
        run, contents = about.metadata.run_id, {}
        for item in iterate_object_tree(tree):
            for _ in range(20):
                got = self.client.PullObject(PullObjectRequest(node=self.node, run_id=run, object_id=item.object_id))
                if got.object_available:
                    break
                time.sleep(0.5)
            contents[item.object_id] = got.object_content
        message: Any = inflate_object_from_contents(tree.object_id, contents)
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def message(self, content: RecordDict | None, error: Error | None = None, **about: Any) -> Message:
        """A message of this client, with content or an error; ``about`` replaces what its metadata say."""
        given = {"message_id": "", "src_node_id": self.id, "dst_node_id": SERVER, "reply_to_message_id": "",
                 "group_id": "", "created_at": time.time(), "ttl": 600.0, "message_type": "train"}  # fmt: skip
        return make_message(metadata=Metadata(**{**given, **about}), content=content, error=error)

    def push(self, *messages: Message, objects: bool = True) -> None:
        """Send messages as Flower's SuperNode does."""
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
        answer = self.client.PushMessages(
            PushMessagesRequest(
                node=self.node,
                messages_list=[message_to_proto(remove_content_from_message(m)) for m in messages],
                message_object_trees=[get_object_tree(m) for m in messages],
            )
        )
        wanted = set(answer.objects_to_push)
        for message in messages:
            for name, item in get_all_nested_objects(message).items():
                if objects and name in wanted:
                    self.client.PushObject(
                        PushObjectRequest(node=self.node, run_id=message.metadata.run_id, object_id=name,
                                          object_content=item.deflate(), session_id=answer.session_id)
                    )  # fmt: skip

    def confirm(self, run: int, message: str) -> None:
        self.client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=message)
        )


def refused(error: httpx.HTTPStatusError) -> str:
    """What a refusal says."""
    return f"{error.response.status_code} {error.response.text}"


def texts_of(message: Message) -> dict[str, str]:
    return {str(name): str(value) for name, value in dict(message.content["fedcc"]).items()}  # type: ignore[call-overload]


def terms_for(terms: str, **changes: Any) -> str:
    return json.dumps({**json.loads(terms), **changes})
