"""What each method shares, needs and costs, from its code, and how accurate it was, from the records.

``python docs/make/which_method.py`` writes the table anew between two markers of docs/methods.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedcc.core.messages import leaves
from fedcc.core.method import AnyMethod, Trained
from fedcc.core.model import Arch
from fedcc.core.requests import Recipe
from fedcc.core.rng import Key
from fedcc.core.roles import Server
from fedcc.core.samples import Samples
from fedcc.engine.counting import Counting
from fedcc.federate import Simulated, build_client, federate
from fedcc.flower.dry_run import ShapeEngine
from fedcc.methods import BEYOND, METHODS, fedov, make
from fedcc.nets import network
from fedcc.report.markdown import grid, link
from fedcc.report.records import find_records

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "methods.md"
WHICH = re.compile(r"(?<=<!-- which -->\n).*?(?=<!-- /which -->)", re.DOTALL)
CLIENTS, PRIVATE, PUBLIC, CLASSES, ROUNDS = 10, 4_500, 5_000, 10, 15  # CIFAR-10 by the paper's protocol
SHAPE = (3, 32, 32)
SCENARIOS = ("classes:2", "dirichlet:0.05")


def costs(name: str) -> list[str]:
    """Needs, megabytes per client and run, images trained on, and what predicts, by a run without training."""
    method, engines = make(name), [Counting(ShapeEngine()) for _ in ("clients", "server")]
    arch = Arch((network("resnet20", SHAPE),), method.outputs(CLASSES), SHAPE)
    blank = torch.zeros((), dtype=torch.uint8)
    public = Samples({"x": blank.expand(PUBLIC, *SHAPE)})
    x, recipe, archs = blank.expand(PRIVATE, *SHAPE), Recipe(), dict.fromkeys(range(CLIENTS), arch)
    labels = [torch.arange(PRIVATE) % 2 + 2 * (k % 5) for k in range(CLIENTS)]
    clients = [build_client(public, CLASSES, recipe, 0, k, archs, Samples({"x": x, "y": labels[k]})) for k in archs]
    server = Server(public=public, classes=CLASSES, recipe=recipe, key=Key(0), archs=archs)
    cohort, up, down, names = Simulated(method, clients, engines[0]), 0, 0, set[str]()
    for done in federate(method, server, cohort, ROUNDS, engines[1]):
        up, down = up + done.bytes_up, down + done.bytes_down
        names |= {path.rpartition(".")[2] for message in done.ups.values() for path, _, _ in leaves(message)}
    trained, images = cohort.trained_models(server), [sum(engine.trained.values()) / 1e6 for engine in engines]
    return [needs(method, names), *(f"{total / CLIENTS / 1e6:.1f}" for total in (up, down)),
            f"{images[0] / CLIENTS:.1f}", f"{images[1]:.1f}", predictor(method, trained)]  # fmt: skip


def needs(method: AnyMethod, uploaded: set[str]) -> str:
    counts = uploaded & {"histogram", "counts"}
    things = {"public samples": method.needs_public, "one network": method.one_network, "label counts": counts}
    return ", ".join(name for name, needed in things.items() if needed) or "nothing more"


def predictor(method: AnyMethod, trained: Trained) -> str:
    """What predicts, by the number of its weights."""

    def size(model: Any) -> float:
        return sum(value.numel() for value in model.floating.values()) / 1e6

    parts = []
    if method.uploads_models or not trained.server:
        models = list(trained.clients.values())
        parts.append(f"{len(models)} x {size(models[0]):.2f} M")
    elif "global" in trained.server:
        parts.append(f"{size(trained.server['global']):.2f} M")
    else:
        parts.append(f"{sum(map(size, trained.server.values())):.2f} M")
    return " + ".join(parts)


def shares(kind: type[Any]) -> str:
    """What its module says that clients share."""
    text = " ".join((sys.modules[kind.__module__].__doc__ or "").split())
    if kind.__name__ == "Local":
        return "nothing"
    if kind.__name__ == "Centralized":
        return "all private samples"
    if found := re.search(r"\bshares,? (receives and predicts as \w+|and receives nothing|.*?)(?=[;.:]|$)", text, re.I):
        return re.sub(r"^receives and predicts ", "", found[1]).replace("and receives nothing", "nothing")
    raise ValueError(f"{kind.__module__} does not say what it shares")


def which_table(names: Sequence[str] = tuple(METHODS)) -> str:
    head = [
        "method",
        "clients share",
        "needs",
        "MB up",
        "MB down",
        "M images, client",
        "M images, server",
        "predicts with",
    ]
    runs = [r for r in find_records([ROOT / "results"]).runs if r.data == "cifar10" and r.seed == 0]
    runs = [r for r in runs if not r.protocol and not r.changed_settings]
    accuracy = {(r.method, r.skew): link(f"{r.final:.1f}", r, PAGE.parent) for r in runs}
    rows = []
    for name in names:
        final = [accuracy.get((name, skew), "–") for skew in SCENARIOS]
        rows.append([METHODS[name]().label, shares(METHODS[name]), *costs(name), *final])
    return grid([*head, *(f"`{skew}`" for skew in SCENARIOS)], rows)


if __name__ == "__main__":
    fedov.outliers = lambda samples, _: samples.x  # type: ignore[assignment]  # only their number counts
    ours = [name for name, kind in METHODS.items() if kind not in BEYOND]
    text = which_table([*ours, *(name for name in METHODS if name not in ours)])
    PAGE.write_text(WHICH.sub(lambda _: text, PAGE.read_text()))
