"""How a program ends early: signals as exceptions, and errors in one line."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

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


class Signals:
    """SIGINT and SIGTERM raise :class:`Stopped`, again and again, until ``over``; those that are ignored stay so.

    Python runs handlers between bytecodes that call or jump back. Setting ``over`` is neither, so nothing is raised
    between leaving the program and reporting how it ended.
    """

    def __init__(self) -> None:
        self.over = False
        self.before: dict[int, Any] = {}
        self.hook = sys.unraisablehook

    def catch(self) -> None:
        """Begin; whatever was raised where nothing can be raised (in ``__del__``, say) is raised a moment later."""
        sys.unraisablehook = self._again
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:
                self.before[number] = signal.signal(number, self._stop)

    def restore(self, to_default: bool) -> None:
        """End: with the handlers from before, or with the system's, which print nothing while Python shuts down."""
        for number, handler in self.before.items():
            signal.signal(number, signal.SIG_DFL if to_default else handler)
        if not to_default:
            sys.unraisablehook = self.hook

    def _stop(self, number: int, frame: Any) -> None:
        if not self.over:
            stop(number, frame)

    def _again(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not isinstance(error, Stopped):
            self.hook(unraisable)
        elif not self.over:
            timer = threading.Timer(0.01, os.kill, (os.getpid(), error.code - 128))
            timer.daemon = True
            timer.start()


@contextmanager
def warnings_to(say: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, warnings of this package go to ``say`` in one line; others are shown as ever."""
    before = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category.__module__.partition(".")[0] == "fedcc":
            say(str(message))
        else:
            before(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def explained(error: BaseException) -> str:
    """An error in one line, with where it happened."""
    text = str(error)
    if isinstance(error, OSError):
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or text
        text = f"{error.filename}: {reason}" if error.filename is not None else reason
    elif isinstance(error, MemoryError) and not text:
        text = "there is not enough memory"
    elif not isinstance(error, (Stopped, ValueError, FloatingPointError, MemoryError, DataError, Told)) or not text:
        text = f"{type(error).__name__}: {text} (this should not happen; FEDCC_DEBUG=1 shows where)"
    notes = "; ".join(getattr(error, "__notes__", ()))
    return " ".join((text + (f" ({notes})" if notes else "")).split())
