"""How many runs share a device: each holds a locked file while it runs, and counts those of the others.

The system gives a lock back when its holder dies, so a file that can be locked belongs to nobody. The count covers
this user's runs on this machine, those in a sweep's processes and under NVIDIA's MPS too; it knows nothing of other
programs, of runs in containers with a temporary folder of their own, or of other users.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from filelock import BaseFileLock


@contextmanager
def shared(device: str, folder: Path | None = None) -> Iterator[Callable[[], int | None]]:
    """While the block runs, this run counts as one on ``device``; gives a function that counts the others there.

    The function gives None where the temporary folder can't be used: the number is then not known.
    """
    from filelock import FileLock

    place, name = folder or folder_of_user(), f"{identity(device)}-"
    own = place / f"{name}{os.getpid()}-{uuid.uuid4().hex[:8]}.lock"
    with ExitStack() as stack:
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = FileLock(own)
            lock.acquire(timeout=0)
            stack.callback(_remove, own, lock)
        except OSError:
            yield lambda: None
            return
        yield lambda: sum(_held(path) for path in place.glob(f"{name}*.lock") if path != own)


def folder_of_user() -> Path:
    """Where this user's runs hold their locks."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"fedcc-runs-{user}"


def identity(device: str) -> str:
    """A device's name in this folder: a GPU's is that of the card, whatever number it has for this process."""
    kind = torch.device(device)
    if kind.type != "cuda":
        return kind.type
    return f"cuda-{getattr(torch.cuda.get_device_properties(kind), 'uuid', kind.index or 0)}"


def _held(path: Path) -> bool:
    """Whether a run holds this file; one that nobody holds is removed."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:  # it is gone
        return False
    _remove(path, lock)
    return False


def _remove(path: Path, lock: BaseFileLock) -> None:
    with suppress(OSError):
        path.unlink()
    lock.release()
