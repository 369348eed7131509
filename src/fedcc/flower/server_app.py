"""The app that Flower runs at the server: the rounds of ``federate`` with the clients at their sites, or a query."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fedcc.core.files import open_whole
from fedcc.core.messages import Predictions
from fedcc.core.method import Trained
from fedcc.core.model import Model
from fedcc.core.naming import printable
from fedcc.core.requests import Executor, Init
from fedcc.core.rng import Key
from fedcc.core.samples import Samples
from fedcc.engine import choose_device, drive, engine
from fedcc.engine.threads import fixed_threads
from fedcc.errors import UserError
from fedcc.evaluate import Evaluation, evaluate, readings_in_round
from fedcc.evaluate.accuracy import targets_accuracy
from fedcc.evaluate.predictions import RemotePredictions
from fedcc.evaluate.uploads import changed_models
from fedcc.experiments.checkpoint import KEPT, Checkpoint, Checkpoints
from fedcc.experiments.record import Record
from fedcc.experiments.result import Result
from fedcc.experiments.rounds import FinishedRound, Observer, Observers, follow, run_rounds
from fedcc.experiments.run import FolderWriter
from fedcc.federate import RoundMessages, Snapshot, build_server
from fedcc.federation import Federation
from fedcc.flower.cohort import FlowerCohort, RunLog
from fedcc.flower.data import read_arrays
from fedcc.flower.dry_run import DryRun
from fedcc.flower.exchange import Answer, Outgoing, Transport
from fedcc.flower.fleet import write_budget
from fedcc.flower.folder import ENVIRONMENT, FederationFolder
from fedcc.flower.keys import public_bytes
from fedcc.flower.own_network import AtSite
from fedcc.flower.replies import Replies
from fedcc.processes import end_with_parent

DAY = 86_400.0
LOST = (3, 4, 5)  # Flower's codes: message or reply unavailable, node unavailable
ERRORS = {
    1: "the site could not load the app",
    2: "the site's program has failed; its own log says why",
    3: "the message is unavailable",
    4: "the answer is unavailable",
    5: "the site is not connected",
    7: "the site does not accept the app: its signature is not the federation's",
    8: "the site's program has ended",
}  # strings for Flower's codes; a client's own text is not repeated

app = ServerApp()


class FlowerServer(Observer):
    """A federation's server: it trains, or answers a query, with the clients at their sites."""

    def __init__(self, folder: FederationFolder, run: str, transport: Transport, log: RunLog):
        self.folder, self.run, self.transport, self.log = folder, run, transport, log
        e = self.experiment = folder.experiment
        self.method, device = e.build_method(), choose_device(e.machine.device)
        self.engine = self.executor = engine(e.machine.engine, device, e.machine.precision)
        self.public = folder.task.public_samples(folder.path / "public.npz").to(device)
        self.test = folder.test()
        self.federation = Federation((), self.public, Samples({"x": self.public.x[:0]}), folder.task.classes,
                                     models=(AtSite(),), fingerprint=folder.task.public_sha256)  # fmt: skip
        self.checkpoints = Checkpoints(folder.run, e, self.federation, every=1, keep=KEPT)
        self.writer = FolderWriter(e, self.federation, self.checkpoints)
        archs = folder.archs(self.method)
        self.server = build_server(
            self.method, self.public, folder.task.classes, e.training.recipe(), e.training.seed, archs
        )

    def train(self) -> None:
        """Run the rounds that are missing, and write the summary."""
        with fixed_threads(self.experiment.machine.threads):
            start, number, measurement = self.start(), self.experiment.training.rounds, self.experiment.measurement
            self.connect(start)
            self.trained: Trained | None = None
            self.changed: dict[str, float] = {}  # clients whose models do not fit their last uploads
            rounds = run_rounds(
                self, number, evaluate_every=measurement.evaluate_every, start=start.snapshot if start else None
            )
            try:
                records, _ = follow(
                    rounds, Observers(self.writer, self.checkpoints, self), start.records if start else ()
                )
            except FloatingPointError as error:  # false uploads of the right form may do that
                name, most = max(self.cohort.largest.items(), key=lambda item: item[1], default=("nobody", 0.0))
                text = f"{error}; the largest number in the clients' latest answers is {name}'s, {most:.3g}"
                raise FloatingPointError(text) from error
            if self.trained is None:  # interrupted after the last round
                self.trained, _ = self.ensemble(self.method.rounds(number), None)
            self.finish(records, self.trained)

    # -- what its rounds are made of

    def details(self, messages: RoundMessages) -> dict[str, Any]:
        self.log.update(round=messages.t)
        return {"federation": asdict(self.cohort.attendance), "seconds": {"clients": self.cohort.seconds}}

    def snapshot(self, messages: RoundMessages) -> Snapshot:
        clients = self.cohort.dry_run.clients
        return Snapshot(messages.t, messages.downs, self.server.models, self.server.memory, clients)

    def evaluate(self, messages: RoundMessages, last: bool) -> Evaluation:
        hidden = self.test.get("public_y") if self.test else None
        if self.method.uploads_models and not last:
            return Evaluation(targets=targets_accuracy(messages.downs, hidden))
        samples = self.samples(x=self.test["x"], y=self.test["y"]) if self.test else None
        self.trained, executor = self.ensemble(messages.t, samples)
        shared = {k: model for k, model in self.trained.clients.items() if model.state}
        changed = changed_models(self.method, shared, messages.ups, self.public, self.engine)
        self.changed = {self.cohort.names[k]: distance for k, distance in changed.items()}
        for name, distance in self.changed.items():
            reason = f"its model does not give the answers that it uploaded (they differ by {distance:.2f})"
            self.cohort.status[name].warning = reason
            self.log.say(f"warning: {name}: {reason}", "warning")
        if samples is None or (self.method.uploads_models and not self.trained.clients):  # all decline
            return Evaluation()
        asks_sites = executor is not self.engine  # other readings are not worth asking the sites again
        readings = {} if asks_sites else readings_in_round(self.method, self.public, last)
        return evaluate(
            self.method, self.trained, samples, executor, downs=messages.downs, hidden=hidden, detailed=last,
            readings=readings if self.experiment.measurement.readings else None,
        )  # fmt: skip

    def samples(self, **columns: Tensor) -> Samples:
        return Samples(columns, self.folder.task.view).to(self.engine.device)

    def round(self, done: FinishedRound) -> None:
        """Write a line of the log."""
        accuracy = done.record["accuracy"]
        accuracy_text = "" if accuracy is None else f", accuracy {accuracy:.2f} %"
        present = ", ".join(done.record["federation"]["present"])
        self.log.say(f"round {done.t} of {done.total} is done with {present}{accuracy_text}")
        self.cohort.note_uploads(done.record)
        for k, reason in done.record.get("warnings", {}).items():
            self.log.say(f"warning: round {done.t}: {self.cohort.names[int(k)]}: {reason}", "warning")

    def start(self) -> Checkpoint | None:
        """The checkpoint that the folder's run resumes from; None if the run is new."""
        start = None
        if (self.folder.run / "experiment.toml").is_file():
            notes = self.writer.folder.check_description()
            start, problems = self.checkpoints.latest()
            if start is None and (problems or len(self.writer.folder.metrics()) > 1):  # the sites are further by now
                advice = "restore one from a copy, or start a new run with `fedcc federation run --overwrite`"
                raise ValueError(f"{self.folder.run} has no whole checkpoint: {'; '.join([*problems, advice])}")
            for problem in notes + problems:
                self.log.say(f"warning: {problem}", "warning")
        self.writer.begin(start)
        if start is None:
            clients, rounds = len(self.folder.clients) - len(self.folder.revoked), self.experiment.training.rounds
            self.log.say(f"{self.method.label}: {clients} clients, {rounds} rounds")
        else:
            self.log.say(f"resuming after round {start.snapshot.t}")
            self.log.update(round=start.snapshot.t)
        return start

    def connect(self, start: Checkpoint | None) -> None:
        clients = start.snapshot.clients if start else None
        training = self.experiment.training
        disclosure = training.disclosure(self.method, self.folder.task.classes)
        dry_run = DryRun(self.method, self.server, training.wire, self.run, clients, disclosure=disclosure)
        self.cohort = FlowerCohort(self.folder, self.run, self.transport, dry_run, self.log, str(self.engine.device))
        for record in start.records if start else ():
            for name in record["federation"]["present"]:
                self.cohort.status[name].answered = record["round"]
            self.cohort.note_uploads(record)
        self.cohort.show_status()

    # -- predicting

    def ensemble(self, t: int, samples: Samples | None) -> tuple[Trained, Executor]:
        """The models to predict with after round t, and an engine that serves them for these samples, if given.

        If the method predicts with the clients' models, the clients are asked for them; those that keep theirs are
        asked to predict. Clients that do not answer are left out.
        """
        clients, cohort = dict[int, Model](), self.cohort
        if self.method.uploads_models:
            if not cohort.disclosure.filters:
                self.log.say("asking the clients for their models")
            for k, weights in cohort.models(t).items():
                arch = self.server.archs[k]
                own = {} if weights is None else self.engine.serve([Init(arch, Key(0))])[0].with_(weights.state).state
                clients[k] = Model(arch, own)
        executor: Executor = self.engine
        if (keeping := [k for k, model in clients.items() if not model.state]) and samples is not None:
            self.log.say(f"{', '.join(cohort.names[k] for k in keeping)} keep their models and are asked to predict")
            answers = cohort.predictions(t, samples.x, keeping)
            clients = {k: model for k, model in clients.items() if model.state or k in answers}

            def ask(other: Tensor) -> Mapping[int, Predictions]:
                more = cohort.predictions(t, other, list(answers))
                if silent := [cohort.names[k] for k in answers if k not in more]:
                    raise ValueError(f"{', '.join(silent)} predicted once, but not what {self.method.name} asked next")
                return more

            executor = remote = RemotePredictions(self.engine, {k: clients[k] for k in answers}, ask)
            remote.learn(samples, answers)
        return Trained.of(self.server, clients), executor

    def query(self, source: Path, target: Path) -> None:
        """The method's scores for the inputs of a file, which are in the task's form."""
        x = read_arrays(source, "x")["x"]
        start, problems = self.checkpoints.latest()
        for problem in problems:
            self.log.say(f"warning: {problem}", "warning")
        if start is None:
            raise ValueError(f"{self.folder.run} holds no trained federation yet; `fedcc federation run` trains one")
        self.server.models, self.server.memory = dict(start.snapshot.models), start.snapshot.memory
        samples = self.samples(x=torch.from_numpy(x))
        with fixed_threads(self.experiment.machine.threads):
            self.connect(start)
            self.cohort.waits_for_quorum = False  # no round depends on it, and somebody waits for the answer
            trained, executor = self.ensemble(start.snapshot.t, samples)
            if self.method.uploads_models and not trained.clients:
                raise ValueError("no client has predicted: their policies do not allow it")
            scores = drive([self.method.predict(trained, samples)], executor)[0].cpu().numpy()
        with open_whole(target) as file:
            np.savez(file, scores=scores, labels=scores.argmax(-1))
        self.log.update(state="finished")

    # -- the end

    def finish(self, records: list[Record], trained: Trained) -> None:
        sharing = {k: model for k, model in trained.clients.items() if model.state}
        keeping = (
            [n for k, n in enumerate(self.cohort.names) if k not in sharing and not self.cohort.status[n].revoked]
            if self.method.uploads_models
            else []
        )
        whole, seconds = replace(trained, clients=sharing), self.checkpoints.seconds
        task = self.folder.task
        result = Result(self.method, whole, task.view, task.dtype, records, seconds, names=task.names,
                        encoding=task.encoding)  # fmt: skip
        self.writer.save_models = not keeping
        self.writer.finish(result, {
            "command": f"fedcc federation run {self.folder.path}",
            "federation": {
                "clients": self.cohort.names,
                "kept_models": keeping,
                "revoked": [name for name, status in self.cohort.status.items() if status.revoked],
                **({"changed_models": self.changed} if self.changed else {}),
            },
        })  # fmt: skip
        final = result.curve[-1][1] if result.curve else None
        self.log.say("finished" if final is None else f"finished: accuracy {final:.2f} %")
        self.log.update(state="finished")


