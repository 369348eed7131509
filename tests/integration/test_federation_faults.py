"""Faults of real federations: processes that are killed, end, raise, are slow or lie. What stays must be right.

The measure is the same federation without processes (``LocalTransport``), in which the same clients miss the same
rounds: all that is sent afterwards, and the accuracy, are equal to the bit only if no model, memory or metric was lost.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from faulty_client import FAULTY_PATH, SPOILED, go, plan
from fedcc.experiments.store import RunFolder
from fedcc.flower.demo import simulate
from fedcc.flower.folder import FederationFolder
from federation import LocalTransport, Real, app_of, make, real
from program import wait_until

pytestmark = pytest.mark.slow

FAULTY = app_of("faulty_client:app")


def site(folder: FederationFolder, name: str) -> Path:
    return folder.path / "sites" / name


def begun(folder: FederationFolder, names: Iterable[str], t: int, seconds: float = 120) -> None:
    """Wait until these clients are at work on round t."""
    wait_until(lambda: all((site(folder, n) / f"begun-{t}").exists() for n in names), seconds)


def sent(folder: FederationFolder) -> dict[tuple[int, str], str]:
    """The fingerprint of what each client sent in each round; a round that was computed twice fails."""
    found = {}
    for name in folder.clients:
        for path in (site(folder, name) / "state").glob("*/rounds.jsonl"):
            for line in map(json.loads, path.read_text().splitlines()):
                assert (line["round"], name) not in found, "computed twice"
                found[line["round"], name] = line["sent"]
    return found


def reports(folder: FederationFolder) -> list[dict[str, Any]]:
    return [r["federation"] for r in RunFolder(folder.run).metrics()]


def accuracy(folder: FederationFolder) -> float:
    found = RunFolder(folder.run).summary()
    assert found is not None
    return float(found["accuracy"]["final"])


def log(folder: FederationFolder) -> str:
    path = folder.operator / "run.log"
    return path.read_text() if path.exists() else ""


def status(federation: Real, *options: str) -> str:
    done = federation.start("status", "status", federation.folder.path, *options).end(60)
    assert done.code == 0, done
    return done.out


def replayed(
    original: FederationFolder, path: Path, fault: Callable[[LocalTransport, str, int], Any]
) -> FederationFolder:
    """The same federation in this process, with what ``fault(transport, name, round)`` says of a round's messages."""
    e, rules = original.experiment, original.rules
    same = {"quorum": rules.quorum, "grace": 0.5, "strikes": rules.strikes}
    folder = make(path, e.method, tuple(original.clients), rules=same, rounds=e.training.rounds, skew=e.split.skew)
    transport = LocalTransport(folder, share=set(original.clients))
    transport.fault = lambda name, purpose, t: fault(transport, name, t) if purpose == "train" else None
    transport.server().train()
    return folder


def test_clients_that_die_leave_raise_or_are_slow(tmp_path: Path) -> None:
    """In round 2 steady does its work; cut is killed with all its processes, and started again; gone is terminated and
    does not come back; angry raises; slow is at work for longer than the deadline; crashed loses the process that
    trains, and nothing else. The deadline leaves Flower the minute that it needs to notice who was killed."""
    names = ("steady", "cut", "gone", "angry", "slow", "crashed")
    rules = {"quorum": 2, "deadline": 120.0, "grace": 300.0}
    folder = make(tmp_path / "f", "fedcc", names, rules=rules, rounds=4, app=FAULTY)
    for name in ("steady", "cut", "gone", "slow"):
        plan(site(folder, name), r2="hold")
    plan(site(folder, "angry"), r2="raise")
    plan(site(folder, "crashed"), r2="die")
    with real(folder, tmp_path / "programs", PYTHONPATH=FAULTY_PATH) as federation:
        federation.server()
        clients = {name: federation.client(name, "--share-model") for name in names}
        run = federation.run()
        begun(folder, names, 2)
        first = (folder.run / "metrics.jsonl").read_text()
        federation.kill(clients["cut"])
        os.kill(clients["gone"].pid, signal.SIGTERM)
        assert clients["gone"].end(30).code != 0
        clients["cut"] = federation.client("cut", "--share-model")
        for name in ("steady", "cut"):
            go(site(folder, name), 2)
        wait_until(lambda: "round 2: angry has failed" in log(folder))
        told = json.loads(status(federation, "--json"))
        assert told["clients"]["angry"]["problem"] == "an error at the site; its own log says which"
        assert "the disk is full" in federation.said(clients["angry"])
        assert (told["state"], told["round"]) == ("running", 1)
        wait_until(lambda: "round 2 of 4 is done" in log(folder), 240)
        go(site(folder, "slow"), 2)
        done = run.end(240)
        assert done.code == 0, done
        text = status(federation)
    one, two, three, four = reports(folder)
    assert one["present"] == list(names)
    assert (folder.run / "metrics.jsonl").read_text().startswith(first)
    assert two["present"] == ["steady", "cut"]
    assert two["absent"] == ["gone"]
    assert two["slow"] == ["slow"]
    assert set(two["failed"]) == {"angry", "crashed"}
    assert two["failed"]["crashed"] == "the site's program has ended"
    assert two["failed"]["angry"] == "an error at the site; its own log says which"
    assert three["late"] == {"slow": 2}
    for report in (three, four):
        assert report["present"] == [n for n in names if n != "gone"]
        assert report["absent"] == ["gone"]
        assert not report["refused"]
        assert not report["failed"]
    assert "run finished, round 4 of 4" in text
    assert [line.split()[2] for line in text.splitlines()[2:] if line[0] != " "] == ["4", "4", "1", "4", "4", "4"], text

    def fault(transport: LocalTransport, name: str, t: int) -> Any:
        if t == 2 and name == "gone":
            transport.away.add("gone")
        if t == 3:
            transport.release()
        failed = RuntimeError("no work of this round is left")
        kinds = {"gone": "lose", "slow": "late", "angry": failed, "crashed": failed}
        return kinds.get(name) if t == 2 else None

    again = replayed(folder, tmp_path / "again", fault)
    assert [r["present"] for r in reports(again)] == [r["present"] for r in reports(folder)]
    assert sent(again) == sent(folder)
    assert accuracy(again) == accuracy(folder)


