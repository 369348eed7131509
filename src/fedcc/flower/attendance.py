"""What the operator is told of the clients: how each one is doing, and who took part in a round."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ClientStatus:
    """One client, as the operator sees it."""

    online: bool = False
    answered: int = 0  # the last round it took part in
    strikes: int = 0  # failures in a row
    aside: bool = False
    problem: str = ""  # the last one
    uploads: dict[str, float] = field(default_factory=dict)  # what the last upload says (``evaluate.uploads``)
    warning: str = ""  # the last one about its uploads
    revoked: bool = False


@dataclass
class Attendance:
    """Who took part in a round and who did not, by name."""

    present: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)  # not connected, or lost on the way
    slow: list[str] = field(default_factory=list)  # still working when the round ended
    late: dict[str, int] = field(default_factory=dict)  # answered an earlier round: which
    failed: dict[str, str] = field(default_factory=dict)  # the client's own error
    refused: dict[str, str] = field(default_factory=dict)  # what is wrong with the upload
    aside: list[str] = field(default_factory=list)  # failed too often: no longer asked
    added: list[str] = field(default_factory=list)  # from the next round on
    revoked: list[str] = field(default_factory=list)  # so far
