"""What is asked of the clients and what they answer, and who carries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fedcc.flower.codec import EncodedMessage, ExpectedMessage


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
    ended: float | None = None

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
