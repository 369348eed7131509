"""The operator's federation folder and the folder that each site receives (docs/federation.md, "The folder")."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fedcc.core.files import write_whole
from fedcc.core.method import AnyMethod
from fedcc.core.model import Arch, Factory
from fedcc.core.naming import unknown
from fedcc.core.options import REQUIRED, check_options, check_value, option
from fedcc.core.samples import IDENTITY, Samples, View
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.options import OPTIONS
from fedcc.experiments.toml import dumps, load
from fedcc.flower.address import write_address
from fedcc.flower.data import errors_named, inputs_sha256, read_arrays
from fedcc.flower.own_network import OWN, client_network
from fedcc.flower.policy import AuditLog, Policy
from fedcc.flower.rules import Rules
from fedcc.inputs.tables import Encoding
from fedcc.methods import build_method, recorded_settings

AGREED = ("method", "settings", *(name for name, o in OPTIONS.items() if o.marks.get("agreed")))  # of the experiment
ENVIRONMENT = "FEDCC_FEDERATION"  # names the folder to the server's app; Flower's configuration would reach every site
Dtype = Literal["uint8", "float32", "int64"]
FORMAT = 2  # of the folders: 1 had neither command keys nor clients that are revoked
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


@dataclass(frozen=True)
class Task:
    """What is learned from what: the same at every site."""

    classes: int = option(REQUIRED, "number of classes", low=2)
    names: tuple[str, ...] = option(REQUIRED, "names of the classes")
    shape: tuple[int, ...] = option(REQUIRED, "shape of one input", low=1)
    public: int = option(REQUIRED, "number of public samples", low=1)
    public_sha256: str = option(REQUIRED, "digest of the public samples")
    view: View = View(scale=1 / 255)
    dtype: Dtype = option("uint8", "number type of the inputs: uint8 (images), float32 or int64 (tokens)")
    encoding: Encoding | None = None  # of a table's columns, which are ``columns`` in files

    @staticmethod
    def read(table: Mapping[str, Any]) -> Task:
        """A task from a file's table, in which the view's fields stand beside the others."""
        values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in table.items()}
        view = View(**{"scale": 1 / 255, **{f.name: values.pop(f.name) for f in fields(View) if f.name in values}})
        columns = values.pop("columns", None)
        task = Task(**values, view=view, encoding=None if columns is None else Encoding.of(columns))
        check_options(view)
        check_value("pad", view.pad, int, 0)
        check_options(task)
        if len(task.names) != task.classes:
            raise ValueError(f"names must be one for each of {task.classes} classes, got {len(task.names)}")
        if task.encoding and (task.dtype, task.shape) != ("float32", (task.encoding.width,)):
            raise ValueError(
                f"columns give {task.encoding.width} inputs in float32, not {task.dtype} of shape {task.shape}"
            )
        return task

    def table(self) -> dict[str, Any]:
        """The task as a file holds it. Its last value is a required one, so a file that was cut off is refused."""
        values = asdict(replace(self, encoding=None))
        del values["encoding"]
        values |= values.pop("view") | ({"columns": self.encoding.values()} if self.encoding else {})
        values["public_sha256"] = values.pop("public_sha256")
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    @property
    def samples_text(self) -> str:
        """What the inputs are called."""
        return "images" if self.dtype == "uint8" else "samples"

    def arch(self, method: AnyMethod, model: str | Factory) -> Arch:
        """A client's network under a method."""
        factory = client_network(model, self.shape) if isinstance(model, str) else model
        tokens = self.dtype != "float32" and self.view == IDENTITY
        return Arch((factory,), method.outputs(self.classes), self.shape, tokens)

    def public_samples(self, path: Path) -> Samples:
        """The public samples of a file, if they are those that everybody has agreed on."""
        x = read_arrays(path, "x")["x"]
        if (digest := inputs_sha256(x)) != self.public_sha256:
            raise ValueError(
                f"{path} holds other public {self.samples_text} than the federation's (sha256 {digest[:12]}, agreed "
                f"{self.public_sha256[:12]}); every site needs the same ones in the same order"
            )
        return Samples({"x": torch.from_numpy(x)}, self.view)


