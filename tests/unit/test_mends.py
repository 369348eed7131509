"""What is changed of Flower itself."""

from __future__ import annotations

import logging
import sys

import pytest

pytest.importorskip("flwr")

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.object_store import ObjectStoreFactory, object_store_factory
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.object_store.object_store import NoObjectInStoreError

from fedcc.flower.mends import AnnouncedTrees, mend_flower, on_one_line


def name(n: int) -> str:
    return f"{n:064x}"


def tree(root: int, *children: ObjectTree) -> ObjectTree:
    return ObjectTree(object_id=name(root), children=children)


def repeating(times: int, levels: int) -> ObjectTree:
    """A tree in which each object has the next one so many times; only the first time it is said what that has."""
    if not levels:
        return tree(0)
    return tree(levels, repeating(times, levels - 1), *[tree(levels - 1)] * (times - 1))


def test_a_small_tree_stays_small() -> None:
    small = repeating(8, 7)
    store = AnnouncedTrees()
    store.preregister(1, small)
    assert store.get_object_tree(name(7)) == small  # Flower's own has two million objects


def test_nobody_decides_what_parts_anothers_message_has() -> None:
    """Every message without arrays has the same object, the empty record; a client could be the first to name it."""
    store, empty = AnnouncedTrees(), 5
    store.preregister(1, tree(1, tree(empty, tree(99))))
    mine = tree(2, tree(empty))
    assert store.preregister(1, mine) == [name(empty), name(2)]
    assert store.get_object_tree(name(2)) == mine
    store.preregister(1, tree(2, tree(empty, tree(98))))  # nor by saying it again
    assert store.get_object_tree(name(2)) == mine


def test_trees_go_with_their_messages() -> None:
    store = AnnouncedTrees()
    for root in (1, 2, 3):
        store.preregister(root, tree(root, tree(5)))
    store.delete(name(1))
    with pytest.raises(NoObjectInStoreError, match="was announced"):
        store.get_object_tree(name(1))
    store.delete_objects_in_run(2)
    assert list(store.trees) == [name(3)]
    store.clear()
    assert not store.trees
    assert not store.store


def test_flower_uses_the_store_and_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("flwr")
    monkeypatch.setattr(object_store_factory, "InMemoryObjectStore", InMemoryObjectStore)
    monkeypatch.setattr(log, "filters", [])
    mend_flower()
    assert isinstance(ObjectStoreFactory().store(), AnnouncedTrees)
    assert log.filters == [on_one_line]


def test_a_record_of_the_log_is_one_line_without_control_characters() -> None:
    forged = "ok\x1b[2J\n2026-11-18 22:00:00.000 INFO forged"
    record = logging.LogRecord("flwr", logging.ERROR, "", 0, "fab_hash=%s", (forged,), None)
    assert on_one_line(record)
    assert logging.Formatter().format(record) == "fab_hash=ok\\x1b[2J 2026-11-18 22:00:00.000 INFO forged"
    try:
        raise ValueError(forged)
    except ValueError:
        record = logging.LogRecord("flwr", logging.ERROR, "", 0, "it failed", (), sys.exc_info())
    assert on_one_line(record)
    text = logging.Formatter().format(record)
    assert text.startswith("it failed Traceback")
    assert text.isprintable()
    assert "ValueError: ok\\x1b[2J" in text
