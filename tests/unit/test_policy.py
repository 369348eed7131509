"""A site's policy and its log; in a federation: integration/test_federation_policy.py."""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path

import pytest

from fedcc.core.digests import DamagedFile
from fedcc.flower.nonces import Nonces
from fedcc.flower.policy import FIRST, AuditLog, Policy, Usage
from fedcc.flower.site_error import SiteError

NONCES = (f"{n:032x}" for n in count())


def allow(
    log: AuditLog, policy: Policy, run: str = "a", t: int = 1, purpose: str = "train", samples: int = 0,
    trains: bool | None = None,
) -> str:  # fmt: skip
    """What is wrong with a new command, or nothing."""
    try:
        log.allow(policy, run, t, next(NONCES), purpose, samples, "", purpose == "train" if trains is None else trains)
    except SiteError as error:
        return str(error)
    return ""


def test_without_limits_everything_is_allowed_and_noted(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    assert log.entries() == []
    for run in "ab":
        for t in range(1, 4):
            assert allow(log, Policy(), run, t) == ""
    assert allow(log, Policy(), "b", 3, "query.predict", 7) == ""
    assert Usage.of(log.entries()) == Usage(frozenset("ab"), 6, 7)


def test_runs_rounds_and_queries_are_limited(tmp_path: Path) -> None:
    log, policy = AuditLog(tmp_path), Policy(runs=2, rounds=3, queries=10)
    assert [allow(log, policy, "a", 1), allow(log, policy, "a", 2), allow(log, policy, "b", 1)] == ["", "", ""]
    assert allow(log, policy, "a", 2, trains=False) == "", "what is stored is sent again"
    assert allow(log, policy, "b", 2) == "at most 3 rounds, this would be number 4"
    assert allow(log, policy, "b", 1) == "at most 3 rounds, this would be number 4", "it would be trained again"
    assert allow(log, policy, "c", 1, "query.model") == "at most 2 runs, this would be number 3"
    assert allow(log, policy, "b", 1, "query.predict", 10) == ""
    assert allow(log, policy, "b", 1, "query.predict", 1) == "at most 10 queries, this would be number 11"
    assert allow(log, policy, "b", 1, "query.predict", 0) == "", "public samples are no queries"
    assert AuditLog(tmp_path).entries() == log.entries(), "limits survive restarts"
    with pytest.raises(SiteError) as error:
        log.allow(policy, "c", 1, "n", "train", 0, "", True)
    assert error.value.code == "policy"
    assert "at most 0 runs" in allow(AuditLog(tmp_path / "new"), Policy(runs=0))


def test_answers_are_noted_with_their_digest(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.answered("train", {"nonce": "1"}, {"float32": b"abc", "uint8": b"d"})
    log.answered("train", {"nonce": "2"}, {"float32": b"ab", "uint8": b"cd"})
    log.answered("query.model", {"nonce": "3", "declined": "yes"}, {})
    log.answered("\x1b[31m" + "x" * 500, {"error": "policy"}, {})
    entries = log.entries()
    assert [e["answer"] for e in entries] == ["sent", "sent", "declined", "policy"]
    assert [e["bytes"] for e in entries] == [4, 4, 0, 0]
    assert entries[0]["sha256"] != entries[1]["sha256"]
    assert entries[2]["sha256"] == entries[3]["sha256"]
    assert "\x1b" not in entries[3]["purpose"]
    assert len(entries[3]["purpose"]) == 200
    assert entries[0]["previous"] == FIRST


@pytest.mark.parametrize("change", [
    lambda lines: [lines[0], *lines[2:]],
    lambda lines: lines[1:],
    lambda lines: [lines[1], lines[0], lines[2]],
    lambda lines: [lines[0], lines[1].replace('"round": 2', '"round": 1'), lines[2]],
    lambda lines: [*lines[:2], lines[2][:40]],
    lambda lines: [*lines, "\udcff"],
    lambda lines: [*lines, "null"],
    lambda lines: [*lines, "[" * 100_000],
    lambda lines: [*lines, lines[2]],
])  # fmt: skip
def test_a_log_that_was_changed_is_not_read(change: object, tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    for t in (1, 2, 3):
        assert allow(log, Policy(), t=t) == ""
    lines = log.path.read_text().splitlines()
    text = "\n".join(change(lines)) + "\n"  # type: ignore[operator]
    log.path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DamagedFile, match=r"line \d does not follow from those before it"):
        log.entries()
    with pytest.raises(DamagedFile):
        log.allow(Policy(), "a", 4, "n", "train", 0, "", True)
    assert json.loads(lines[0])["round"] == 1


def test_a_line_that_a_crash_cut_off_is_written_over(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    assert allow(log, Policy(), t=1) == ""
    with log.path.open("a") as file:
        file.write('{"time": "2026')
    assert [entry["round"] for entry in log.entries()] == [1]
    assert allow(log, Policy(), t=2) == ""
    assert [entry["round"] for entry in log.entries()] == [1, 2]
    assert log.path.read_text().count("\n") == 2


def test_rounds_that_an_older_version_has_counted_stay_counted() -> None:
    """It counted every pair of a round and what was asked once, also where the site trained twice."""
    line = {"kind": "allowed", "purpose": "train", "run": "a", "round": 1, "samples": 0}
    entries = [line, line, *2 * [{**line, "asked": "x"}], {**line, "asked": "x", "trains": True}]
    assert Usage.of([*entries, {**line, "asked": "x", "trains": False}]).rounds == 3


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_log_without_a_line_for_a_nonce_that_was_spent_is_not_read(left: int, tmp_path: Path) -> None:
    """A log that is gone, or has lost whole lines at its end, would free all limits."""
    log, policy = AuditLog(tmp_path), Policy(rounds=3)
    for t, run in enumerate(("a", "a", "b"), start=1):
        nonce = next(NONCES)
        log.allow(policy, run, t, nonce, "train", 0, "", True)
        (tmp_path / run).mkdir(exist_ok=True)
        Nonces(tmp_path / run).spend(nonce)
    lines = log.path.read_text().splitlines(keepends=True)
    log.path.write_text("".join(lines[:left]))
    if not left:
        log.path.unlink()
    with pytest.raises(DamagedFile, match=f"no line for {3 - left} of the commands that were obeyed"):
        allow(log, policy)
    with pytest.raises(DamagedFile):
        log.answered("train", {}, {})
    log.path.write_text("".join(lines))
    assert "at most 3 rounds" in allow(log, policy)


def test_a_nonce_with_a_line_is_not_obeyed_again(tmp_path: Path) -> None:
    """The file of nonces may be gone, with the run's folder."""
    log, nonce = AuditLog(tmp_path), next(NONCES)
    log.allow(Policy(), "a", 1, nonce, "train", 0, "", True)
    with pytest.raises(SiteError, match="was obeyed before") as error:
        log.allow(Policy(), "b", 1, nonce, "train", 0, "", True)
    assert error.value.code == "replay"
    assert len(log.entries()) == 1


def test_new_files_are_on_the_disk_with_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(str(Path(f"/proc/self/fd/{number}").readlink())))
    state, run = tmp_path / "state", tmp_path / "state" / "run1"
    log, nonce = AuditLog(state), next(NONCES)
    log.allow(Policy(), "run1", 1, nonce, "train", 0, "", True)
    assert synced == [str(log.path), str(state), str(tmp_path)]
    run.mkdir()
    Nonces(run).spend(nonce)
    assert synced[3:] == [str(run / "nonces"), str(run), str(state)]
    Nonces(run).spend(next(NONCES))
    assert synced[6:] == [str(run / "nonces")]


def test_a_policy_in_a_file() -> None:
    assert Policy.read({}) == Policy()
    assert Policy().table() == {}
    policy = Policy.read({"methods": ["fedcc"], "queries": 0})
    assert policy == Policy(("fedcc",), queries=0)
    assert policy.table() == {"methods": ["fedcc"], "queries": 0}
    policy.check_method("fedcc")
    with pytest.raises(SiteError, match="methods are fedcc, the experiment's is fedavg"):
        policy.check_method("fedavg")
    Policy().check_method("anything")
    with pytest.raises(ValueError, match="runs"):
        Policy.read({"runs": -2})
    with pytest.raises(ValueError, match="rounds"):
        Policy.read({"rounds": "many"})
    with pytest.raises(TypeError):
        Policy.read({"round": 1})
