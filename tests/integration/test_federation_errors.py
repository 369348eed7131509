"""What a client's errors tell the server and its operator: a code, in the server's own words, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Error, RecordDict

from attacker import Attacker, texts_of
from faulty_client import FAULTY_PATH
from fedcc.flower.clientapp import REASON
from fedcc.flower.create import APP
from fedcc.flower.folder import Site
from federation import NAMES, make, real
from program import wait_until

pytestmark = pytest.mark.slow

ESCAPE = "\x1b[2J\x1b]0;owned\x07\x9b2J\u202e"


def test_an_errors_text_stays_at_the_site_and_control_characters_stay_out_of_terminals(tmp_path: Path) -> None:
    """One site's data are damaged once it is connected: the error names their path and a label. The other one sends
    control characters, as an error of Flower's and as one of ours."""
    folder = make(tmp_path / "f", "fedcc", NAMES[:2], rules={"quorum": 2, "strikes": 3}, skew="iid")
    honest, data = NAMES[0], folder.path / "sites" / NAMES[0] / "data.npz"
    with real(folder, tmp_path / "programs") as federation:
        federation.server()
        client = federation.client(honest)
        wait_until(lambda: "connected" in federation.said(client), 90)
        arrays = dict(np.load(data))
        np.savez(data, x=arrays["x"], y=np.full_like(arrays["y"], 4711))
        attacker = Attacker(folder.path / "sites" / NAMES[1], folder.port)
        run = federation.run()
        asked = attacker.pull()
        about = {"run_id": asked.metadata.run_id, "reply_to_message_id": asked.metadata.message_id}
        attacker.push(attacker.message(None, error=Error(2, ESCAPE + "a path"), **about))
        asked = attacker.pull()
        texts = {"nonce": texts_of(asked).get("nonce", ""), "error": ESCAPE, "field": ESCAPE, "value": ESCAPE}
        content: Any = RecordDict({"fedcc": ConfigRecord(texts), "arrays": ArrayRecord({})})  # type: ignore[arg-type]
        about["reply_to_message_id"] = asked.metadata.message_id
        attacker.push(attacker.message(content, **about))
        wait_until(
            lambda: "labels must lie in 0 .. 9, got 4711" in federation.said(client), 60
        )  # at the site it is said
        done = run.end(120)
        assert done.code != 0
        status = federation.start("status", "status", folder.path).end(60)
        records = (*folder.operator.glob("*.log"), *folder.operator.glob("*.json"), *folder.run.glob("*.json*"))
        texts_there = {p.name: p.read_text(errors="replace") for p in records}
        seen = {"run": done.out + done.err, "status": status.out + status.err, **texts_there}
    for name, text in seen.items():
        for secret in ("4711", "labels must lie", "a path", str(data)):
            assert secret not in text, (name, secret)
        assert not [c for c in text if not c.isprintable() and c not in "\n\t"] or name == "superlink.log", (name, text)
    told = json.loads(texts_there["status.json"])["clients"]
    assert told[honest]["problem"] == "an error at the site; its own log says which"
    assert "unknown code" in told[NAMES[1]]["problem"]


@pytest.mark.parametrize("forked", [True, False])
def test_an_error_outside_the_app_stays_at_the_site_too(forked: bool, tmp_path: Path) -> None:
    """Flower unpacks the app for every message, where it cannot do so here: the error names the folder. Without the
    fork server its program is a process of its own."""
    app = APP.replace("fedcc.flower.server_app:app", "rogue_server:app")
    folder = make(tmp_path / "f", "fedcc", NAMES[:2], app=app, skew="iid")
    site, heard = Site.read(folder.site(NAMES[0])), folder.path / "answers.json"
    with real(folder, tmp_path / "programs", PYTHONPATH=FAULTY_PATH) as federation:
        federation.server()
        client = federation.client(NAMES[0])
        wait_until(lambda: "connected" in federation.said(client), 90)
        (site.state / "home").mkdir(exist_ok=True)
        (site.state / "home" / "apps").touch()
        if not forked:
            (site.state / "warm" / "socket").unlink()
        federation.run()
        wait_until(heard.exists, 120)
    assert json.loads(heard.read_text())["unsigned round 7"] == {"flower": REASON}
    assert [(e["purpose"], e["answer"]) for e in site.audit.entries()][:1] == [("train", "failed")]
    assert str(site.state / "home" / "apps") in (site.state / "supernode.log").read_text(), "its own log says which"
