"""The server of a federation: the rounds of ``federate`` with the clients at their sites, into a run folder."""

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

from fedcc.core.files import write_whole, written_whole
from fedcc.core.messages import Predictions
from fedcc.core.method import Trained
from fedcc.core.model import Model, Outputs
from fedcc.core.requests import Executor, Init, Predict, Recipe, Request
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
from fedcc.flower.cohort import FlowerCohort, Transport
from fedcc.flower.data import check_images, read_arrays
from fedcc.flower.dry_run import DryRun
from fedcc.flower.folder import FederationFolder
from fedcc.record import record_of
from fedcc.run import Record, Result, chosen_device, server_of
from fedcc.threads import fixed_threads


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


class FlowerServer:
    """A federation's server: it trains, or answers a query, with the clients at their sites."""

    def __init__(self, folder: FederationFolder, run: str, transport: Transport, log: RunLog):
        self.folder, self.run, self.transport, self.log = folder, run, transport, log
        e = self.experiment = folder.experiment
        self.method, device = e.made(), chosen_device(e.device)
        self.engine = engine(e.engine, device, e.precision)  # type: ignore[arg-type]
        self.public = folder.task.public_samples(folder.path / "public.npz").to(device)
        self.test = folder.test()
        self.federation = Federation((), self.public, Samples({"x": self.public.x[:0]}), folder.task.classes, (),
                                     fingerprint=folder.task.public_sha256)  # fmt: skip
        self.files, self.checkpoints = RunFolder(folder.run), Checkpoints(folder.run, e, self.federation)
        recipe = Recipe(lr=e.lr, batch=e.batch, epochs=e.epochs, reset=e.reset)
        archs = folder.archs(self.method)
        self.role = server_of(self.method, self.public, folder.task.classes, recipe, e.seed, archs)

    def train(self) -> None:
        """Run the rounds that are missing, and write the summary."""
        with fixed_threads(self.experiment.threads):
            self._train()

    def _train(self) -> None:
        start = self.start()
        begun = time.perf_counter() - (start.seconds if start else 0.0)
        records: list[Record] = list(start.records) if start else []
        cohort = self.cohort(start)
        total = self.experiment.rounds
        last = self.method.rounds(total)
        trained: Trained | None = None
        for done in federate(self.method, self.role, cohort, total, self.engine, start.snapshot if start else None):
            attendance, waited = asdict(cohort.attendance), cohort.seconds
            self.log.update(round=done.t)
            hidden = self.test.get("public_y") if self.test else None
            found, now = Evaluation(targets=targets_accuracy(done.downs, hidden)), time.perf_counter()
            if self.method.evaluates(done.t, total) and (done.t == last or not self.method.uploads_models):
                trained, found = self.evaluated(cohort, done.t, done.downs)
            spent = {"clients": waited, **self.engine.seconds, "evaluate": time.perf_counter() - now}
            record = record_of(done, found, spent, {k: {} for k in done.ups}) | {"federation": attendance}
            self.engine.seconds = {}
            records.append(record)
            self.files.add(record)
            snapshot = Snapshot(done.t, done.downs, self.role.models, self.role.memory, cohort.dry_run.clients)
            self.checkpoints.write(snapshot, records, time.perf_counter() - begun)
            accuracy = "" if found.accuracy is None else f", accuracy {found.accuracy:.2f} %"
            self.log.say(f"round {done.t} of {last} is done with {', '.join(attendance['present'])}{accuracy}")
        if trained is None:  # it was stopped after the last round
            trained, _ = self.ensemble(cohort, last, None)
        self.finish(records, trained, time.perf_counter() - begun)

    def start(self) -> Checkpoint | None:
        """The checkpoint that the folder's run resumes from; None if it starts."""
        start = None
        if (self.folder.run / "experiment.toml").is_file():
            notes = self.files.check_start()
            start, problems = self.checkpoints.latest()
            for problem in notes + problems:
                self.log.say(f"warning: {problem}")
        if start is None:
            self.files.begin(self.experiment, None)
            self.log.say(f"{self.method.label}: {len(self.folder.clients)} clients, {self.experiment.rounds} rounds")
            return None
        self.files.restore(self.experiment, None, start.records)
        self.checkpoints.remove(after=start.snapshot.t)
        self.log.say(f"resuming after round {start.snapshot.t}")
        self.log.update(round=start.snapshot.t)
        return start

    def cohort(self, start: Checkpoint | None) -> FlowerCohort:
        clients = start.snapshot.clients if start else None
        dry_run = DryRun(self.method, self.role, self.experiment.wire, self.run, clients)

        def changed() -> None:
            self.log.update(clients={n: asdict(s) for n, s in cohort.status.items()})

        cohort = FlowerCohort(self.folder, self.run, self.transport, dry_run, device=str(self.engine.device),
                              say=self.log.say, on_change=changed)  # fmt: skip
        for record in start.records if start else ():
            for name in record["federation"]["present"]:
                cohort.status[name].answered = record["round"]
        changed()
        return cohort

    # -- predicting

    def ensemble(self, cohort: FlowerCohort, t: int, x: Tensor | None) -> tuple[Trained, Executor]:
        """The models to predict with after round t, and an engine that serves them for the images ``x``, if given.

        If the method predicts with the clients' models, the clients are asked for them; those that keep theirs are
        asked to predict. Clients that do not answer are left out.
        """
        clients: dict[int, Model] = {}
        if self.method.uploads_models:
            self.log.say("asking the clients for their models")
            for k, weights in cohort.models(t).items():
                arch = self.role.archs[k]
                own = {} if weights is None else self.engine.serve([Init(arch, Key(0))])[0].with_(weights.state).state
                clients[k] = Model(arch, own)
        executor: Executor = self.engine
        if (keeping := [k for k, model in clients.items() if not model.state]) and x is not None:
            self.log.say(f"{', '.join(cohort.names[k] for k in keeping)} keep their models and are asked to predict")
            answers = cohort.predictions(t, x, keeping)
            clients = {k: model for k, model in clients.items() if model.state or k in answers}

            def ask(other: Tensor) -> Mapping[int, Predictions]:
                found = cohort.predictions(t, other, list(answers))
                if silent := [cohort.names[k] for k in answers if k not in found]:
                    raise ValueError(f"{', '.join(silent)} predicted once, but not what {self.method.name} asked next")
                return found

            executor = RemoteModels(self.engine, {id(clients[k]): k for k in answers}, (x, answers), ask)
        return Trained(self.folder.task.classes, clients, dict(self.role.models)), executor

    def evaluated(self, cohort: FlowerCohort, t: int, downs: Mapping[int, Any]) -> tuple[Trained, Evaluation]:
        if self.test is None:
            return self.ensemble(cohort, t, None)[0], Evaluation()
        samples = Samples({"x": self.test["x"], "y": self.test["y"]}, self.folder.task.view).to(self.engine.device)
        trained, executor = self.ensemble(cohort, t, samples.x)
        hidden = self.test.get("public_y")
        asked = executor is not self.engine  # other readings are not worth asking the sites again
        last = t == self.method.rounds(self.experiment.rounds)
        readings = {} if asked else dict(self.method.readings(self.public))
        if last and not asked:
            readings |= self.method.last_readings(self.public)
        found = evaluate(
            self.method, trained, samples, executor, downs=downs, hidden=hidden, readings=readings, detailed=last
        )
        return trained, found

    def query(self, source: Path, target: Path) -> None:
        """The method's scores for the images of a file."""
        x = read_arrays(source, "x")["x"]
        check_images(source, x, self.folder.task)
        start, _ = self.checkpoints.latest()
        if start is None:
            raise ValueError(f"{self.folder.run} holds no trained federation yet; `fedcc federation run` trains one")
        self.role.models = dict(start.snapshot.models)
        samples = Samples({"x": torch.from_numpy(x)}, self.folder.task.view).to(self.engine.device)
        with fixed_threads(self.experiment.threads):
            trained, executor = self.ensemble(self.cohort(start), start.snapshot.t, samples.x)
            scores = drive([self.method.predict(trained, samples)], executor)[0].cpu().numpy()
        with written_whole(target) as file:
            np.savez(file, scores=scores, labels=scores.argmax(-1))
        self.log.update(state="finished")

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
        self.log.update(state="finished")
        final = result.curve[-1][1] if result.curve else None
        self.log.say("finished" if final is None else f"finished: accuracy {final:.2f} %")


class RemoteModels:
    """An engine for models that stay at their sites: it has their predictions for some inputs and asks for others.

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
