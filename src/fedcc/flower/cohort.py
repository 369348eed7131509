"""The clients at their sites as a cohort: who is asked, who is waited for, and which uploads count.

A round begins for a client when it is connected and not at work on something else. It ends when everybody has
answered; or a grace period after a quorum has; or at the deadline, if there is a quorum by then. A client that
disconnects is asked again when it comes back; one that is late for a round gets the current one's downlink next; one
that fails several times in a row is set aside.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedcc import __version__
from fedcc.core.messages import Predictions, Weights
from fedcc.core.rng import Key
from fedcc.flower.codec import Encoded, Expected, Refused, accept, decode, encode
from fedcc.flower.envelope import opened, sealed, text_of
from fedcc.flower.folder import FederationFolder
from fedcc.flower.rehearsal import Rehearsal

POLL = 0.2  # seconds
HELD = 2.0  # seconds after which one looks again who is connected


@dataclass(frozen=True, eq=False)
class Answer:
    """What came back for a ticket: content, or an error; ``lost`` if the client never got to work on it."""

    ticket: str
    content: Any = None
    error: str = ""
    lost: bool = False


class Post(Protocol):
    """How messages reach sites, by their names."""

    def online(self) -> set[str]:
        """Who is connected."""
        ...

    def send(self, name: str, purpose: str, t: int, content: Any) -> str | None:
        """A ticket for the answer, or None if it could not be sent."""
        ...

    def collect(self, tickets: Sequence[str]) -> list[Answer]:
        """What has come back by now."""
        ...


class NoQuorum(RuntimeError):
    """Too few clients for a round; the run can go on later."""


@dataclass
class Standing:
    """One client, as the operator sees it."""

    online: bool = False
    answered: int = 0  # the last round it was part of
    strikes: int = 0  # failures in a row
    aside: bool = False
    problem: str = ""  # the last one


@dataclass
class Report:
    """Who took part in a round and who did not, by name."""

    present: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)  # not connected, or lost on the way
    slow: list[str] = field(default_factory=list)  # at work when the round ended
    late: dict[str, int] = field(default_factory=dict)  # answers to an earlier round, and which
    failed: dict[str, str] = field(default_factory=dict)  # the client's own error
    refused: dict[str, str] = field(default_factory=dict)  # what is wrong with the upload
    aside: list[str] = field(default_factory=list)  # failed too often: no longer asked


@dataclass
class Sent:
    """A message that is out."""

    number: int
    purpose: str
    t: int
    overdue: float | None = None  # when its round ended without the answer


class Across:
    """The cohort; ``downs`` and uplinks are messages of the method, as in the simulator."""

    def __init__(
        self,
        folder: FederationFolder,
        run: str,
        post: Post,
        rehearsal: Rehearsal,
        *,
        device: str = "cpu",
        say: Callable[[str], None] = print,
        on_change: Callable[[], None] = lambda: None,
    ):
        self.folder, self.run, self.post, self.rehearsal, self.device = folder, run, post, rehearsal, device
        self.wire: str = folder.experiment.training.wire
        self.rules, self.names = folder.rules, list(folder.clients)
        self.say, self.on_change = say, on_change
        self.standing = {name: Standing() for name in self.names}
        self.report = Report()
        self.out: dict[str, Sent] = {}  # by ticket
        self.away: set[int] = set()  # those that were not connected in the last round either
        self.looked = -HELD
        self.waited = 0.0  # seconds, for the answers of the latest round

    # -- what the clients are asked

    def round(self, t: int, downs: Mapping[int, Any]) -> dict[int, Any]:
        encoded: dict[tuple[int, int | None], Encoded] = {}
        expected: dict[int, Expected] = {}

        def letter(k: int) -> Any:
            stochastic = self.wire.endswith("-stochastic")
            place = id(downs[k]), k if stochastic else None  # one downlink for all is encoded once
            if place not in encoded:
                encoded[place] = encode(
                    downs[k], self.wire, run=self.run, round=t, key=self.key(k, t, "down") if stochastic else None
                )
            if k not in expected:
                down = decode(encoded[place], self.rehearsal.messages, self.wire, run=self.run, round=t)
                expected[k] = self.rehearsal.expect(k, t, down)
            return sealed(self.about(k, t), encoded[place])

        def read(k: int, content: Any) -> Any:
            return self.accepted(content, expected[k])

        return self.exchange("train", t, letter, read)

    def models(self, t: int) -> dict[int, Weights | None]:
        """The clients' models after round t; None for those that keep theirs."""

        def read(k: int, content: Any) -> Weights | None:
            texts, _ = opened(content)
            if texts.get("declined"):
                return None
            found: Weights = self.accepted(content, replace(self.rehearsal.expect_model(k, t), wire="fp32"))
            return found

        return self.exchange("query.model", t, lambda k: sealed(self.about(k, t)), read)

    def predictions(self, t: int, x: Tensor, whom: Collection[int]) -> dict[int, Predictions]:
        """The logits of these clients' own models for these inputs."""
        question = encode(Inputs(x.cpu()), "fp32", run=self.run, round=t)
        archs = self.folder.archs(self.rehearsal.method)

        def read(k: int, content: Any) -> Any:
            like = Predictions(torch.zeros(len(x), archs[k].outputs))
            classes = {"Predictions": Predictions}
            return self.accepted(content, Expected(like, classes, self.folder.task.classes, "fp32", self.run, t))

        return self.exchange("query.predict", t, lambda k: sealed(self.about(k, t), question), read, whom)

    def accepted(self, content: Any, expected: Expected) -> Any:
        texts, buffers = opened(content)
        return accept(text_of(texts, "kind"), text_of(texts, "header"), buffers, expected, device=self.device)

    def about(self, k: int, t: int) -> dict[str, str]:
        terms = json.dumps(self.folder.terms(self.names[k]))
        return {"run": self.run, "round": str(t), "version": __version__, "terms": terms}

    def key(self, k: int, t: int, stream: str) -> Key:
        return Key(self.folder.experiment.training.seed, t, k, "wire", stream)

    # -- asking, waiting, ending

    def exchange(
        self,
        purpose: str,
        t: int,
        letter: Callable[[int], Any],
        read: Callable[[int, Any], Any],
        whom: Collection[int] | None = None,
    ) -> dict[int, Any]:
        """One question to these clients (to all by default), and the answers that came in time, by number."""
        rules, begun = self.rules, time.monotonic()
        asked = range(len(self.names)) if whom is None else sorted(whom)
        quorum = min(rules.quorum, len(asked))
        got: dict[int, Any] = {}
        report = self.report = Report()
        over: set[int] = set()  # those that failed in this round
        quorum_at, missed = None, 0
        while True:
            online = self.online()
            self.give_up()
            aside = {k for k, n in enumerate(self.names) if self.standing[n].aside}
            waiting = [k for k in asked if k not in got and k not in over | aside]
            busy = {sent.number for sent in self.out.values()}
            for k in waiting:
                if self.names[k] in online and k not in busy:
                    ticket = self.post.send(self.names[k], purpose, t, letter(k))
                    if ticket is not None:
                        self.out[ticket] = Sent(k, purpose, t)
            for answer in self.post.collect(list(self.out)):
                self.take(answer, purpose, t, read, got, over, report)
            aside = {k for k, n in enumerate(self.names) if self.standing[n].aside}
            waiting = [k for k in asked if k not in got and k not in over | aside]
            now = time.monotonic()
            if len(got) + len(waiting) < quorum:
                again = sorted(over - aside)
                if not again:
                    reasons = {**report.failed, **report.refused}
                    raise NoQuorum(f"round {t}: {len(got)} of {quorum} clients that make a quorum; {reasons}")
                over.clear()  # they are needed, so they are asked again until they are set aside
            elif not waiting:
                break
            elif len(got) >= quorum:
                quorum_at = now if quorum_at is None else quorum_at
                gone = all(k in self.away and self.names[k] not in online for k in waiting)
                if gone or now - quorum_at >= rules.grace or now - begun >= rules.deadline:
                    break
            elif now - begun >= rules.deadline * (missed + 1):
                missed += 1
                over.clear()  # whoever failed may do better than those that are waited for
                lacking = self.lacking(waiting, online)
                self.say(f"round {t}: {len(got)} of {quorum} clients after {missed} deadlines; {lacking}")
                if missed >= rules.patience:
                    raise NoQuorum(f"round {t}: no quorum of {quorum} clients within {missed} deadlines; {lacking}")
            time.sleep(POLL)
        self.waited = time.monotonic() - begun
        self.close(t, report, got, waiting, online)
        return dict(sorted(got.items()))

    def take(
        self,
        answer: Answer,
        purpose: str,
        t: int,
        read: Callable[[int, Any], Any],
        got: dict[int, Any],
        over: set[int],
        report: Report,
    ) -> None:
        sent = self.out.pop(answer.ticket)
        k, name = sent.number, self.names[sent.number]
        if (sent.purpose, sent.t) != (purpose, t):
            if not answer.lost:
                report.late[name] = sent.t
                self.say(f"{name}: its answer to round {sent.t} came too late")
            return
        if answer.lost:
            self.say(f"round {t}: {name} was lost ({answer.error})")
            self.looked = -HELD  # is it still there?
            return
        standing = self.standing[name]
        if not answer.error:
            try:
                got[k] = read(k, answer.content)
                standing.strikes = 0
                report.failed.pop(name, None), report.refused.pop(name, None)
                what = "" if purpose == "train" else f" {purpose}"
                self.say(f"round {t}: {name} has answered{what} ({len(got)} of {len(self.names)})")
                if purpose == "train":
                    standing.answered = t
                    self.on_change()
                return
            except Refused as error:
                report.refused[name] = standing.problem = str(error)
                self.say(f"round {t}: {name} is refused: {error}")
        else:
            report.failed[name] = standing.problem = answer.error
            self.say(f"round {t}: {name} has failed: {answer.error}")
        over.add(k)
        standing.strikes += 1
        if standing.strikes >= self.rules.strikes:
            standing.aside = True
            self.say(f"{name} is set aside: it has failed {standing.strikes} times in a row")
        self.on_change()

    def close(self, t: int, report: Report, got: Mapping[int, Any], waiting: list[int], online: set[str]) -> None:
        report.present = [self.names[k] for k in sorted(got)]
        asked = {sent.number for sent in self.out.values()}
        report.slow = [self.names[k] for k in waiting if k in asked and self.names[k] in online]
        report.absent = [self.names[k] for k in waiting if self.names[k] not in report.slow]
        report.aside = [name for name in self.names if self.standing[name].aside]
        self.away = {k for k in waiting if self.names[k] in report.absent}
        for sent in self.out.values():
            sent.overdue = sent.overdue or time.monotonic()
        for kind in ("absent", "slow"):
            if names := getattr(report, kind):
                self.say(f"round {t}: without {', '.join(names)} ({kind})")
        self.on_change()

    def online(self) -> set[str]:
        """Who is connected; asked every now and then."""
        if time.monotonic() - self.looked >= HELD:
            now = self.post.online()
            for name, standing in self.standing.items():
                if standing.online != (name in now):
                    standing.online = name in now
                    self.say(f"{name} is {'connected' if standing.online else 'gone'}")
                    self.on_change()
            self.looked = time.monotonic()
        return {name for name, standing in self.standing.items() if standing.online}

    def give_up(self) -> None:
        """Wait no longer for what is overdue by a deadline: it may have been lost where nobody noticed."""
        for ticket, sent in list(self.out.items()):
            if sent.overdue is not None and time.monotonic() - sent.overdue >= self.rules.deadline:
                del self.out[ticket]
                self.say(f"{self.names[sent.number]}: no answer to round {sent.t} for a deadline; it is asked anew")

    def lacking(self, waiting: list[int], online: set[str]) -> str:
        return ", ".join(
            f"{self.names[k]} {'is at work' if self.names[k] in online else 'is not connected'}" for k in waiting
        )


@dataclass(frozen=True, eq=False)
class Inputs:
    """Images that the clients are asked about."""

    x: Tensor
