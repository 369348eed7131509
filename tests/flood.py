"""A flood of slow connections, by somebody who has neither a key nor the CA's certificate."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections import Counter
from contextlib import suppress

MIB = 2**20
KINDS = ("handshake", "header", "large body", "body")
HEAD = "POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\ncontent-type: application/protobuf\r\n"


class Flood:
    """Connections that stay open and send little, or much but never all of it; whoever is cut off comes again."""

    def __init__(self, port: int, connections: int):
        self.port, self.connections = port, connections
        self.cut = Counter[str]()  # connections that the server has ended, by what they had sent
        self.over = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.all()), daemon=True)

    def __enter__(self) -> Flood:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join(30)

    async def all(self) -> None:
        tasks = [asyncio.create_task(self.one(n)) for n in range(self.connections)]
        while not self.over.is_set():
            await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def one(self, n: int) -> None:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        await asyncio.sleep(n * 0.01)
        while True:
            connected = False
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", self.port, ssl=None if n % 4 == 0 else context
                )
                connected = True
                sender = asyncio.create_task(self.send(writer, n % 4))
                await reader.read()  # until it is cut off
                sender.cancel()
                writer.close()
            if connected:
                self.cut[KINDS[n % 4]] += 1
            await asyncio.sleep(3)

    async def send(self, writer: asyncio.StreamWriter, kind: int) -> None:
        with suppress(OSError):
            await self.slowly(writer, kind)

    async def slowly(self, writer: asyncio.StreamWriter, kind: int) -> None:
        if kind == 1:  # a header without end
            writer.write(HEAD.encode())
        if kind == 2:  # nearly all of a large body
            writer.write(f"{HEAD}content-length: {32 * MIB}\r\n\r\n".encode())
            for _ in range(31):
                writer.write(bytes(MIB))
                await writer.drain()
        if kind == 3:  # the same, of a size that an object may have
            writer.write(f"{HEAD}content-length: {5 * MIB}\r\n\r\n".encode())
            writer.write(bytes(5 * MIB - 1))
        while True:
            await asyncio.sleep(1)
            if kind == 1:
                writer.write(b"x: y\r\n")
            if kind == 0:
                writer.write(b"\x16")  # a handshake, byte by byte
