"""An ``analysis.json``, checked: margins, embeddings and an example of the models of one run."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from fedcc.report.values import InvalidRecord, Schema, check, mapping, number, optional, short, text, whole

CLASSES = 65_536  # the most that a data set may have
PANELS = 26  # pictures in one figure
ORIGIN = ("method", "data", "skew", "seed", "data_sha256", "partition_sha256")

MARGIN = partial(number, low=-1, high=1)
SHARE = partial(number, low=0, high=1.001)  # a probability, rounded
PURITY = partial(number, low=0, high=1)
PERCENT = partial(number, low=0, high=100)
COORDINATE = partial(number, low=-1e9, high=1e9)
ANSWER = {"unknown": [SHARE], "plain": [SHARE]}
SCHEMA: dict[str, Schema] = {
    "margins": {"edges": [MARGIN], "models": [{"name": text, "mean": MARGIN, "counts": [whole]}]},
    "embeddings": {
        "labels": [partial(whole, high=CLASSES - 1)],
        "panels": [{"name": text, "client": optional(whole), "points": [[COORDINATE]], "purity": PURITY}],
    },
    "example": {
        "public": whole,
        "image": partial(text, longest=2_000_000),
        "label": optional(whole),
        "classes": [lambda value, what: text(str(value), what)],
        "clients": [{"client": whole, **ANSWER, "weight": partial(number, low=0)}],
        "aggregates": ANSWER,
        "accuracy": optional({"unknown": PERCENT, "plain": PERCENT}),
    },
}


def read_analysis(value: Any, record: Mapping[str, Any]) -> dict[str, Any]:
    """What was found in the trained models of the run with this record; each of the three parts may be missing."""
    stored = mapping(value, "analysis")
    for name in ORIGIN:
        if name in stored and name in record and stored[name] != record[name]:
            theirs, ours = short(stored[name]), short(record[name])
            raise InvalidRecord(f"is of another run: {name} is {theirs}, but the run's is {ours}")
    parts = {name: check(stored[name], part, name) for name, part in SCHEMA.items() if stored.get(name) is not None}
    for name, part in parts.items():
        CHECKS[name](part)
    return parts


def _check_margins(margins: Mapping[str, Any]) -> None:
    edges = len(margins["edges"])
    for counts in (len(model["counts"]) for model in margins["models"]):
        if counts != edges - 1:
            raise InvalidRecord(f"margins need a count between two edges, got {counts} for {edges} edges")


def _check_embeddings(embeddings: Mapping[str, Any]) -> None:
    labels, panels = embeddings["labels"], embeddings["panels"]
    if not labels or not 1 <= len(panels) <= PANELS:
        raise InvalidRecord(f"embeddings need a label and 1 to {PANELS} panels, got {len(labels)} and {len(panels)}")
    for panel in panels:
        if len(panel["points"]) != len(labels) or any(len(point) != 2 for point in panel["points"]):
            raise InvalidRecord(f"a panel needs {len(labels)} points of two coordinates")


def _check_example(example: Mapping[str, Any]) -> None:
    classes, clients, label = len(example["classes"]), example["clients"], example["label"]
    if not classes or not clients:
        raise InvalidRecord(f"the example needs a class and a client, got {classes} and {len(clients)}")
    for shares, outputs in [(example["aggregates"], classes), *((client, classes + 1) for client in clients)]:
        for name, size in (("unknown", outputs), ("plain", classes)):
            if len(shares[name]) != size:
                raise InvalidRecord(f"the example needs {size} probabilities, got {len(shares[name])}")
    if label is not None:
        whole(label, "example.label", 0, classes - 1)
    if not _is_small_png(example["image"]):
        raise InvalidRecord("the example's image must be a small PNG as a data URL")


def _is_small_png(address: str) -> bool:
    """Whether an address holds a picture of a size that a data set may have."""
    from PIL import Image

    if not re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/]+=*", address):
        return False
    try:
        with Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])), formats=["PNG"]) as image:
            image.load()
            return max(image.size) <= 1024
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False


CHECKS = {"margins": _check_margins, "embeddings": _check_embeddings, "example": _check_example}
