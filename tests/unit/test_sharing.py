"""How many runs share a device: those that hold their lock, and nobody else."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from fedcc.experiments.record import sharing
from fedcc.experiments.sharing import shared

HOLD = """
import sys, time
from pathlib import Path
from fedcc.experiments.sharing import shared
with shared(sys.argv[1], Path(sys.argv[2])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_runs_on_one_device_count_each_other(tmp_path: Path) -> None:
    with shared("cpu", tmp_path) as first:
        assert first() == 0
        with shared("cpu", tmp_path) as second, shared("cpu", tmp_path) as third:
            assert (first(), second(), third()) == (2, 2, 2)
        assert first() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_no_longer_counts(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLD, "cpu", str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    with shared("cpu", tmp_path) as others, other:
        try:
            assert other.stdout.readline() == "held\n"
            assert others() == 1
        finally:
            other.send_signal(signal.SIGKILL)
        other.wait()
        assert others() == 0
        assert len(list(tmp_path.iterdir())) == 1  # the file that it left is gone


def test_a_folder_that_cannot_be_used_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with shared("cpu", tmp_path / "file") as others:
        assert others() is None


def test_a_record_has_the_most_and_the_mean() -> None:
    assert sharing([{"sharing": 2}, {"sharing": 2}, {"sharing": 0}]) == {"sharing": {"most": 2, "mean": 1.33}}
    assert sharing([{"sharing": None}, {}]) == {}
