"""Ctrl-C while the program still imports: it ends at once, without a traceback.

``fedcc/__init__.py`` imports this first, since torch takes seconds; :func:`fedcc.cli.main` takes over from here.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any


def is_program() -> bool:
    """Whether this process is the program: ``fedcc``, or ``python -m fedcc``; not a script that imports the package."""
    words = sys.orig_argv[1:3]
    return words == ["-m", "fedcc"] or Path(*words[:1]).stem == "fedcc"


def leave(number: int, _: Any) -> None:
    """The handler until there is something to clean up."""
    os.write(2, b"fedcc: interrupted\n")
    os._exit(128 + number)


if is_program() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored on purpose
    signal.signal(signal.SIGINT, leave)
