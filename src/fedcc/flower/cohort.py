"""The clients at their sites as a cohort: who is asked, who is waited for, and which uploads count.

A client is asked when it is connected and not working on something else. A round ends when everybody has answered; or
a grace period after a quorum has; or at the deadline, if there is a quorum by then. A client that disconnects is asked
again when it comes back; one that is late for a round receives the current one's downlink next; one that fails several
times in a row is set aside.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fedcc import __version__
from fedcc.core.files import write_whole
from fedcc.core.messages import Predictions, Weights
from fedcc.core.rng import Key
from fedcc.flower.codec import EncodedMessage, ExpectedMessage, InvalidMessage, accept, decode, encode
from fedcc.flower.content import read_content, required_text, write_content
from fedcc.flower.dry_run import DryRun
from fedcc.flower.folder import FederationFolder

POLL_SECONDS = 0.2  # from one look for answers to the next
ONLINE_SECONDS = 2.0  # from one look for who is connected to the next


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to a message: content, or an error; ``lost`` if the client never started on it."""

    ticket: str
    content: Any = None
    error: str = ""
    lost: bool = False


class Transport(Protocol):
    """How messages reach sites, by their names."""

    def online(self) -> set[str]:
        """Who is connected."""

    def send(self, name: str, purpose: str, t: int, content: Any) -> str | None:
        """A ticket for the answer, or None if the message could not be sent."""

    def collect(self, tickets: Sequence[str]) -> list[Answer]:
        """The answers that have arrived."""


