"""The app that Flower runs at a site, in a new process for every message: what lasts lies in the site's folder."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fedcc.core.digests import DamagedFile
from fedcc.core.messages import Labels, Predictions, Weights, carried
from fedcc.core.model import Factory, Model
from fedcc.core.naming import shortened
from fedcc.core.requests import Predict
from fedcc.core.rng import Key
from fedcc.core.roles import Client
from fedcc.core.samples import Samples
from fedcc.core.tree import MessageClasses, message_classes
from fedcc.engine import choose_device, default_engine, default_precision, drive, engine
from fedcc.engine.threads import fixed_threads
from fedcc.experiments.packing import from_bytes, read_header, to_bytes, unreadable_refused
from fedcc.experiments.round_files import RoundFiles
from fedcc.experiments.store import RunFolderError
from fedcc.federate import build_client, first_model
from fedcc.flower.answers import AnswerStore, questions
from fedcc.flower.codec import InvalidMessage, decode, encode, fingerprint, read_content, write_content
from fedcc.flower.command import Command
from fedcc.flower.data import site_samples
from fedcc.flower.exchange import Inputs
from fedcc.flower.folder import Site
from fedcc.flower.nonces import Nonces
from fedcc.flower.own_network import own_network
from fedcc.flower.policy import AuditLog
from fedcc.flower.site_error import SiteError, error_texts, log_error

ABOUT = {"format": 1}  # of the snapshots' files
KEEP = 2  # rounds: a server that goes back by one finds the client where it was


class SiteApp(ClientApp):
    """Flower's app, except that the server learns an error's code and nothing more: Flower would send its text."""

    def __call__(self, message: Message, context: Context) -> Message:
        try:
            reply = super().__call__(message, context)
        except Exception as error:
            log_error(error)
            reply = error_reply(message, error)
        try:  # nothing leaves the site unless the log says so
            AuditLog(Path(str(context.node_config["site"])) / "state").answered(
                message.metadata.message_type, *read_content(reply.content), _texts(message)
            )
        except Exception as error:
            log_error(error)
            return error_reply(message, error)
        return reply


def error_reply(message: Message, error: Exception) -> Message:
    """The answer that says which kind of error there was."""
    return Message(write_content({**_nonce(message), **error_texts(error)}), reply_to=message)


def _texts(message: Message) -> dict[str, str]:
    """The texts of a message, which may be anything."""
    try:
        return dict(read_content(message.content)[0])
    except Exception:  # whatever was sent
        return {}


def _nonce(message: Message) -> dict[str, str]:
    """The nonce of a message, which its answer has too, if there is one."""
    return {name: text[:64] for name, text in _texts(message).items() if name == "nonce"}


app = SiteApp()


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
    """A site's client, asked something by the federation that the site has agreed to; its snapshots are files."""

    def __init__(self, message: Message, context: Context):
        settings = dict(context.node_config)
        self.site = site = Site.read(Path(str(settings["site"])))
        self.message, self.command = message, Command.read(message.metadata.message_type, message.content, site)
        self.run, self.t = self.command.run, self.command.t
        self.data, self.label = Path(str(settings["data"])), str(settings.get("label", ""))
        self.threads = int(settings["threads"])
        self.method, self.device = site.experiment.build_method(), choose_device(str(settings["device"]))
        self.wire, self.seed = site.experiment.training.wire, site.experiment.training.seed
        self.disclosure = site.experiment.training.disclosure(self.method, site.task.classes)
        site.check_policy()
        self.folder = site.state / self.run
        Nonces(self.folder).check(self.command.nonce)  # first: a command that is sent again is not even looked at
        self.files = RoundFiles(self.folder, "round")
        machine = site.experiment.machine
        same = torch.device(machine.device).type == self.device.type
        precision = machine.precision if same else default_precision(self.device)
        self.engine = engine(default_engine(self.device), self.device, precision)
        self.network: str | Factory = site.model
        if site.brings_network:
            sys.path.append(str(settings["code"]))
            self.network = own_network(str(settings["network"]), site.task.shape)

    def allow(self, samples: int = 0, trains: bool = False) -> None:
        """Note the command in the log and spend its nonce, if the policy allows it. Nothing was written before."""
        site, command = self.site, self.command
        about = (command.purpose, samples, command.digest, trains)
        site.audit.allow(site.policy, self.run, self.t, command.nonce, *about)
        self.folder.mkdir(parents=True, exist_ok=True)
        Nonces(self.folder).spend(command.nonce)

    @contextmanager
    def working(self) -> Iterator[None]:
        """One process at a time works for the site, in whatever run: a killed node's child may still do."""
        from filelock import FileLock

        self.site.state.mkdir(parents=True, exist_ok=True)
        with FileLock(self.site.state / "site.lock"), fixed_threads(self.threads):
            yield

    def new_samples(self) -> int:
        """How many of the samples to predict are not public."""
        x = self.inputs()
        public = self.site.task.public_samples(self.site.path / "public.npz").x
        known = {row.numpy().tobytes() for row in public}
        return sum(row.numpy().tobytes() not in known for row in x.cpu())

    def inputs(self) -> Tensor:
        """The samples to predict, in the task's form: in another type the same sample would be a new question."""
        task, x = self.site.task, self.question({"Inputs": Inputs}).x
        form = f"{task.dtype} [samples, {', '.join(map(str, task.shape))}]"
        if not isinstance(x, Tensor):
            raise InvalidMessage(f"inputs must be {form}, got {shortened(x)}")
        if x.dtype != getattr(torch, task.dtype) or tuple(x.shape[1:]) != task.shape:
            raise InvalidMessage(f"inputs must be {form}, got {str(x.dtype).removeprefix('torch.')} {list(x.shape)}")
        return x

    def question(self, known: MessageClasses, wire: str = "fp32") -> Any:
        """The server's message, of one of these classes."""
        return decode(self.command.message, known, wire, run=self.run, round=self.t, device=str(self.device))

    def answer(self, message: Any, wire: str = "fp32", key: Key | None = None) -> Message:
        encoded = encode(message, wire, run=self.run, round=self.t, key=key)
        return Message(write_content({"nonce": self.command.nonce}, encoded), reply_to=self.message)

    def decline(self) -> Message:
        """The answer of a site that keeps its model."""
        return Message(write_content({"nonce": self.command.nonce, "declined": "yes"}), reply_to=self.message)

    @property
    def upload_key(self) -> Key:
        """The key of the draws that round an upload."""
        return Key(self.seed, self.t, self.site.number, "wire", "up")

    def round(self, down: Any) -> Any:
        """One round's uplink; one that is kept and was computed from the same downlink is not computed again."""
        t = self.t
        with self.working():
            received, snapshot = fingerprint(down), self.after(t)
            kept = snapshot is not None and snapshot.received == received
            self.allow(trains=not kept)
            if snapshot is not None and kept:
                return snapshot.up
            start_time, client = time.perf_counter(), self.client_before(t)
            client.begin(t)
            up = self.disclose(drive([self.method.client(client, down)], self.engine)[0], client.model, client.public.x)
            log = {n: float(v) for n, v in client.log.items()}
            snapshot = ClientSnapshot(t, received, up, client.model, client.memory, log)
            content = to_bytes(snapshot, self.method, ABOUT)
            self.files.write(t, content, obsolete=lambda rounds: [r for r in rounds if not t - KEEP < r <= t])
            sent = fingerprint(carried(up, self.wire, self.upload_key))
            line = {"round": t, "sent": sent, "log": log, "seconds": round(time.perf_counter() - start_time, 3)}
            with (self.folder / "rounds.jsonl").open("a") as file:  # the site's own log
                file.write(json.dumps(line) + "\n")
            return up

    def client_before(self, t: int) -> Client:
        """The client as round t finds it."""
        site, task, recipe = self.site, self.site.task, self.site.experiment.training.recipe()
        public = task.public_samples(site.path / "public.npz").to(self.device)
        private = site_samples(self.data, task, self.label).to(self.device)
        archs = site.archs(self.method, self.network)
        client = build_client(public, task.classes, recipe, self.seed, site.number, archs, private)
        if snapshot := self.before(t):
            client.model, client.memory = snapshot.model, snapshot.memory
        else:
            client.model = self.engine.serve([first_model(client)])[0]
        return client

    def predict(self) -> Predictions | Labels:
        """Its own model's answers for the inputs that were sent: logits, unless the run shares less."""
        with self.working():
            model, x = self.latest().model, self.inputs()  # first: what cannot be answered uses up no limit
            self.allow(self.new_samples())
            samples = Samples({"x": x.to(self.device)}, self.site.task.view)
            logits: Tensor = self.engine.serve([Predict(model, samples)])[0].logits.cpu()
            values = logits.softmax(-1) if self.disclosure.filters else logits
            answers: Predictions | Labels = self.disclose(Predictions(values), model, x)
            return answers

    def disclose(self, up: Any, model: Model, x: Tensor) -> Any:
        """What leaves the site of the model's answers for these inputs; the audit log counts it first.

        A noisy answer is stored, and given again if the same model is asked about the same sample.
        """
        disclosure, command = self.disclosure, self.command
        about = (command.purpose, self.run, self.t, command.nonce)
        if disclosure.share != "noisy":
            answers = len(up.values) if isinstance(up, Predictions | Labels) else 0
            self.site.audit.disclosed(*about, disclosure.share if answers else "uploads", answers or 1)
            return disclosure.sent(up)
        store = AnswerStore(self.site.state, self.site.audit.ledger().answers)
        asked = questions(fingerprint(Weights.of(model)), x)
        if new := store.missing(asked):
            epsilon, columns = disclosure.epsilon, disclosure.columns
            self.site.audit.disclosed(*about, disclosure.share, len(new), epsilon=epsilon, columns=columns)
            store.add([asked[at] for at in new], disclosure.randomised(disclosure.hard(up)[new]))
        return Labels.of(store.answers(asked), disclosure.columns)

    # -- its snapshots

    def after(self, t: int) -> ClientSnapshot | None:
        """The client after round t; None if there is no such file or it is damaged."""
        path = self.files.paths().get(t) if self.folder.exists() else None
        if path is None:
            return None
        try:
            content = self.files.read(path)
        except DamagedFile as error:
            print(f"fedcc: {path} is not used: {error}")
            return None
        with unreadable_refused(path):
            about, tree = read_header(content)
            if about != ABOUT:
                raise ValueError(f"format {about.get('format')}, this fedcc reads format {ABOUT['format']}")
            named = {name for arch in tree["archs"].values() for name in arch["trunks"]}
            if self.site.brings_network and named != {str(self.network)}:
                text = f"holds a model of {', '.join(named)}, but the client was started with --network {self.network}"
                raise RunFolderError(f"{path} {text}; start it with the same network")
            return from_bytes(ClientSnapshot, content, tree, self.method, device=self.device)

    def before(self, t: int) -> ClientSnapshot | None:
        """Where round t starts: after the latest round before it or, if the server went back further, the first."""
        kept = self.files.paths() if self.folder.exists() else {}
        rounds = sorted(kept, key=lambda r: (r >= t, -r if r < t else r))
        return next((snapshot for snapshot in map(self.after, rounds) if snapshot is not None), None)

    def latest(self) -> ClientSnapshot:
        """The client after its last round."""
        snapshot = self.before(2**31)
        if snapshot is None:
            raise SiteError("rounds", f"{self.site.name} has not taken part in any round of run {self.run} yet")
        return snapshot


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round of the method."""
    client = SiteClient(message, context)
    up = client.round(client.question(message_classes(client.method), client.wire))
    return client.answer(up, client.wire, client.upload_key)


@app.query("model")
def model(message: Message, context: Context) -> Message:
    """The model, if the site shares it."""
    client = SiteClient(message, context)
    site, command = client.site, client.command
    declines = site.brings_network or not site.may_share_model or not context.node_config.get("share-model")
    own = None if declines else client.latest().model  # first: what cannot be answered uses up no limit
    client.allow()
    if own is None:
        return client.decline()
    site.audit.disclosed(command.purpose, client.run, client.t, command.nonce, "models", 1)
    return client.answer(Weights.of(own, 1))


@app.query("predict")
def predict(message: Message, context: Context) -> Message:
    """The answers of the client's own model for the inputs that the server sent, if the site's policy allows it."""
    try:
        client = SiteClient(message, context)
        return client.answer(client.predict())
    except SiteError as error:
        if error.code != "policy":
            raise
        log_error(error)
        return Message(write_content({**_nonce(message), "declined": "yes"}), reply_to=message)
