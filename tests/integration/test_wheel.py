"""The wheel: built, installed into a clean environment, and used from there without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
OFFLINE = """
import socket, sys
def refuse(*_, **__): raise OSError("no network in this test")
socket.socket.connect = socket.getaddrinfo = refuse
sys.argv = ["fedcc", "demo", "--rounds", "1", "--epochs", "1", "--clients", "10", "--out", "d"]
from fedcc.cli import main
import fedcc
print(fedcc.__file__)
if __name__ == "__main__": main()
"""


def run(*words: str | Path, cwd: Path) -> str:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(w) for w in words], cwd=cwd, env=kept, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_wheel_and_the_source_distribution_are_ready_for_an_index(tmp_path: Path) -> None:
    """The wheel is built from the source distribution, which thus has what a build needs; twine accepts both."""
    run(sys.executable, "-m", "build", "--outdir", tmp_path, CHECKOUT, cwd=tmp_path)
    built = sorted(tmp_path.iterdir())
    assert [path.suffix for path in built] == [".whl", ".gz"]
    assert run(sys.executable, "-m", "twine", "check", "--strict", *built, cwd=tmp_path).count("PASSED") == 2


@pytest.mark.slow
def test_the_wheel_in_a_clean_environment(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "dist", CHECKOUT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").iterdir()
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    quiet = ("--quiet", "--disable-pip-version-check", "--no-compile")
    run(python, "-m", "pip", "install", *quiet, "-c", CHECKOUT / "constraints.txt", wheel, cwd=tmp_path)
    pins = dict(line.split("==") for line in (CHECKOUT / "constraints.txt").read_text().split())
    installed = dict(
        line.split("==") for line in run(python, "-m", "pip", "freeze", cwd=tmp_path).split() if "==" in line
    )
    assert {n: v.partition("+")[0] for n, v in installed.items() if n in pins} == {
        n: pins[n] for n in installed if n in pins
    }
    assert "torch" in installed
    run(python, "-m", "pip", "check", cwd=tmp_path)
    assert "py.typed" in run(python, "-c", "import os, fedcc; print(os.listdir(fedcc.__path__[0]))", cwd=tmp_path)

    (tmp_path / "demo.py").write_text(OFFLINE)
    out = run(python, "demo.py", cwd=tmp_path)
    assert str(tmp_path / "env") in out.splitlines()[0]  # not the checkout
    for word in ("FedCC", "FedAvg", "FedMD", "Local", "Centralized", "d/curves.png"):
        assert word in out
    assert (tmp_path / "d" / "fedcc" / "summary.json").is_file()
    program = tmp_path / "env" / "bin" / "fedcc"
    assert run(program, "--version", cwd=tmp_path).strip() in wheel.name
