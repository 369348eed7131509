"""The rounds of a run: train, evaluate, record. One loop for the simulator and for clients at their sites."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fedcc.core.method import AnyMethod
from fedcc.core.requests import Executor, Fit
from fedcc.core.roles import Server
from fedcc.engine import Fused, Plain
from fedcc.engine.counting import Counting
from fedcc.evaluate import Evaluation, Metric, evaluate, readings_in_round
from fedcc.evaluate.accuracy import choice_accuracy, targets_accuracy
from fedcc.evaluate.uploads import upload_signs
from fedcc.experiments.options import Measurement, Training
from fedcc.experiments.record import Record, round_record
from fedcc.federate import Cohort, RoundMessages, Simulated, Snapshot, build_roles, federate
from fedcc.federation import Federation

if TYPE_CHECKING:
    from fedcc.experiments.result import Result


@dataclass(frozen=True)
class Stop:
    """An observer's request to end the run after this round: the result is valid, and marked as stopped."""

    reason: str


class Pause(Stop):
    """An observer's request to leave the run unfinished, with a checkpoint to resume it from."""


class Paused(Exception):
    """The run was left between two rounds; its checkpoint is written."""


@dataclass(eq=False)
class FinishedRound:
    """A round that has ended."""

    t: int
    total: int  # the rounds of the run
    record: Record
    messages: RoundMessages
    snapshot: Callable[[], Snapshot]  # what the next round depends on; call it before that round begins
    request: Stop | None = None  # from an observer that was called earlier

    @property
    def is_last(self) -> bool:
        return self.t == self.total


class Observer:
    """Follows a run. Override what you need; the methods of all observers are called in the observers' order.

    This one ends a run early. With :class:`Pause` in place of :class:`Stop`, the run could be resumed.

    >>> import fedcc
    >>> class Enough(fedcc.Observer):
    ...     def round(self, done: fedcc.FinishedRound) -> fedcc.Stop | None:
    ...         return fedcc.Stop("above 50 %") if done.record["accuracy"] > 50 else None
    >>> federation = fedcc.Federation.named("digits", skew="classes:2", clients=5, models="resnet8")
    >>> result = fedcc.run("fedcc", federation, rounds=9, epochs=1, observers=[Enough()])
    >>> len(result.rounds), result.stopped
    (1, 'above 50 %')
    """

    def fit_started(self, fit: Fit) -> None:
        """An engine starts a fit, or several together with this one."""

    def samples_trained(self, number: int) -> None:
        """A step on ``number`` samples has ended."""

    def round(self, done: FinishedRound) -> Stop | None:
        """A round has ended; a :class:`Stop` or :class:`Pause` ends the run, unless the round was the last."""

    def end(self, result: Result | None) -> None:
        """The run is over; ``result`` is None if it was paused, interrupted or failed."""


class Observers(Observer):
    """Several observers as one, called in their order."""

    def __init__(self, *observers: Observer):
        self.all = observers
        methods = {method for o in observers for method in (type(o).fit_started, type(o).samples_trained)}
        unused = methods <= {Observer.fit_started, Observer.samples_trained}
        self.monitor = None if unused else self  # for an engine, which is faster without one

    def fit_started(self, fit: Fit) -> None:
        for observer in self.all:
            observer.fit_started(fit)

    def samples_trained(self, number: int) -> None:
        for observer in self.all:
            observer.samples_trained(number)

    def round(self, done: FinishedRound) -> Stop | None:
        for observer in self.all:
            request = observer.round(done)
            done.request = done.request or request
        return done.request

    def end(self, result: Result | None) -> None:
        with ExitStack() as stack:  # each observer is told, whatever another one raises
            for observer in reversed(self.all):

                def end(error: Any, *_: Any, observer: Observer = observer) -> None:
                    observer.end(None if error else result)

                stack.push(end)


class Deployment(Protocol):
    """Where a method's server and clients run: in this process, or the clients at their sites."""

    method: AnyMethod
    server: Server
    engine: Plain | Fused

    @property
    def cohort(self) -> Cohort: ...
    @property
    def executor(self) -> Executor: ...  # serves the server in training: the engine, possibly counted
    def details(self, messages: RoundMessages) -> dict[str, Any]: ...  # further entries of a round's record
    def evaluate(self, messages: RoundMessages, last: bool) -> Evaluation: ...
    def snapshot(self, messages: RoundMessages) -> Snapshot: ...  # what the next round depends on


