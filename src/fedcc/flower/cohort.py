"""The clients at their sites as a cohort: who is asked, who is waited for, and which uploads count.

docs/federation.md, "Rounds", says when a round ends and what becomes of clients that are away, slow, late or failing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fedcc import __version__
from fedcc.core.files import write_whole
from fedcc.core.messages import Predictions, Weights
from fedcc.core.naming import printable
from fedcc.core.rng import Key
from fedcc.experiments.record import Record
from fedcc.flower import codec
from fedcc.flower.codec import EncodedMessage, ExpectedMessage, InvalidMessage, decode, encode
from fedcc.flower.command import CommandSigner
from fedcc.flower.dry_run import DryRun
from fedcc.flower.folder import FederationFolder
from fedcc.flower.logs import FORMAT_VARIABLE, Level, LogFile
from fedcc.flower.own_network import is_at_site
from fedcc.flower.site_error import error_reason

POLL_SECONDS = 0.2  # from one look for answers to the next
SENT_TOGETHER = 16  # messages in one request to Flower
FLOWERS_BYTES = 64 * 2**10  # that an answer may have besides its arrays and header: Flower's records and other texts
ONLINE_SECONDS = 2.0  # from one look for who is connected to the next


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


class RunLog:
    """What the operator can follow while the server works: the lines of ``run.log``, and ``status.json``."""

    def __init__(self, folder: Path, run: str):
        self.log, self.status_path = (
            LogFile(folder / "run.log", os.environ.get(FORMAT_VARIABLE, "text")),
            folder / "status.json",
        )
        self.status: dict[str, Any] = {"run": run, "state": "running", "round": 0, "problem": "", "clients": {}}

    def say(self, text: str, level: Level = "info") -> None:
        self.log.say(text, level)

    def update(self, **changes: Any) -> None:
        self.status |= changes
        write_whole(self.status_path, json.dumps(self.status, indent=1))


class NoQuorum(RuntimeError):
    """Too few clients for a round; the run can be resumed."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """What the clients are asked about."""

    x: Tensor


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


def _what(exchange: Exchange) -> str:
    return "" if exchange.purpose == "train" else f" {exchange.purpose}"


@dataclass(frozen=True, eq=False)
class Question:
    """An exchange's question to one client, which has not answered yet."""

    name: str
    exchange: Exchange
    nonce: str  # the answer has it too


