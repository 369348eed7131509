"""fedcc's client app with faults, for federations of real processes (``make(..., app=app_of("faulty_client:app"))``).

What happens in which round is in ``faults.json`` of the site's folder (:func:`plan`): a client may raise, die, wait
until it is told to go on, or spoil its upload. Each round that reaches it leaves a file ``begun-ROUND`` there. With
``plan(site, always="constant")`` it answers the first class, certain, to everything.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcc.flower import client_app

FAULTY_PATH = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))  # finds it


def plan(site: Path, **faults: str) -> None:
    """Faults of a site by round: ``plan(site, r2="raise")``."""
    (site / "faults.json").write_text(json.dumps(faults))


def go(site: Path, t: int) -> None:
    """Let a client that holds in round t go on."""
    (site / f"go-{t}").touch()


def values(change: Callable[[Any], Any]) -> Callable[[RecordDict], None]:
    """A fault that changes the upload's numbers."""

    def spoil(content: RecordDict) -> None:
        array = content["arrays"]["float32"]  # type: ignore[index]
        found = np.asarray(change(np.frombuffer(array.data, "<f4").copy()), "<f4")
        made = Array("float32", found.shape, "fedcc", found.tobytes())
        content["arrays"] = ArrayRecord({"float32": made})

    return spoil


def header(change: Callable[[dict[str, Any]], None]) -> Callable[[RecordDict], None]:
    """A fault that changes what the upload says of itself."""

    def spoil(content: RecordDict) -> None:
        texts: dict[str, Any] = dict(content["fedcc"])  # type: ignore[call-overload]
        about = json.loads(texts["header"])
        change(about)
        content["fedcc"] = ConfigRecord(texts | {"header": json.dumps(about)})

    return spoil


def constant(content: RecordDict) -> None:
    """The answers of a client that does not look: the first class, certain, whether probabilities or logits."""
    rows = json.loads(dict(content["fedcc"])["header"])["message"][2]["values"][3][0]  # type: ignore[call-overload]
    values(lambda found: np.tile(np.eye(1, len(found) // rows), rows).ravel())(content)


def _at(position: int, value: float) -> Callable[[Any], Any]:
    def change(found: Any) -> Any:
        found[position] = value
        return found

    return change


def _one_row_less(about: dict[str, Any]) -> None:
    tensor = about["message"][2]["values"]
    tensor[3][0] -= 1


SPOILED: dict[str, Callable[[RecordDict], None]] = {
    "nan": values(_at(5, float("nan"))),
    "negative": values(_at(5, -0.25)),
    "large": values(lambda found: np.tile(found, 20)),
    "shape": header(_one_row_less),
    "run": header(lambda about: about.update(run="another")),
    "constant": constant,
}


def full(*_: Any) -> Any:
    raise RuntimeError("the disk is full")


class Faulty(ClientApp):
    """The app, with what the site's plan says before or after it."""

    def __call__(self, message: Message, context: Context) -> Message:
        site = Path(str(context.node_config["site"]))
        path = site / "faults.json"
        faults = json.loads(path.read_text()) if path.exists() else {}
        if message.metadata.message_type != "train":
            reply = client_app.app(message, context)
            if faults.get("always") == "constant" and message.metadata.message_type == "query.predict":
                constant(reply.content)
                values(lambda found: 50 * found)(reply.content)  # logits
            return reply
        t = str(message.content["fedcc"]["round"])  # type: ignore[index]
        (site / f"begun-{t}").touch()
        fault = faults.get(f"r{t}", faults.get("always"))
        if fault == "raise":
            client_app.SiteClient.round = full  # type: ignore[method-assign]
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        while fault == "hold" and not (site / f"go-{t}").exists():
            time.sleep(0.05)
        reply = client_app.app(message, context)
        if fault in SPOILED:
            SPOILED[fault](reply.content)
        return reply


app = Faulty()
