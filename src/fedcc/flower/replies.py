"""The replies of many sites, as the server's app gets them from Flower's grid.

``Grid.pull_messages`` asks for the messages it is given, and then fetches the parts of each reply in turn; it waits
minutes for parts that are missing. One call for all sites would let one of them hold up the others, and one call for
each site would be a hundred requests for every look. So one request asks which replies are there, and each of those is
then read by a thread, with Flower's own code.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

import httpx
from flwr.app import Message
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.serverapp import Grid

READERS = 4  # replies that are read at a time
STUCK_SECONDS = 5.0  # after which a reply that is being read no longer counts as one of them
LOOK_SECONDS = 0.5  # that replies are waited for, before the next look


class OneReply:
    """Flower's client for a grid that reads one reply: which one is there has been asked before."""

    def __init__(self, client: Any, response: PullAppMessagesResponse):
        self.client, self.response = client, response

    def PullMessages(self, _: PullAppMessagesRequest) -> PullAppMessagesResponse:
        return self.response

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


class Replies:
    """The replies that have arrived, by ticket: the id of the message that each replies to."""

    def __init__(self, grid: Grid):
        self.grid: Any = grid
        self.fetching: set[str] = set()  # tickets of replies that are in line or being read
        self.line: deque[tuple[str, PullAppMessagesResponse]] = deque()
        self.readers: dict[threading.Thread, float] = {}  # and since when each is at its reply
        self.read: SimpleQueue[tuple[str, Message | Exception]] = SimpleQueue()

    def take(self, tickets: Sequence[str]) -> list[tuple[str, Message | Exception]]:
        """The replies that have been read, after a look for replies to these; what cannot be read is an error."""
        if tickets:
            found = self.grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=tickets))
            for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                ticket = message.metadata.reply_to_message_id
                self.fetching.add(ticket)
                self.line.append(
                    (ticket, PullAppMessagesResponse(messages_list=[message], message_object_trees=[tree]))
                )
        taken: list[tuple[str, Message | Exception]] = []
        end = time.monotonic() + LOOK_SECONDS
        while self.fetching and time.monotonic() < end:
            self._start_readers()
            try:
                ticket, reply = self.read.get(timeout=0.05)
            except Empty:
                continue
            self.fetching.discard(ticket)
            if isinstance(reply, httpx.HTTPError):
                raise reply
            taken.append((ticket, reply))
        return taken

    def _start_readers(self) -> None:
        now = time.monotonic()
        self.readers = {thread: since for thread, since in self.readers.items() if thread.is_alive()}
        busy = sum(now - since < STUCK_SECONDS for since in self.readers.values())
        for _ in range(min(READERS - busy, len(self.line))):
            thread = threading.Thread(target=self._work, daemon=True)
            self.readers[thread] = now
            thread.start()

    def _work(self) -> None:
        """Read replies until none is in line."""
        while True:
            try:
                ticket, response = self.line.popleft()
            except IndexError:
                return
            self.readers[threading.current_thread()] = time.monotonic()
            grid = copy.copy(self.grid)
            grid._client = OneReply(self.grid._runtime_client, response)
            try:
                self.read.put((ticket, next(iter(grid.pull_messages([ticket])))))
            except Exception as error:  # a client may send anything
                self.read.put((ticket, error))
