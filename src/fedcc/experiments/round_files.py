"""Files of a folder, one for each round, whose names hold the checksum of their content."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path

from fedcc.core.digests import DamagedFile
from fedcc.core.files import uninterrupted, write_whole

CHECKSUM_BYTES = 16


class RoundFiles:
    """The files ``KIND-ROUND-CHECKSUM.safetensors`` of a folder."""

    def __init__(self, folder: Path, kind: str):
        self.folder, self.kind = folder, kind

    def paths(self) -> dict[int, Path]:
        """The files by round, in ascending order."""
        pattern = rf"{self.kind}-(\d+)-[0-9a-f]+\.safetensors"
        paths = sorted(self.folder.iterdir())
        return {int(match[1]): path for path in paths if (match := re.fullmatch(pattern, path.name))}

    def read(self, path: Path) -> bytes:
        content = path.read_bytes()
        if f"-{_checksum(content)}." not in path.name:
            raise DamagedFile("its content does not match its checksum")
        return content

    def write(self, t: int, content: bytes, obsolete: Callable[[list[int]], Iterable[int]]) -> None:
        """Write the file of round ``t`` and remove obsolete rounds' files, even if a signal asks the program to end."""
        path = self.folder / f"{self.kind}-{t:06d}-{_checksum(content)}.safetensors"
        with uninterrupted():
            write_whole(path, content)
            for other in self.folder.glob(f"{self.kind}-{t:06d}-*.safetensors"):
                if other != path:  # of the same round, which was repeated
                    other.unlink()
            self.remove(obsolete(list(self.paths())))

    def remove(self, rounds: Iterable[int]) -> None:
        paths = self.paths()
        for t in rounds:
            paths[t].unlink()


def _checksum(content: bytes) -> str:
    return blake2b(content, digest_size=CHECKSUM_BYTES).hexdigest()