def run_rounds(
    deployment: Deployment, number: int, *, evaluate_every: int = 1, start: Snapshot | None = None
) -> Iterator[FinishedRound]:
    """Run the rounds, or those after ``start``; the last one is always evaluated."""
    d, total = deployment, deployment.method.rounds(number)
    for messages in federate(d.method, d.server, d.cohort, number, d.executor, start):
        t, details, evaluation = messages.t, d.details(messages), Evaluation()
        seconds, start_time = {**details.pop("seconds", {}), **d.engine.seconds}, time.perf_counter()
        if d.method.evaluates(t, number) and (t == total or t % evaluate_every == 0):
            evaluation = d.evaluate(messages, t == total)
        seconds["evaluate"] = time.perf_counter() - start_time
        d.engine.seconds = {}
        signs = upload_signs(d.method, d.server.classes, messages.ups, messages.received)
        if d.cohort.disclosure.filters:  # its limit is for predictions; honest labels of one-class clients are below it
            signs = {k: {name: value for name, value in own.items() if name != "relation"} for k, own in signs.items()}
        record = round_record(messages, evaluation, seconds, details, signs)
        yield FinishedRound(t, total, record, messages, partial(d.snapshot, messages))


def follow(
    rounds: Iterable[FinishedRound], observer: Observer, records: Sequence[Record] = ()
) -> tuple[list[Record], str]:
    """Show each round to an observer; returns all records, and why it stopped the run (empty if it did not)."""
    all_records = list(records)
    for done in rounds:
        all_records.append(done.record)
        request = observer.round(done)
        if isinstance(request, Pause) and not done.is_last:
            raise Paused(f"stopped after round {done.t} of {done.total}: {request.reason}")
        if request is not None and not done.is_last:
            return all_records, request.reason
    return all_records, ""


class Simulation:
    """A deployment with all clients in this process."""

    def __init__(
        self,
        method: AnyMethod,
        federation: Federation,
        training: Training,
        measurement: Measurement,
        engine: Plain | Fused,
        *,
        start: Snapshot | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ):
        self.metrics = metrics or {}
        self.method, self.federation, self.engine, self.readings = method, federation, engine, measurement.readings
        self.server, clients = build_roles(method, federation, training.recipe(), training.seed, engine.device)
        self.executor = Counting(engine)  # of what training asks for; evaluation is not counted
        self.cohort = Simulated(
            method,
            clients,
            self.executor,
            participation=training.participation,
            wire=training.wire,
            disclosure=training.disclosure(method, federation.classes),
            start=start,
        )
        self.test = federation.test.to(engine.device)
        measure = measurement.client_accuracy and method.trains_clients
        self.counts = {c.id: c.counts().cpu() for c in clients} if measure else {}

    def details(self, messages: RoundMessages) -> dict[str, Any]:
        present = self.cohort.present
        majorities = {str(c.id): c.majority for c in present if c.majority is not None}
        logs = {c.id: {n: round(float(v), 6) for n, v in c.log.items()} for c in present}
        for c in present:
            right = choice_accuracy(messages.ups.get(c.id), self.federation.hidden, c.private["y"])
            logs[c.id] |= {} if right is None else {"chosen, of own classes": right}
        return {
            "majority": {k: mask.nonzero().flatten().tolist() for k, mask in majorities.items()},
            "log": {str(k): log for k, log in logs.items() if log},
            "images": self.executor.take(),
        }

    def evaluate(self, messages: RoundMessages, last: bool) -> Evaluation:
        present = self.cohort.present
        if not len(self.test):
            return Evaluation(targets=targets_accuracy(messages.downs, self.federation.hidden))
        return evaluate(
            self.method,
            self.cohort.trained_models(self.server),
            self.test,
            self.engine,
            counts={c.id: self.counts[c.id] for c in present if c.id in self.counts},
            majority={c.id: c.majority for c in present if c.majority is not None},
            downs=messages.downs,
            hidden=self.federation.hidden,
            readings=readings_in_round(self.method, self.server.public, last) if self.readings else None,
            detailed=last,
            metrics=self.metrics,
            disclosure=self.cohort.disclosure,
        )

    def snapshot(self, messages: RoundMessages) -> Snapshot:
        return self.cohort.snapshot(self.server, messages)
