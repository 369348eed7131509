"""Atomic writes (a reader sees the old file or the new one, never half of one), and deep folders."""

import errno
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO

UNSYNCED = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.EBADF, errno.EISDIR, errno.ENOTSUP, errno.ENOSYS)
"""Errors of systems that cannot flush a folder: Windows does not open one, some file systems refuse."""


@contextmanager
def open_whole(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that gets its name ``path`` only when the block ends without an error.

    The temporary file is beside the target, since a rename is atomic only within one file system. The content is on
    the disk before the rename, and the rename before this returns: a power failure leaves no empty file.
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
        with suppress(OSError):  # in the way of the error itself
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # not the temporary one
        raise


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file whole."""
    with open_whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_end(path: Path, end: int, content: bytes) -> None:
    """Write at position ``end`` of a file, which ends after it, or a new file; it is on the disk when this returns."""
    new = not path.exists()
    with path.open("wb" if new else "r+b") as file:
        file.truncate(end)
        file.seek(end)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if new:
        for folder in (path.parent, path.parent.parent):  # the folder may be new, too
            _sync_folder(folder)


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
        if threading.current_thread() is threading.main_thread():  # only there handlers run and can be set
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
    """Make a folder and its parents, however deep: ``Path.mkdir(parents=True)`` fails at a thousand levels."""
    missing = list(takewhile(lambda folder: not folder.is_dir(), (path, *path.parents)))
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)


def is_temporary(name: str) -> bool:
    """Whether a file is one that :func:`write_whole` had begun when it was killed."""
    return name.startswith(".") and name.endswith(".tmp")
