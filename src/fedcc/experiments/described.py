"""A run that Python started, as an experiment: how its folder describes it.

A federation by :meth:`Federation.named` and a method that can be imported are described in full, so that ``fedcc
resume`` can resume the run. Other objects are described as far as possible; such a run is resumed by the same call.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedcc.code import OWN, remember
from fedcc.core.method import AnyMethod
from fedcc.core.model import factory_name
from fedcc.experiments.experiment import Experiment, first_difference
from fedcc.experiments.options import DEFAULTS
from fedcc.experiments.toml import load, parse
from fedcc.federation import Federation
from fedcc.methods import METHODS


@dataclass(frozen=True)
class PythonExperiment(Experiment):
    """An experiment with objects that no file can describe: a method, networks or data."""

    instance: AnyMethod | None = None

    @property
    def kind(self) -> type[AnyMethod]:
        return type(self.build_method())

    def build_method(self) -> AnyMethod:
        assert self.instance is not None
        return self.instance

    def command(self) -> str:
        options = {**asdict(self.training), **asdict(self.measurement), **asdict(self.machine)}
        words = (f"{name}={json.dumps(v)}" for name, v in options.items() if DEFAULTS.get(name) != v)
        return f"fedcc.run({self.method}, federation, {', '.join(words)})"


def describe_run(
    method: AnyMethod, federation: Federation, options: Mapping[str, Any]
) -> tuple[Experiment, Federation]:
    """The experiment of a run with these options, and the federation with the digest of its data."""
    kind, networks = type(method), federation.models_of(method)
    in_package = METHODS.get(kind.__name__.lower()) is kind
    importable = in_package or (kind.__module__ != "__main__" and "<" not in kind.__qualname__)
    name = kind.__name__.lower() if in_package else remember(kind) if importable else OWN + kind.__name__
    models = [m if isinstance(m, str) else OWN + factory_name(m) for m in networks]
    if len(set(models)) < len(set(networks)):
        raise ValueError(
            f"networks need different names, by which checkpoints tell them apart, got {', '.join(models)}"
        )
    split, seed = federation.options, options.get("seed", DEFAULTS["seed"])
    named = split is not None and split["seed"] == seed
    if split is None or not named:
        if split is None:
            federation = replace(federation, fingerprint=data_digest(federation))
        split = _own_split(federation)
    settings = asdict(method)  # type: ignore[call-overload]
    experiment = Experiment.of(name, settings, {**split, **options, "models": ",".join(models)})
    if named and importable and all(isinstance(m, str) for m in networks):
        return experiment, federation
    return PythonExperiment(**vars(experiment), instance=method), federation


def _own_split(federation: Federation) -> dict[str, Any]:
    """The options of a split that no options made, as far as there are any."""
    public, private = len(federation.public), sum(map(len, federation.private))
    title = federation.data if federation.data != Federation.data else f"data {federation.fingerprint[:8]}"
    return {
        "data": OWN + re.sub(r"\W+", "_", title),
        "skew": federation.skew,
        "clients": len(federation.private),
        "assignment": federation.assignment,
        "augment": "none",
        "public": public / (public + private) if public else DEFAULTS["public"],
    }


def data_digest(federation: Federation) -> str:
    """A fingerprint of all samples."""
    digest = hashlib.sha256()
    for samples in (*federation.private, federation.public, federation.test):
        for name in ("x", "y"):
            if name in samples.columns:
                array = samples[name].contiguous().numpy()
                digest.update(repr((name, array.shape, array.dtype.str)).encode())
                digest.update(array.data)
    return digest.hexdigest()


def recorded_difference(folder: Path, experiment: Experiment) -> tuple[str, Any, Any] | None:
    """Where a folder's ``experiment.toml`` says something else than an experiment: name, value there, value here."""
    return first_difference({**DEFAULTS, **load(folder / "experiment.toml")}, parse(experiment.toml()))
