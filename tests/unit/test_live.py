"""What a terminal shows while something runs: which part of how many, the time so far, the time left; it never stands
still, and fits into 80 columns."""

from __future__ import annotations

import io
import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedcc.cli.console import console, say, show
from fedcc.cli.live import RunRows
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.progress import Progress, steps


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", console.file.getvalue()).replace("\r", "\n")


def test_steps_tick_when_one_is_complete_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with steps(console) as step:
        step("figures", 0, 2)
        step("figures", 1, 2)
        step("figures", 2, 2)
        time.sleep(1.3)
        step("page", 0, 4)
        time.sleep(1.3)
    text = shown(console)
    assert re.search(r"figures 2/2 .* 0:00:0[1-9]", text)
    assert "0:00 left" not in text
    assert re.search(r"page 0/4 .* 0:00:0[1-9]", text)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [80, 120])
def test_steps_take_one_line_with_what_is_left(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the longest description of `report` and `federation demo`, and hours to go."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("fedcc.experiments.progress.time", SimpleNamespace(perf_counter=iter([0, 0, 0, 7200]).__next__))
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    with steps(console) as step:
        step("fedavg in the simulator, rounds", 0, 12)
        step("fedavg in the simulator, rounds", 6, 12)
    lines = shown(console).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    assert any(
        re.search(r"fedavg in the simulator, rounds 6/12 .*\d:\d\d:\d\d 2:00:00 left", line) for line in lines
    ), lines


def test_a_run_ticks_while_nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions between two fits may take minutes; the line shows that the run lives, and fits."""
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    progress = Progress(console, 15, done=11)
    progress.accuracy, progress.start_time = 98.7, time.perf_counter() - 3600
    progress.phase, progress.client, progress.expected, progress.round_seconds = "refine", 12, 1000, 300.0
    with progress.live:
        time.sleep(1.3)
    text = shown(console)
    assert re.search(r"round 12/15 .* 1:00:0[1-9], 20:00 left", text), text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "samples/s" not in text
    assert "samples/s" in Progress(Console(width=120), 15).row().columns[4]._cells[0].plain  # type: ignore[union-attr]
    assert [len(Progress(Console(width=width), 15).row().columns) for width in (120, 80, 30)] == [6, 6, 4]  # no bar


def test_a_long_line_breaks_between_words_on_a_terminal_only() -> None:
    narrow = Console(file=io.StringIO(), force_terminal=True, width=20)
    show(narrow, "ten clients, seed 0, cpu fp32 plain")
    assert shown(narrow) == "ten clients, seed 0,\ncpu fp32 plain\n"
    log = Console(file=io.StringIO(), width=20)
    show(log, "ten clients, seed 0, cpu fp32 plain")
    assert shown(log) == "ten clients, seed 0, cpu fp32 plain\n"


def test_a_terminal_that_does_not_tell_its_width_has_the_usual_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.fileno", lambda: 2)

    def refuse(_: int) -> os.terminal_size:
        raise OSError("not a terminal")

    for answer in (lambda _: os.terminal_size((0, 0)), refuse):
        monkeypatch.setattr(os, "get_terminal_size", answer)
        say("word " * 30)
        assert [len(line) for line in capsys.readouterr().err.splitlines()] == [76, 79]
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert console().width == 80


def test_an_error_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say("the server says \x1b[2J\x9b2J\nno\u202e")
    assert capsys.readouterr().err == "fedcc: the server says \\x1b[2J\\x9b2J no\\u202e\n"


def test_a_command_to_copy_is_not_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.fileno", lambda: 2)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((30, 24)))
    say("stopped (resume with `fedcc resume /home/me/runs/a/b/seed0`)")
    assert capsys.readouterr().err.splitlines()[1] == "`fedcc resume /home/me/runs/a/b/seed0`)"
    narrow = Console(file=io.StringIO(), force_terminal=True, width=20)
    show(narrow, "resume with `fedcc resume runs/digits_classes-1/seed0`")
    assert shown(narrow) == "resume with\n`fedcc resume runs/digits_classes-1/seed0`\n"


def test_without_a_terminal_steps_print_nothing() -> None:
    console = Console(file=io.StringIO())
    with steps(console) as step:
        step("figures", 1, 2)
    assert shown(console) == ""


def test_a_run_in_progress_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcc.cli.live.time", SimpleNamespace(monotonic=lambda: 130.0, time=lambda: 1e9))
    folder = Path("digits_classes-1") / "fedavg" / ("a-very-long-name-" * 4) / "seed0"
    rows, start = RunRows(tmp_path), 100.0
    assert rows.row(folder, start)[1:4] == ("starting", "", "0:30")
    (tmp_path / folder).mkdir(parents=True)
    experiment = Experiment.resolve("fedavg", data="digits", rounds=4, device="cpu")
    (tmp_path / folder / "experiment.toml").write_text(experiment.toml())
    assert rows.row(folder, start)[1] == "round 1/4"
    metrics = tmp_path / folder / "metrics.jsonl"
    metrics.write_text(json.dumps({"round": 1, "accuracy": 12.34}) + "\n")
    os.utime(metrics, (1e9 - 10, 1e9 - 10))  # the round took 20 s of the 30
    row = rows.row(folder, start)
    assert row[1:] == ("round 2/4", "12.3 %", "0:30", "0:50 left")
    os.utime(metrics, (1e9 - 25, 1e9 - 25))  # the first took 5 s, and the second takes longer than all four would
    assert rows.row(folder, start)[-1] == ""
    console = Console(file=io.StringIO(), width=80)
    console.print(rows.table(("0/1 runs", "", "", "0:30", ""), [row]))
    lines = shown(console).splitlines()
    assert len(lines) == 2, "a long name is cut, not wrapped"
    assert all(word in lines[1] for word in ("round 2/4", "12.3 %", "left"))
