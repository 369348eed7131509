"""Files that are written whole (a reader sees the old file or the new one, never half of one), folders, and JSON."""

from __future__ import annotations

import json
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that takes its name ``path`` only once the block has ended without an error.

    The temporary file lies beside the target, since a rename is atomic only within one file system.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # a failed write names no file, or the temporary one
        raise


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block has ended."""
    waiting: list[int] = []
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():  # handlers run there, and are set there, alone
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(signal.getsignal(number)):
                    before[number] = signal.signal(number, lambda number, _: waiting.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if waiting:
            signal.raise_signal(waiting[0])


def make_folder(path: Path) -> None:
    """Make a folder and those above it, however deep: ``Path.mkdir(parents=True)`` fails at a thousand levels."""
    missing = []
    for place in (path, *path.parents):
        if place.is_dir():
            break
        missing.append(place)
    for place in reversed(missing):
        place.mkdir(exist_ok=True)


def read_json(path: Path) -> Any:
    """What a JSON file holds; a file that is not JSON is a ValueError that names it."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{path} is damaged, it is not valid JSON: {reason}") from None
