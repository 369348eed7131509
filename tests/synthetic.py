"""Records of runs that never were, as `fedcc run` and `fedcc analyse` would write them; the numbers are drawn."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedcc.core.samples import Samples
from fedcc.data import find_dataset
from fedcc.experiments.experiment import Experiment
from fedcc.report import paper

LOGGING = ("majority", "alpha", "unknown")


def record(
    method: str = "fedcc",
    final: float | None = None,
    settings: dict[str, Any] | None = None,
    confused: bool = False,
    **given: Any,
) -> dict[str, Any]:
    """The summary of one run; ``final`` fixes its last accuracy, the rest is drawn, the same for the same arguments.

    ``confused``: with a confusion matrix, which must change with the accuracy.
    """
    e = Experiment.resolve(method, settings=settings, device="cpu", **given)
    rng = np.random.default_rng([e.training.seed, *map(ord, e.method + e.split.data + e.split.skew)])
    classes, clients = find_dataset(e.split.data).classes, range(e.split.clients)
    near = paper.TABLE1.get((e.method, (e.split.data, e.split.skew)), paper.Value(50.0, 5.0))
    end = np.clip(rng.normal(near.mean, max(near.spread, 0.2)), 1, 99) if final is None else final
    climb = end * (1 - np.exp(-np.arange(1, e.training.rounds + 1) / 3)) + rng.normal(0, 0.5, e.training.rounds)
    known = [round(float(v), 4) for v in np.clip(climb, 0, 100)]
    known[-1] = round(float(end), 4)
    made = e.build_method()
    rounds = made.rounds(e.training.rounds)
    evaluated = [t for t in range(1, rounds + 1) if t == rounds or made.evaluates(t, e.training.rounds)]
    curve: list[float | None] = [None] * rounds
    for t, v in zip(evaluated, known[-len(evaluated) :], strict=True):
        curve[t - 1] = v
    own = {"local": 90, "global": 12} | (
        {"valid": 75, "valid_labels": 74, "local_full": 85} if method == "fedcc" else {}
    )
    table2 = {
        test: {str(k): round(float(rng.uniform(mean - 5, mean + 5)), 4) for k in clients} for test, mean in own.items()
    }
    names = list(made.readings(Samples({"x": torch.zeros(1, 1, 8, 8)})))
    up = down = 11_000_000 if made.family == "parameters" else classes * 200_000
    shared = made.family != "bound"
    trained, predicted = [900_000 + 100_000 * (t > 0) for t in range(rounds)], [50_000] * rounds
    return {
        "format": 1,
        "method": made.name,
        "family": made.family,
        "note": made.note,
        "settings": dict(e.settings),
        **{n: e.values()[n] for n in ("data", "skew", "seed", "clients", "models", "epochs")},
        "rounds": rounds,
        "accuracy": {
            "final": known[-1],
            "best": max(known),
            "best_round": 1 + curve.index(max(known)),
            "rounds": curve,
            "targets": [round(v * 0.9, 4) if v and made.family == "distillation" else None for v in curve],
            "clients": table2["global"],
            "local": table2["local"],
            "table2": table2,
            **({"readings": {name: higher(curve, n + 3) for n, name in enumerate(names)}} if names else {}),
        },
        "log": {
            name: {str(k): [round(float(v), 4) for v in rng.uniform(0, 1, e.training.rounds)] for k in clients}
            for name in LOGGING
        }
        if method == "fedcc"
        else {},
        "bytes": {
            "up": up * rounds * shared,
            "down": down * rounds * shared,
            "models": 0,
            "rounds": {"up": [up * shared] * rounds, "down": [down * shared] * rounds},
        },
        "counts": {str(k): (rng.dirichlet(np.full(classes, 0.1)) * 4500).astype(int).tolist() for k in clients},
        "public": 5000,
        **({"confusion": confusion(known[-1], classes, rng)} if confused else {}),
        **(
            {"known": {str(k): np.round(rng.beta(0.3, 0.5, classes), 4).tolist() for k in clients}}
            if method == "fedcc"
            else {}
        ),
        "images": {
            "trained": {"fit": sum(trained)},
            "predicted": sum(predicted),
            "rounds": {"trained": trained, "predicted": predicted},
        },
        "seconds": round(float(rng.uniform(10, 1000)), 3),
        "engine": e.machine.engine,
        "device": "a machine",
        "precision": e.machine.precision,
        "threads": e.machine.threads,
        "versions": {"fedcc": "0.1.0", "python": "3.12.3", "torch": "2.11.0", "numpy": "2.5.2"},
        "commit": "0" * 40,
        "command": e.command(),
        "experiment": e.values(),
    }


def confusion(accuracy: float, classes: int, rng: np.random.Generator, samples: int = 10_000) -> list[list[int]]:
    """Test samples by label and predicted class, with this accuracy."""
    rows = np.zeros((classes, classes), int)
    right = rng.multinomial(round(samples * accuracy / 100), np.full(classes, 1 / classes))
    wrong = rng.multinomial(samples - right.sum(), rng.dirichlet(np.full(classes * (classes - 1), 0.2)))
    rows[~np.eye(classes, dtype=bool)] = wrong
    rows[np.diag_indices(classes)] = right
    return [[int(n) for n in row] for row in rows]


def higher(curve: list[float | None], by: int) -> dict[str, Any]:
    """The same curve some points higher, as a reading."""
    found = [None if v is None else min(100.0, round(v + by, 4)) for v in curve]
    best = max(v for v in found if v is not None)
    return {"final": found[-1], "best": best, "best_round": 1 + found.index(best), "rounds": found}


def analysis(summary: dict[str, Any], samples: int = 300) -> dict[str, Any]:
    """What `fedcc analyse` would find in its models."""
    rng = np.random.default_rng([summary["seed"], *map(ord, summary["method"] + summary["skew"])])
    classes = find_dataset(summary["data"]).classes
    labels = rng.integers(0, classes, samples)
    centres = 30 * rng.normal(size=(classes, 2))

    def panel(name: str, width: float, **more: Any) -> dict[str, Any]:
        points = centres[labels] + width * rng.normal(size=(samples, 2))
        return {"name": name, **more, "points": np.round(points, 3).tolist(), "purity": 0.9}

    def shares(n: int) -> list[float]:
        return np.round(rng.dirichlet(np.full(n, 0.3)), 6).tolist()

    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(buffer, "PNG")
    example = {
        "public": 17,
        "image": "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode(),
        "label": 3,
        "classes": [f"class {c}" for c in range(classes)],
        "clients": [
            {"client": k, "unknown": shares(classes + 1), "plain": shares(classes), "weight": 1 / summary["clients"]}
            for k in range(summary["clients"])
        ],
        "aggregates": {"unknown": shares(classes), "plain": shares(classes)},
        "accuracy": {"unknown": 80.0, "plain": 30.0},
    }
    edges = np.round(np.linspace(-1, 1, 41), 4).tolist()
    return {
        "format": 1,
        **{n: summary[n] for n in ("method", "data", "skew", "seed")},
        "margins": {
            "edges": edges,
            "models": [
                {"name": name, "mean": round(rng.uniform(-0.5, 0.5), 4), "counts": rng.integers(0, 900, 40).tolist()}
                for name in ("global", "clients", "client 0")
            ],
        },
        "embeddings": {
            "samples": samples,
            "labels": labels.tolist(),
            "panels": [panel("local", 9, client=0), panel("global", 4)],
        },
        "example": example if summary["method"] == "FedCC" else None,
    }  # fmt: skip


def packed(html: str, name: str) -> bytes:
    """What a page holds in compressed form under this id: ``content``, or ``archive``."""
    found = re.search(rf'id="{name}">([A-Za-z0-9+/=]+)</script>', html)
    assert found is not None
    return gzip.decompress(base64.b64decode(found[1]))


def write(summary: dict[str, Any], place: Path, analysed: bool = False) -> Path:
    """A record as a run folder (the name has no ending) or as a bare file."""
    file = place if place.suffix == ".json" else place / "summary.json"
    beside = file.with_name(f"{file.stem}.analysis.json" if place.suffix == ".json" else "analysis.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(summary))
    if analysed:
        beside.write_text(json.dumps(analysis(summary)))
    return file


def folders(
    root: Path,
    methods: Iterable[str] = paper.METHODS,
    scenarios: Iterable[paper.Scenario] = paper.SCENARIOS,
    seeds: int = 3,
    analysed: Iterable[str] = (),
    **given: Any,
) -> Path:
    """Run folders of methods by scenarios by seeds, as a sweep leaves them."""
    for method in methods:
        for data, skew in scenarios:
            for seed in range(seeds):
                made = record(method, data=data, skew=skew, seed=seed, confused=True, **given)
                place = root / f"{data}_{skew.replace(':', '-')}" / method / f"seed{seed}"
                write(made, place, method in analysed)
                for name in ("experiment.toml", "metrics.jsonl", "environment.json", "partition.npz"):
                    (place / name).touch()
    return root
