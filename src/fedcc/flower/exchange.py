"""What is asked of the clients and what they answer, and who carries it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fedcc.flower.codec import EncodedMessage, ExpectedMessage

LONGEST_PAUSE = 60.0  # seconds after which a client that was lost is asked again


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to a message: content, or an error; ``lost`` if the client never started on it."""

    ticket: str
    content: Any = None
    error: str = ""
    lost: bool = False


@dataclass(frozen=True, eq=False)
class Outgoing:
    """A message to a site, whose answer may have ``limit`` bytes."""

    name: str
    purpose: str
    t: int
    content: Any
    limit: int


class Transport(Protocol):
    """Sends messages to sites, addressed by name."""

    def online(self) -> set[str]:
        """Who is connected."""

    def send(self, messages: Sequence[Outgoing]) -> list[str | None]:
        """A ticket for each answer, or None if the message could not be sent."""

    def collect(self, tickets: Sequence[str]) -> list[Answer]:
        """The answers that have arrived."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """What the clients are asked about."""

    x: Tensor


@dataclass(eq=False)
class Exchange:
    """A question to some clients, and the answers so far."""

    purpose: str
    t: int
    message: Callable[[int], EncodedMessage | None]  # what a client is sent with the command
    expected: Callable[[int], ExpectedMessage]  # what a client must answer
    clients: list[str]
    may_decline: bool = False
    answers: dict[str, Any] = field(default_factory=dict)
    failures: set[str] = field(default_factory=set)  # clients that failed and are not asked again for now
    losses: Counter[str] = field(default_factory=Counter)
    again: dict[str, float] = field(default_factory=dict)  # when clients that were lost may be asked again
    ended: float | None = None

    def lose(self, name: str) -> None:
        """Note that a client was lost. The first time it is asked again at once, then after ever longer pauses.

        A client that reports its own loss would otherwise be sent the question as fast as it can report.
        """
        self.losses[name] += 1
        if (again := self.losses[name] - 2) >= 0:
            self.again[name] = time.monotonic() + min(2.0 ** min(again, 10), LONGEST_PAUSE)

    @property
    def what(self) -> str:
        """What it asks for, in the log; nothing for a round."""
        return "" if self.purpose == "train" else f" {self.purpose}"


@dataclass(frozen=True, eq=False)
class Question:
    """An exchange's question to one client, which has not answered yet."""

    name: str
    exchange: Exchange
    nonce: str  # the answer has it too
