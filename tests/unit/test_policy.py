"""A site's policy and its log; in a federation: integration/test_federation_policy.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedcc.core.digests import DamagedFile
from fedcc.flower.policy import FIRST, AuditLog, Policy, Usage
from fedcc.flower.site_error import SiteError


def allow(
    log: AuditLog, policy: Policy, run: str = "a", t: int = 1, purpose: str = "train", samples: int = 0, asked: str = ""
) -> str:
    """What is wrong with a command, or nothing."""
    try:
        log.allow(policy, run, t, "n", purpose, samples, asked)
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
    assert Usage.of(log.entries()) == Usage(
        frozenset("ab"), frozenset((run, t, "") for run in "ab" for t in range(1, 4)), 7
    )


def test_runs_rounds_and_queries_are_limited(tmp_path: Path) -> None:
    log, policy = AuditLog(tmp_path), Policy(runs=2, rounds=3, queries=10)
    assert [allow(log, policy, "a", 1), allow(log, policy, "a", 2), allow(log, policy, "b", 1)] == ["", "", ""]
    assert allow(log, policy, "a", 2) == "", "a round that is asked for again is the same round"
    assert allow(log, policy, "b", 2) == "at most 3 rounds, this would be number 4"
    assert allow(log, policy, "b", 1, asked="other targets") == "at most 3 rounds, this would be number 4"
    assert allow(log, policy, "c", 1, "query.model") == "at most 2 runs, this would be number 3"
    assert allow(log, policy, "b", 1, "query.predict", 10) == ""
    assert allow(log, policy, "b", 1, "query.predict", 1) == "at most 10 queries, this would be number 11"
    assert allow(log, policy, "b", 1, "query.predict", 0) == "", "public samples are no queries"
    assert AuditLog(tmp_path).entries() == log.entries(), "limits survive restarts"
    with pytest.raises(SiteError) as error:
        log.allow(policy, "c", 1, "n", "train", 0)
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
        log.allow(Policy(), "a", 4, "n", "train", 0)
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
