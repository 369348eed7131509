"""Create a federation folder: experiment, certificates, and a folder for each site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcc import __version__
from fedcc.code import is_reference
from fedcc.core.options import check_options, options_of
from fedcc.core.samples import IDENTITY, Samples, View
from fedcc.data.arrays import usual_network
from fedcc.data.dataset import PAPER_EPOCHS, PAPER_ROUNDS, Inputs
from fedcc.data.deal import standardised
from fedcc.data.own import as_inputs
from fedcc.experiments.experiment import Experiment, resolve_machine
from fedcc.experiments.options import Split
from fedcc.federate import build_server
from fedcc.federation import Federation, deal, several
from fedcc.flower.address import is_host
from fedcc.flower.data import ENCODED, inputs_sha256, read_arrays, site_samples
from fedcc.flower.dry_run import check_outputs_suffice
from fedcc.flower.folder import FederationFolder, Task
from fedcc.flower.keys import (
    make_authority,
    make_command_key,
    make_key_pair,
    make_server_certificate,
    sign_app,
)
from fedcc.flower.members import write_site
from fedcc.flower.own_network import OWN
from fedcc.flower.rules import Rules
from fedcc.inputs import TABLES
from fedcc.inputs.images import common_form, decode_all, list_images
from fedcc.inputs.tables import Encoding, Table
from fedcc.methods import build_method

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


def create_federation(
    path: Path,
    method: str,
    clients: Mapping[str, str | None],
    *,
    options: Mapping[str, Any],
    port: int,
    settings: Mapping[str, Any] | None = None,
    hosts: Sequence[str] = (),
    rules: Mapping[str, Any] | None = None,
    data_dir: Path | None = None,
    public_file: Path | None = None,
    test_file: Path | None = None,
    class_names: tuple[str, ...] = (),
    simulate_sites: bool = False,
    make_keys: bool = False,
    app: str = APP,
) -> FederationFolder:
    """Create a federation of these clients, on a named data set or on the operator's own public samples.

    The sites make their own keys, unless ``make_keys`` or ``simulate_sites`` asks for keys in their folders.
    """
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{path} is not empty; a federation needs a folder of its own")
    for host in hosts:
        if not is_host(host):
            raise ValueError(
                f"--host must be a name or an IP address, without port and brackets, got {host!r}; --port sets the port"
            )
    if is_reference(method):
        raise ValueError(f"{method} is code, which sites do not import: a federation's method is part of an installed "
                         "package (entry point fedcc.methods)")  # fmt: skip
    instance = build_method(method, settings)
    if instance.family == "bound":
        raise ValueError(f"{instance.name} is a bound for simulations; it shares nothing, or private data")
    options = {**options, "clients": len(clients)}
    if public_file is None:
        experiment = Experiment.resolve(method, settings=settings, **options)
        federation = experiment.federation(data_dir)
    elif simulate_sites:
        raise ValueError("--simulate-sites needs a named data set, which --public-file does not use")
    else:
        federation = _own_federation(public_file, class_names, options)
        options = {"models": federation.models[0], **options}
        experiment = _own_experiment(method, asdict(instance), options)  # type: ignore[call-overload]
    public, names = federation.public, federation.names
    x, encoding = public.x.numpy(), federation.encoding
    task = Task(len(names), names, public.shape, len(x), inputs_sha256(x), public.view, x.dtype.name, encoding)  # type: ignore[arg-type]
    default_models = deal([str(m) for m in several(experiment.split.models)], len(clients), experiment.split.assignment)
    networks = {name: model or default_models[k] for k, (name, model) in enumerate(clients.items())}
    experiment = experiment.with_options(models=",".join(networks.values()))
    archs = {k: task.arch(instance, model) for k, model in enumerate(networks.values())}
    training = experiment.training
    training.disclosure(instance, task.classes)
    check_outputs_suffice(
        instance, build_server(instance, public, task.classes, training.recipe(), training.seed, archs)
    )
    if instance.family == "parameters" and len(set(networks.values())) > 1:
        raise ValueError(
            f"{instance.name} averages weights, so all clients need the same network, got {experiment.split.models}"
        )
    round_rules = Rules(**{"quorum": -(-2 * len(clients) // 3), **(rules or {})})
    round_rules.check(len(clients))
    hosts = tuple(dict.fromkeys((*hosts, "localhost", "127.0.0.1")))
    folder = FederationFolder(path, experiment, task, round_rules, networks, hosts, port)
    check_options(folder)
    test = federation.test if test_file is None else site_samples(test_file, task, experiment.split.label)
    _write(folder, public, app, make_keys or simulate_sites)
    if len(test):
        hidden = federation.hidden if test_file is None else None
        labels: dict[str, Any] = {} if hidden is None else {"public_y": hidden.numpy()}
        np.savez(folder.operator / "test.npz", x=test.x.numpy(), y=test["y"].numpy(), **labels)
    if simulate_sites:
        x_name = ENCODED if encoding else "x"
        for name, private in zip(networks, federation.private, strict=True):
            np.savez(folder.site(name) / "data.npz", **{x_name: private.x.numpy(), "y": private["y"].numpy()})  # type: ignore[arg-type]
    folder.write()
    return folder


def _write(folder: FederationFolder, public: Samples, app: str, make_keys: bool) -> None:
    """Write all files but the data and ``federation.toml``, which says that the folder is complete."""
    operator = folder.operator
    (operator / "keys").mkdir(parents=True)
    operator.chmod(0o700)
    folder.query.mkdir()
    (operator / "app").mkdir()
    (operator / "app" / "pyproject.toml").write_text(app)
    trusted_key, signature = sign_app(operator / "app")
    (operator / "app.json").write_text(signature)
    (operator / "app.yaml").write_text(trusted_key)
    make_authority(operator)
    make_server_certificate(operator, folder.hosts)
    make_command_key(folder.command_key)
    np.savez(folder.path / "public.npz", x=public.x.numpy())
    for name in folder.clients:
        site = write_site(folder, name)
        if make_keys:
            make_key_pair(site / "site.key", folder.key(name), name)


def _own_experiment(method: str, settings: Mapping[str, Any], options: Mapping[str, Any]) -> Experiment:
    """An experiment on the sites' own data; rounds and epochs are the paper's unless given."""
    for name in options_of(Split):
        if name in options and name not in ("clients", "models", "assignment", "label", "resize"):
            raise ValueError(
                f"--{name} applies only to a named data set; with --public-file the sites provide the data"
            )
    values = {"data": OWN, "skew": OWN, "augment": "none", "rounds": PAPER_ROUNDS, "epochs": PAPER_EPOCHS}
    return Experiment.of(method.lower(), settings, values | resolve_machine(options))


def _own_federation(path: Path, names: tuple[str, ...], options: Mapping[str, Any]) -> Federation:
    """The operator's public samples and no others, with the network for such inputs.

    Images are normalised by their own mean and standard deviation per channel, a table's columns are encoded.
    """
    if len(names) < 2:
        raise ValueError("with --public-file the classes must be named: --class NAME, at least twice")
    if len(set(names)) < len(names):
        raise ValueError(f"classes must have different names, got {', '.join(names)}")
    x, encoding = _public_inputs(path, options.get("label", ""), options.get("resize", 0)), None
    if not len(x):
        raise ValueError(f"{path} holds no samples")
    if isinstance(x, Table):
        encoding = Encoding.fit(x)
        x = encoding.encode(x)
    assert isinstance(x, np.ndarray)  # files of a federation are read, not mapped
    images = x.dtype == np.uint8
    numbers = encoding is None and x.dtype == np.float32 and x.ndim == 2
    view = _image_view(path, x) if images else standardised(x) if numbers else IDENTITY
    public = Samples({"x": torch.from_numpy(x)}, view)
    network = "resnet14" if images else usual_network(x)
    empty = Samples({"x": public.x[:0]})
    return Federation((), public, empty, len(names), (network,), names=names, encoding=encoding)


def _public_inputs(path: Path, label: str, resize: int) -> Inputs:
    """Public samples: ``x`` of an NPZ file, a table without its column of labels, or a folder of images."""
    if label and path.suffix.lower() not in TABLES:
        raise ValueError(f"label names a column of a table, got label={label} for {path}")
    if path.is_dir():
        paths = list_images(path).paths
        return decode_all(paths, common_form(paths, resize))
    if resize:
        raise ValueError(f"resize is for a folder of images, got resize={resize} for {path}")
    if path.suffix.lower() in TABLES:
        return TABLES[path.suffix.lower()](path).without(label)
    return as_inputs(str(path), read_arrays(path, "x")["x"])


def _image_view(path: Path, x: np.ndarray) -> View:
    scaled = x.astype(np.float64) / 255
    mean, std = scaled.mean((0, 2, 3)), scaled.std((0, 2, 3))
    if not std.all():
        raise ValueError(f"{path}: a channel of the images is constant")
    return View(1 / 255, tuple(mean.round(4).tolist()), tuple(std.round(4).clip(1e-4).tolist()))
