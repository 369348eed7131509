"""The package as two wheels, installed in light environments: another version is another program, as at real sites."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from program import Done, descendants, wait_until

CHECKOUT = Path(__file__).parents[1]


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout."""
    words = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(CHECKOUT)]
    subprocess.run(words, check=True, capture_output=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    return wheel


def raised_patch(wheel: Path) -> Path:
    """The same wheel with the patch version raised by one."""
    version = wheel.name.split("-")[1]
    start, _, patch = version.rpartition(".")
    new = f"{start}.{int(patch) + 1}"
    target = wheel.with_name(wheel.name.replace(version, new))
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w") as changed:
        for item in old.infolist():
            content = old.read(item)
            if item.filename == "fedcc/__init__.py":
                content, number = re.subn(rb'__version__ = "[^"]*"', f'__version__ = "{new}"'.encode(), content)
                assert number == 1
            elif item.filename.endswith(("/METADATA", "/RECORD")):
                content = content.replace(f"fedcc-{version}".encode(), f"fedcc-{new}".encode())
                content = content.replace(f"Version: {version}\n".encode(), f"Version: {new}\n".encode())
            changed.writestr(item.filename.replace(f"fedcc-{version}", f"fedcc-{new}"), content)
    return target


def install(wheel: Path, folder: Path) -> Path:
    """An environment with a wheel and, for all the rest, the packages of this one; its ``bin``."""
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not followed
    words = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-deps", "--quiet"]
    subprocess.run([*words, "--disable-pip-version-check", str(wheel)], check=True, capture_output=True, timeout=120)
    for script in Path(sys.executable).parent.iterdir():  # Flower's programs
        if script.name.startswith(("flwr", "flower")) and (text := script.read_bytes()).startswith(b"#!"):
            own = folder / "bin" / script.name
            own.write_bytes(f"#!{folder / 'bin' / 'python'}\n".encode() + text.partition(b"\n")[2])
            own.chmod(0o755)
    return folder / "bin"


class Installed:
    """``fedcc federation`` of an environment, running; its output lies in a file."""

    def __init__(self, programs: Path, log: Path, *arguments: Any):
        self.log, self.arguments = log, arguments
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment["OMP_NUM_THREADS"] = "1"
        words = [str(programs / "fedcc"), "federation", *map(str, arguments)]
        with log.open("wb") as file:
            self.process = subprocess.Popen(words, env=environment, stdout=file, stderr=file, cwd=log.parent,
                                            start_new_session=True)  # fmt: skip

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = 240, after: int = 0) -> None:
        """Wait until it has said something, beyond the first ``after`` characters; an error if it ends before."""
        wait_until(lambda: text in self.said()[after:] or self.process.poll() is not None, seconds)
        assert text in self.said()[after:], f"{self.arguments}: {self.said()}"

    def end(self, number: int = signal.SIGINT, seconds: float = 90) -> Done:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        return self.ended(seconds)

    def ended(self, seconds: float = 240) -> Done:
        return Done(self.process.wait(seconds), self.said(), "")


@contextmanager
def all_ended(programs: list[Installed]) -> Iterator[None]:
    """Ends all programs of a list, and what they have started, when the block ends."""
    try:
        yield
    finally:
        alive = [p for p in programs if p.process.poll() is None]
        below = [pid for p in alive for pid in descendants(p.process.pid)]
        for program in alive:
            program.process.terminate()
        deadline = time.monotonic() + 20
        for program in alive:
            with suppress(subprocess.TimeoutExpired):
                program.process.wait(max(0.1, deadline - time.monotonic()))
        for pid in [p.process.pid for p in alive] + below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
