"""Flower's program at a site keeps errors' texts; with real processes: integration/test_federation_errors.py."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.app.message import make_message

from fedcc.flower.clientapp import REASON, keep_reasons
from fedcc.flower.policy import AuditLog


def asked() -> Message:
    about = Metadata(run_id=1, message_id="1", src_node_id=1, dst_node_id=2, reply_to_message_id="", group_id="",
                     created_at=0.0, ttl=600.0, message_type="train")  # fmt: skip
    return make_message(metadata=about, content=RecordDict())


def program(sent: list[Message]) -> Any:
    def push_message(client: Any, message: Message, context: Any) -> None:
        sent.append((client, message, context)[1])

    flower = import_module("flwr.supernode.runtime.run_clientapp")
    return SimpleNamespace(push_message=push_message, run_clientapp=flower.run_clientapp)


@pytest.mark.parametrize("writable", [True, False])
def test_an_errors_text_is_replaced_and_the_log_has_a_line(writable: bool, tmp_path: Path) -> None:
    sent: list[Message] = []
    found, context = program(sent), SimpleNamespace(node_config={"site": str(tmp_path)})
    if not writable:
        (tmp_path / "state").touch()
    keep_reasons(found)
    found.push_message(None, Message(Error(2, "/home/north is full"), reply_to=asked()), context)
    found.push_message(None, Message(RecordDict(), reply_to=asked()), context)
    assert (sent[0].error.code, sent[0].error.reason) == (2, REASON)
    assert not sent[1].has_error()
    if writable:
        entries = AuditLog(tmp_path / "state").entries()
        assert [(e["purpose"], e["answer"]) for e in entries] == [("train", "failed")]


def otherwise(client: Any, reply: Any, context: Any) -> None:
    """Has another argument."""


@pytest.mark.parametrize("change", [
    {"push_message": otherwise}, {"push_message": None}, {"run_clientapp": otherwise}, {"run_clientapp": None},
])  # fmt: skip
def test_a_program_that_sends_in_another_way_is_not_run(change: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="sends answers in a way that this fedcc does not know"):
        keep_reasons(SimpleNamespace(**{**vars(program([])), **change}))
