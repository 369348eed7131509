"""Randomness is data: a key names each draw, so every engine and any number of workers draw the same numbers.

No global generator is used. Keys are hashed, so another phase, stream or client shifts no other draw, and a resumed
run needs no generator state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

SERVER = -1  # instead of a client's id


@dataclass(frozen=True)
class Key:
    """What a draw is for: (seed, round, client, phase name, stream).

    >>> a, b = Key(0, 1, 3, "fit", "private"), Key(0, 1, 3, "fit", "public")
    >>> a.integer() == Key(0, 1, 3, "fit", "private").integer(), a.integer() == b.integer()
    (True, False)
    """

    seed: int
    round: int = 0
    client: int = SERVER
    phase: str = ""
    stream: str = ""

    def of(self, **fields: str | int) -> Key:
        """The same key with some fields changed."""
        return replace(self, **fields)  # type: ignore[arg-type]

    def __str__(self) -> str:
        who = "server" if self.client == SERVER else f"client {self.client}"
        return f"{who}, round {self.round}" + (f", {self.phase!r}" if self.phase else "")

    def integer(self) -> int:
        """63 bits, to seed a generator."""
        text = "\x1f".join(map(str, (self.seed, self.round, self.client, self.phase, self.stream)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def generator(self) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(self.integer()))
