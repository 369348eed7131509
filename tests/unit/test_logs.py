"""Log lines, rotation, and following a log that is rotated meanwhile."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from fedcc.flower import logs
from fedcc.flower.logs import LogFile, LogFollower, LogLine, console_log, rotate


def test_a_line_has_date_level_and_message_as_text_and_as_json(tmp_path: Path) -> None:
    LogFile(tmp_path / "text").say("a is connected")
    LogFile(tmp_path / "json", "json").say('b says "no"\nand more', "warning")
    text, entry = (tmp_path / "text").read_text(), json.loads((tmp_path / "json").read_text())
    line = LogLine.parse(text.rstrip("\n"))
    assert (line.message, line.level) == ("a is connected", "info")
    assert abs((line.time - datetime.now()).total_seconds()) < 60
    assert entry["message"] == 'b says "no"\nand more'
    assert entry["level"] == "warning"
    assert datetime.fromisoformat(entry["time"]).tzinfo is not None
    assert (tmp_path / "json").read_text().count("\n") == 1


def test_the_console_keeps_the_time_and_level_of_a_line_from_a_log() -> None:
    said: list[str] = []
    say = console_log(said.append, "json")
    say("2026-03-01 09:30:00.250 ERROR stopped: no quorum")
    say("ready")
    say("the server cannot be reached", "warning")
    first, second, third = map(json.loads, said)
    assert (third["level"], third["message"]) == ("warning", "the server cannot be reached")
    assert first == {"time": "2026-03-01T09:30:00.250", "level": "error", "message": "stopped: no quorum"}
    assert (second["level"], second["message"]) == ("info", "ready")


@pytest.mark.parametrize("form", ["text", "json"])
def test_words_of_others_cannot_control_a_terminal_or_add_lines(tmp_path: Path, form: str) -> None:
    """Whatever form the log has and the console, and whether the words come by a log or not."""
    words = "at \x1b[2J\x9b2J\n2026-03-01 09:30:00.250 ERROR of nobody\u202e"
    log, said = LogFile(tmp_path / "run.log", form), list[str]()
    for shown in ("text", "json"):
        say = console_log(said.append, shown)  # type: ignore[arg-type]
        say(words)
        follower = LogFollower(log.path, say)
        log.say(words, "warning")
        follower.poll()
    assert log.path.read_text().count("\n") == 2
    assert len(said) == 4
    assert all(line.isprintable() for line in (*said, *log.path.read_text().splitlines()))
    assert ["WARNING" in line or '"warning"' in line for line in said] == [False, True, False, True]


def test_logs_are_rotated_and_the_oldest_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    for n in range(9):
        path.write_text(f"{n}" * 20)
        assert rotate(path, largest=20, kept=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.log.1", "run.log.2", "run.log.3"]
    assert [(tmp_path / f"run.log.{n}").read_text()[0] for n in (1, 2, 3)] == ["8", "7", "6"]
    path.write_text("short")
    assert not rotate(path, largest=20)


@pytest.mark.parametrize("copy", [False, True])
def test_a_follower_misses_no_line_of_a_log_that_is_rotated(tmp_path: Path, copy: bool) -> None:
    path, seen = tmp_path / "run.log", list[str]()
    path.write_text("old\n")
    kept_open = path.open("a")
    follower = LogFollower(path, seen.append)

    def write(text: str) -> None:
        if copy:  # a process that keeps it open
            kept_open.write(text)
            kept_open.flush()
        else:
            with path.open("a") as file:
                file.write(text)

    write("one\ntw")
    follower.poll()
    write("o\nthree\x1b[2J\n")
    assert rotate(path, copy=copy, largest=1)
    write("four\n")
    follower.poll()
    write("five\n")
    follower.poll()
    kept_open.close()
    assert seen == ["one", "two", "three\\x1b[2J", "four", "five"]


def test_a_log_file_rotates_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs.rotate, "__kwdefaults__", {"copy": False, "largest": 200, "kept": 2})
    log = LogFile(tmp_path / "run.log")
    for n in range(20):
        log.say(f"line {n}")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.log", "run.log.1", "run.log.2"]
    assert "line 19" in log.path.read_text()
