"""What is changed of Flower itself, in the processes that the gate starts: the trees of messages, and the log."""

from __future__ import annotations

import logging

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.object_store import object_store_factory
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.object_store.object_store import NoObjectInStoreError

from fedcc.core.naming import printable


def mend_flower() -> None:
    """Make the changes; before Flower has made its store."""
    object_store_factory.InMemoryObjectStore = AnnouncedTrees  # type: ignore[attr-defined]
    logging.getLogger("flwr").addFilter(on_one_line)


class AnnouncedTrees(InMemoryObjectStore):
    """Flower's store, which gives a message's tree as it was announced.

    Flower puts it together from what was first said of each object, by anybody. So one client could say which parts
    another's message has, and a small request with an object that occurs many times would fill the memory.
    """

    def __init__(self, verify: bool = True) -> None:
        super().__init__(verify)
        self.trees: dict[str, ObjectTree] = {}  # by the id of the message

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        with self.lock_store:
            new = super().preregister(run_id, object_tree)
            self.trees.setdefault(object_tree.object_id, object_tree)
            return new

    def get_object_tree(self, object_id: str) -> ObjectTree:
        with self.lock_store:
            if (tree := self.trees.get(object_id)) is None:
                raise NoObjectInStoreError(f"No message with ID '{object_id}' was announced.")
            return tree

    def delete(self, object_id: str) -> None:
        with self.lock_store:
            super().delete(object_id)
            if object_id not in self.store:
                self.trees.pop(object_id, None)

    def clear(self) -> None:
        with self.lock_store:
            super().clear()
            self.trees.clear()


def on_one_line(record: logging.LogRecord) -> bool:
    """Flower's log has words of clients, which could control a terminal or look like lines of the log's own."""
    text = record.getMessage()
    if record.exc_info:
        text = f"{text} {logging.Formatter().formatException(record.exc_info)}"
    record.msg, record.args, record.exc_info, record.exc_text = printable(text), (), None, None
    return True
