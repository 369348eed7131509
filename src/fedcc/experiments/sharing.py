"""How many of this user's runs share a device: each holds a locked file, and counts those of the others.

The system releases a lock when its holder dies, so a file that can be locked has no holder.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from filelock import BaseFileLock, FileLock, Timeout


@contextmanager
def shared(device: str, folder: Path | None = None) -> Iterator[Callable[[], int | None]]:
    """Count as a run on ``device`` during the block; yields a function that counts the others, None if it cannot."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    folder = folder or Path(tempfile.gettempdir()) / f"fedcc-runs-{user}"
    prefix = f"{device_name(device)}-"
    own = folder / f"{prefix}{os.getpid()}-{uuid.uuid4().hex[:8]}.lock"
    with ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = FileLock(own)
            lock.acquire(timeout=0)
            stack.callback(_remove, own, lock)
        except OSError:
            yield lambda: None
            return
        yield lambda: sum(_is_locked(path) for path in folder.glob(f"{prefix}*.lock") if path != own)


def device_name(device: str) -> str:
    """The name of a device in the files' names: a GPU's is that of the card, whatever its number in this process."""
    kind = torch.device(device)
    if kind.type != "cuda":
        return kind.type
    return f"cuda-{getattr(torch.cuda.get_device_properties(kind), 'uuid', kind.index or 0)}"


def _is_locked(path: Path) -> bool:
    """Whether a run holds this file; a file without a holder is removed."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:  # removed meanwhile
        return False
    _remove(path, lock)
    return False


def _remove(path: Path, lock: BaseFileLock) -> None:
    with suppress(OSError):
        path.unlink()
    lock.release()
