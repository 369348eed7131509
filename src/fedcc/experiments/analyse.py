"""Analyse the models of a finished run: decision margins, embeddings, one public sample (the paper's figures)."""

from __future__ import annotations

import base64
import io
import shlex
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcc.core.digests import DIGEST, Unchecked, write_json
from fedcc.core.model import Outputs
from fedcc.core.requests import Executor, Predict
from fedcc.core.rng import Key
from fedcc.core.samples import Samples
from fedcc.engine import Plain, choose_device, drive
from fedcc.engine.threads import cores, fixed_threads
from fedcc.evaluate.embeddings import panel
from fedcc.evaluate.example import example
from fedcc.evaluate.margins import histograms
from fedcc.evaluate.predictions import PredictionCache
from fedcc.experiments.environment import commit
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.options import Analysis
from fedcc.experiments.result import Result
from fedcc.experiments.store import RunFolder, RunFolderError
from fedcc.federation import Federation
from fedcc.methods import FedCC

ANALYSIS_FORMAT = 1
COPIED = ("method", "data", "skew", "seed", "data_sha256", "partition_sha256")  # from the summary


def check(path: Path) -> dict[str, Any]:
    """The summary of a finished run that has its models; refuses other folders."""
    if not (path / "experiment.toml").is_file():
        raise RunFolderError(f"{path} holds no run: experiment.toml is missing")
    folder = RunFolder(path)
    summary = folder.summary()
    if summary is None:
        raise RunFolderError(
            f"{path} holds an unfinished run: summary.json is missing; resume it with `{folder.resume}`"
        )
    if missing := [name for name in COPIED if name not in summary]:
        raise RunFolderError(f"{path / 'summary.json'} is damaged: it has no {missing[0]!r}")
    if not (path / "models.safetensors").is_file():
        raise RunFolderError(
            f"{path} holds no models: models.safetensors is missing (--no-save-models); run it again with them"
        )
    return summary


def analyse(
    path: Path, options: Analysis | None = None, *, device: str = "auto", data_dir: Path | None = None
) -> dict[str, Any]:
    """Analyse a run folder: its ``analysis.json``, which is written there too."""
    options, summary = options or Analysis(), check(path)
    try:
        experiment = Experiment.stored(summary["experiment"])  # not the TOML, whose device may not be here
    except (TypeError, ValueError) as error:
        raise RunFolderError(f"{path / 'summary.json'} is damaged in its 'experiment': {error}") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Unchecked)  # the caller sees from the summary that the run is an older one
        result = Result.load(path)
    federation = experiment.federation(data_dir)
    for name, value in federation.digests.items():
        if summary[name] != value:
            raise RunFolderError(
                f"{path} was run on different data: its {name} is {summary[name]}, but here it is {value}"
            )
    with fixed_threads(min(experiment.machine.threads, cores())):  # the record may come from a larger machine
        parts = inspect_models(result, federation, options, experiment.training.seed, device)
    words = ["fedcc", "analyse", str(path)]
    for name, value in asdict(options).items():
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    analysis = {
        "format": ANALYSIS_FORMAT,
        **{name: summary[name] for name in COPIED},
        "summary_sha256": summary.get(DIGEST),
        "commit": commit(),
        "command": shlex.join(words),
        **parts,
    }
    return write_json(path / "analysis.json", analysis)


def inspect_models(
    result: Result, federation: Federation, options: Analysis, seed: int = 0, device: str = "cpu"
) -> dict[str, Any]:
    """Margins, embeddings and the example of trained models; a note for what a method does not have."""
    method, trained = result.method, result.trained
    engine = PredictionCache(Plain(choose_device(device)))
    test, labels = federation.test.only("x"), federation.test["y"]
    scores = drive([method.predict(trained, test)], engine)[0]
    features = torch.cat([out.features for out in engine.outputs.values()], 1).cpu()  # by the method's own prediction
    global_probabilities = method.probabilities(scores).cpu() if scores.ndim == 2 else None
    clients = client_outputs(result, test, engine) if method.trains_clients else {}
    if clients and options.client not in clients:
        raise ValueError(f"client must be one of the run's, 0 to {max(clients)}, got {options.client}")

    rows = Key(seed, phase="embeddings").generator().permutation(len(test))[: options.samples]
    rows.sort()
    classes, panels = labels[rows].numpy(), []
    if clients:
        own = clients[options.client].features[rows].numpy()
        panels.append({"name": "local", "client": options.client, **panel(own, classes, options.variance)})
    if global_probabilities is not None:
        panels.append({"name": "global", **panel(features[rows].numpy(), classes, options.variance)})
    known = {k: out.logits[:, : trained.classes].softmax(-1) for k, out in clients.items()}
    has_example = isinstance(method, FedCC) and is_picture(federation.public.x)
    absent = {
        "has no global model, each client predicts alone": global_probabilities is None,
        "trains no client models": not clients,
        'has no answer "unknown", so there is no example': not isinstance(method, FedCC),
    }
    notes = [f"{method.name} {text}" for text, true in absent.items() if true]
    if isinstance(method, FedCC) and not has_example:
        notes.append("the public samples are no images, so there is no example")
    return {
        "margins": histograms(global_probabilities, known, labels),
        "embeddings": {"samples": len(rows), "labels": classes.tolist(), "panels": panels},
        "example": public_example(result, federation, options, engine) if has_example else None,
        "notes": notes,
    }


def client_outputs(result: Result, samples: Samples, engine: Executor) -> dict[int, Outputs]:
    """Every client's own outputs."""
    outputs = {k: engine.serve([Predict(m, samples)])[0] for k, m in result.trained.clients.items()}
    return {k: Outputs(out.logits.cpu(), out.features.cpu()) for k, out in outputs.items()}


def public_example(result: Result, federation: Federation, options: Analysis, engine: Executor) -> dict[str, Any]:
    """One public sample with its picture, and what each client says of it."""
    split, clients, public = federation.partition, result.trained.clients, federation.public
    assert split is not None
    assert isinstance(result.method, FedCC)
    row = None
    if options.public_index is not None:
        positions = (split.public == options.public_index).nonzero()[0]
        if not len(positions):
            raise ValueError(f"public_index must be the position of a public sample, got {options.public_index}")
        row = int(positions[0])
    logits = torch.stack([out.logits for out in client_outputs(result, public, engine).values()])
    parts = example(logits, federation.hidden, row, result.method.trust, result.method.guard_votes)
    row = int(parts.pop("row"))
    return {
        "public": int(split.public[row]),
        "image": data_address(public.x[row], public.view.scale),
        "classes": list(federation.names),
        **parts,
        "clients": [{"client": k, **answer} for k, answer in zip(clients, parts["clients"], strict=True)],
    }


def is_picture(x: Tensor) -> bool:
    """Whether samples [N, ...] are images, grey or in colour; rows of tables and tokens are not."""
    return x.ndim == 4 and x.shape[1] in (1, 3)


def data_address(image: Tensor, scale: float) -> str:
    """A stored image [channels, H, W] as a PNG inside an address, for a page."""
    from PIL import Image

    pixels = (image.double() * scale * 255).round().clamp(0, 255).to(torch.uint8)
    channels_last = pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)
    buffer = io.BytesIO()
    Image.fromarray(channels_last.numpy()).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
