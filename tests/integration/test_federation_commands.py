"""Who may tell a site what to do: its own server; not another client, nor whoever holds the server's programs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, PullMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest

from attacker import SERVER, Attacker, refused, terms_for, texts_of
from faulty_client import FAULTY_PATH
from fedcc.flower.create import APP
from fedcc.flower.folder import FederationFolder
from fedcc.flower.keys import public_bytes
from federation import NAMES, make, real
from program import wait_until

pytestmark = pytest.mark.slow


def files(folder: FederationFolder, name: str) -> dict[str, bytes]:
    """What a site has kept of its rounds."""
    state = folder.path / "sites" / name / "state"
    return {str(p.relative_to(state)): p.read_bytes() for p in state.glob("*/round*")}


def logged(folder: FederationFolder, name: str, words: str) -> str:
    """What follows these words in the log of a client's SuperNode."""
    log = (folder.path / "sites" / name / "state" / "supernode.log").read_text()
    return log.partition(words)[2].split()[0].strip(")")


def command(own: Any, terms: str, t: int, purpose: str) -> RecordDict:
    """What the server sent the attacker, changed for another site: another round, or images to predict."""
    texts = texts_of(own) | {"round": str(t), "terms": terms}
    about = json.loads(texts.get("header", "{}")) | {"round": t}
    arrays = {}
    if purpose == "query.predict":
        texts["kind"], about["wire"] = "Inputs", "fp32"
        about["message"] = ["message", "Inputs", {"x": ["tensor", "raw", "uint8", [3, 1, 8, 8]]}]
        arrays = {"uint8": Array("uint8", (192,), "fedcc", bytes(192))}
    texts["header"] = json.dumps(about, separators=(",", ":"))
    return RecordDict({"fedcc": ConfigRecord(texts), "arrays": ArrayRecord(arrays)})  # type: ignore[arg-type]


