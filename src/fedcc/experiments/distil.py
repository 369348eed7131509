"""One student for many networks: trained on the public samples with the run's predictions as targets.

It takes place at the server: no private sample is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcc.core.digests import write_json
from fedcc.core.files import is_temporary, make_folder
from fedcc.core.method import Trained, shares
from fedcc.core.model import Arch, Factory
from fedcc.core.options import check_value
from fedcc.core.requests import Fit, Init, Recipe
from fedcc.core.rng import SERVER, Key
from fedcc.core.samples import Samples
from fedcc.engine import choose_device, default_engine, default_precision, drive, engine
from fedcc.engine.threads import fixed_threads
from fedcc.errors import InputError
from fedcc.evaluate.accuracy import percent
from fedcc.experiments import toml
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.result import Result, load
from fedcc.experiments.store import RunFolder, RunFolderError
from fedcc.federation import Federation, as_samples
from fedcc.inputs import read_inputs
from fedcc.losses import SoftCrossEntropy
from fedcc.methods.student import Student
from fedcc.nets import network

STUDENT = "student"  # the folder inside the run's
ABOUT = "student.json"  # marks a student's folder


def distil(result: Result, public: Samples, factory: Factory, *, epochs: int = 10, mixes: int = 19,
           sharpness: float = 4.0, lr: float = 1e-3, batch: int = 64, seed: int = 0) -> Result:  # fmt: skip
    """A student of a result: one network, trained on public samples with the result's probabilities as targets.

    The result labels ``mixes`` mixtures per public sample too. Its probabilities are raised to the power
    ``sharpness``, since those of an ensemble whose members abstain are flat.
    """
    check_value("sharpness", sharpness, float, 0)
    key = Key(seed, 0, SERVER, "student")
    x = torch.cat([public.x, mixtures(public.x, mixes * len(public), key)])
    probabilities = result.predict_proba(x)
    if probabilities.ndim != 2:
        raise ValueError(f"{result.method.name} has one model per client and no common prediction to learn from")
    samples = Samples({"x": x, "target": shares(probabilities.to(x.device) ** sharpness)}, public.view)
    return fit_student(result, samples, factory, key, Recipe(lr=lr, batch=batch, epochs=epochs, schedule="cosine"))


def mixtures(x: Tensor, number: int, key: Key) -> Tensor:
    """Mixtures of two inputs each, in random proportions; none of tokens, which cannot be mixed."""
    if not number or x.dtype == torch.int64:
        return x[:0]
    rng = key.of(stream="mixtures").generator()
    first, second = (torch.from_numpy(rng.integers(0, len(x), number)).to(x.device) for _ in range(2))
    part = torch.from_numpy(rng.random(number, np.float32)).to(x.device).view(-1, *[1] * (x.ndim - 1))
    mixed = torch.lerp(x[first].float(), x[second].float(), part)
    return mixed if x.is_floating_point() else mixed.round().to(x.dtype)


def fit_student(result: Result, samples: Samples, factory: Factory, key: Key, recipe: Recipe) -> Result:
    """One network trained on samples with targets."""
    arch = Arch((factory,), result.trained.classes, samples.shape, result.dtype == "int64")

    async def train() -> Any:
        return await Fit(await Init(arch, key), SoftCrossEntropy("public"), {"public": samples}, key, recipe)

    device = samples.x.device
    fitted = drive([train()], engine(default_engine(device), device, default_precision(device)))[0]
    return replace(result, method=Student(), trained=Trained(arch.outputs, {}, {"student": fitted.model}), rounds=[],
                   seconds=0.0, stopped="")  # fmt: skip


@dataclass(frozen=True)
class Distilled:
    """A student's folder and its accuracy on the test set, beside its teacher's and a student of the true labels."""

    folder: Path
    network: str
    public: int
    student: float | None  # None without a test set
    teacher: float | None
    labels: float | None  # of the same network, trained on the true labels of the public samples

    def values(self) -> dict[str, Any]:
        return {
            "network": self.network,
            "public": self.public,
            "accuracy": {"student": self.student, "teacher": self.teacher, "true labels": self.labels},
        }

    def line(self) -> str:
        accuracy = "no test samples"
        if self.student is not None:
            reference = "" if self.labels is None else f", on the true public labels {self.labels:.2f} %"
            accuracy = f"{self.student:.2f} % (its teacher {self.teacher:.2f} %{reference})"
        return f"{self.network} on {self.public} public samples: {accuracy}, {self.folder}"


def distil_run(
    folder: Path, model: str | None, *, inputs: Path | None = None, out: Path | None = None,
    data_dir: Path | None = None, seed: int = 0, **options: Any,
) -> Distilled:  # fmt: skip
    """Distil the run of a folder and measure the student on the run's test set, if that can be had.

    ``inputs`` are samples to learn from; the run's public ones by default.
    """
    place = out or folder / STUDENT
    check_value("sharpness", options.get("sharpness", 4.0), float, 0)
    if (folder / ABOUT).is_file():
        raise InputError(f"{folder} holds a student, which cannot be distilled again; give the folder of its run")
    _check_place(place, folder)
    loaded, experiment = load(folder), _experiment(folder / "experiment.toml")
    device = choose_device("auto" if experiment.machine.device != "cpu" else "cpu")
    result, federation = loaded.to(device), _federation(experiment, folder, data_dir, needed=inputs is None)
    if inputs is not None:
        x = read_inputs(inputs, result.shape, result.dtype, result.encoding)[1]
        public = as_samples(str(inputs), x, result.view).to(device)
    else:
        assert federation is not None
        public = federation.public.to(device)
    name = model or experiment.split.models.split(",")[0]
    factory = network(name, public.shape)
    options |= {"batch": experiment.training.batch, "seed": seed}

    def measure(predictor: Result) -> float | None:
        if federation is None or not len(federation.test):
            return None
        test = federation.test.to(device)
        return percent(predictor.scores(test.x).argmax(-1) == test["y"].cpu())

    with fixed_threads(experiment.machine.threads):
        student = distil(result, public, factory, **options)
        reference = None
        if inputs is None and federation is not None and federation.hidden is not None:  # the same number of steps
            true = public.with_(target=F.one_hot(federation.hidden, federation.classes).float().to(device))
            steps = -(-len(public) * (1 + options["mixes"]) // options["batch"]) * options["epochs"]
            recipe = Recipe(batch=options["batch"], steps=steps, schedule="cosine")
            reference = measure(fit_student(result, true, factory, Key(seed, 0, SERVER, "student"), recipe))
        numbers = (measure(student), measure(result), reference)
    distilled = Distilled(place, name, len(public), *numbers)
    make_folder(place)
    write_json(place / ABOUT, {**distilled.values(), **options})  # first: a folder without it is not replaced
    student.save(place)
    return distilled


def _experiment(path: Path) -> Experiment:
    """A run's options; its data need not be here."""
    if not path.is_file():
        raise InputError(f"{path.parent} holds no run: experiment.toml is missing")
    table = toml.load(path)
    try:
        return Experiment.stored(table)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _check_place(place: Path, folder: Path) -> None:
    """Refuse a folder that holds anything but an earlier student."""
    if place.resolve() == folder.resolve():
        raise RunFolderError(f"{place} holds the run that the student learns from; choose another --out")
    for path in (place, *place.parents):
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"{path} is a file; --out must name a folder")
    names = {path.name for path in place.iterdir() if not is_temporary(path.name)} if place.is_dir() else set()
    if "experiment.toml" in names:
        raise RunFolderError(f"{place} holds another run; choose another --out")
    if names and ABOUT not in names:
        raise RunFolderError(f"{place} holds other files ({min(names)}); choose another --out")


def _federation(experiment: Experiment, folder: Path, data_dir: Path | None, needed: bool) -> Federation | None:
    """The data of a folder's run; None if it is not here, as that of a federation, or has changed, and not needed."""
    summary = RunFolder(folder).summary() or {}
    try:
        federation = experiment.federation(data_dir)
        then, now = summary.get("data_sha256"), federation.fingerprint
        if summary.get("partition_sha256") and then != now:  # a federation's record has no partition
            raise InputError(f"the data has changed since the run: its data_sha256 is {then}, but here it is {now}")
        return federation
    except ValueError as error:
        if needed:
            raise InputError(
                f"the run's public samples cannot be had here ({error}): give some with --public"
            ) from None
        return None
