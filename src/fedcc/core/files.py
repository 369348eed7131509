"""Files that are written whole (a reader sees the old file or the new one, never half of one), and folders."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

UNSYNCED = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.EBADF, errno.EISDIR, errno.ENOTSUP, errno.ENOSYS)
"""What systems answer that cannot flush a folder: Windows does not open one, some file systems refuse."""


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that takes its name ``path`` only once the block has ended without an error.

    The temporary file lies beside the target, since a rename is atomic only within one file system. The content is on
    the disk before the rename, and the rename before this returns: a loss of power leaves no empty file.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # a failed write names no file, or the temporary one
        raise


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file whole."""
    with written_whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, where the system can."""
    try:
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as error:
        if error.errno not in UNSYNCED:
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