class FlowerCohort:
    """The cohort; downlinks and uplinks are messages of the method, as in the simulator."""

    def __init__(
        self, folder: FederationFolder, run: str, transport: Transport, dry_run: DryRun, log: RunLog, device: str
    ):
        self.folder, self.run, self.transport, self.dry_run, self.device = folder, run, transport, dry_run, device
        self.wire: str = folder.experiment.training.wire
        self.rules, self.names, self.log, self.say = folder.rules, list(folder.clients), log, log.say
        self.numbers = {name: k for k, name in enumerate(self.names)}
        self.archs, self.disclosure = folder.archs(dry_run.method), dry_run.disclosure
        self.status = {name: ClientStatus() for name in self.names}
        self.attendance = Attendance()  # of the latest exchange
        self.signer = CommandSigner(folder.command_key, __version__)
        self.pending: dict[str, Question] = {}  # by ticket
        self.absent: set[str] = set()  # clients that were not connected in the last exchange
        self.last_look = -ONLINE_SECONDS
        self.seconds = 0.0  # of the latest exchange

    def show_status(self) -> None:
        self.log.update(clients={name: asdict(status) for name, status in self.status.items()})

    def note_uploads(self, record: Record) -> None:
        """Show what a round's uploads say of the clients."""
        for k, signs in record.get("uploads", {}).items():
            self.status[self.names[int(k)]].uploads = signs
        for k, reason in record.get("warnings", {}).items():
            self.status[self.names[int(k)]].warning = f"round {record['round']}: {reason}"
        self.show_status()

    # -- what the clients are asked

    def round(self, t: int, downs: Mapping[int, Any]) -> dict[int, Any]:
        stochastic = self.wire.endswith("-stochastic")
        encoded: dict[tuple[int, int | None], EncodedMessage] = {}
        expected: dict[int, ExpectedMessage] = {}

        def message(k: int) -> EncodedMessage:
            cache_key = id(downs[k]), k if stochastic else None  # a downlink that clients share is encoded once
            if cache_key not in encoded:
                key = Key(self.folder.experiment.training.seed, t, k, "wire", "down") if stochastic else None
                encoded[cache_key] = encode(downs[k], self.wire, run=self.run, round=t, key=key)
            if k not in expected:
                down = decode(encoded[cache_key], self.dry_run.message_classes, self.wire, run=self.run, round=t)
                expected[k] = self.dry_run.expected_upload(k, t, down)
            return encoded[cache_key]

        return self.ask(Exchange("train", t, message, expected.__getitem__, self.names))

    def models(self, t: int) -> dict[int, Weights | None]:
        """The clients' models after round t; None for those that keep theirs, as all do that bring their network.

        Where clients share labels only, all keep theirs.
        """

        def expected(k: int) -> ExpectedMessage:
            return self.whole(Weights.of(self.dry_run.clients[k][0], 1), t)

        models: dict[int, Weights | None] = {
            k: None for k, arch in self.archs.items() if is_at_site(arch) or self.disclosure.filters
        }
        names = [name for k, name in enumerate(self.names) if k not in models]
        if names:
            models |= self.ask(Exchange("query.model", t, lambda _: None, expected, names, may_decline=True))
        return dict(sorted(models.items()))

    def predictions(self, t: int, x: Tensor, clients: Collection[int]) -> dict[int, Predictions]:
        """The logits of these clients' own models for these inputs; without those that decline."""
        question = encode(Inputs(x.cpu()), "fp32", run=self.run, round=t)

        def expected(k: int) -> ExpectedMessage:
            blank = (
                self.disclosure.blank(len(x)) if filtered else Predictions(torch.zeros(len(x), self.archs[k].outputs))
            )
            return self.whole(blank, t)

        filtered, names = self.disclosure.filters, [self.names[k] for k in clients]
        answers = self.ask(Exchange("query.predict", t, lambda _: question, expected, names, may_decline=True))
        answers = {k: answer for k, answer in answers.items() if answer is not None}
        return {k: Predictions(self.disclosure.logits(a)) for k, a in answers.items()} if filtered else answers

    def whole(self, message: Any, t: int) -> ExpectedMessage:
        """An answer like this message, which no wire has rounded."""
        labels = self.disclosure.columns or self.folder.task.classes
        return ExpectedMessage(message, self.dry_run.message_classes, labels, "fp32", self.run, t)

    # -- asking, waiting, ending

    def ask(self, exchange: Exchange) -> dict[int, Any]:
        """Ask the question and return the answers that came in time, by client."""
        rules, start_time, t, answers = self.rules, time.monotonic(), exchange.t, exchange.answers
        quorum = min(rules.quorum, len(exchange.clients))
        self.attendance = Attendance()
        quorum_at, missed = None, 0
        self.say(f"round {t}: asking {len(exchange.clients)} clients{_what(exchange)}")
        while True:
            online = self.online()
            self.give_up()
            working = self.working
            self.send(exchange, [name for name in self.waiting(exchange) if name in online and name not in working])
            if arrived := self.transport.collect(list(self.pending)):
                for answer in arrived:
                    self.take(answer)
                self.show_status()  # once for all: the file is flushed to the disk
            waiting, now = self.waiting(exchange), time.monotonic()
            if len(answers) + len(waiting) < quorum:
                if all(self.status[name].aside for name in exchange.failures):
                    reasons = {**self.attendance.failed, **self.attendance.refused}
                    raise NoQuorum(
                        f"round {t}: only {len(answers)} of the {quorum} clients needed for a quorum; {reasons}"
                    )
                exchange.failures.clear()  # they are needed, so they are asked again until they are set aside
            elif not waiting:
                break
            elif len(answers) >= quorum:
                quorum_at = now if quorum_at is None else quorum_at
                gone = all(name in self.absent and name not in online for name in waiting)
                if gone or now - quorum_at >= rules.grace or now - start_time >= rules.deadline:
                    break
            elif now - start_time >= rules.deadline * (missed + 1):
                missed += 1
                exchange.failures.clear()  # they may do better than those that are waited for
                missing = ", ".join(f"{name} is {'working' if name in online else 'not connected'}" for name in waiting)
                self.say(f"round {t}: {len(answers)} of {quorum} clients after {missed} deadlines; {missing}")
                if missed >= rules.patience:
                    raise NoQuorum(f"round {t}: no quorum of {quorum} clients within {missed} deadlines; {missing}")
            time.sleep(POLL_SECONDS)
        exchange.ended = time.monotonic()
        self.seconds = exchange.ended - start_time
        self.close(exchange, waiting, online)
        return {k: answers[name] for k, name in enumerate(self.names) if name in answers}

    def send(self, exchange: Exchange, names: list[str]) -> None:
        """Send the question to these clients, a few at a time: the first can begin before the last is asked."""
        for first in range(0, len(names), SENT_TOGETHER):
            questions, messages = [], []
            for name in names[first : first + SENT_TOGETHER]:
                k, purpose, t = self.numbers[name], exchange.purpose, exchange.t
                message = exchange.message(k)
                nonce, content = self.signer.content(purpose, name, self.run, t, self.folder.terms(name), message)
                limit = sum(codec.upload_limits(exchange.expected(k).form)) + FLOWERS_BYTES
                questions.append(Question(name, exchange, nonce))
                messages.append(Outgoing(name, purpose, t, content, limit))
            for ticket, question in zip(self.transport.send(messages), questions, strict=True):
                if ticket is not None:
                    self.pending[ticket] = question

    @property
    def working(self) -> set[str]:
        """The clients that have not answered what they were sent."""
        return {question.name for question in self.pending.values()}

    def waiting(self, exchange: Exchange) -> list[str]:
        """The clients that may still answer."""
        over = exchange.answers.keys() | exchange.failures
        return [name for name in exchange.clients if name not in over and not self.status[name].aside]

    def take(self, answer: Answer) -> None:
        """Read an answer, or note what is wrong with it."""
        if (question := self.pending.pop(answer.ticket, None)) is None:
            self.say("an answer to nothing that was asked is ignored")
            return
        name, exchange = question.name, question.exchange
        t, status, attendance = exchange.t, self.status[name], self.attendance
        if exchange.ended is not None:
            if not answer.lost:
                attendance.late[name] = t
                self.say(f"{name}: its answer to round {t} came too late")
            return
        if answer.lost:
            self.say(f"round {t}: {name} was lost ({printable(answer.error)})")
            self.last_look = -ONLINE_SECONDS  # is it still connected?
            return
        failures, reason = attendance.failed, answer.error
        if not reason:
            try:
                reason = self.read(question, answer.content)
            except InvalidMessage as error:
                failures, reason = attendance.refused, str(error)
        if reason:
            failures[name] = status.problem = reason = printable(reason)
            self.say(f"round {t}: {name} {'has failed' if failures is attendance.failed else 'is refused'}: {reason}")
            exchange.failures.add(name)
            status.strikes += 1
            if status.strikes >= self.rules.strikes:
                status.aside = True
                self.say(f"{name} is set aside: it has failed {status.strikes} times in a row")
        else:
            status.strikes = 0
            attendance.failed.pop(name, None), attendance.refused.pop(name, None)
            self.say(f"round {t}: {name} has answered{_what(exchange)} ({len(exchange.answers)} of {len(self.names)})")
            status.answered = t if exchange.purpose == "train" else status.answered

    def read(self, question: Question, content: Any) -> str:
        """Read an answer; the error that the client reports in it, if any."""
        name, exchange = question.name, question.exchange
        texts, buffers = codec.read_content(content)
        if texts["nonce"] != question.nonce:
            raise InvalidMessage("it does not answer the command that was sent")
        if "error" in texts:
            return error_reason(texts, self.folder.terms(name), __version__)
        if exchange.may_decline and texts.get("declined"):
            exchange.answers[name] = None
            return ""
        expected = exchange.expected(self.numbers[name])
        exchange.answers[name] = codec.accept(texts["kind"], texts["header"], buffers, expected, device=self.device)
        return ""

    def close(self, exchange: Exchange, waiting: list[str], online: set[str]) -> None:
        """Note who took part and who did not."""
        attendance, working = self.attendance, self.working & online
        attendance.present = [name for name in self.names if name in exchange.answers]
        attendance.slow = [name for name in waiting if name in working]
        attendance.absent = [name for name in waiting if name not in working]
        attendance.aside = [name for name in self.names if self.status[name].aside]
        self.absent = set(attendance.absent)
        for kind in ("absent", "slow"):
            if names := getattr(attendance, kind):
                self.say(f"round {exchange.t}: without {', '.join(names)} ({kind})")
        self.show_status()

    def online(self) -> set[str]:
        """Who is connected; the transport is asked every few seconds."""
        if time.monotonic() - self.last_look >= ONLINE_SECONDS:
            now, changed = self.transport.online(), False
            for name, status in self.status.items():
                if status.online != (name in now):
                    status.online = name in now
                    self.say(f"{name} is {'connected' if status.online else 'disconnected'}")
                    changed = True
            if changed:
                self.show_status()
            self.last_look = time.monotonic()
        return {name for name, status in self.status.items() if status.online}

    def give_up(self) -> None:
        """Stop waiting for answers that are overdue by a deadline: the messages may be lost."""
        for ticket, question in list(self.pending.items()):
            ended = question.exchange.ended
            if ended is not None and time.monotonic() - ended >= self.rules.deadline:
                del self.pending[ticket]
                t = question.exchange.t
                self.say(f"{question.name}: no answer to round {t} a deadline after it ended; asking again")
