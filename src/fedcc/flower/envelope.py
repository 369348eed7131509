"""Encoded messages in Flower's records, and out of them again.

A record's arrays are split into chunks by Flower, so there they lie, raw; all else is text in one config record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedcc.flower.codec import Encoded, Refused

if TYPE_CHECKING:
    from flwr.app import RecordDict

ABOUT, ARRAYS = "fedcc", "arrays"


def sealed(about: Mapping[str, str], encoded: Encoded | None = None) -> RecordDict:
    """Texts and a message, ready to be sent."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    texts, arrays = dict(about), {}
    if encoded is not None:
        texts |= {"kind": encoded.kind, "header": encoded.text}
        for name, buffer in encoded.buffers.items():
            length = len(encoded.arrays[name])
            arrays[name] = Array(dtype=name, shape=(length,), stype="fedcc", data=buffer)
    return RecordDict({ABOUT: ConfigRecord(dict(texts)), ARRAYS: ArrayRecord(arrays)})


def opened(content: RecordDict) -> tuple[dict[str, str], dict[str, bytes]]:
    """The texts and the arrays' bytes; whatever is not of this form is refused."""
    try:
        records: Any = content
        texts = {str(name): value for name, value in records[ABOUT].items()}
        buffers = {str(name): array.data for name, array in records[ARRAYS].items()}
    except (KeyError, AttributeError, TypeError):
        raise Refused("it is no message of fedcc") from None
    if odd := [name for name, value in texts.items() if not isinstance(value, str)]:
        raise Refused(f"{odd[0]!r} must be a text")
    return texts, buffers


def text_of(texts: Mapping[str, str], name: str) -> str:
    if name not in texts:
        raise Refused(f"{name!r} is missing")
    return texts[name]
