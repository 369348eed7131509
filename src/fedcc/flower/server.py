"""The server's side of a federation: the rounds of ``federate`` with the clients at their sites, into a run folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcc.core.files import written_whole
from fedcc.core.messages import Predictions
from fedcc.core.method import Trained
from fedcc.core.model import Model, Outputs
from fedcc.core.requests import Executor, Init, Predict, Request
from fedcc.core.rng import Key
from fedcc.core.samples import Samples
from fedcc.engine import drive, engine
from fedcc.evaluate import Evaluation, evaluate
from fedcc.evaluate.accuracy import targets_accuracy
from fedcc.experiments.checkpoint import Checkpoint, Checkpoints
from fedcc.experiments.execute import summary
from fedcc.experiments.store import RunFolder
from fedcc.federate import Snapshot, federate
from fedcc.federation import Federation
from fedcc.flower.cohort import Across, Post
from fedcc.flower.data import checked_images
from fedcc.flower.folder import FederationFolder, arrays
from fedcc.flower.rehearsal import Rehearsal
from fedcc.record import record_of
from fedcc.run import Record, Result, chosen_device, server_of
from fedcc.threads import fixed_threads


class Journal:
    """What the operator can look at while the server is at work: lines of a log, and where it stands."""

    def __init__(self, folder: Path, run: str):
        self.log, self.status = folder / "run.log", folder / "status.json"
        self.about: dict[str, Any] = {"run": run, "state": "running", "round": 0, "problem": "", "clients": {}}

    def say(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{datetime.now():%H:%M:%S} {text}\n")

    def update(self, **changes: Any) -> None:
        self.about |= changes
        with written_whole(self.status) as file:
            file.write(json.dumps(self.about, indent=1).encode())


class Server:
    """A federation's server: it trains, or answers a query, with the clients that ``post`` reaches."""

    def __init__(self, folder: FederationFolder, run: str, post: Post, journal: Journal):
        self.folder, self.run, self.post, self.journal = folder, run, post, journal
        e = self.experiment = folder.experiment
        self.method, device = e.build_method(), chosen_device(e.machine.device)
        self.engine = engine(e.machine.engine, device, e.machine.precision)
        self.public = folder.task.public_samples(folder.path / "public.npz").to(device)
        self.test = folder.test()
        self.federation = Federation((), self.public, Samples({"x": self.public.x[:0]}), folder.task.classes, (),
                                     fingerprint=folder.task.public_sha256)  # fmt: skip
        self.files, self.checkpoints = RunFolder(folder.run), Checkpoints(folder.run, e, self.federation)
        recipe = e.training.recipe()
        archs = folder.archs(self.method)
        self.role = server_of(self.method, self.public, folder.task.classes, recipe, e.training.seed, archs)

    def train(self) -> None:
        """All rounds that are not done yet, and the summary."""
        with fixed_threads(self.experiment.machine.threads):
            self._train()

    def _train(self) -> None:
        start = self.start()
        begun = time.perf_counter() - (start.seconds if start else 0.0)
        records: list[Record] = list(start.records) if start else []
        cohort = self.cohort(start)
        total = self.experiment.training.rounds
        last = self.method.rounds(total)
        trained: Trained | None = None
        for done in federate(self.method, self.role, cohort, total, self.engine, start.snapshot if start else None):
            report, waited = asdict(cohort.report), cohort.waited
            self.journal.update(round=done.t)
            hidden = self.test.get("public_y") if self.test else None
            found, now = Evaluation(targets=targets_accuracy(done.downs, hidden)), time.perf_counter()
            if self.method.evaluates(done.t, total) and (done.t == last or not self.method.uploads_models):
                trained, found = self.evaluated(cohort, done.t, done.downs)
            spent = {"clients": waited, **self.engine.seconds, "evaluate": time.perf_counter() - now}
            record = record_of(done, found, spent, {k: {} for k in done.ups}) | {"federation": report}
            self.engine.seconds = {}
            records.append(record)
            self.files.add(record)
            snapshot = Snapshot(done.t, done.downs, self.role.models, self.role.memory, cohort.rehearsal.clients)
            self.checkpoints.write(snapshot, records, time.perf_counter() - begun)
            accuracy = "" if found.accuracy is None else f", accuracy {found.accuracy:.2f} %"
            self.journal.say(f"round {done.t} of {last} is done with {', '.join(report['present'])}{accuracy}")
        if trained is None:  # stopped behind the last round
            trained, _ = self.ensemble(cohort, last, None)
        self.finish(records, trained, time.perf_counter() - begun)

    def start(self) -> Checkpoint | None:
        """Where the run of the folder goes on; None if it begins."""
        start = None
        if (self.folder.run / "experiment.toml").is_file():
            notes = self.files.check_start()
            start, problems = self.checkpoints.latest()
            for problem in notes + problems:
                self.journal.say(f"warning: {problem}")
        if start is None:
            self.files.begin(self.experiment, None)
            self.journal.say(
                f"{self.method.label}: {len(self.folder.clients)} clients, {self.experiment.training.rounds} rounds"
            )
            return None
        self.files.restore(self.experiment, None, start.records)
        self.checkpoints.remove(after=start.snapshot.t)
        self.journal.say(f"going on after round {start.snapshot.t}")
        self.journal.update(round=start.snapshot.t)
        return start

    def cohort(self, start: Checkpoint | None) -> Across:
        clients = start.snapshot.clients if start else None
        rehearsal = Rehearsal(self.method, self.role, self.experiment.training.wire, self.run, clients)

        def changed() -> None:
            self.journal.update(clients={n: asdict(s) for n, s in cohort.standing.items()})

        cohort = Across(self.folder, self.run, self.post, rehearsal, device=str(self.engine.device),
                        say=self.journal.say, on_change=changed)  # fmt: skip
        for record in start.records if start else ():
            for name in record["federation"]["present"]:
                cohort.standing[name].answered = record["round"]
        changed()
        return cohort

    # -- predicting

    def ensemble(self, cohort: Across, t: int, x: Tensor | None) -> tuple[Trained, Executor]:
        """What there is to predict with after round t, and the engine to do it for the images ``x``, if there are any.

        Where the method predicts with the clients' models, they are asked for these; those that keep theirs are asked
        to predict. Whoever does not answer is left out.
        """
        clients: dict[int, Model] = {}
        if self.method.uploads_models:
            self.journal.say("asking the clients for their models")
            for k, weights in cohort.models(t).items():
                arch = self.role.archs[k]
                own = {} if weights is None else self.engine.serve([Init(arch, Key(0))])[0].with_(weights.state).state
                clients[k] = Model(arch, own)
        executor: Executor = self.engine
        if (keeping := [k for k, model in clients.items() if not model.state]) and x is not None:
            self.journal.say(
                f"{', '.join(cohort.names[k] for k in keeping)} keep their models and are asked to predict"
            )
            answers = cohort.predictions(t, x, keeping)
            clients = {k: model for k, model in clients.items() if model.state or k in answers}

            def ask(other: Tensor) -> Mapping[int, Predictions]:
                found = cohort.predictions(t, other, list(answers))
                if silent := [cohort.names[k] for k in answers if k not in found]:
                    raise ValueError(f"{', '.join(silent)} predicted once, but not what {self.method.name} asked next")
                return found

            executor = Answered(self.engine, {id(clients[k]): k for k in answers}, (x, answers), ask)
        return Trained(self.folder.task.classes, clients, dict(self.role.models)), executor

    def evaluated(self, cohort: Across, t: int, downs: Mapping[int, Any]) -> tuple[Trained, Evaluation]:
        if self.test is None:
            return self.ensemble(cohort, t, None)[0], Evaluation()
        samples = Samples({"x": self.test["x"], "y": self.test["y"]}, self.folder.task.view).to(self.engine.device)
        trained, executor = self.ensemble(cohort, t, samples.x)
        hidden = self.test.get("public_y")
        asked = executor is not self.engine  # sites are not asked again for the sake of other readings
        last = t == self.method.rounds(self.experiment.training.rounds)
        readings = {} if asked else dict(self.method.readings(self.public))
        if last and not asked:
            readings |= self.method.last_readings(self.public)
        found = evaluate(
            self.method, trained, samples, executor, downs=downs, hidden=hidden, readings=readings, detailed=last
        )
        return trained, found

    def query(self, source: Path, target: Path) -> None:
        """The method's scores for the images of a file."""
        x = arrays(source, "x")["x"]
        checked_images(source, x, self.folder.task)
        start, _ = self.checkpoints.latest()
        if start is None:
            raise ValueError(f"{self.folder.run} holds no trained federation yet; `fedcc federation run` trains one")
        self.role.models = dict(start.snapshot.models)
        samples = Samples({"x": torch.from_numpy(x)}, self.folder.task.view).to(self.engine.device)
        with fixed_threads(self.experiment.machine.threads):
            trained, executor = self.ensemble(self.cohort(start), start.snapshot.t, samples.x)
            scores = drive([self.method.predict(trained, samples)], executor)[0].cpu().numpy()
        with written_whole(target) as file:
            np.savez(file, scores=scores, labels=scores.argmax(-1))
        self.journal.update(state="finished")

    # -- the end

    def finish(self, records: list[Record], trained: Trained, seconds: float) -> None:
        sharing = {k: model for k, model in trained.clients.items() if model.state}
        keeping = (
            [n for k, n in enumerate(self.folder.clients) if k not in sharing] if self.method.uploads_models else []
        )
        whole = Trained(trained.classes, sharing, trained.server)
        result = Result(self.method, whole, self.folder.task.view, "uint8", records, seconds)
        if not keeping:
            result.save(self.files.path)
        facts = {
            "data_sha256": self.folder.task.public_sha256,
            "partition_sha256": None,
            "checkpoint_bytes": self.checkpoints.size,
            "command": f"fedcc federation run {self.folder.path}",
            "federation": {"clients": list(self.folder.clients), "kept_models": keeping},
        }
        self.files.finish(summary(self.experiment, result, seconds) | facts, records, self.checkpoints.paths())
        self.journal.update(state="finished")
        final = result.curve[-1][1] if result.curve else None
        self.journal.say("finished" if final is None else f"finished: accuracy {final:.2f} %")


class Answered:
    """An engine for models that stay at their sites: it has their predictions for some inputs, and asks for others.

    ``clients`` says by a model's ``id`` whose it is.
    """

    def __init__(
        self,
        executor: Executor,
        clients: Mapping[int, int],
        known: tuple[Tensor, Mapping[int, Predictions]],
        ask: Callable[[Tensor], Mapping[int, Predictions]],
    ):
        self.executor, self.clients, self.known, self.ask = executor, clients, [known], ask

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Request[Any]) -> Any:
        if isinstance(request, Predict) and id(request.model) in self.clients:
            x = request.samples.x
            if not any(x is seen for seen, _ in self.known):
                self.known.append((x, self.ask(x)))
            answers = next(found for seen, found in self.known if seen is x)
            logits = answers[self.clients[id(request.model)]].values
            return Outputs(logits, logits[:, :0])
        return self.executor.serve([request])[0]