def test_a_client_cannot_command_another(tmp_path: Path) -> None:
    """With its own key, it sends messages in the server's name to another client, and tries every route with that
    client's ids. The other client hears nothing of it, and the run ends as if nothing had happened."""
    folder = make(tmp_path / "f", "fedcc", NAMES[:2], rounds=3, skew="iid")
    victim, own = NAMES[0], NAMES[1]
    with real(folder, tmp_path / "programs") as federation:
        federation.server()
        there = federation.client(victim, "--share-model")
        run = federation.run()
        attacker = Attacker(folder.path / "sites" / own, folder.port)
        mine = attacker.pull()
        wait_until(lambda: len(files(folder, victim)) >= 2, 90)
        before, target = files(folder, victim), int(logged(folder, victim, "SuperNode ID:"))
        terms = terms_for(texts_of(mine)["terms"], client=0, model=folder.clients[victim])
        run_id, said = mine.metadata.run_id, list[str]()

        def tried(call: Any, *arguments: Any) -> None:
            try:
                call(*arguments)
                said.append(f"200 {arguments}")
            except httpx.HTTPStatusError as error:
                said.append(refused(error))

        for purpose, t in (("train", 7), ("train", 2), ("query.predict", 1)):
            content = command(mine, terms, t, purpose)
            about = {"dst_node_id": target, "message_type": purpose, "run_id": run_id}
            for source in (SERVER, attacker.id, target):
                tried(attacker.push, attacker.message(content, src_node_id=source, **about))
        answer, reply = (
            attacker.message(RecordDict({}), run_id=run_id),
            {"reply_to_message_id": mine.metadata.message_id},
        )
        for bad in (answer, attacker.message(RecordDict({}), run_id=run_id, src_node_id=target, **reply),
                    attacker.message(RecordDict({}), run_id=run_id, dst_node_id=target, **reply),
                    attacker.message(RecordDict({}), run_id=run_id, reply_to_message_id="0" * 64)):  # fmt: skip
            tried(attacker.push, bad)
        tried(attacker.push, attacker.message(RecordDict({}), run_id=run_id, **reply), answer)
        theirs_key = public_bytes(folder.key(victim))
        theirs = logged(folder, victim, "Receiving: train message (ID:")
        assert len(theirs) == 64
        client = attacker.client
        tried(attacker.confirm, run_id, theirs)
        tried(client.PullObject, PullObjectRequest(node=attacker.node, run_id=run_id, object_id=theirs))
        tried(client.PushObject, PushObjectRequest(node=attacker.node, run_id=run_id, object_id=theirs))
        tried(client.GetFab, GetFabRequest(node=attacker.node, run_id=run_id, hash_str="../" * 20))
        as_other = Node(node_id=target)
        tried(client.PushObject, PushObjectRequest(node=as_other, run_id=run_id, object_id=theirs))
        tried(client.GetRun, GetRunRequest(node=as_other, run_id=run_id))
        tried(client.GetFab, GetFabRequest(node=as_other, run_id=run_id, hash_str="a" * 64))
        tried(client.ActivateNode, ActivateNodeRequest(public_key=theirs_key, heartbeat_interval=30.0))
        tried(client.PullMessages, PullMessagesRequest(node=as_other))
        tried(client.DeactivateNode, DeactivateNodeRequest(node_id=target))
        tried(client.SendNodeHeartbeat, SendNodeHeartbeatRequest(node=Node(node_id=target), heartbeat_interval=30.0))
        time.sleep(15)  # a client looks for messages every 3 s
        assert files(folder, victim) == before, "the other client has worked for the attacker"
        assert "asks for predictions" not in federation.said(there)
        assert {text[:3] for text in said[:-7]} == {"403"}, said
        assert {text[:3] for text in said[-7:]} == {"401"}, said  # another node than the key's
        texts = ConfigRecord({"nonce": texts_of(mine)["nonce"], "error": "failed"})
        honest = RecordDict({"fedcc": texts, "arrays": ArrayRecord({})})  # type: ignore[arg-type]
        attacker.push(attacker.message(honest, run_id=run_id, **reply))
        client.DeactivateNode(DeactivateNodeRequest(node_id=attacker.id))
        federation.client(own, "--share-model")  # it is honest again
        done = run.end(240)
        assert done.code == 0, done


def test_a_site_obeys_commands_that_its_server_has_signed(tmp_path: Path) -> None:
    """Not if they are unsigned, changed, for another site or round, or sent twice. None of those leaves a trace."""
    app = APP.replace("fedcc.flower.server_app:app", "rogue_server:app")
    folder = make(tmp_path / "f", "fedcc", NAMES[:2], app=app, skew="iid")
    site = folder.path / "sites" / NAMES[0]
    with real(folder, tmp_path / "programs", PYTHONPATH=FAULTY_PATH) as federation:
        federation.server()
        there = federation.client(NAMES[0], "--share-model")
        federation.run()
        answers: dict[str, Any] = {}

        def heard(label: str) -> bool:
            path = folder.path / "answers.json"
            answers.update(json.loads(path.read_text()) if path.exists() else {})
            return label in answers or (folder.path / "ended").exists()

        wait_until(lambda: heard("unsigned query"), 120)
        assert not list((site / "state").glob("rogue1")), "a folder was made for a command that nobody signed"
        wait_until(lambda: heard("asked again"), 240)
        said = federation.said(there)
    codes = {label: answer.get("texts", {}).get("error") for label, answer in answers.items()}
    assert codes == {
        "unsigned round 7": "command", "unsigned round 1": "command", "unsigned query": "command",
        "another key": "command", "another site's": "command", "round 7": "round", "round 0": "round",
        "another purpose": "command", "changed text": "command", "signed": None, "sent again": "replay",
        "asked again": None,
    }  # fmt: skip
    assert answers["signed"]["arrays"] == answers["asked again"]["arrays"] != {}
    assert answers["signed"]["texts"]["nonce"] != answers["asked again"]["texts"]["nonce"]
    assert "not signed by this federation's server" in said
    lines = (site / "state" / "rogue1" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1], "the second answer is the kept one"
