"""The fuzz harness finds what it looks for, in targets that misbehave; and every target of it runs."""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuzz.__main__ import TARGETS
from fuzz.harness import Case, Limits, Target, Wrong, fuzz, planned, save

LIMITS = Limits(seconds=10, growth=200 * 2**20)  # a machine's first use of 300 MiB may take more than a second
SHORT = Limits(seconds=0.5, growth=200 * 2**20)


class Planted(Target):
    """Reads texts, and misbehaves at some of them."""

    name = "planted"

    def make(self, rng: random.Random) -> Case:
        return {"file": str(rng.randrange(1000)).encode()}

    def check(self, case: Case, folder: Path) -> bool:
        (folder / "file").write_bytes(case["file"] or b"")
        return self.read(folder / "file", int(case["file"] or b"0"))

    def read(self, path: Path, number: int) -> bool:
        return True

    def at(self, index: int) -> int:
        """The number of an input."""
        return int(self.case(0, index)["file"] or b"0")


def findings(target: Planted, room: Path, inputs: int = 20, limits: Limits = LIMITS) -> dict[str, list[int]]:
    """What is found, with the inputs."""
    [tally] = fuzz({target: inputs}, 0, room, jobs=1, limits=limits).values()
    assert tally.inputs == inputs
    return {f.what: f.indices for f in tally.findings.values()}


def test_nothing_is_found_in_a_target_that_accepts_or_refuses(tmp_path: Path) -> None:
    class Good(Planted):
        def read(self, path: Path, number: int) -> bool:
            if number % 2:
                raise ValueError(f"{path}: {number} is odd")
            return True

    target = Good()
    [tally] = fuzz({target: 300}, 0, tmp_path, jobs=2, limits=LIMITS).values()
    assert (tally.inputs, tally.findings) == (300, {})
    assert tally.accepted == sum(target.at(i) % 2 == 0 for i in range(300))


@pytest.mark.parametrize(
    ("crash", "signal"), [(os.abort, "SIGABRT"), (lambda: ctypes.string_at(0), "SIGSEGV")], ids=["abort", "segfault"]
)
def test_a_crash_is_found_at_its_input_and_the_rest_goes_on(tmp_path: Path, crash, signal: str) -> None:
    class Crashing(Planted):
        def read(self, path: Path, number: int) -> bool:
            if number == self.at(7):
                crash()
            return True

    assert findings(Crashing(), tmp_path) == {f"killed by {signal}": [7]}


@pytest.mark.parametrize("how", ["busy", "asleep"])
def test_a_hang_is_found_even_one_that_answers_no_signal(tmp_path: Path, how: str, monkeypatch) -> None:
    import signal

    monkeypatch.setattr("fuzz.harness.SLEEP", 2)

    class Hanging(Planted):
        def read(self, path: Path, number: int) -> bool:
            if number == self.at(7):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                while True:
                    if how == "asleep":
                        time.sleep(1)
            return True

    assert findings(Hanging(), tmp_path, limits=SHORT) == {"took over 0.5 s": [7]}


def test_memory_that_grows_is_found(tmp_path: Path) -> None:
    class Growing(Planted):
        def read(self, path: Path, number: int) -> bool:
            if number == self.at(7):
                len(b"x" * (300 * 2**20))
            return True

    [(what, indices)] = findings(Growing(), tmp_path).items()
    assert "memory grew" in what
    assert indices == [7]


def test_memory_beyond_the_limit_is_not_given(tmp_path: Path) -> None:
    class Greedy(Planted):
        def read(self, path: Path, number: int) -> bool:
            return number != self.at(7) or bool(b"x" * (5 * 2**30))

    assert findings(Greedy(), tmp_path) == {"MemoryError came through": [7]}


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (KeyError("x"), "KeyError is not among the refusals"),
        (RecursionError(), "RecursionError came through"),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "x"), "UnicodeDecodeError came through"),
        (ValueError("it is odd"), "the refusal names no file"),
        (ValueError(), "the refusal says nothing"),
        (Wrong("other numbers, silently"), "other numbers, silently"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_wrong_exception_or_answer_is_found(tmp_path: Path, error: Exception, what: str) -> None:
    class Raising(Planted):
        def read(self, path: Path, number: int) -> bool:
            if number == self.at(7):
                raise error
            return True

    assert findings(Raising(), tmp_path) == {what: [7]}


def test_an_input_that_cannot_be_made_is_found(tmp_path: Path) -> None:
    class Broken(Planted):
        def make(self, rng: random.Random) -> Case:
            raise ValueError("a fault of its own")

    target = Broken()
    [tally] = fuzz({target: 3}, 0, tmp_path / "room", jobs=1, limits=LIMITS).values()
    [finding] = tally.findings.values()
    assert (finding.what, finding.indices) == ("no input was made", [0, 1, 2])
    assert "a fault of its own" in (save(finding, target, 0, tmp_path / "kept") / "finding.txt").read_text()


def test_a_finding_is_kept_with_its_input_and_how_to_make_it_again(tmp_path: Path) -> None:
    class Raising(Planted):
        def read(self, path: Path, number: int) -> bool:
            raise KeyError(number)

    target = Raising()
    [tally] = fuzz({target: [3]}, 5, tmp_path / "room", jobs=1, limits=LIMITS).values()
    [finding] = tally.findings.values()
    folder = save(finding, target, 5, tmp_path / "kept")
    assert (folder / "input" / "file").read_bytes() == target.case(5, 3)["file"]
    assert "make fuzz TARGET=planted SEED=5 INDEX=3" in (folder / "finding.txt").read_text()


def test_a_million_inputs_leave_forty_thousand_for_each_target() -> None:
    plan = planned([kind() for kind in TARGETS], 1_000_000)
    assert min(plan.values()) >= 40_000
    assert 999_000 <= sum(plan.values()) <= 1_000_000


@pytest.mark.slow
def test_make_fuzz_runs_every_target_and_finds_nothing(tmp_path: Path) -> None:
    words = [
        "-m",
        "fuzz",
        "--inputs",
        "750",
        "--json",
        str(tmp_path / "figures"),
        "--findings",
        str(tmp_path / "found"),
    ]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, *words], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures").read_text())
    assert {row["target"] for row in figures["targets"]} == {kind.name for kind in TARGETS}
    assert all(row["inputs"] >= 30 for row in figures["targets"])


@pytest.mark.parametrize("kind", TARGETS, ids=lambda kind: kind.name)
def test_inputs_depend_on_seed_and_index_alone(kind: type[Target], tmp_path: Path) -> None:
    one, other = kind(), kind()
    for n, target in enumerate((one, other)):
        (tmp_path / str(n)).mkdir()
        target.prepare(tmp_path / str(n))
    assert [one.case(0, i) for i in range(5)] == [other.case(0, i) for i in range(5)]
    assert one.case(0, 0) != one.case(1, 0) or one.case(0, 1) != one.case(1, 1)
