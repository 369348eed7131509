"""A server's app that sends a site commands which it should refuse, and some that it should obey.

Flower runs it in place of the federation's app; what the site answered is in ``answers.json`` of the folder.
It stands for whoever has taken over the server's programs but not the operator's key, and for a message that somebody
has recorded or changed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from fedcc.flower.folder import FederationFolder

RUN = "rogue1"
app = ServerApp()


def header(t: int, message: Any = None, wire: str = "fp32") -> str:
    return json.dumps({"format": 1, "run": RUN, "round": t, "wire": wire, "message": message}, separators=(",", ":"))


def unsigned(folder: FederationFolder, name: str, t: int, images: int = 0) -> RecordDict:
    """A command as it was before commands were signed: a round without targets or, with images, a query."""
    from fedcc import __version__

    texts = {"run": RUN, "round": str(t), "version": __version__, "terms": json.dumps(folder.terms(name)),
             "kind": "None", "header": header(t)}  # fmt: skip
    arrays = {}
    if images:
        x = np.zeros((images, *folder.task.shape), np.uint8)
        texts |= {"kind": "Inputs"}
        texts["header"] = header(t, ["message", "Inputs", {"x": ["tensor", "raw", "uint8", list(x.shape)]}])
        arrays = {"uint8": Array("uint8", (x.size,), "fedcc", x.tobytes())}
    return RecordDict({"fedcc": ConfigRecord(texts), "arrays": ArrayRecord(arrays)})  # type: ignore[arg-type]


def changed(content: RecordDict, **texts: str) -> RecordDict:
    old: Any = content["fedcc"]
    return RecordDict({"fedcc": ConfigRecord({**dict(old), **texts}), "arrays": content["arrays"]})


def commands(folder: FederationFolder, name: str) -> Iterator[tuple[str, str, RecordDict]]:
    """Commands with a label and their purpose, in the order in which they are sent."""
    other = next(n for n in folder.clients if n != name)
    yield "unsigned round 7", "train", unsigned(folder, name, 7)
    yield "unsigned round 1", "train", unsigned(folder, name, 1)
    yield "unsigned query", "query.predict", unsigned(folder, name, 1, images=3)
    from fedcc.flower.codec import encode
    from fedcc.flower.command import CommandSigner
    from fedcc.flower.keys import make_command_key

    own = CommandSigner(folder.command_key)

    def signed(t: int, site: str = name, signer: CommandSigner = own, purpose: str = "train") -> RecordDict:
        message = encode(None, "fp32", run=RUN, round=t)
        content: RecordDict = signer.content(purpose, site, RUN, t, folder.terms(site), message)[1]
        return content

    stranger = folder.path / "stranger.key"
    make_command_key(stranger)
    yield "another key", "train", signed(1, signer=CommandSigner(stranger))
    yield "another site's", "train", signed(1, site=other)
    yield "round 7", "train", signed(7)
    yield "round 0", "train", signed(0)
    yield "another purpose", "query.model", signed(1)
    yield "changed text", "train", changed(signed(1), header=header(1, 0))
    first = signed(1)
    yield "signed", "train", first
    yield "sent again", "train", first
    yield "asked again", "train", signed(1)


@app.main()
def main(grid: Grid, _: Context) -> None:
    folder = FederationFolder.read(Path(os.environ["FEDCC_FEDERATION"]))
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    answers: dict[str, Any] = {}
    try:
        for label, purpose, content in commands(folder, next(iter(folder.clients))):
            message = Message(content, nodes[0], purpose, ttl=300.0, group_id="1:10000000")
            answers[label] = described(asked(grid, message))
            (folder.path / "answers.new").write_text(json.dumps(answers))
            (folder.path / "answers.new").replace(folder.path / "answers.json")
    finally:
        (folder.path / "ended").touch()


def asked(grid: Grid, message: Message, seconds: float = 100) -> Message | None:
    [ticket] = grid.push_messages([message])
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if replies := list(grid.pull_messages([ticket])):
            return replies[0]
        time.sleep(0.2)
    return None


def described(reply: Message | None) -> dict[str, Any]:
    if reply is None or reply.has_error():
        return {"flower": None if reply is None else reply.error.reason}
    arrays: Any = reply.content["arrays"]
    data = {name: array.data.hex()[:64] for name, array in arrays.items()}
    texts: Any = reply.content["fedcc"]
    return {"texts": {k: v for k, v in dict(texts).items() if k != "header"}, "arrays": data}