def test_a_server_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """In round 2 with all that belongs to it, in round 3 only the process that runs the rounds, in round 4 only the
    command that watches it. Nothing is lost: all that is sent, and the accuracy, are the simulator's."""
    names = ("north", "east", "south")
    folder = make(tmp_path / "f", "fedcc", names, rounds=4, skew="iid", app=FAULTY)
    for name in names[1:]:
        plan(site(folder, name), r2="hold", r3="hold")
    with real(folder, tmp_path / "programs", PYTHONPATH=FAULTY_PATH) as federation:
        server = federation.server()
        clients = [federation.client(name, "--share-model") for name in names]
        run = federation.run()
        begun(folder, names, 2)
        wait_until(lambda: "round 2: north has answered" in log(folder))
        first = (folder.run / "metrics.jsonl").read_text()
        assert first.count("\n") == 1
        federation.kill(server)
        done = run.end(60)
        done.failed("server", "run")
        assert "not running" in status(federation)
        assert json.loads(status(federation, "--json"))["state"] == "stopped"
        go(site(folder, "east"), 2)
        federation.server()
        run = federation.run()
        go(site(folder, "south"), 2)
        begun(folder, names, 3)
        wait_until(lambda: "round 3: north has answered" in log(folder))
        second = (folder.run / "metrics.jsonl").read_text()
        assert second.startswith(first)
        federation.run().end(60).failed("a run or a prediction is in progress")
        os.kill(json.loads((folder.operator / "status.json").read_text())["pid"], signal.SIGKILL)
        run.end(60).failed("has ended", "run again")
        for name in names[1:]:
            go(site(folder, name), 3)
        run = federation.run()
        wait_until(lambda: "round 3 of 4 is done" in log(folder), 120)
        os.kill(run.pid, signal.SIGKILL)
        done = federation.run().end(240)
        assert done.code == 0, done
        assert all(client.process.is_alive() for client in clients)
    assert (folder.run / "metrics.jsonl").read_text().startswith(second)
    assert [r["round"] for r in RunFolder(folder.run).metrics()] == [1, 2, 3, 4]
    assert [r["present"] for r in reports(folder)] == [list(names)] * 4
    simulated = simulate(folder.experiment)
    assert sent(folder) == simulated.uplinks
    assert accuracy(folder) == simulated.accuracy


def test_uploads_that_are_wrong_are_refused_and_the_round_goes_on(tmp_path: Path) -> None:
    names = ("north", "east", "south")
    rules = {"quorum": 1, "deadline": 60.0, "grace": 60.0, "strikes": 3}
    folder = make(tmp_path / "f", "fedcc", names, rules=rules, rounds=6, skew="iid", app=FAULTY)
    lies = {"r1": "shape", "r2": "nan", "r4": "run", "r5": "large"}
    plan(site(folder, "east"), **lies)
    stubborn = dict.fromkeys(("r1", "r2", "r3", "r4"), "negative")
    plan(site(folder, "south"), **stubborn)
    with real(folder, tmp_path / "programs", PYTHONPATH=FAULTY_PATH) as federation:
        federation.server()
        for name in names:
            federation.client(name, "--share-model")
        done = federation.run().end(300)
        assert done.code == 0, done
        text = status(federation)
    found = reports(folder)
    assert [r["present"] for r in found] == [
        ["north"],
        ["north"],
        ["north", "east"],
        ["north"],
        ["north"],
        ["north", "east"],
    ]
    rules_named = [
        ("east", 1, "wrong shape"), ("east", 2, "must be finite"), ("east", 4, "wrong run"), ("east", 5, "too large"),
        *(("south", t, "must not be negative") for t in (1, 2, 3)),
    ]  # fmt: skip
    for name, t, rule in rules_named:
        assert rule in found[t - 1]["refused"][name], (name, t)
    assert [len(r["refused"]) for r in found] == [2, 2, 1, 1, 1, 0]
    assert [r["aside"] for r in found] == [[], [], *[["south"]] * 4]
    assert not (site(folder, "south") / "begun-4").exists()
    (line,) = (line for line in text.splitlines() if line.startswith("south"))
    assert "set aside" in line

    def fault(_: LocalTransport, name: str, t: int) -> Any:
        kind = {"east": lies, "south": stubborn}.get(name, {}).get(f"r{t}")
        return None if kind is None else lambda content: SPOILED[kind](content) or content

    again = replayed(folder, tmp_path / "again", fault)
    assert sent(again) == sent(folder)
    assert accuracy(again) == accuracy(folder)
