"""The app that Flower runs at a site, in a new process for every message: it reads the site's folder and answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcc import __version__
from fedcc.core.messages import Predictions, Weights
from fedcc.core.rng import Key
from fedcc.core.tree import message_classes
from fedcc.flower.client import SiteClient
from fedcc.flower.codec import EncodedMessage, decode, encode
from fedcc.flower.cohort import Inputs
from fedcc.flower.content import read_content, required_text, write_content
from fedcc.flower.folder import Site, disagreement_reason

app = ClientApp()


@dataclass(frozen=True, eq=False)
class Question:
    """A message from the server, if it comes from the federation that this site has agreed to."""

    client: SiteClient
    t: int
    texts: dict[str, str]
    buffers: dict[str, bytes]

    @staticmethod
    def read(message: Message, context: Context) -> Question:
        settings = dict(context.node_config)
        site = Site.read(Path(str(settings["site"])))
        texts, buffers = read_content(message.content)
        if (theirs := required_text(texts, "version")) != __version__:
            raise ValueError(f"the server has fedcc {theirs}, {site.name} has {__version__}; install the same version")
        if reason := disagreement_reason(json.loads(required_text(texts, "terms")), site.terms()):
            raise ValueError(f"{site.name} has agreed to another experiment: {reason}")
        run = required_text(texts, "run")
        if not run.isalnum():  # it names a folder
            raise ValueError(f"a run is named by letters and digits, got {run!r}")
        device, threads = str(settings["device"]), int(settings["threads"])
        client = SiteClient(site, run, data=Path(str(settings["data"])), device=device, threads=threads)
        return Question(client, int(required_text(texts, "round")), texts, buffers)

    def message(self, wire: str, known: dict[str, type[Any]]) -> Any:
        kind, header = required_text(self.texts, "kind"), required_text(self.texts, "header")
        encoded = EncodedMessage.parse(kind, header, self.buffers)
        return decode(encoded, known, wire, run=self.client.run, round=self.t, device=str(self.client.device))

    def answer(self, message: Any, wire: str, key: Key | None = None) -> RecordDict:
        return write_content(
            {"version": __version__}, encode(message, wire, run=self.client.run, round=self.t, key=key)
        )


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round of the method."""
    question = Question.read(message, context)
    client, wire = question.client, question.client.site.experiment.training.wire
    snapshot = client.round(question.t, question.message(wire, message_classes(client.method)))
    return Message(question.answer(snapshot.up, wire, client.upload_key(question.t)), reply_to=message)


@app.query("model")
def model(message: Message, context: Context) -> Message:
    """The model, if the site shares it."""
    question = Question.read(message, context)
    if not context.node_config.get("share-model"):
        return Message(write_content({"version": __version__, "declined": "yes"}), reply_to=message)
    weights = Weights.of(question.client.latest().model, 1)
    return Message(question.answer(weights, "fp32"), reply_to=message)


@app.query("predict")
def predict(message: Message, context: Context) -> Message:
    """The own model's logits for the images that the server sent."""
    question = Question.read(message, context)
    inputs: Inputs = question.message("fp32", {"Inputs": Inputs})
    return Message(question.answer(Predictions(question.client.predict(inputs.x)), "fp32"), reply_to=message)