@dataclass(frozen=True)
class FederationFolder:
    """The operator's folder."""

    path: Path
    experiment: Experiment
    task: Task
    rules: Rules
    clients: Mapping[str, str]  # each client's network, by name; their order gives their numbers, for good
    hosts: tuple[str, ...]  # names and addresses of the server; sites use the first
    port: int = option(REQUIRED, "the server's port", low=1, high=65_535)
    revoked: tuple[str, ...] = option((), "clients that no longer take part; they keep their numbers")
    format: int = option(FORMAT, "version of the folder's form", low=1)

    @staticmethod
    def read(path: Path) -> FederationFolder:
        if not (file := path / "federation.toml").is_file():
            raise ValueError(
                f"{path} is not a federation folder: federation.toml is missing; `fedcc federation init` creates one"
            )
        table, experiment = load(file), read_experiment(path / "experiment.toml")
        with errors_named(f"{file} is damaged"):
            task, clients, hosts = Task.read(table["task"]), table["clients"], tuple(table["hosts"])
            parse_clients([f"{name}={client_network(model, task.shape)}" for name, model in clients.items()])
            rules = Rules(**table["rounds"])
            rules.check(len(clients))
            revoked = tuple(table.get("revoked", ()))
            form = table.get("format", 1)
            folder = FederationFolder(path, experiment, task, rules, clients, hosts, table["port"], revoked, form)
            check_options(folder)
            if not hosts:
                raise ValueError("hosts must name at least one")
            if strangers := set(revoked) - set(clients):
                raise ValueError(f"revoked must name clients, got {', '.join(sorted(strangers))}")
        return folder

    @staticmethod
    def open(path: Path) -> FederationFolder:
        """Read a folder that this version works with; others are refused with what to do."""
        folder = FederationFolder.read(path)
        check_format(path, folder.format)
        return folder

    def current(self) -> FederationFolder:
        """This folder with the clients that are in the file by now; ValueError if the file is not whole.

        Half a file may be valid TOML, with half of the clients.
        """
        table = load(file := self.path / "federation.toml")
        with errors_named(f"{file} is damaged"):
            clients, revoked, _ = dict(table["clients"]), tuple(table.get("revoked", ())), table["task"]
            parse_clients([f"{name}={model}" for name, model in clients.items()])
            if list(clients)[: len(self.clients)] != list(self.clients):
                raise ValueError(f"clients keep their places, the first must be {', '.join(self.clients)}")
            for name in list(clients)[len(self.clients) :]:
                client_network(clients[name], self.task.shape)
            if strangers := set(revoked) - set(clients):
                raise ValueError(f"revoked must name clients, got {', '.join(map(str, strangers))}")
        return replace(self, clients=clients, revoked=revoked)

    def latest(self) -> tuple[FederationFolder, str]:
        """As :meth:`current`; while the file is not whole, as when somebody edits it, this folder and what is wrong."""
        try:
            return self.current(), ""
        except (ValueError, OSError) as error:
            return self, str(error)

    def with_counted_clients(self) -> FederationFolder:
        """The folder for a new run: its experiment has the clients of today. That of a run that has begun stays."""
        experiment = self.experiment.with_options(clients=len(self.clients), models=",".join(self.clients.values()))
        return replace(self, experiment=experiment)

    def write(self) -> None:
        table = {
            "format": self.format, "hosts": list(self.hosts), "port": self.port,
            "revoked": list(self.revoked) or None, "rounds": asdict(self.rules), "clients": self.clients,
        }  # fmt: skip
        write_whole(self.path / "experiment.toml", self.experiment.toml())
        write_whole(self.path / "federation.toml", dumps({**table, "task": self.task.table()}))  # last: all is there

    @property
    def operator(self) -> Path:
        return self.path / "operator"

    @property
    def query(self) -> Path:
        """Where a question to the trained federation and its answer lie."""
        return self.operator / "query"

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def address(self) -> str:
        """Where the sites connect."""
        return write_address(self.hosts[0], self.port)

    def site(self, name: str) -> Path:
        return self.path / "sites" / name

    @property
    def command_key(self) -> Path:
        """The key that signs what the sites are asked; ``command.pub`` beside it and in every site's folder fits it."""
        return self.operator / "command.key"

    def key(self, name: str) -> Path:
        """A client's public key; it is missing until the client has sent it."""
        return self.operator / "keys" / f"{name}.pub"

    @property
    def members(self) -> list[str]:
        """The clients that may connect: those with a key that are not revoked."""
        return [name for name in self.clients if name not in self.revoked and self.key(name).is_file()]

    def archs(self, method: AnyMethod) -> dict[int, Arch]:
        return {k: self.task.arch(method, model) for k, model in enumerate(self.clients.values())}

    def terms(self, name: str) -> dict[str, Any]:
        return terms(self.experiment, self.task, list(self.clients).index(name), self.clients[name])

    def test(self) -> dict[str, torch.Tensor] | None:
        """The operator's test set, if there is one: x, y, and the public labels where they are known."""
        path = self.operator / "test.npz"
        if not path.exists():
            return None
        return {n: torch.from_numpy(v) for n, v in read_arrays(path).items()}


