"""Ctrl-C and SIGTERM raise exceptions; before the program has anything to clean up, they end it.

``fedcc/__init__.py`` imports this first; :func:`fedcc.cli.main` takes over. It imports little, so that a Ctrl-C in the
program's first milliseconds finds the handler in place.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # not typing's: its import takes milliseconds
if TYPE_CHECKING:
    from typing import Any


class Interrupted(BaseException):
    """A signal asks the program to end: 130 for Ctrl-C, 143 for SIGTERM."""

    def __init__(self, number: int, *_: Any):
        super().__init__("interrupted" if number == signal.SIGINT else "terminated")
        self.code = 128 + number


def interrupt(number: int, _: Any) -> None:
    """The handler that makes a signal an exception."""
    raise Interrupted(number)


class Signals:
    """SIGINT and SIGTERM raise :class:`Interrupted`, again and again, until ``over``; those that are ignored stay so.

    Python runs handlers between bytecodes that call or jump back. Setting ``over`` is neither, so nothing is raised
    between leaving the program and reporting how it ended.
    """

    def __init__(self) -> None:
        self.over = self.hooked = False
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
        if importing_torch():
            leave(number, frame)
        if not (self.over or self.hooked):
            interrupt(number, frame)

    def _again(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not isinstance(error, Interrupted):
            self.hook(unraisable)
            return
        import threading

        self.hooked = True
        try:
            threading.Thread(target=self._send, args=(error.code - 128,), daemon=True).start()
        finally:
            self.hooked = False

    def _send(self, number: int) -> None:
        import time

        while self.hooked:
            time.sleep(0.01)
        if not self.over:
            os.kill(os.getpid(), number)


def is_program() -> bool:
    """Whether this process is the program: ``fedcc``, or ``python -m fedcc``; not a script that imports the package."""
    words = sys.orig_argv[1:3]
    name = words[0].replace(os.sep, "/").rpartition("/")[2] if words else ""
    return words == ["-m", "fedcc"] or name.partition(".")[0] == "fedcc"


def importing_torch() -> bool:
    """Whether torch is being imported, before the program has begun: an exception in its C++ code would abort."""
    return bool(getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False))


def leave(number: int, _: Any) -> None:
    """The handler until there is something to clean up."""
    os.write(2, f"fedcc: {Interrupted(number)}\n".encode())
    os._exit(128 + number)


if is_program() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored on purpose
    signal.signal(signal.SIGINT, leave)
