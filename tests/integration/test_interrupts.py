"""Ctrl-C, again and again: no traceback at any moment, and the tests answer it even where a shell ignores it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedcc.signals import importing_torch
from program import started

TESTS = Path(__file__).parent
OFFSETS = [0.2 + 0.25 * i for i in range(24)]  # seconds: imports, data, training, shut-down


def before_the_handler(traceback: str) -> bool:
    """Whether Python was still starting, before the module that handles signals was imported."""
    return "runpy" in traceback and set(re.findall(r"src/fedcc/(\S+)\.py", traceback)) <= {"__init__", "signals"}


@pytest.mark.slow
def test_two_interrupts_at_any_moment_print_no_traceback(tmp_path: Path) -> None:
    words = ("run", "local", "--rounds", 20, "--epochs", 0, "--models", "resnet8", "--device", "cpu", "--no-checkpoint")
    for i, offset in enumerate(OFFSETS):
        run = started(tmp_path, *words, "--no-save-models", "--out", i)
        time.sleep(offset)
        for pause in (0.0, 0.002, 0.004):
            time.sleep(pause)
            if run.poll() is None:
                os.kill(run.pid, signal.SIGINT)
        _, err = run.communicate(timeout=120)
        if err.startswith("Fatal Python error: init") or before_the_handler(err):
            continue
        assert "Traceback" not in err, (offset, err)
        assert "Exception ignored" not in err, (offset, err)
        assert run.returncode in (0, 130, -signal.SIGINT), (offset, err)


def test_an_interrupt_while_torch_is_imported_is_told_from_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not importing_torch()
    half = SimpleNamespace(__spec__=SimpleNamespace(_initializing=True))
    monkeypatch.setitem(sys.modules, "torch", half)  # type: ignore[arg-type]
    assert importing_torch()
    monkeypatch.delitem(sys.modules, "torch")
    assert not importing_torch()


def test_a_second_interrupt_while_the_first_is_reported_is_quiet(tmp_path: Path) -> None:
    """Each signal arrives at a chosen place: in the clean-up, in ``__del__``, in the report, at the end."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for place in ("clean-up", "del", "report", "exit"):
        done = subprocess.run(
            [sys.executable, str(script), place], capture_output=True, text=True, check=False, timeout=120
        )
        assert "Traceback" not in done.stderr, (place, done.stderr)
        assert "Exception ignored" not in done.stderr, (place, done.stderr)
        assert "fedcc: interrupted" in done.stderr, (place, done.stderr)
        assert done.returncode in (130, -signal.SIGINT), (place, done)


SCRIPT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
place = sys.argv[1]
sys.orig_argv = [sys.executable, "-m", "fedcc"]
from fedcc import cli
from fedcc.cli import program
import time

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.001)

class Odd:
    def __del__(self):
        interrupt()

def app(*_, **__):
    if place == "del":
        Odd()
        time.sleep(5)
        return 0
    try:
        interrupt()
    finally:
        if place == "clean-up":
            interrupt()

explained = program.error_line

def twice(error):
    if place == "report":
        interrupt()
        interrupt()
    return explained(error)

class Last:
    def __del__(self):
        if place == "exit":
            interrupt()

program.app, program.error_line = app, twice
last = Last()
cli.main()
"""


@pytest.mark.slow
def test_the_tests_answer_ctrl_c_where_a_shell_ignores_it() -> None:
    name = "test_run_folder.py::test_a_signal_in_mid_run_leaves_a_valid_folder[SIGINT-130-interrupted]"
    words = shlex.join([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / name)])
    done = subprocess.run(["sh", "-c", f"trap '' INT; exec {words}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
