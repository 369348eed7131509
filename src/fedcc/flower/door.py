"""The public port below HTTP: how long a connection may take, how many there may be, and what may wait in memory.

Anyone can connect, so whoever has not shown a registered key gets little: a time for handshake and header together, a
number of connections per address, and nothing of a request's body is read. When there are too many connections the
oldest ends, not the newest: a client needs a moment to show its key, a flood would have to be faster. Clients that have
shown a key are counted by key, so strangers behind the same address cannot shut them out.

This module imports nothing of the project, so that Flower's processes do not load torch.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

HEAD_SECONDS = 20.0  # for handshake and header; and from one request to the next
BODY_SECONDS, SLOWEST = 20.0, 64 * 2**10  # for a body: this, and its length at this many bytes per second
REFUSED_SECONDS = 1.0  # for a refusal to arrive
LINE_SECONDS = 60.0  # in line, before a body is read
PER_ADDRESS, STRANGERS = 128, 512  # connections of strangers: per address and in all
PER_NODE = 8  # of a client: a SuperNode has at most four, and each may hold an answer of 5 MiB that nobody reads
UNREAD, UNREAD_PER_NODE = 32 * 2**20, 12 * 2**20  # bytes of the bodies that are being read: in all, of a client
REQUESTS_PER_NODE = 32  # that are read or in line
HEADER_BYTES = 32 * 2**10
REFUSALS, REFUSALS_SECONDS = 30, 60.0  # refused requests of a client in this time, and for how long it waits then

Address = tuple[str, int]


class Connection(socket.socket):
    """A connection at the public port; it is a stranger's until a request shows a registered key."""

    door: Door
    address: Address
    node: int | None = None
    waits_since: float | None = None  # for a request; None while one is served
    owned: bool | None = None  # whether its other end belongs to the operator; None if nobody has asked

    def close(self) -> None:
        self.door.forget(self)
        super().close()

    def end(self) -> None:
        """Cut the connection; asyncio then closes the socket."""
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


class Listener(socket.socket):
    """The public port's socket: its connections are known to a door."""

    door: Door

    def accept(self) -> tuple[socket.socket, Any]:
        plain, address = super().accept()
        connection = Connection(fileno=plain.detach())
        connection.door, connection.address = self.door, (str(address[0]), int(address[1]))
        self.door.admit(connection)
        return connection, address


class Door:
    """The connections at the public port; used by one event loop."""

    def __init__(self) -> None:
        self.connections: dict[Address, Connection] = {}  # oldest first
        self.ended = Counter[str]()  # connections that were cut, by reason

    def listen(self, plain: socket.socket) -> Listener:
        """A listening socket whose connections are counted, in place of a plain one."""
        listener = Listener(fileno=plain.detach())
        listener.door = self
        return listener

    def admit(self, connection: Connection) -> None:
        """Count a new connection, and end the oldest if there are too many."""
        self.connections[connection.address] = connection
        connection.waits_since = time.monotonic()
        asyncio.get_running_loop().call_later(HEAD_SECONDS, self.check, connection)
        strangers = [c for c in self.connections.values() if c.node is None]
        self._end_oldest([c for c in strangers if c.address[0] == connection.address[0]], PER_ADDRESS)
        self._end_oldest(strangers, STRANGERS)

    def check(self, connection: Connection) -> None:
        """End a connection that has waited too long for a request; look again later if not."""
        if self.connections.get(connection.address) is not connection:
            return
        since = connection.waits_since
        remaining = HEAD_SECONDS if since is None else since + HEAD_SECONDS - time.monotonic()
        if remaining <= 0:
            self.ended["slow"] += 1
            connection.end()
            remaining = HEAD_SECONDS
        asyncio.get_running_loop().call_later(max(remaining, 0.1), self.check, connection)

    def forget(self, connection: Connection) -> None:
        if self.connections.get(connection.address) is connection:
            del self.connections[connection.address]

    def begin(self, address: Address, node: int) -> None:
        """A request of a registered client begins."""
        if (connection := self.connections.get(address)) is not None:
            connection.node, connection.waits_since = node, None
            self._end_oldest([c for c in self.connections.values() if c.node == node], PER_NODE)

    def finish(self, address: Address, size: int = 0) -> None:
        """A request has been answered, with so many bytes; the connection waits for the next.

        The answer may still be on its way, at the pace of the caller's line.
        """
        if (connection := self.connections.get(address)) is not None:
            connection.waits_since = time.monotonic() + size / SLOWEST

    def refuse(self, address: Address) -> None:
        """End a connection whose request was refused, once the refusal is out: what it still sends is not awaited."""
        if (connection := self.connections.get(address)) is not None:
            asyncio.get_running_loop().call_later(REFUSED_SECONDS, connection.end)

    def _end_oldest(self, group: list[Connection], limit: int) -> None:
        for connection in group[: max(0, len(group) - limit)]:
            self.ended["too many"] += 1
            connection.end()
            self.forget(connection)


class PrivateDoor(Door):
    """The connections at the private port, which are not limited: only the operator's are served."""

    def admit(self, connection: Connection) -> None:
        self.connections[connection.address] = connection


class Busy(Exception):
    """There is no room for a request now."""


class Waits(Busy):
    """Too many requests of this client were refused."""


class Refusals:
    """The requests of each client that were read and refused: who has many in a minute has to wait for as long.

    What is refused while it waits does not count, so a program that tries again gets through.
    """

    def __init__(self) -> None:
        self.total = Counter[int]()  # by node
        self.last = defaultdict[int, deque[float]](lambda: deque(maxlen=REFUSALS))  # times of the last ones

    def note(self, node: int) -> None:
        self.total[node] += 1
        self.last[node].append(time.monotonic())

    def check(self, node: int) -> None:
        """:class:`Waits` if a client has to wait."""
        last = self.last[node]
        if len(last) < REFUSALS or last[-1] - last[0] > REFUSALS_SECONDS:
            return
        if (seconds := last[-1] + REFUSALS_SECONDS - time.monotonic()) > 0:
            raise Waits(f"{REFUSALS} requests of this client were refused in a minute; try again in {seconds:.0f} s")


class Line:
    """Bodies wait in line until there is memory for them; meanwhile they are at their senders."""

    def __init__(self, total: int = UNREAD, each: int = UNREAD_PER_NODE):
        self.total, self.each = total, each
        self.condition = asyncio.Condition()
        self.bytes, self.requests = Counter[int](), Counter[int]()  # by node

    @asynccontextmanager
    async def room(self, node: int, size: int) -> AsyncIterator[None]:
        """Room for a body of a client's, as soon as there is some; :class:`Busy` if it takes too long."""
        if self.requests[node] >= REQUESTS_PER_NODE:
            raise Busy(f"a client may send {REQUESTS_PER_NODE} requests at a time")
        self.requests[node] += 1
        taken = 0
        try:
            try:
                async with asyncio.timeout(LINE_SECONDS), self.condition:
                    await self.condition.wait_for(
                        lambda: self.bytes.total() + size <= self.total and self.bytes[node] + size <= self.each
                    )
                    self.bytes[node] += size
                    taken = size
            except TimeoutError:
                raise Busy(f"there was no room for the request within {LINE_SECONDS:g} s") from None
            yield
        finally:
            self.requests[node] -= 1
            self.bytes[node] -= taken
            async with self.condition:
                self.condition.notify_all()
