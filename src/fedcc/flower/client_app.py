"""The app that Flower runs at a site: it answers a message with a round of the method on the site's own data.

Every message is served by a new process, so all that lasts between rounds lies in the site's folder.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fedcc import __version__
from fedcc.core.digests import DamagedFile
from fedcc.core.messages import Predictions, Weights, carried
from fedcc.core.model import Model
from fedcc.core.requests import Predict
from fedcc.core.rng import Key
from fedcc.core.roles import Client
from fedcc.core.samples import Samples
from fedcc.core.tree import Classes, message_classes
from fedcc.engine import choose_device, default_engine, default_precision, drive, engine
from fedcc.engine.threads import fixed_threads
from fedcc.experiments.packing import from_bytes, read_header, readable, to_bytes
from fedcc.experiments.round_files import RoundFiles
from fedcc.federate import build_client, first_model
from fedcc.flower.codec import EncodedMessage, decode, encode, fingerprint, read_content, write_content
from fedcc.flower.cohort import Inputs
from fedcc.flower.data import site_samples
from fedcc.flower.folder import Site, disagreement_reason

ABOUT = {"format": 1}  # of the snapshots' files
KEEP = 2  # rounds: a server that goes back by one finds the client where it was

app = ClientApp()


@dataclass(frozen=True, eq=False)
class ClientSnapshot:
    """A client after a round: the fingerprint of what it received, what it sent, its model and its memory."""

    t: int
    received: str
    up: Any
    model: Model
    memory: dict[str, Any]
    log: dict[str, float]


class SiteClient:
    """A site's client in one run; its snapshots are files in the format of checkpoints."""

    def __init__(self, site: Site, run: str, *, data: Path, device: str, threads: int):
        self.site, self.run, self.data, self.threads = site, run, data, threads
        self.method, self.device = site.experiment.build_method(), choose_device(device)
        self.folder = site.state / run
        self.folder.mkdir(parents=True, exist_ok=True)
        self.files = RoundFiles(self.folder, "round")
        machine = site.experiment.machine
        same = torch.device(machine.device).type == self.device.type
        precision = machine.precision if same else default_precision(self.device)
        self.engine = engine(default_engine(self.device), self.device, precision)

    def round(self, t: int, down: Any) -> ClientSnapshot:
        """One round; a round that was computed from the same downlink before is not computed again."""
        from filelock import FileLock

        with FileLock(self.folder / "lock"), fixed_threads(self.threads):  # a killed node's child may still be working
            received = fingerprint(down)
            snapshot = self.after(t)
            if snapshot is not None and snapshot.received == received:
                return snapshot
            begun = time.perf_counter()
            client = self.client_before(t)
            client.begin(t)
            up = drive([self.method.client(client, down)], self.engine)[0]
            log = {n: float(v) for n, v in client.log.items()}
            snapshot = ClientSnapshot(t, received, up, client.model, client.memory, log)
            content = to_bytes(snapshot, self.method, ABOUT)
            self.files.write(t, content, obsolete=lambda rounds: [r for r in rounds if not t - KEEP < r <= t])
            sent = fingerprint(carried(up, self.site.experiment.training.wire, self.upload_key(t)))
            line = {"round": t, "sent": sent, "log": log, "seconds": round(time.perf_counter() - begun, 3)}
            with (self.folder / "rounds.jsonl").open("a") as file:  # for the site's own eyes
                file.write(json.dumps(line) + "\n")
            return snapshot

    def client_before(self, t: int) -> Client:
        """The client as round t finds it."""
        e, task, site = self.site.experiment, self.site.task, self.site
        public = task.public_samples(site.path / "public.npz").to(self.device)
        private, arch = site_samples(self.data, task).to(self.device), task.arch(self.method, site.model)
        seed = e.training.seed
        client = build_client(public, task.classes, e.training.recipe(), seed, site.number, arch, private)
        if snapshot := self.before(t):
            client.model, client.memory = snapshot.model, snapshot.memory
        else:
            client.model = self.engine.serve([first_model(client)])[0]
        return client

    def upload_key(self, t: int) -> Key:
        """The key of the draws that round an upload."""
        return Key(self.site.experiment.training.seed, t, self.site.number, "wire", "up")

    def predict(self, x: Tensor) -> Tensor:
        """Its own model's logits for these images."""
        with fixed_threads(self.threads):
            samples = Samples({"x": x.to(self.device)}, self.site.task.view)
            logits: Tensor = self.engine.serve([Predict(self.latest().model, samples)])[0].logits
            return logits.cpu()

    # -- its snapshots

    def after(self, t: int) -> ClientSnapshot | None:
        """The client after round t; None if there is no such file or it is damaged."""
        path = self.files.paths().get(t)
        if path is None:
            return None
        try:
            content = self.files.read(path)
        except DamagedFile as error:
            print(f"fedcc: {path} is not used: {error}")
            return None
        with readable(path):
            about, tree = read_header(content)
            if about != ABOUT:
                raise ValueError(f"format {about.get('format')}, this fedcc reads format {ABOUT['format']}")
            return from_bytes(ClientSnapshot, content, tree, self.method, device=self.device)

    def before(self, t: int) -> ClientSnapshot | None:
        """Where round t starts: after the latest round before it or, if the server went back further, the first."""
        rounds = sorted(self.files.paths(), key=lambda r: (r >= t, -r if r < t else r))
        return next((snapshot for snapshot in map(self.after, rounds) if snapshot is not None), None)

    def latest(self) -> ClientSnapshot:
        """The client after its last round."""
        snapshot = self.before(2**31)
        if snapshot is None:
            raise ValueError(f"{self.site.name} has taken part in no round of run {self.run} yet")
        return snapshot


