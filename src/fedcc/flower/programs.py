"""Flower's programs: started with a home of their own and nothing that leaves the machine, watched, and ended."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedcc.core.files import uninterrupted
from fedcc.core.naming import printable
from fedcc.errors import UserError
from fedcc.flower.logs import rotate
from fedcc.processes import end_with_parent


class FlowerError(UserError):
    """One of Flower's programs has failed, or the federation that they run."""


def environment(home: Path, threads: int = 1, **more: str) -> dict[str, str]:
    """The environment of Flower's programs: this home, no telemetry, and this Python's programs first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **quiet, "FLWR_HOME": str(home), "PATH": path, "OMP_NUM_THREADS": str(threads), **more}


def forget_apps(home: Path) -> None:
    """Have Flower unpack its app again: one that was cut off, or is damaged, it would use as it is for ever."""
    shutil.rmtree(home / "apps", ignore_errors=True)


class ChildProcess:
    """A program in a session of its own, its output in a log; it ends with this process, however that ends."""

    def __init__(self, arguments: list[str], env: Mapping[str, str], log: Path, patience: float = 10):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.patience = log, patience  # seconds for it to end by itself
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                arguments,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(signal.SIGTERM),
                cwd=log.parent,
            )

    def close(self) -> None:
        """Terminate it, then kill it and its children."""
        with uninterrupted():  # a second Ctrl-C leaves nothing running either
            if self.process.poll() is None:
                self.process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(self.patience)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def check(self) -> None:
        """Raise an error if the program has ended."""
        if (code := self.process.poll()) is not None:
            lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()[-5:]]
            tail = printable(" / ".join(filter(None, lines)))
            raise FlowerError(f"{self.log.stem} has ended ({code}): {tail}; see {self.log}")

    def wait_until(self, condition: Callable[[], bool], seconds: float = math.inf) -> None:
        """Return as soon as the condition holds; an error if the program ends before, or if it takes longer."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.check()
            rotate(self.log, copy=True)
            if time.monotonic() > deadline:
                raise FlowerError(f"{self.log.stem} is not ready after {seconds:g} s; see {self.log}")
            time.sleep(0.1)


def close_to_others(*folders: Path) -> None:
    """Let nobody else read these folders, nor what this process and its children write from now on."""
    os.umask(0o077)
    for folder in folders:
        if folder.is_dir() and folder.stat().st_mode & 0o077:
            folder.chmod(0o700)


def flwr(arguments: list[str], env: Mapping[str, str], seconds: float = 60) -> dict[str, Any]:
    """Call Flower's command line and return its JSON answer."""
    words = ["flwr", *arguments, "--format", "json"]
    try:
        completed = subprocess.run(words, env=dict(env), capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise FlowerError(f"`flwr {' '.join(arguments)}` has not answered within {seconds:g} s") from None
    try:
        answer = json.loads(completed.stdout[completed.stdout.find("{") :])
    except ValueError:
        answer = {"success": False}
    if completed.returncode or not answer.get("success"):
        reason = answer.get("error-message") or f"{completed.stdout} {completed.stderr}"
        raise FlowerError(f"`flwr {arguments[0]}` has failed: {printable(str(reason))[-500:]}")
    return dict(answer)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1).close()
        return True
    except OSError:
        return False
