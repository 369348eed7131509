"""Connections at the public port, with real sockets; with real Flower: integration/test_federation_flood.py."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fedcc.flower import door as door_module
from fedcc.flower.door import Busy, Door, Line


class Echo(asyncio.Protocol):
    """Sends back what comes."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@asynccontextmanager
async def served(door: Door) -> AsyncIterator[int]:
    plain = socket.create_server(("127.0.0.1", 0))
    port = int(plain.getsockname()[1])
    server = await asyncio.get_running_loop().create_server(Echo, sock=door.listen(plain))
    try:
        yield port
    finally:
        server.close()


class Caller:
    """The other end of a connection."""

    @staticmethod
    async def call(port: int) -> Caller:
        caller = Caller()
        caller.reader, caller.writer = await asyncio.open_connection("127.0.0.1", port)
        caller.address = caller.writer.get_extra_info("sockname")
        assert await caller.is_open()
        return caller

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    address: tuple[str, int]

    async def is_open(self) -> bool:
        try:
            self.writer.write(b"x")
            return await asyncio.wait_for(self.reader.read(1), 5) == b"x"
        except OSError:
            return False


def run(what: Callable[[], Any]) -> None:
    asyncio.run(what())


async def settle() -> None:
    """Let everything happen that is due."""
    for _ in range(20):
        await asyncio.sleep(0)


class Clock:
    """The time of the door and of its event loop: the real one, and what a test lets pass."""

    def __init__(self) -> None:
        self.passed = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed

    async def wait(self, seconds: float) -> None:
        self.passed += seconds
        await settle()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(door_module, "time", clock)
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda _: clock.monotonic())
    return clock


def test_a_connection_that_makes_no_request_in_time_ends(clock: Clock) -> None:
    async def scene() -> None:
        door = Door()
        async with served(door) as port:
            stranger, client, idle = [await Caller.call(port) for _ in range(3)]
            door.begin(client.address, 7)  # a long request
            door.begin(idle.address, 7)
            door.finish(idle.address)
            await clock.wait(15)
            assert all([await caller.is_open() for caller in (stranger, client, idle)])
            await clock.wait(10)
            assert not await stranger.is_open()
            assert not await idle.is_open()
            assert await client.is_open()
            assert list(door.connections) == [client.address]

    run(scene)


def test_a_client_with_a_slow_line_has_time_to_receive_a_large_answer(clock: Clock) -> None:
    async def scene() -> None:
        door = Door()
        async with served(door) as port:
            client = await Caller.call(port)
            door.begin(client.address, 7)
            door.finish(client.address, 640 * 2**10)  # it is under way for 10 s
            await clock.wait(25)
            assert await client.is_open()
            await clock.wait(10)
            assert not await client.is_open()

    run(scene)


def test_the_oldest_stranger_makes_room_and_clients_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "PER_ADDRESS", 3)

    async def scene() -> None:
        door = Door()
        async with served(door) as port:
            client = await Caller.call(port)
            door.begin(client.address, 7)
            door.finish(client.address)
            strangers = [await Caller.call(port) for _ in range(4)]
            assert [await s.is_open() for s in strangers] == [False, True, True, True]
            assert await client.is_open()
            newcomer = await Caller.call(port)
            door.begin(newcomer.address, 8)
            assert [await s.is_open() for s in strangers] == [False, False, True, True]
            assert await newcomer.is_open()

    run(scene)


def test_strangers_of_all_addresses_and_a_clients_own_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "STRANGERS", 2)
    monkeypatch.setattr(door_module, "PER_NODE", 2)

    async def scene() -> None:
        door = Door()
        async with served(door) as port:
            strangers = [await Caller.call(port) for _ in range(3)]
            assert [await s.is_open() for s in strangers] == [False, True, True]
            own = []
            for _ in range(3):
                own.append(await Caller.call(port))
                door.begin(own[-1].address, 7)
            assert [await c.is_open() for c in own] == [False, True, True]

    run(scene)


def test_a_refused_connection_ends_soon(clock: Clock) -> None:
    async def scene() -> None:
        door = Door()
        async with served(door) as port:
            caller = await Caller.call(port)
            door.refuse(caller.address)
            assert await caller.is_open()
            await clock.wait(2)
            assert not await caller.is_open()
            assert not door.connections

    run(scene)


def test_bodies_wait_in_line_for_memory() -> None:
    async def scene() -> None:
        line, order = Line(total=10, each=6), list[str]()

        async def body(name: str, node: int, size: int, leave: asyncio.Event) -> None:
            async with line.room(node, size):
                order.append(name)
                await leave.wait()

        leave = {name: asyncio.Event() for name in "abcd"}
        sizes = {"a": (1, 6), "b": (1, 1), "c": (2, 4), "d": (3, 1)}
        tasks = {}
        for name, (node, size) in sizes.items():
            tasks[name] = asyncio.create_task(body(name, node, size, leave[name]))
        await settle()
        assert order == ["a", "c"]  # b: its client has enough; d: there is no more
        leave["a"].set()
        await settle()
        assert sorted(order[2:]) == ["b", "d"]
        for event in leave.values():
            event.set()
        await asyncio.gather(*tasks.values())
        assert line.bytes.total() == line.requests.total() == 0

    run(scene)


def test_a_client_waits_for_a_while_and_with_so_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "LINE_SECONDS", 0.05)
    monkeypatch.setattr(door_module, "REQUESTS_PER_NODE", 2)

    async def scene() -> None:
        line = Line(total=10, each=6)
        async with line.room(1, 6):
            with pytest.raises(Busy, match="no room"):
                async with line.room(1, 1):
                    pass
            async with line.room(1, 0):
                with pytest.raises(Busy, match="2 requests at a time"):
                    async with line.room(1, 0):
                        pass
            async with line.room(2, 4):
                pass
        assert line.bytes.total() == line.requests.total() == 0

    run(scene)
