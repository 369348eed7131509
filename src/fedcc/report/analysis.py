"""An ``analysis.json``, checked: margins, embeddings and an example of the models of one run."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping
from typing import Any

from fedcc.report.values import Odd, items, mapping, number, short, text, whole

CLASSES = 65_536  # more no data set may have
PANELS = 26  # pictures in one figure
WHOSE = ("method", "data", "skew", "seed", "data_sha256", "partition_sha256")


def read_analysis(value: Any, record: Mapping[str, Any]) -> dict[str, Any]:
    """What was looked at in the trained models of the run with this record; each of the three parts may be missing."""
    stored = mapping(value, "analysis")
    for name in WHOSE:
        if name in stored and name in record and stored[name] != record[name]:
            raise Odd(f"is of another run: {name} is {short(stored[name])}, but the run's is {short(record[name])}")
    read = {"margins": _margins, "embeddings": _embeddings, "example": _example}
    return {name: check(mapping(stored[name], name)) for name, check in read.items() if stored.get(name) is not None}


def _margins(value: Mapping[str, Any]) -> dict[str, Any]:
    edges = [number(e, "an edge", -1, 1) for e in items(value.get("edges"), "edges")]
    models = []
    for m in items(value.get("models"), "models"):
        counts = [whole(n, "a count") for n in items(mapping(m, "a model").get("counts"), "counts")]
        if len(counts) != len(edges) - 1:
            raise Odd(f"margins need a count between two edges, got {len(counts)} for {len(edges)} edges")
        mean = number(m.get("mean"), "mean", -1, 1)
        models.append({"name": text(m.get("name"), "name"), "mean": mean, "counts": counts})
    return {"edges": edges, "models": models}


def _embeddings(value: Mapping[str, Any]) -> dict[str, Any]:
    labels = [whole(n, "a label", 0, CLASSES - 1) for n in items(value.get("labels"), "labels")]
    panels: list[dict[str, Any]] = []
    for p in items(value.get("panels"), "panels"):
        points = [
            [number(c, "a coordinate", -1e9, 1e9) for c in items(xy, "a point")[:2]]
            for xy in items(mapping(p, "a panel").get("points"), "points")
        ]
        if len(points) != len(labels) or any(len(xy) != 2 for xy in points):
            raise Odd(f"a panel needs {len(labels)} points of two coordinates")
        client = p.get("client")
        panels.append(
            {
                "name": text(p.get("name"), "name"),
                "client": None if client is None else whole(client, "client"),
                "points": points,
                "purity": number(p.get("purity"), "purity", 0, 1),
            }
        )
    if not labels or not 1 <= len(panels) <= PANELS:
        raise Odd(f"embeddings need a label and 1 to {PANELS} panels, got {len(labels)} and {len(panels)}")
    return {"samples": len(labels), "labels": labels, "panels": panels}


def _example(value: Mapping[str, Any]) -> dict[str, Any]:
    image = text(value.get("image"), "image", 2_000_000)
    if not re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/]+=*", image) or not _drawable(image):
        raise Odd("the example's image must be a small PNG as a data URL")
    classes = [text(str(c), "a class") for c in items(value.get("classes"), "classes")]

    def shares(stored: Any, length: int) -> list[float]:
        found = [number(p, "a probability", 0, 1.001) for p in items(stored, "probabilities")]
        if len(found) != length:
            raise Odd(f"the example needs {length} probabilities, got {len(found)}")
        return found

    clients = [
        {
            "client": whole(mapping(c, "a client").get("client"), "client"),
            "unknown": shares(c.get("unknown"), len(classes) + 1),
            "plain": shares(c.get("plain"), len(classes)),
            "weight": number(c.get("weight"), "weight", 0),
        }
        for c in items(value.get("clients"), "clients")
    ]
    if not classes or not clients:
        raise Odd(f"the example needs a class and a client, got {len(classes)} and {len(clients)}")
    both = mapping(value.get("aggregates"), "aggregates")
    label, right = value.get("label"), value.get("accuracy")
    return {
        "public": whole(value.get("public"), "public"),
        "image": image,
        "label": None if label is None else whole(label, "label", 0, len(classes) - 1),
        "classes": classes,
        "clients": clients,
        "aggregates": {name: shares(both.get(name), len(classes)) for name in ("unknown", "plain")},
        "accuracy": {n: number(mapping(right, "accuracy").get(n), "accuracy", 0, 100) for n in ("unknown", "plain")}
        if right is not None
        else None,
    }


def _drawable(address: str) -> bool:
    """Whether it is a picture of a size that a data set may have."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])), formats=["PNG"]) as image:
            image.load()
            return max(image.size) <= 1024
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False