# -- what it answers


class Question:
    """A message from the server, if it comes from the federation that this site has agreed to."""

    def __init__(self, message: Message, context: Context):
        self.received, settings = message, dict(context.node_config)
        site = Site.read(Path(str(settings["site"])))
        self.texts, self.buffers = read_content(message.content)
        if (theirs := self.texts["version"]) != __version__:
            raise ValueError(f"the server has fedcc {theirs}, {site.name} has {__version__}; install the same version")
        if reason := disagreement_reason(json.loads(self.texts["terms"]), site.terms()):
            raise ValueError(f"{site.name} has agreed to another experiment: {reason}")
        run = self.texts["run"]
        if not run.isalnum():  # it names a folder
            raise ValueError(f"a run is named by letters and digits, got {run!r}")
        device, threads = str(settings["device"]), int(settings["threads"])
        self.client = SiteClient(site, run, data=Path(str(settings["data"])), device=device, threads=threads)
        self.t, self.wire = int(self.texts["round"]), site.experiment.training.wire

    def message(self, known: Classes, wire: str = "fp32") -> Any:
        encoded = EncodedMessage.parse(self.texts["kind"], self.texts["header"], self.buffers)
        return decode(encoded, known, wire, run=self.client.run, round=self.t, device=str(self.client.device))

    def answer(self, message: Any, wire: str = "fp32", key: Key | None = None) -> Message:
        encoded = encode(message, wire, run=self.client.run, round=self.t, key=key)
        return Message(write_content({"version": __version__}, encoded), reply_to=self.received)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round of the method."""
    question = Question(message, context)
    client, t, wire = question.client, question.t, question.wire
    snapshot = client.round(t, question.message(message_classes(client.method), wire))
    return question.answer(snapshot.up, wire, client.upload_key(t))


@app.query("model")
def model(message: Message, context: Context) -> Message:
    """The model, if the site shares it."""
    question = Question(message, context)
    if not context.node_config.get("share-model"):
        return Message(write_content({"version": __version__, "declined": "yes"}), reply_to=message)
    return question.answer(Weights.of(question.client.latest().model, 1))


@app.query("predict")
def predict(message: Message, context: Context) -> Message:
    """The own model's logits for the images that the server sent."""
    question = Question(message, context)
    inputs: Inputs = question.message({"Inputs": Inputs})
    return question.answer(Predictions(question.client.predict(inputs.x)))
