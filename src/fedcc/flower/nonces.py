"""The nonces of the commands that a site has obeyed."""

from __future__ import annotations

import re
from pathlib import Path

from fedcc.core.digests import DamagedFile
from fedcc.core.files import write_end
from fedcc.flower.site_error import SiteError


def damaged(path: Path, reason: str) -> DamagedFile:
    """The error for a file of a site's state; the caller raises it."""
    advice = "put a copy back that is as new, or move the folder state away: then all limits and answers begin anew"
    return DamagedFile(f"{path} is damaged: {reason}; {advice}")


class Nonces:
    """The nonces of a run, in a file of the run's folder."""

    def __init__(self, folder: Path):
        self.path = folder / "nonces"

    @staticmethod
    def of_all_runs(state: Path) -> set[str]:
        """The nonces in a site's state."""
        found = [Nonces(path.parent)._lines() for path in sorted(state.glob("*/nonces"))]
        return {nonce.decode() for lines in found for nonce in lines.split()}

    def check(self, nonce: str) -> int:
        """Refuse a nonce that is on disk, since it was sent twice; the bytes of the file that are whole lines."""
        lines = self._lines()
        if nonce.encode() in lines.split():
            raise obeyed_before(nonce)
        return len(lines)

    def spend(self, nonce: str) -> None:
        """Note a nonce on disk, unless it is there already."""
        from filelock import FileLock

        with FileLock(self.path.with_suffix(".lock")):
            write_end(self.path, self.check(nonce), f"{nonce}\n".encode())

    def _lines(self) -> bytes:
        """The whole lines. An end without a line break was being written at a power failure: its command was not
        obeyed."""
        content = self.path.read_bytes() if self.path.exists() else b""
        lines = content[: content.rfind(b"\n") + 1]
        if not re.fullmatch(rb"([0-9a-f]{32}\n)*", lines):
            raise damaged(self.path, "a line of it is no nonce")
        return lines


def obeyed_before(nonce: str) -> SiteError:
    return SiteError("replay", f"the command with nonce {nonce} was obeyed before")
