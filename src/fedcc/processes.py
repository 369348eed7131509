"""Child processes: they end with their parent and leave Ctrl-C to it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: little is safe between fork and exec


def end_with_parent(number: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Send this process a signal as soon as its parent ends, even if the parent is killed.

    ``parent`` is the parent's process id, if known, in case it has ended already. On Linux the kernel sends the signal,
    also after ``exec``; the thread of the parent that started this process must live as long as the parent.
    """
    parent = parent or os.getppid()
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Ctrl-C waits until the block ends; processes that start in it never see one."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_alive(pid: int) -> bool:
    """Whether a process runs (Linux); one that has ended but has not been waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
