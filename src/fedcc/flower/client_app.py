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
from fedcc.flower.codec import Encoded, decode, encode
from fedcc.flower.cohort import Inputs
from fedcc.flower.envelope import opened, sealed, text_of
from fedcc.flower.folder import Site, disagreement

app = ClientApp()


@dataclass(frozen=True, eq=False)
class Question:
    """A message from the server, if it comes from the federation that this site has agreed to."""

    site: Site
    client: SiteClient
    run: str
    t: int
    texts: dict[str, str]
    buffers: dict[str, bytes]

    @staticmethod
    def of(content: RecordDict, settings: dict[str, Any]) -> Question:
        site = Site.read(Path(str(settings["site"])))
        texts, buffers = opened(content)
        if (theirs := text_of(texts, "version")) != __version__:
            raise ValueError(f"the server has fedcc {theirs}, {site.name} has {__version__}; install the same version")
        if odd := disagreement(json.loads(text_of(texts, "terms")), site.terms()):
            raise ValueError(f"{site.name} has agreed to another experiment: {odd}")
        run = text_of(texts, "run")
        if not run.isalnum():  # it names a folder
            raise ValueError(f"a run is named by letters and digits, got {run!r}")
        device, threads = str(settings["device"]), int(settings["threads"])
        client = SiteClient(site, run, data=Path(str(settings["data"])), device=device, threads=threads)
        return Question(site, client, run, int(text_of(texts, "round")), texts, buffers)

    def message(self, wire: str, known: dict[str, type[Any]]) -> Any:
        encoded = Encoded.received(text_of(self.texts, "kind"), text_of(self.texts, "header"), self.buffers)
        return decode(encoded, known, wire, run=self.run, round=self.t, device=str(self.client.device))

    def answer(self, message: Any, wire: str, key: Key | None = None) -> RecordDict:
        return sealed({"version": __version__}, encode(message, wire, run=self.run, round=self.t, key=key))


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round of the method."""
    question = Question.of(message.content, dict(context.node_config))
    wire, method = question.site.experiment.training.wire, question.client.method
    kept = question.client.round(question.t, question.message(wire, message_classes(method)))
    key = Key(question.site.experiment.training.seed, question.t, question.site.number, "wire", "up")
    return Message(question.answer(kept.up, wire, key), reply_to=message)


@app.query("model")
def model(message: Message, context: Context) -> Message:
    """The model, if the site shares it."""
    question = Question.of(message.content, dict(context.node_config))
    if not context.node_config.get("share-model"):
        return Message(sealed({"version": __version__, "declined": "yes"}), reply_to=message)
    weights = Weights.of(question.client.latest().model, 1)
    return Message(question.answer(weights, "fp32"), reply_to=message)


@app.query("predict")
def predict(message: Message, context: Context) -> Message:
    """The own model's logits for the images that are asked about."""
    question = Question.of(message.content, dict(context.node_config))
    inputs: Inputs = question.message("fp32", {"Inputs": Inputs})
    return Message(question.answer(Predictions(question.client.predict(inputs.x)), "fp32"), reply_to=message)
