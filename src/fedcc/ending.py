"""How a program ends early: signals as exceptions, and errors in one line."""

from __future__ import annotations

import errno
import signal
from typing import Any

from fedcc.data.dataset import DataError


class Stopped(BaseException):
    """A signal asks the program to end: 130 for Ctrl-C, 143 for SIGTERM."""

    def __init__(self, number: int, *_: Any):
        super().__init__("interrupted" if number == signal.SIGINT else "terminated")
        self.code = 128 + number


class Told(RuntimeError):
    """A failure whose own words say all there is to say."""


def stop(number: int, _: Any) -> None:
    """The handler that makes a signal an exception."""
    raise Stopped(number)


def explained(error: BaseException) -> str:
    """An error in one line, with where it happened."""
    text = str(error)
    if isinstance(error, OSError):
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or text
        text = f"{error.filename}: {reason}" if error.filename is not None else reason
    elif not isinstance(error, (Stopped, ValueError, FloatingPointError, MemoryError, DataError, Told)) or not text:
        text = f"{type(error).__name__}: {text} (this should not happen; FEDCC_DEBUG=1 shows where)"
    notes = "; ".join(getattr(error, "__notes__", ()))
    return " ".join((text + (f" ({notes})" if notes else "")).split())
