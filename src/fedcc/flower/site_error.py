"""What a site tells the server about an error: a code of a closed list. The text stays in the site's own log.

An exception's text may hold paths, numbers of samples or labels. ``version`` and ``terms`` also name the field and the
site's value of it, which is public: the server knows all of them from its own folder.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from typing import Any

from fedcc.core.naming import printable

CODES = {
    "command": "the site has not accepted the command: the signature, the site or the form is wrong",
    "replay": "the site has obeyed this very command before",
    "round": "the site knows no such round",
    "version": "the site has another version of fedcc",
    "terms": "the site has agreed to another experiment",
    "message": "the site could not read the message",
    "files": "the site could not read or write its files",
    "rounds": "the site has not taken part in any round yet",
    "policy": "the site's policy does not allow it",
    "memory": "the site has run out of memory",
    "failed": "an error at the site",
}
LONGEST = 200  # characters of a field's name or value


class SiteError(Exception):
    """An error with a code for the server; its text is for the site's log."""

    def __init__(self, code: str, text: str, *, field: str = "", value: str = ""):
        super().__init__(text)
        self.code, self.field, self.value = code, field, value


def error_texts(error: BaseException) -> dict[str, str]:
    """What the server is told about an error."""
    from fedcc.flower.codec import InvalidMessage

    if isinstance(error, SiteError):
        texts = {"error": error.code, "field": error.field, "value": error.value}
        return {name: text for name, text in texts.items() if text}
    kinds = {"message": InvalidMessage, "files": OSError, "memory": MemoryError}
    code = next((code for code, kind in kinds.items() if isinstance(error, kind)), "failed")
    out_of_memory = type(error).__name__ == "OutOfMemoryError"  # torch's, of a GPU
    return {"error": "memory" if out_of_memory else code}


def log_error(error: BaseException) -> None:
    """Write an error to the site's log; the line with ``fedcc:`` reaches the console."""
    if not isinstance(error, SiteError):
        for line in "".join(traceback.format_exception(error)).splitlines():
            print(line[: len(line) - len(line.lstrip(" "))] + printable(line), flush=True)
    print(f"fedcc: {error_texts(error)['error']}: {printable(str(error) or type(error).__name__)}", flush=True)


def error_reason(texts: Mapping[str, str], terms: Mapping[str, Any], version: str) -> str:
    """The server's own words for what a site has told; anything else that the site may have sent is left out."""
    code, name, value = texts.get("error", ""), texts.get("field", ""), printable(texts.get("value", ""))[:LONGEST]
    if code not in CODES:
        return f"an error with an unknown code at the site ({printable(code)[:LONGEST]})"
    if code == "version":
        return f"{CODES[code]}: {value}, the server has {version}"
    settings = terms.get("settings")
    own = {**terms, **(settings if isinstance(settings, dict) else {})}
    if code == "terms" and name in own:
        return (
            f"{CODES[code]}: {name} is {printable(json.dumps(own[name]))[:LONGEST]} on the server, {value} at the site"
        )
    return CODES[code] + ("; its own log says which" if code in ("files", "failed") else "")