class GridTransport:
    """Flower's grid with sites by their names. A site is known by its key, whatever its node number is."""

    def __init__(self, grid: Grid, folder: FederationFolder):
        self.grid, self.folder, self.ttl = grid, folder, max(DAY, 2 * folder.rules.deadline)
        self.nodes: dict[str, int] = {}
        self.replies = Replies(grid)

    def online(self) -> set[str]:
        folder, _ = self.folder.latest()  # the cohort says what is wrong with it
        self.folder = folder
        names = {public_bytes(folder.key(name)): name for name in folder.members}
        nodes = self.grid.get_nodes()
        self.nodes = {names[node.public_key]: node.node_id for node in nodes if node.public_key in names}
        return set(self.nodes)

    def send(self, messages: Sequence[Outgoing]) -> list[str | None]:
        made = [
            Message(m.content, self.nodes[m.name], m.purpose, ttl=self.ttl, group_id=write_budget(m.t, m.limit))
            for m in messages
        ]
        tickets = [ticket or None for ticket in self.grid.push_messages(made)]
        return tickets or [None] * len(made)  # none at all if the request was too large

    def collect(self, tickets: Sequence[str]) -> list[Answer]:
        found = self.replies.take([ticket for ticket in tickets if ticket not in self.replies.fetching])
        return [self.answer(ticket, message) for ticket, message in found if ticket in tickets]

    def answer(self, ticket: str, message: Message | Exception) -> Answer:
        if isinstance(message, Exception):
            return Answer(ticket, error=f"its answer cannot be read ({type(message).__name__})")
        if not message.has_error():
            return Answer(ticket, message.content)
        code = message.error.code
        return Answer(ticket, error=ERRORS.get(code, f"an error with Flower's code {code}"), lost=code in LOST)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, or answer the query in the folder."""
    from filelock import FileLock

    end_with_parent()  # without its SuperLink it would keep trying to reach it forever
    folder = FederationFolder.read(Path(os.environ[ENVIRONMENT]))
    run, task = str(context.run_config["run"]), str(context.run_config["task"])
    directory = folder.query if task == "predict" else folder.operator
    log = RunLog(directory, run)
    log.update(pid=os.getpid(), flower_run=context.run_id)
    try:
        with FileLock(folder.operator / "run.lock"):  # an earlier one may still be ending
            server = FlowerServer(folder, run, GridTransport(grid, folder), log)
            if task == "predict":
                server.query(directory / "input.npz", directory / "output.npz")
            else:
                server.train()
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # so Flower ends it, on Ctrl-C in `run` for example
            log.update(state="stopped", problem="it was asked to stop")
            log.say("stopped: it was asked to stop")
        else:
            told = str(error) if isinstance(error, (ValueError, UserError)) else f"{type(error).__name__}: {error}"
            log.update(state="stopped", problem=printable(told))
            log.say(f"stopped: {error}", "error")
        raise
