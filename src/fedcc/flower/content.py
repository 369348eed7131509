"""Encoded messages as the content of Flower's messages, and back.

Flower splits the arrays of a record into chunks, so they are sent raw; everything else is text in one config record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedcc.flower.codec import EncodedMessage, InvalidMessage

if TYPE_CHECKING:
    from flwr.app import RecordDict

TEXTS, ARRAYS = "fedcc", "arrays"


def write_content(texts: Mapping[str, str], message: EncodedMessage | None = None) -> RecordDict:
    """Texts and perhaps a message, ready to send."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    config, arrays = dict(texts), {}
    if message is not None:
        config |= {"kind": message.kind, "header": message.text}
        for name, buffer in message.buffers.items():
            arrays[name] = Array(dtype=name, shape=(len(message.arrays[name]),), stype="fedcc", data=buffer)
    return RecordDict({TEXTS: ConfigRecord(dict(config)), ARRAYS: ArrayRecord(arrays)})


def read_content(content: RecordDict) -> tuple[dict[str, str], dict[str, bytes]]:
    """The texts and the bytes of the arrays; content of another form is refused."""
    try:
        records: Any = content
        texts = {str(name): value for name, value in records[TEXTS].items()}
        buffers = {str(name): array.data for name, array in records[ARRAYS].items()}
    except (KeyError, AttributeError, TypeError):
        raise InvalidMessage("it is no message of fedcc") from None
    for name, value in texts.items():
        if not isinstance(value, str):
            raise InvalidMessage(f"{name!r} must be a text")
    return texts, buffers


def required_text(texts: Mapping[str, str], name: str) -> str:
    if name not in texts:
        raise InvalidMessage(f"{name!r} is missing")
    return texts[name]
