"""Errors and warnings in one line each."""

from __future__ import annotations

import errno
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedcc.signals import Interrupted

BUG = "this should not happen; FEDCC_DEBUG=1 shows where"


class UserError(RuntimeError):
    """A failure that the message explains in full; no traceback is needed."""


class InputError(ValueError):
    """Something of the user's own that cannot be used: a file, a folder, code. The message says why."""


class LeftOut(UserWarning):
    """Part of the user's data is not used."""


class PointlessSetting(UserWarning):
    """A setting that is allowed and does not do what it is for."""


@contextmanager
def warnings_to(say: Callable[[str], None]) -> Iterator[None]:
    """Pass the warnings of this package to ``say`` while the block runs; others are shown as usual."""
    before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if category.__module__.partition(".")[0] == "fedcc":
            say(str(message))
        else:
            before(message, category, *rest, **named)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def _users_place(error: BaseException) -> str:
    """The file and line in the user's own code where an error arose, perhaps in a library called there; else empty."""
    ours, libraries = Path(__file__).parent, Path(os.__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(ours):
            return ""
        installed = {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(libraries)
        if not installed and path.is_file():  # not "<string>" and the like
            return f"{frame.filename}:{frame.lineno}"
    return ""


def error_line(error: BaseException) -> str:
    """An error in one line, with where it happened."""
    text = str(error)
    if isinstance(error, OSError):
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or text
        text = f"{error.filename}: {reason}" if error.filename is not None else reason
    elif isinstance(error, MemoryError) and not text:
        text = "there is not enough memory"
    elif type(error).__name__ == "OutOfMemoryError":  # torch's, which is imported only where it is needed
        text = f"the GPU has not enough free memory: {text}"
    elif not isinstance(error, (Interrupted, ValueError, FloatingPointError, MemoryError, UserError)) or not text:
        text, place = f"{type(error).__name__}: {text}", _users_place(error)
        text = f"error in your code {place}: {text}" if place else f"{text} ({BUG})"
    notes = "; ".join(getattr(error, "__notes__", ()))
    return " ".join((text + (f" ({notes})" if notes else "")).split())