class RunLog:
    """What the operator can follow while the server works: the lines of ``run.log``, and ``status.json``."""

    def __init__(self, folder: Path, run: str):
        self.path, self.status_path = folder / "run.log", folder / "status.json"
        self.status: dict[str, Any] = {"run": run, "state": "running", "round": 0, "problem": "", "clients": {}}

    def say(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{datetime.now():%H:%M:%S} {text}\n")

    def update(self, **changes: Any) -> None:
        self.status |= changes
        write_whole(self.status_path, json.dumps(self.status, indent=1))


class NoQuorum(RuntimeError):
    """Too few clients for a round; the run can be resumed."""


@dataclass
class ClientStatus:
    """One client, as the operator sees it."""

    online: bool = False
    answered: int = 0  # the last round it took part in
    strikes: int = 0  # failures in a row
    aside: bool = False
    problem: str = ""  # the last one


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


@dataclass
class PendingMessage:
    """A message without an answer yet."""

    client: int
    purpose: str
    t: int
    overdue_since: float | None = None  # when its round ended without the answer


@dataclass
class Exchange:
    """One question to some clients, while it lasts."""

    purpose: str
    t: int
    read: Callable[[int, Any], Any]  # a client's answer from its content
    answers: dict[int, Any] = field(default_factory=dict)
    failures: set[int] = field(default_factory=set)  # clients that failed and are not asked again for now


class FlowerCohort:
    """The cohort; downlinks and uplinks are messages of the method, as in the simulator."""

    def __init__(
        self,
        folder: FederationFolder,
        run: str,
        transport: Transport,
        dry_run: DryRun,
        log: RunLog,
        device: str = "cpu",
    ):
        self.folder, self.run, self.transport, self.dry_run, self.device = folder, run, transport, dry_run, device
        self.wire: str = folder.experiment.training.wire
        self.rules, self.names, self.log, self.say = folder.rules, list(folder.clients), log, log.say
        self.status = {name: ClientStatus() for name in self.names}
        self.attendance = Attendance()  # of the latest exchange
        self.pending: dict[str, PendingMessage] = {}  # by ticket
        self.absent: set[int] = set()  # clients that were not connected in the last exchange
        self.last_look = -ONLINE_SECONDS
        self.seconds = 0.0  # of the latest exchange

    def show_status(self) -> None:
        self.log.update(clients={name: asdict(status) for name, status in self.status.items()})

    # -- what the clients are asked

    def round(self, t: int, downs: Mapping[int, Any]) -> dict[int, Any]:
        stochastic = self.wire.endswith("-stochastic")
        encoded: dict[tuple[int, int | None], EncodedMessage] = {}
        expected: dict[int, ExpectedMessage] = {}

        def content(k: int) -> Any:
            shared = id(downs[k]), k if stochastic else None  # a downlink that clients share is encoded once
            if shared not in encoded:
                key = Key(self.folder.experiment.training.seed, t, k, "wire", "down") if stochastic else None
                encoded[shared] = encode(downs[k], self.wire, run=self.run, round=t, key=key)
            if k not in expected:
                down = decode(encoded[shared], self.dry_run.messages, self.wire, run=self.run, round=t)
                expected[k] = self.dry_run.upload(k, t, down)
            return write_content(self.texts(k, t), encoded[shared])

        return self.ask("train", t, content, lambda k, answer: self.accept(answer, expected[k]))

    def models(self, t: int) -> dict[int, Weights | None]:
        """The clients' models after round t; None for those that keep theirs."""

        def read(k: int, answer: Any) -> Weights | None:
            texts, _ = read_content(answer)
            if texts.get("declined"):
                return None
            weights: Weights = self.accept(answer, replace(self.dry_run.model_upload(k, t), wire="fp32"))
            return weights

        return self.ask("query.model", t, lambda k: write_content(self.texts(k, t)), read)

    def predictions(self, t: int, x: Tensor, clients: Collection[int]) -> dict[int, Predictions]:
        """The logits of these clients' own models for these inputs."""
        question = encode(Inputs(x.cpu()), "fp32", run=self.run, round=t)
        archs = self.folder.archs(self.dry_run.method)

        def read(k: int, answer: Any) -> Any:
            like = Predictions(torch.zeros(len(x), archs[k].outputs))
            known = {"Predictions": Predictions}
            return self.accept(answer, ExpectedMessage(like, known, self.folder.task.classes, "fp32", self.run, t))

        return self.ask("query.predict", t, lambda k: write_content(self.texts(k, t), question), read, clients)

    def accept(self, answer: Any, expected: ExpectedMessage) -> Any:
        texts, buffers = read_content(answer)
        kind, header = required_text(texts, "kind"), required_text(texts, "header")
        return accept(kind, header, buffers, expected, device=self.device)

    def texts(self, k: int, t: int) -> dict[str, str]:
        terms = json.dumps(self.folder.terms(self.names[k]))
        return {"run": self.run, "round": str(t), "version": __version__, "terms": terms}

    # -- asking, waiting, ending

    def ask(
        self,
        purpose: str,
        t: int,
        content: Callable[[int], Any],
        read: Callable[[int, Any], Any],
        clients: Collection[int] | None = None,
    ) -> dict[int, Any]:
        """Ask these clients (all by default) a question and return the answers that came in time, by client."""
        rules, begun = self.rules, time.monotonic()
        asked = range(len(self.names)) if clients is None else sorted(clients)
        quorum = min(rules.quorum, len(asked))
        exchange, self.attendance = Exchange(purpose, t, read), Attendance()
        answers, failures = exchange.answers, exchange.failures
        quorum_at, missed = None, 0
        while True:
            online = self.online()
            self.give_up()
            busy = {message.client for message in self.pending.values()}
            for k in self.waiting(asked, exchange):
                if self.names[k] in online and k not in busy:
                    ticket = self.transport.send(self.names[k], purpose, t, content(k))
                    if ticket is not None:
                        self.pending[ticket] = PendingMessage(k, purpose, t)
            for answer in self.transport.collect(list(self.pending)):
                self.take(answer, exchange)
            waiting = self.waiting(asked, exchange)
            now = time.monotonic()
            if len(answers) + len(waiting) < quorum:
                if all(self.status[self.names[k]].aside for k in failures):
                    reasons = {**self.attendance.failed, **self.attendance.refused}
                    raise NoQuorum(f"round {t}: {len(answers)} of {quorum} clients that make a quorum; {reasons}")
                failures.clear()  # they are needed, so they are asked again until they are set aside
            elif not waiting:
                break
            elif len(answers) >= quorum:
                quorum_at = now if quorum_at is None else quorum_at
                gone = all(k in self.absent and self.names[k] not in online for k in waiting)
                if gone or now - quorum_at >= rules.grace or now - begun >= rules.deadline:
                    break
            elif now - begun >= rules.deadline * (missed + 1):
                missed += 1
                failures.clear()  # they may do better than those that are waited for
                states = {True: "is working", False: "is not connected"}
                missing = ", ".join(f"{self.names[k]} {states[self.names[k] in online]}" for k in waiting)
                self.say(f"round {t}: {len(answers)} of {quorum} clients after {missed} deadlines; {missing}")
                if missed >= rules.patience:
                    raise NoQuorum(f"round {t}: no quorum of {quorum} clients within {missed} deadlines; {missing}")
            time.sleep(POLL_SECONDS)
        self.seconds = time.monotonic() - begun
        self.close(exchange, waiting, online)
        return dict(sorted(answers.items()))

    def waiting(self, asked: Collection[int], exchange: Exchange) -> list[int]:
        """The clients that may still answer."""
        over = exchange.failures | {k for k, name in enumerate(self.names) if self.status[name].aside}
        return [k for k in asked if k not in exchange.answers and k not in over]

    def take(self, answer: Answer, exchange: Exchange) -> None:
        """Read an answer, or note what is wrong with it."""
        message = self.pending.pop(answer.ticket)
        k, name, t = message.client, self.names[message.client], exchange.t
        if (message.purpose, message.t) != (exchange.purpose, t):
            if not answer.lost:
                self.attendance.late[name] = message.t
                self.say(f"{name}: its answer to round {message.t} came too late")
            return
        if answer.lost:
            self.say(f"round {t}: {name} was lost ({answer.error})")
            self.last_look = -ONLINE_SECONDS  # is it still connected?
            return
        status, failures, reason = self.status[name], self.attendance.failed, answer.error
        if not reason:
            try:
                exchange.answers[k] = exchange.read(k, answer.content)
            except InvalidMessage as error:
                failures, reason = self.attendance.refused, str(error)
        if reason:
            failures[name] = status.problem = reason
            what = "has failed" if answer.error else "is refused"
            self.say(f"round {t}: {name} {what}: {reason}")
            exchange.failures.add(k)
            status.strikes += 1
            if status.strikes >= self.rules.strikes:
                status.aside = True
                self.say(f"{name} is set aside: it has failed {status.strikes} times in a row")
        else:
            status.strikes = 0
            self.attendance.failed.pop(name, None), self.attendance.refused.pop(name, None)
            what = "" if exchange.purpose == "train" else f" {exchange.purpose}"
            self.say(f"round {t}: {name} has answered{what} ({len(exchange.answers)} of {len(self.names)})")
            status.answered = t if exchange.purpose == "train" else status.answered
        self.show_status()

    def close(self, exchange: Exchange, waiting: list[int], online: set[str]) -> None:
        """Note who took part and who did not."""
        attendance = self.attendance
        attendance.present = [self.names[k] for k in sorted(exchange.answers)]
        working = {message.client for message in self.pending.values()}
        attendance.slow = [self.names[k] for k in waiting if k in working and self.names[k] in online]
        attendance.absent = [self.names[k] for k in waiting if self.names[k] not in attendance.slow]
        attendance.aside = [name for name in self.names if self.status[name].aside]
        self.absent = {k for k in waiting if self.names[k] in attendance.absent}
        for message in self.pending.values():
            message.overdue_since = message.overdue_since or time.monotonic()
        for kind in ("absent", "slow"):
            if names := getattr(attendance, kind):
                self.say(f"round {exchange.t}: without {', '.join(names)} ({kind})")
        self.show_status()

    def online(self) -> set[str]:
        """Who is connected; the transport is asked every few seconds."""
        if time.monotonic() - self.last_look >= ONLINE_SECONDS:
            now = self.transport.online()
            for name, status in self.status.items():
                if status.online != (name in now):
                    status.online = name in now
                    self.say(f"{name} is {'connected' if status.online else 'gone'}")
                    self.show_status()
            self.last_look = time.monotonic()
        return {name for name, status in self.status.items() if status.online}

    def give_up(self) -> None:
        """Stop waiting for answers that are overdue by a deadline: the messages may be lost."""
        for ticket, message in list(self.pending.items()):
            if message.overdue_since is not None and time.monotonic() - message.overdue_since >= self.rules.deadline:
                del self.pending[ticket]
                self.say(f"{self.names[message.client]}: no answer to round {message.t} for a deadline; asking again")


@dataclass(frozen=True, eq=False)
class Inputs:
    """Images that the clients are asked about."""

    x: Tensor
