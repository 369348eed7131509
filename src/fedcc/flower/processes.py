"""Flower's executables: started with a private home and nothing that leaves the machine, watched, and ended with us."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedcc.errors import UserError

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONUNBUFFERED": "1"}
TERMINATE_SECONDS = 10.0


class FlowerError(UserError):
    """One of Flower's programs has failed, or what they do together."""


def executable(name: str) -> str:
    """One of Flower's programs: the one beside this Python, else one on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FlowerError(f"{name} is not installed; `pip install 'fedcc[flower]'`")
    return found


def environment(home: Path, threads: int = 1, **more: str) -> dict[str, str]:
    """What Flower's programs see: its home here, its telemetry off, and this Python's programs first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path, "OMP_NUM_THREADS": str(threads), **more}


class Child:
    """A program of Flower's in a session of its own; it and what it has started end when this process does."""

    def __init__(self, arguments: list[str], env: Mapping[str, str], log: Path, read: bool = False):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name, self.log = Path(arguments[0]).name, log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                arguments,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if read else file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
                cwd=log.parent,
            )

    def follow(self, told: Callable[[str], None]) -> None:
        """Tell what it writes, line by line, until it ends; its log has it too.

        Its own children hold the pipe open for longer, hence the thread.
        """

        def read() -> None:
            assert self.process.stdout is not None
            with self.log.open("ab") as file:
                for line in self.process.stdout:
                    file.write(line)
                    file.flush()
                    told(line.decode(errors="replace").rstrip())

        threading.Thread(target=read, daemon=True).start()
        self.process.wait()
        time.sleep(0.2)  # for its last lines

    def ended(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        """Ask it to end, then end it and its children."""
        if self.ended() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(TERMINATE_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def tail(self, lines: int = 5) -> str:
        """The end of its log, for an error."""
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return " / ".join(line.strip() for line in text[-lines:] if line.strip())


def _end_with_parent() -> None:
    """On Linux, SIGTERM when the parent ends, however it ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def flwr(arguments: list[str], env: Mapping[str, str], seconds: float = 60) -> dict[str, Any]:
    """One call of Flower's command line; the JSON that it answers with."""
    words = [executable("flwr"), *arguments, "--format", "json"]
    try:
        done = subprocess.run(words, env=dict(env), capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise FlowerError(f"`flwr {' '.join(arguments)}` has not answered within {seconds:g} s") from None
    text = done.stdout[done.stdout.find("{") :]
    try:
        answer = json.loads(text)
    except ValueError:
        answer = {"success": False}
    if done.returncode or not answer.get("success"):
        reason = answer.get("error-message") or f"{done.stdout} {done.stderr}"
        raise FlowerError(f"`flwr {arguments[0]}` has failed: {' '.join(str(reason).split())[-500:]}")
    return dict(answer)


REGISTER = """
import json, sys
from flwr.cli.app import app
for name, key in json.loads(sys.argv[1]).items():
    app(["supernode", "register", key, sys.argv[2], "--name", name], standalone_mode=False)
"""


def register(keys: Mapping[str, Path], superlink: str, env: Mapping[str, str]) -> None:
    """``flwr supernode register`` for each of these public keys, in one process: its imports take over a second."""
    words = [sys.executable, "-P", "-c", REGISTER, json.dumps({n: str(k) for n, k in keys.items()}), superlink]
    done = subprocess.run(words, env=dict(env), capture_output=True, text=True, check=False)
    if done.returncode:
        raise FlowerError(f"the clients' keys could not be registered: {' '.join(done.stderr.split())[-500:]}")


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


def wait_for(true: Callable[[], Any], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise FlowerError(f"{what} within {seconds:g} s")
        time.sleep(0.1)


def listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1).close()
        return True
    except OSError:
        return False


def reached(address: str, authority: Path) -> str | None:
    """What keeps this machine from the server at an address, or None; a wrong certificate is an error."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=str(authority))
    try:
        with (
            socket.create_connection((host, int(port)), 5) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return None
    except ssl.SSLCertVerificationError as error:
        raise FlowerError(f"{address} does not show a certificate of this federation: {error.verify_message}") from None
    except OSError as error:
        return error.strerror or str(error)
