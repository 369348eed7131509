"""Making a federation folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fedcc import __version__
from fedcc.core.samples import Samples, View
from fedcc.engine import choose_device
from fedcc.experiments.experiment import Experiment
from fedcc.federation import Federation, several
from fedcc.flower.data import site_samples
from fedcc.flower.folder import FederationFolder, Rules, Site, Task, arrays
from fedcc.flower.keys import make_authority, make_pair
from fedcc.flower.signing import built, signed
from fedcc.methods import make

OWN = "own"  # the data of a federation of no known data set

APP = f"""\
# What Flower runs: nothing but the installed package. Sites run this file's app and no other.
[project]
name = "fedcc-federation"
version = "{__version__}"
dependencies = []

[tool.flwr.app]
publisher = "fedcc"

[tool.flwr.app.components]
serverapp = "fedcc.flower.server_app:app"
clientapp = "fedcc.flower.client_app:app"

[tool.flwr.app.config]
run = ""
task = "train"
"""


def make_folder(
    path: Path,
    method: str,
    clients: Mapping[str, str | None],
    *,
    settings: Mapping[str, Any],
    given: Mapping[str, Any],
    hosts: list[str],
    port: int,
    rules: Mapping[str, Any],
    data_dir: Path | None = None,
    public_file: Path | None = None,
    test_file: Path | None = None,
    class_names: tuple[str, ...] = (),
    simulate_sites: bool = False,
    app: str = APP,
) -> FederationFolder:
    """A federation of these clients: of a data set by name, or of the operator's own public images."""
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{path} is not empty; a federation needs a folder of its own")
    made = make(method, settings)
    if made.family == "bound":
        raise ValueError(f"{made.name} is a bound for simulations; it shares nothing, or private data")
    federation: Federation | None = None
    if public_file is None:
        chosen = {**given, "clients": len(clients)}
        experiment = Experiment.resolve(method, settings=settings, **chosen)
        federation = experiment.federation(data_dir)
        names = _class_names(experiment.split.data, data_dir)
        public = federation.public
    else:
        experiment = _own_experiment(method, settings, given, len(clients))
        public = _own_public(public_file)
        names = class_names
        if len(names) < 2:
            raise ValueError("with --public-file the classes must be named: --class NAME, at least twice")
    networks = _networks(clients, experiment)
    experiment = experiment.with_options(models=",".join(networks.values()))
    task = Task.of(public, names)
    for model in networks.values():
        task.arch(made, model)
    if made.family == "parameters" and len(set(networks.values())) > 1:
        raise ValueError(
            f"{made.name} averages weights, so all clients need the same network, got {experiment.split.models}"
        )
    quorum = rules.get("quorum") or -(-2 * len(clients) // 3)
    others = {name: value for name, value in rules.items() if value is not None and name != "quorum"}
    checked = Rules(quorum, **others).checked(len(clients))
    local = [h for h in ("localhost", "127.0.0.1") if h not in hosts]
    folder = FederationFolder(path, experiment, task, checked, networks, (*(hosts or []), *local), port)
    test = _test(federation, test_file, task)
    _write(folder, public, test, app)
    if simulate_sites:
        if federation is None:
            raise ValueError("--simulate-sites splits a data set by name; there is none with --public-file")
        for name, private in zip(networks, federation.private, strict=True):
            np.savez(path / "sites" / name / "data.npz", x=private.x.numpy(), y=private["y"].numpy())
    return folder


def _write(folder: FederationFolder, public: Samples, test: Mapping[str, Any] | None, app: str) -> None:
    operator = folder.operator
    (operator / "keys").mkdir(parents=True)
    operator.chmod(0o700)
    (operator / "query").mkdir()
    (operator / "app").mkdir()
    (operator / "app" / "pyproject.toml").write_text(app)
    trusted, signature = signed(built(operator / "app"))
    (operator / "app.json").write_text(signature)
    make_authority(operator, list(folder.hosts))
    np.savez(folder.path / "public.npz", x=public.x.numpy())
    if test is not None:
        np.savez(operator / "test.npz", **test)
    for number, (name, model) in enumerate(folder.clients.items()):
        place = folder.path / "sites" / name
        place.mkdir(parents=True)
        place.chmod(0o700)
        make_pair(place / "site.key", folder.key(name))
        (place / "app.yaml").write_text(trusted)
        shutil.copyfile(operator / "ca.crt", place / "ca.crt")
        shutil.copyfile(folder.path / "public.npz", place / "public.npz")
        Site(place, name, number, model, folder.address, False, folder.experiment, folder.task).write()
    folder.write()


def _own_experiment(method: str, settings: Mapping[str, Any], given: Mapping[str, Any], clients: int) -> Experiment:
    """An experiment on data that no registry knows; its length is the paper's unless given."""
    from fedcc.data.dataset import PAPER_EPOCHS, PAPER_ROUNDS
    from fedcc.engine import usual_engine, usual_precision

    for name in ("data", "skew", "fraction", "public", "stratified", "augment", "resize"):
        if given.get(name) is not None:
            raise ValueError(f"--{name} belongs to a data set by name; with --public-file the sites bring the data")
    device = choose_device(given.get("device") or "auto")
    usual: dict[str, Any] = {
        "rounds": PAPER_ROUNDS, "epochs": PAPER_EPOCHS, "models": "resnet14", "augment": "none",
        "engine": usual_engine(device), "precision": usual_precision(device),
    }  # fmt: skip
    chosen = usual | {name: value for name, value in given.items() if value is not None} | {"device": str(device)}
    made = asdict(make(method, settings))  # type: ignore[call-overload]
    return Experiment.of(method.lower(), made, {"data": OWN, "skew": OWN, "clients": clients, **chosen})


def _own_public(path: Path) -> Samples:
    """The operator's public images, normalised by their own mean and deviation, channel by channel."""
    import torch

    x = arrays(path, "x")["x"]
    if x.dtype != np.uint8 or x.ndim != 4 or not len(x):
        raise ValueError(f"{path}: x must be uint8 images [samples, channels, height, width], got {x.dtype} {x.shape}")
    scaled = x.astype(np.float64) / 255
    mean, std = scaled.mean((0, 2, 3)), scaled.std((0, 2, 3))
    if not std.all():
        raise ValueError(f"{path}: a channel of the images is constant")
    view = View(1 / 255, tuple(mean.round(4).tolist()), tuple(std.round(4).clip(1e-4).tolist()))
    return Samples({"x": torch.from_numpy(x)}, view)


def _networks(clients: Mapping[str, str | None], experiment: Experiment) -> dict[str, str]:
    """Each client's network: its own, or the experiment's in turn."""
    dealt = [str(m) for m in several(experiment.split.models)]
    number = len(clients)
    if experiment.split.assignment == "halves":
        turn = [dealt[k * len(dealt) // number] for k in range(number)]
    else:
        turn = [dealt[k % len(dealt)] for k in range(number)]
    return {name: model or turn[k] for k, (name, model) in enumerate(clients.items())}


def _test(federation: Federation | None, path: Path | None, task: Task) -> dict[str, Any] | None:
    if path is not None:
        samples = site_samples(path, task)
        return {"x": samples.x.numpy(), "y": samples["y"].numpy()}
    if federation is None:
        return None
    test = {"x": federation.test.x.numpy(), "y": federation.test["y"].numpy()}
    return test | ({} if federation.hidden is None else {"public_y": federation.hidden.numpy()})


def _class_names(data: str, data_dir: Path | None) -> tuple[str, ...]:
    from fedcc.data import load

    return load(data, data_dir).classes


def readable(folder: FederationFolder) -> str:
    """What has been made, in a few lines."""
    e = folder.experiment
    return (
        f"{e.build_method().label} on {e.split.data}: {', '.join(f'{n} ({m})' for n, m in folder.clients.items())}; "
        f"T={e.training.rounds}, E={e.training.epochs}; {folder.task.public} public images; server {folder.address}"
    )
