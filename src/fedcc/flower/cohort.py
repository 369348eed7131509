"""The clients at their sites as a cohort: who is asked, who is waited for, and which uploads count.

docs/federation.md, "Rounds, and sites that are down", says when a round ends and what becomes of clients that are away,
slow, late or failing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcc import __version__
from fedcc.core.files import write_whole
from fedcc.core.messages import Predictions, Weights, leaves
from fedcc.core.model import Arch
from fedcc.core.naming import printable
from fedcc.core.rng import Key
from fedcc.errors import UserError
from fedcc.experiments.record import Record
from fedcc.flower import codec
from fedcc.flower.attendance import Attendance, ClientStatus
from fedcc.flower.codec import EncodedMessage, ExpectedMessage, InvalidMessage, decode, encode
from fedcc.flower.command import CommandSigner
from fedcc.flower.dry_run import DryRun
from fedcc.flower.exchange import Answer, Exchange, Inputs, Outgoing, Question, Transport
from fedcc.flower.folder import FederationFolder
from fedcc.flower.logs import FORMAT_VARIABLE, Level, LogFile
from fedcc.flower.own_network import is_at_site
from fedcc.flower.site_error import error_reason

POLL_SECONDS = 0.2  # from one look for answers to the next
SENT_TOGETHER = 16  # messages in one request to Flower
FLOWERS_BYTES = 64 * 2**10  # that an answer may have besides its arrays and header: Flower's records and other texts
ONLINE_SECONDS = 2.0  # from one look for who is connected to the next


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


class NoQuorum(UserError):
    """Too few clients for a round; the run can be resumed."""


def key_bytes(folder: FederationFolder) -> dict[str, bytes]:
    """The keys of those who may connect."""
    return {name: folder.key(name).read_bytes() for name in folder.members}


class FlowerCohort:
    """The cohort; downlinks and uplinks are messages of the method, as in the simulator."""

    def __init__(
        self, folder: FederationFolder, run: str, transport: Transport, dry_run: DryRun, log: RunLog, device: str
    ):
        self.folder, self.run, self.transport, self.dry_run, self.device = folder, run, transport, dry_run, device
        self.wire: str = folder.experiment.training.wire
        self.rules, self.names, self.log, self.say = folder.rules, list(folder.clients), log, log.say
        self.numbers = {name: k for k, name in enumerate(self.names)}
        self.disclosure = dry_run.disclosure
        self.status = {name: ClientStatus() for name in self.names}
        self.attendance = Attendance()  # of the latest exchange
        self.pending: dict[str, Question] = {}  # by ticket
        self.keys = dict[str, bytes]()
        self.unreadable = False  # whether the folder's file was not whole at the last look
        self.look_for_changes()
        self.absent: set[str] = set()  # clients that were not connected in the last exchange
        self.last_look = -ONLINE_SECONDS
        self.seconds = 0.0  # of the latest exchange
        self.waits_for_quorum = True  # also for clients that are not connected
        self.largest: dict[str, float] = {}  # number of each client's last answer

    def show_status(self) -> None:
        self.log.update(clients={name: asdict(status) for name, status in self.status.items()})

    def note_uploads(self, record: Record) -> None:
        """Show what a round's uploads say of the clients."""
        for k, signs in record.get("uploads", {}).items():
            self.status[self.names[int(k)]].uploads = signs
        for k, reason in record.get("warnings", {}).items():
            self.status[self.names[int(k)]].warning = f"round {record['round']}: {reason}"
        self.show_status()

    @property
    def archs(self) -> Mapping[int, Arch]:
        return self.dry_run.server.archs

    # -- who belongs to it

    def look_for_changes(self) -> None:
        """Let go of clients that were revoked, and forget what those with a new key were asked with the old one."""
        (self.folder, problem), before = self.folder.latest(), self.keys
        if problem and not self.unreadable:  # it may be saved half: the next look reads it again
            self.say(f"{problem}; the run continues with its present clients", "warning")
        self.unreadable = bool(problem)
        self.keys, self.signer = key_bytes(self.folder), CommandSigner(self.folder.command_key, __version__)
        for name, status in self.status.items():
            if name in self.folder.revoked and not status.revoked:
                status.revoked, status.online = True, False
                self.say(f"{name} is revoked: it is no longer asked")
            if status.revoked or before.get(name) != self.keys.get(name):
                self.pending = {ticket: question for ticket, question in self.pending.items() if question.name != name}

    def admit(self) -> None:
        """Let clients in that were added: the server's next message is for them, too."""
        self.look_for_changes()
        for name, model in list(self.folder.clients.items())[len(self.names) :]:
            self.dry_run.add(len(self.names), self.folder.task.arch(self.dry_run.method, model))
            self.numbers[name] = len(self.names)
            self.names.append(name)
            self.status[name] = ClientStatus(revoked=name in self.folder.revoked)
            self.attendance.added.append(name)
            self.say(f"{name} is added: it takes part from the next round on")

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

        names = [name for k, name in enumerate(self.names) if k in downs]  # others were added after a checkpoint
        ups = self.ask(Exchange("train", t, message, expected.__getitem__, names))
        self.admit()
        return ups

    def models(self, t: int) -> dict[int, Weights | None]:
        """The clients' models after round t; None for those that keep theirs, as all do that bring their network.

        Where clients share labels only, all keep theirs.
        """

        def expected(k: int) -> ExpectedMessage:
            return self.whole(Weights.of(self.dry_run.clients[k][0], 1), t)

        members = [k for k, name in enumerate(self.names) if not self.status[name].revoked]
        at_sites = [k for k in members if is_at_site(self.archs[k]) or self.disclosure.filters]
        models: dict[int, Weights | None] = dict.fromkeys(at_sites)
        if names := [self.names[k] for k in members if k not in models]:
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
        self.attendance = Attendance()
        quorum_at, missed, self.last_look = None, 0, -ONLINE_SECONDS
        self.say(f"round {t}: asking {len(self.members(exchange))} clients{exchange.what}")
        while True:
            online = self.online()
            self.give_up()
            for name in [name for name in answers if self.status[name].revoked]:
                del answers[name]
            quorum = min(rules.quorum, len(self.members(exchange)))
            if not quorum:
                raise NoQuorum(f"round {t}: all clients that were to be asked are revoked")
            self.send(
                exchange, [name for name in self.waiting(exchange) if name in online and self.is_free(name, exchange)]
            )
            if arrived := self.transport.collect(list(self.pending)):
                for answer in arrived:
                    self.take(answer)
                self.show_status()  # once for all: the file is flushed to the disk
            waiting, now = self.waiting(exchange), time.monotonic()
            if not self.waits_for_quorum:
                here = len(answers.keys() | (online & set(self.members(exchange))))
                if not here and now - start_time >= rules.grace:
                    raise NoQuorum(f"none of {', '.join(self.members(exchange))} is connected")
                quorum = min(quorum, max(1, here))
            if len(answers) + len(waiting) < quorum:
                if all(self.status[name].aside for name in exchange.failures):
                    problems = {**self.attendance.failed, **self.attendance.refused}
                    reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
                    raise NoQuorum(
                        f"round {t}: only {len(answers)} of the {quorum} clients needed for a quorum; {reasons}"
                    )
                exchange.failures.clear()  # they are needed, so they are asked again until they are set aside
            elif not waiting:
                if self.none_is_revoked(answers):
                    break
            elif len(answers) >= quorum:
                quorum_at = now if quorum_at is None else quorum_at
                gone = all(name in self.absent and name not in online for name in waiting)
                is_over = gone or now - quorum_at >= rules.grace or now - start_time >= rules.deadline
                if is_over and self.none_is_revoked(answers):
                    break
            elif now - start_time >= rules.deadline * (missed + 1):
                missed += 1
                exchange.failures.clear()  # they may do better than those that are waited for
                missing = ", ".join(f"{name} is {'working' if name in online else 'not connected'}" for name in waiting)
                text = f"round {t}: {len(answers)} of {quorum} clients after {missed} deadlines; {missing}"
                self.say(text, "warning")
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

    def members(self, exchange: Exchange) -> list[str]:
        """The clients that an exchange is for, without those that are revoked by now."""
        return [name for name in exchange.clients if not self.status[name].revoked]

    def none_is_revoked(self, names: Iterable[str]) -> bool:
        """Whether these clients belong to the federation at this moment."""
        self.look_for_changes()
        return not any(self.status[name].revoked for name in names)

    def is_free(self, name: str, exchange: Exchange) -> bool:
        """Whether a client may be sent the question now: it is at no other one, and was not lost a moment ago."""
        return name not in self.working and time.monotonic() >= exchange.again.get(name, 0.0)

    @property
    def working(self) -> set[str]:
        """The clients that have not answered what they were sent."""
        return {question.name for question in self.pending.values()}

    def waiting(self, exchange: Exchange) -> list[str]:
        """The clients that may still answer."""
        over = exchange.answers.keys() | exchange.failures
        names = [name for name in exchange.clients if name not in over]
        return [name for name in names if not (self.status[name].aside or self.status[name].revoked)]

    def take(self, answer: Answer) -> None:
        """Read an answer, or note what is wrong with it."""
        if (question := self.pending.pop(answer.ticket, None)) is None:
            self.say("an answer to nothing that was asked is ignored", "warning")
            return
        name, exchange = question.name, question.exchange
        t, status, attendance = exchange.t, self.status[name], self.attendance
        if exchange.ended is not None:
            if not answer.lost:
                attendance.late[name] = t
                self.say(f"{name}: its answer to round {t} came too late", "warning")
            return
        if answer.lost:
            self.say(f"round {t}: {name} was lost ({printable(answer.error)})", "warning")
            exchange.lose(name)
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
            verb = "has failed" if failures is attendance.failed else "is refused"
            self.say(f"round {t}: {name} {verb}: {reason}", "warning")
            exchange.failures.add(name)
            status.strikes += 1
            if status.strikes >= self.rules.strikes:
                status.aside = True
                self.say(f"{name} is set aside: it has failed {status.strikes} times in a row", "warning")
        else:
            status.strikes, total = 0, len(self.members(exchange))
            attendance.failed.pop(name, None), attendance.refused.pop(name, None)
            self.say(f"round {t}: {name} has answered{exchange.what} ({len(exchange.answers)} of {total})")
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
        answer = codec.accept(texts["kind"], texts["header"], buffers, expected, device=self.device)
        numbers = [v for _, v, _ in leaves(answer) if isinstance(v, Tensor) and v.is_floating_point() and v.numel()]
        self.largest[name] = max((v.abs().max().item() for v in numbers), default=0.0)
        exchange.answers[name] = answer
        return ""

    def close(self, exchange: Exchange, waiting: list[str], online: set[str]) -> None:
        """Note who took part and who did not."""
        attendance, working = self.attendance, self.working & online
        attendance.present = [name for name in self.names if name in exchange.answers]
        attendance.slow = [name for name in waiting if name in working]
        attendance.absent = [name for name in waiting if name not in working]
        attendance.aside = [name for name in self.names if self.status[name].aside]
        attendance.revoked = [name for name in self.names if self.status[name].revoked]
        self.absent = set(attendance.absent)
        for kind in ("absent", "slow"):
            if names := getattr(attendance, kind):
                self.say(f"round {exchange.t}: without {', '.join(names)} ({kind})", "warning")
        self.show_status()

    def online(self) -> set[str]:
        """Who is connected; the transport is asked every few seconds."""
        if time.monotonic() - self.last_look >= ONLINE_SECONDS:
            self.look_for_changes()
            now, changed = self.transport.online() - set(self.folder.revoked), False
            for name, status in self.status.items():
                if status.online != (name in now):
                    status.online = name in now
                    word = "connected" if status.online else "disconnected"
                    self.say(f"{name} is {word}", "info" if status.online else "warning")
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
                self.say(f"{question.name}: no answer to round {t} a deadline after it ended; asking again", "warning")
