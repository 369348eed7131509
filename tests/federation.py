"""Federations as tests run them: in this process, without Flower's servers, or with real ones on free ports.

``LocalTransport`` stands in for the network: it passes each message to the client's app, in this process, and can be
told to lose, delay or spoil it. ``Real`` starts ``fedcc federation`` programs; all of them, and what they have started,
end with the ``with`` block. A test that needs another app at the sites gives ``make(..., app=app_of("module:app"))``
and ``real(..., PYTHONPATH=...)``, where the module lies; such an app may wrap ``fedcc.flower.client_app``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Context, Metadata, RecordDict
from flwr.app.message import make_message

from fedcc.flower import client_app
from fedcc.flower.cohort import Answer, Outgoing, RunLog
from fedcc.flower.create import APP, create_federation
from fedcc.flower.folder import FederationFolder
from fedcc.flower.programs import free_port
from fedcc.flower.server_app import FlowerServer
from program import Done, Running, descendants, wait_until

NAMES = ("north", "east", "south", "west")
QUICK = {"device": "cpu", "skew": "classes:3", "fraction": 0.2, "rounds": 2, "epochs": 1, "models": "resnet8"}


def make(
    path: Path, method: str = "fedcc", names: Sequence[str] = NAMES, rules: Any = None, **given: Any
) -> FederationFolder:
    """A federation of digits, small; ``app`` is the app that Flower runs, ``hosts`` are the server's names."""
    app, hosts, settings = given.pop("app", APP), given.pop("hosts", []), given.pop("settings", {})
    return create_federation(
        path,
        method,
        dict.fromkeys(names),
        settings=settings,
        options={**QUICK, **given},
        hosts=hosts,
        port=free_port(),
        rules={"quorum": len(names), "grace": 5.0, "deadline": 120.0, **(rules or {})},
        simulate_sites=True,
        app=app,
    )


def app_of(client: str) -> str:
    """The app with another client: ``"module:name"``."""
    return APP.replace("fedcc.flower.client_app:app", client)


@dataclass
class LocalTransport:
    """A transport that serves messages in this process; ``fault(name, purpose, t)`` may say what happens to one.

    A fault is ``"lose"`` (no answer, the client is told nothing), ``"late"`` (the answer waits until :meth:`release`),
    an exception (the client raises it) or a function of the reply's content, which it returns changed.
    """

    folder: FederationFolder
    share: set[str] = field(default_factory=lambda: set(NAMES))
    config: dict[str, dict[str, str]] = field(default_factory=dict)  # of some clients: data, label, network, code
    away: set[str] = field(default_factory=set)
    fault: Callable[[str, str, int], Any] = lambda *_: None
    sent: list[tuple[str, str, int]] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    waiting: dict[str, Answer] = field(default_factory=dict)

    def online(self) -> set[str]:
        return set(self.folder.latest()[0].members) - self.away

    def send(self, messages: Sequence[Outgoing]) -> list[str | None]:
        return [self.send_one(m.name, m.purpose, m.t, m.content) for m in messages]

    def send_one(self, name: str, purpose: str, t: int, content: RecordDict) -> str:
        self.sent.append((name, purpose, t))
        ticket = f"{len(self.sent)}"
        fault = self.fault(name, purpose, t)
        if fault == "lose":
            self.waiting[ticket] = Answer(ticket, error="gone", lost=True)
        elif isinstance(fault, Exception):
            self.waiting[ticket] = Answer(ticket, error=str(fault))
        else:
            self.waiting[ticket] = self.served(ticket, name, purpose, content, fault)
            if fault == "late":
                self.held.add(ticket)
        return ticket

    def served(self, ticket: str, name: str, purpose: str, content: RecordDict, fault: Any) -> Answer:
        site = self.folder.path / "sites" / name
        config = {"site": str(site), "data": str(site / "data.npz"), "device": "cpu", "threads": 1,
                  "share-model": name in self.share, **self.config.get(name, {})}  # fmt: skip
        context = Context(1, 1, node_config=config, state=RecordDict(), run_config={})
        about = Metadata(run_id=1, message_id=ticket, src_node_id=1, dst_node_id=2, reply_to_message_id="",
                         group_id="", created_at=time.time(), ttl=600.0, message_type=purpose)  # fmt: skip
        message = make_message(metadata=about, content=content)
        try:
            reply = client_app.app(message, context).content
        except Exception as error:
            return Answer(ticket, error=str(error))
        return Answer(ticket, fault(reply) if callable(fault) else reply)

    def collect(self, tickets: Sequence[str]) -> list[Answer]:
        return [self.waiting.pop(t) for t in tickets if t in self.waiting and t not in self.held]

    def release(self) -> None:
        self.held.clear()

    def server(self, run: str = "run1") -> FlowerServer:
        """A server of the folder's run, as a new process would make one."""
        return FlowerServer(self.folder, run, self, RunLog(self.folder.operator, run))


class Real:
    """A federation of real processes: a server, clients and runs of one folder."""

    def __init__(self, folder: FederationFolder, home: Path, environment: dict[str, str]):
        self.folder, self.home, self.environment = folder, home, environment
        self.namespaces: dict[str, str] = {}  # networks that programs of these names run in
        self.started: list[Running] = []
        self.seen: set[int] = set()  # processes below them, while they lived

    def start(self, name: str, *arguments: Any, **environment: str) -> Running:
        """``fedcc federation`` with these arguments; its output lies in the folder ``name``."""
        place = self.home / f"{name}-{len(self.started)}"
        place.mkdir(parents=True, exist_ok=True)
        namespace, environment = self.namespaces.get(name), self.environment | environment
        self.started.append(Running(place, ("federation", *arguments), environment=environment, namespace=namespace))
        return self.started[-1]

    def server(self, seconds: float = 120, bind: str = "127.0.0.1") -> Running:
        running = self.start("server", "server", self.folder.path, "--bind", bind)
        wait_until(lambda: "ready" in self.said(running) or not running.process.is_alive(), seconds)
        assert "ready" in self.said(running), self.said(running)
        return running

    def client(self, name: str, *options: Any, data: Path | None = None, **environment: str) -> Running:
        site = self.folder.path / "sites" / name
        words = ("client", site, "--data", data or site / "data.npz", "--device", "cpu")
        return self.start(name, *words, *options, **environment)

    def run(self) -> Running:
        return self.start("run", "run", self.folder.path)

    def said(self, running: Running) -> str:
        """What a program has written so far."""
        parts = [running.folder / name for name in ("stdout", "stderr")]
        return "".join(p.read_text() for p in parts if p.exists())

    def kill(self, running: Running) -> None:
        """Kill a program and everything below it, as a power cut would."""
        for pid in (running.pid, *descendants(running.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        running.process.join(10)

    def end(self, running: Running, seconds: float = 60) -> Done:
        """Ask a program to end, as Ctrl-C does."""
        self.seen |= set(descendants(running.pid))
        with suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGINT)
        return running.end(seconds)

    def close(self) -> None:
        for running in self.started:
            self.seen |= set(descendants(running.pid)) if running.process.is_alive() else set()
        for running in reversed(self.started):
            if running.process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(running.pid, signal.SIGTERM)
        end = time.monotonic() + 20
        for running in self.started:
            running.process.join(max(0.1, end - time.monotonic()))
            if running.process.is_alive():
                running.process.kill()
        for pid in self.seen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def real(folder: FederationFolder, home: Path, **environment: str) -> Iterator[Real]:
    """Processes of a federation, all with this added to their environment; none of them outlives the block."""
    federation = Real(folder, home, environment)
    try:
        yield federation
    finally:
        federation.close()