@dataclass(frozen=True)
class Site:
    """One site's folder."""

    path: Path
    experiment: Experiment
    task: Task
    name: str = option(REQUIRED, "the client's name")
    number: int = option(REQUIRED, "the client's number", low=0)
    model: str = option(REQUIRED, "the client's network")
    server: str = option(REQUIRED, "HOST:PORT of the server")
    share_model: bool = option(REQUIRED, "send the model to the server at the end")
    networks: tuple[str, ...] = option((), "the networks of all clients, by number")  # older folders lack it
    policy: Policy = Policy()
    format: int = option(FORMAT, "version of the folder's form", low=1)

    @staticmethod
    def find(text: str) -> Path:
        """A site's folder by its path, or by its name in or below the current folder."""
        for path in (Path(text), Path("sites") / text, *sorted(Path().glob(f"*/sites/{text}"))):
            if (path / "site.toml").is_file():
                return path
        if Path(text).is_dir():
            return Path(text)  # what it lacks is said when it is read
        patterns = ("*/site.toml", "sites/*/site.toml", "*/sites/*/site.toml")
        raise unknown("site", text, sorted({file.parent.name for p in patterns for file in Path().glob(p)}))

    @staticmethod
    def read(path: Path) -> Site:
        if not (file := path / "site.toml").is_file():
            raise ValueError(f"{path} is not a site's folder: site.toml is missing; ask the operator for it")
        table, experiment = load(file), read_experiment(path / "experiment.toml")
        with errors_named(f"{file} is damaged"):
            policy, table["format"] = Policy.read(table.pop("policy", {})), table.get("format", 1)
            table["networks"] = tuple(table.get("networks", ()))
            site = Site(path, experiment, Task.read(table.pop("task")), **table, policy=policy)
            check_options(site)
            parse_clients([f"{site.name}={client_network(site.model, site.task.shape)}"])
        return site

    @staticmethod
    def open(path: Path) -> Site:
        """Read a folder that this version works with; others are refused with what to do."""
        site = Site.read(path)
        check_format(path, site.format)
        return site

    def write(self) -> None:
        own = {name: getattr(self, name) for name in ("format", "name", "number", "model", "server", "share_model")}
        own["networks"] = list(self.networks)
        write_whole(self.path / "experiment.toml", self.experiment.toml())
        policy = {"policy": limits} if (limits := self.policy.table()) else {}
        write_whole(self.path / "site.toml", dumps({**own, **policy, "task": self.task.table()}))

    @property
    def brings_network(self) -> bool:
        """Whether the site names its network itself."""
        return self.model == OWN

    @property
    def state(self) -> Path:
        """What the site keeps for itself."""
        return self.path / "state"

    @property
    def audit(self) -> AuditLog:
        """The log of what the site was asked and has answered."""
        return AuditLog(self.state)

    def check_policy(self) -> None:
        """Refuse an experiment that the site's own policy does not allow."""
        training = self.experiment.training
        self.policy.check_method(self.experiment.method)
        self.policy.check_share(training.share, training.answer_epsilon)

    @property
    def may_share_model(self) -> bool:
        """Whether a model tells no more than what the site shares anyway."""
        return self.experiment.training.share == self.policy.share == "predictions"

    def archs(self, method: AnyMethod, own: str | Factory) -> dict[int, Arch]:
        """The clients' networks under a method, this site's as it is here."""
        return {k: self.task.arch(method, model) for k, model in enumerate(self.networks)} | {
            self.number: self.task.arch(method, own)
        }

    def terms(self) -> dict[str, Any]:
        return terms(self.experiment, self.task, self.number, self.model)


def check_format(path: Path, form: int) -> None:
    """Refuse a folder of an older or newer fedcc."""
    if form < FORMAT:
        raise ValueError(f"{path} has format {form}, of an older fedcc: `fedcc federation upgrade {path}` upgrades it")
    if form > FORMAT:
        raise ValueError(f"{path} has format {form}, this fedcc knows {FORMAT}: install the newer version that made it")


def terms(experiment: Experiment, task: Task, number: int, model: str) -> dict[str, Any]:
    """What server and site must agree on: the values that decide what a client computes and sends."""
    values = experiment.values()
    agreed = {name: values[name] for name in AGREED} | task.table() | {"client": number, "model": model}
    return json.loads(json.dumps(agreed))  # type: ignore[no-any-return]


def disagreement(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first value in which the server's terms differ from a site's: its name, the server's, the site's; or None."""
    for name in (*mine, *theirs):
        a, b = theirs.get(name), mine.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            if found := disagreement(a, b):  # none if one of them only lacks what is None in the other
                return found
        elif a != b:
            return name, a, b
    return None


def read_experiment(path: Path) -> Experiment:
    """An experiment whose data may be the sites' own; options that an older file lacks are as they were then."""
    table = load(path)
    with errors_named(f"{path} is damaged"):
        method, settings = table.pop("method"), table.pop("settings", {})
        check_value("method", method, str)
        settings, reason = recorded_settings(method, settings, table.pop("version", None))
        if reason:
            raise ValueError(f"{reason}; `fedcc federation init` makes the federation again")
        return Experiment.of(method, asdict(build_method(method, settings)), table)  # type: ignore[call-overload]


def parse_clients(texts: list[str]) -> dict[str, str | None]:
    """``["a=resnet8", "b"]`` as names and networks."""
    clients: dict[str, str | None] = {}
    for text in texts:
        name, equals, model = text.partition("=")
        if not re.fullmatch(NAME, name):
            raise ValueError(
                f"a client's name has letters, digits, '.', '_' and '-' and begins with a letter or digit, got {name!r}"
            )
        if name == "command":
            raise ValueError("a client cannot be called command: command.pub is the operator's file in a site's folder")
        if name in clients:
            raise ValueError(f"clients must have different names, got {name!r} twice")
        if equals and not model:
            raise ValueError(f"a client is given as NAME or NAME=MODEL, got {text!r}")
        clients[name] = model or None
    if not clients:
        raise ValueError("a federation needs at least one client: --client NAME[=MODEL], once for each")
    return clients
