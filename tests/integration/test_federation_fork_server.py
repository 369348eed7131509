"""The fork server is Flower's program for all that its callers can see, and ends with its client."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from program import alive, wait_until

pytest.importorskip("flwr")

pytestmark = pytest.mark.slow

CALLS = (("--help",), ("--nonsense",))
STARTER = """
import sys, time
from pathlib import Path
from fedcc.flower.fork_server import ForkServer
print(ForkServer(Path(sys.argv[1])).pid, flush=True)
time.sleep(600)
"""


def test_it_answers_as_the_program_itself_and_does_not_outlive_its_client(tmp_path: Path) -> None:
    folder = tmp_path / ("long " * 30)  # a socket's path may have 108 characters
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert starter.stdout is not None
        server = int(starter.stdout.readline())
        env = {**os.environ, "PATH": f"{folder}{os.pathsep}{Path(sys.executable).parent}"}
        found = [subprocess.run(["flwr-clientapp", *call], env=env, capture_output=True, text=True) for call in CALLS]
        assert alive(server)
        starter.kill()
        starter.wait()
        wait_until(lambda: not alive(server))
        cold = [subprocess.run(["flwr-clientapp", *call], env=env, capture_output=True, text=True) for call in CALLS]
    finally:
        starter.kill()
    for a, b in zip(found, cold, strict=True):
        assert (a.returncode, a.stdout, a.stderr) == (b.returncode, b.stdout, b.stderr)
    assert [a.returncode for a in found] == [0, 2]
