"""The program as tests start it: in this process, or as one of its own that begins with everything imported."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fedcc.cli import main

QUICK = ("--rounds", "1", "--epochs", "1", "--models", "resnet8", "--fraction", "0.2", "--device", "cpu")

WARM = multiprocessing.get_context("forkserver")  # importing torch once for all costs seconds less than each time
WARM.set_forkserver_preload(
    ["fedcc.cli", "fedcc.experiments", "fedcc.experiments.progress", "sklearn.datasets", "safetensors.torch"]
)


@dataclass
class Done:
    """How a call ended."""

    code: int
    out: str
    err: str

    def refused(self, *words: str, code: int = 2) -> None:
        """One line on stderr with these words in it, and nothing else anywhere."""
        assert (self.code, self.out) == (code, ""), self
        self.failed(*words, code=code)
        assert self.err.count("\n") == 1, self.err

    def failed(self, *words: str, code: int = 1) -> None:
        assert self.code == code, self
        last = self.err.splitlines()[-1]
        assert last.startswith("fedcc: "), self.err
        assert "Traceback" not in self.err
        assert "should not happen" not in self.err, self.err
        for word in words:
            assert word in last, last


def call(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Done:
    """The program in this process."""
    capsys.readouterr()
    with mock.patch.object(sys, "argv", ["fedcc", *map(str, arguments)]), pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return Done(end.value.code, out, err)


@dataclass
class Running:
    """The program in a process of its own, its output in files of ``folder``."""

    folder: Path
    arguments: tuple[Any, ...]
    terminal: str | None = None  # the device that it writes to instead
    largest: int | None = None  # bytes of a file
    environment: dict[str, str] = field(default_factory=dict)
    namespace: str | None = None  # of the network, as `ip netns` names it

    def __post_init__(self) -> None:
        self.process = WARM.Process(
            target=_program,
            args=(
                [*map(str, self.arguments)],
                str(self.folder),
                self.terminal,
                self.largest,
                self.environment,
                self.namespace,
            ),
        )
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def end(self, seconds: float = 60) -> Done:
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            pytest.fail(f"{self.arguments} did not end within {seconds} s")
        texts = [p.read_text() if (p := self.folder / name).exists() else "" for name in ("stdout", "stderr")]
        return Done(self.process.exitcode, *texts)


def _program(
    arguments: list[str],
    folder: str,
    terminal: str | None,
    largest: int | None,
    environment: dict[str, str],
    namespace: str | None,
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests with it ignored
    if namespace is not None:
        with Path(f"/run/netns/{namespace}").open("rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.chdir(folder)
    os.environ.update(environment)
    for number, name in ((1, "stdout"), (2, "stderr")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(terminal, os.O_RDWR) if terminal else os.open(name, flags), number)
    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    sys.argv = ["fedcc", *arguments]
    main()


DEFAULT_SIGINT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def started(folder: Path, *arguments: Any) -> subprocess.Popen[str]:
    """The program in a fresh process and a session of its own, which answers Ctrl-C even if the tests ignore it."""
    words = [sys.executable, "-c", DEFAULT_SIGINT, sys.executable, "-m", "fedcc", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=folder, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def wait_until(true: Callable[[], Any], seconds: float = 60) -> Any:
    """What ``true`` gives once it gives something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := true():
            return found
        time.sleep(0.01)
    return pytest.fail("waited in vain")


def descendants(pid: int) -> list[int]:
    """The living processes below one."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
