"""One student for many networks: trained on the public samples with the run's predictions as targets.

It takes place at the server: no private sample is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fedcc.core.digests import write_json
from fedcc.core.method import Trained
from fedcc.core.model import Arch, Factory
from fedcc.core.requests import Fit, Init, Recipe
from fedcc.core.rng import SERVER, Key
from fedcc.core.samples import Samples
from fedcc.engine import Plain, drive
from fedcc.engine.threads import fixed_threads
from fedcc.evaluate.accuracy import percent
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.result import Result, load
from fedcc.losses import SoftCrossEntropy
from fedcc.methods.student import Student
from fedcc.nets import network


def distil(result: Result, public: Samples, factory: Factory, *, epochs: int = 100, lr: float = 1e-3, batch: int = 64,
           seed: int = 0, targets: Tensor | None = None) -> Result:  # fmt: skip
    """A student of a result: one network, trained on public samples with the result's probabilities as targets."""
    if targets is None:
        targets = result.predict_proba(public.x)
    if targets.ndim != 2:
        raise ValueError(f"{result.method.name} has one model per client and no common prediction to learn from")
    arch = Arch((factory,), result.trained.classes, public.shape, result.dtype == "int64")
    key = Key(seed, 0, SERVER, "student")

    async def train() -> Any:
        model = await Init(arch, key)
        samples = public.with_(target=targets)
        recipe = Recipe(lr=lr, batch=batch, epochs=epochs, schedule="cosine")
        return await Fit(model, SoftCrossEntropy("public"), {"public": samples}, key, recipe)

    fitted = drive([train()], Plain(public.x.device))[0]
    trained = Trained(result.trained.classes, {}, {"student": fitted.model})
    return Result(Student(), trained, result.view, result.dtype, labels=result.labels, names=result.names,
                  encoding=result.encoding)  # fmt: skip


@dataclass(frozen=True)
class Distilled:
    """A student's folder and its accuracy on the test set, beside its teacher's and a student of the true labels."""

    folder: Path
    network: str
    public: int
    student: float
    teacher: float
    labels: float | None  # of the same network, trained on the true labels of the public samples

    def values(self) -> dict[str, Any]:
        return {
            "network": self.network,
            "public": self.public,
            "accuracy": {"student": self.student, "teacher": self.teacher, "true labels": self.labels},
        }

    def line(self) -> str:
        reference = "" if self.labels is None else f", on the true public labels {self.labels:.2f} %"
        return (
            f"{self.network} on {self.public} public samples: {self.student:.2f} % "
            f"(its teacher {self.teacher:.2f} %{reference}), {self.folder}"
        )


def distil_run(
    folder: Path, model: str, *, epochs: int, seed: int, out: Path | None, data_dir: Path | None
) -> Distilled:
    """Distil the run of a folder and measure the student on the test set."""
    result = load(folder)
    experiment = Experiment.read(folder / "experiment.toml")
    federation = experiment.federation(data_dir)
    public, test = federation.public, federation.test
    factory = network(model, public.shape)
    options: dict[str, Any] = {"epochs": epochs, "batch": experiment.training.batch, "seed": seed}

    def measure(predictor: Result) -> float:
        return percent(predictor.scores(test.x).argmax(-1) == test["y"])

    with fixed_threads(experiment.machine.threads):
        student = distil(result, public, factory, **options)
        reference = None
        if federation.hidden is not None:
            true = F.one_hot(federation.hidden, federation.classes).float()
            reference = measure(distil(result, public, factory, targets=true, **options))
        numbers = (measure(student), measure(result), reference)
    place = out or folder / "student"
    distilled = Distilled(place, model, len(public), *numbers)
    student.save(place)
    write_json(place / "student.json", {**distilled.values(), **options})
    return distilled
