"""The federation folder of the operator and the folder that each site is handed: what they hold, checked.

```
FOLDER/
  federation.toml  experiment.toml  public.npz
  operator/    keys, certificates, the test set, Flower's home, logs: never leaves this machine
  sites/NAME/  what the site NAME needs, ready to hand over
  run/         the run folder
```
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcc.core.files import written_whole
from fedcc.core.method import AnyMethod
from fedcc.core.model import Arch
from fedcc.core.naming import unknown
from fedcc.core.options import check_value
from fedcc.core.samples import Samples, View
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.options import OPTIONS
from fedcc.experiments.toml import dumps, load
from fedcc.methods import make
from fedcc.nets import network

AGREED = ("method", "settings", *(name for name, o in OPTIONS.items() if o.marks.get("agreed")))  # of the experiment
ENVIRONMENT = "FEDCC_FEDERATION"  # names the folder to the server's app; Flower's configuration would tell every site
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


@dataclass(frozen=True)
class Task:
    """What is learned from what: the same at every site."""

    classes: int
    names: tuple[str, ...]  # of the classes
    shape: tuple[int, ...]  # of one image
    public: int  # samples
    public_sha256: str
    scale: float = 1 / 255
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    pad: int = 0
    flip: bool = False
    hole: float = 0.0
    brightness: float = 0.0
    shift: float = 0.0

    @staticmethod
    def of(public: Samples, names: tuple[str, ...]) -> Task:
        digest = images_sha256(public.x.numpy())
        return Task(len(names), names, public.shape, len(public), digest, **asdict(public.view))

    @staticmethod
    def read(table: Mapping[str, Any]) -> Task:
        """A task as a file holds it; a ValueError or TypeError says what is wrong with it."""
        values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in table.items()}
        task = Task(**values)
        for name, kind, low in (("classes", int, 2), ("public", int, 1), ("public_sha256", str, None),
                                ("scale", float, None), ("pad", int, 0), ("flip", bool, None)):  # fmt: skip
            check_value(name, values.get(name, getattr(task, name)), kind, low)
        for name, kind, low in (("names", str, None), ("shape", int, 1), ("mean", float, None), ("std", float, None)):
            check_list(name, getattr(task, name), kind, low)
        if len(task.names) != task.classes:
            raise ValueError(f"names must be one for each of {task.classes} classes, got {len(task.names)}")
        return task

    @property
    def view(self) -> View:
        return View(**{f.name: getattr(self, f.name) for f in fields(View)})

    def arch(self, method: AnyMethod, model: str) -> Arch:
        """A client's network under a method."""
        return Arch((network(model, self.shape),), method.outputs(self.classes), self.shape)

    def public_samples(self, path: Path) -> Samples:
        """The public images of a folder, if they are those that all have agreed on."""
        x = arrays(path, "x")["x"]
        if (found := images_sha256(x)) != self.public_sha256:
            raise ValueError(
                f"{path} holds other public images than the federation's (sha256 {found[:12]}, agreed "
                f"{self.public_sha256[:12]}); every site needs the same ones in the same order"
            )
        return Samples({"x": torch.from_numpy(x)}, self.view)


@dataclass(frozen=True)
class Rules:
    """When a round ends, and who is waited for."""

    quorum: int  # clients whose uploads make a round
    deadline: float = 3600.0  # seconds from a round's beginning after which it ends, if there is a quorum
    grace: float = 60.0  # seconds that the others have once there is a quorum
    patience: int = 10  # deadlines that pass without a quorum before the run stops
    strikes: int = 3  # failures in a row after which a client is set aside

    def checked(self, clients: int) -> Rules:
        check_value("quorum", self.quorum, int)
        if not 1 <= self.quorum <= clients:
            raise ValueError(f"quorum must be from 1 to the number of clients, {clients}, got {self.quorum}")
        for name, low in (("deadline", 1), ("grace", 0)):
            check_value(name, getattr(self, name), float, low)
        for name in ("patience", "strikes"):
            check_value(name, getattr(self, name), int, 1)
        return self


@dataclass(frozen=True)
class FederationFolder:
    """The operator's folder."""

    path: Path
    experiment: Experiment
    task: Task
    rules: Rules
    clients: Mapping[str, str]  # each client's network, by name; their order gives their numbers
    hosts: tuple[str, ...]  # names and addresses under which sites reach the server, the first is what they are told
    port: int

    @staticmethod
    def read(path: Path) -> FederationFolder:
        file = path / "federation.toml"
        if not file.is_file():
            raise ValueError(f"{path} is no federation folder: federation.toml is missing; `fedcc federation init`")
        table = load(file)
        with damage(file):
            task, clients, hosts = Task.read(table["task"]), table["clients"], tuple(table["hosts"])
            client_names([f"{name}={network(model, task.shape)}" for name, model in clients.items()])
            rules = Rules(**table["rounds"]).checked(len(clients))
            check_list("hosts", hosts, str)
            check_value("port", port := table["port"], int, 1, 65_535)
            if not hosts:
                raise ValueError("hosts must name at least one")
        return FederationFolder(path, read_experiment(path / "experiment.toml"), task, rules, clients, hosts, port)

    def write(self) -> None:
        table = {"hosts": list(self.hosts), "port": self.port, "rounds": asdict(self.rules), "clients": self.clients}
        text = dumps({**table, "task": _lists(asdict(self.task))})
        with written_whole(self.path / "experiment.toml") as file:
            file.write(self.experiment.toml().encode())
        with written_whole(self.path / "federation.toml") as file:  # last: it says that the folder is complete
            file.write(text.encode())

    @property
    def operator(self) -> Path:
        return self.path / "operator"

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def address(self) -> str:
        """What the sites are told."""
        return f"{self.hosts[0]}:{self.port}"

    def key(self, name: str) -> Path:
        """A client's public key."""
        return self.operator / "keys" / f"{name}.pub"

    def number(self, name: str) -> int:
        return list(self.clients).index(name)

    def archs(self, method: AnyMethod) -> dict[int, Arch]:
        return {k: self.task.arch(method, model) for k, model in enumerate(self.clients.values())}

    def terms(self, name: str) -> dict[str, Any]:
        return terms(self.experiment, self.task, self.number(name), self.clients[name])

    def test(self) -> dict[str, torch.Tensor] | None:
        """The operator's test set, if there is one: x, y, and the public labels where they are known."""
        path = self.operator / "test.npz"
        if not path.exists():
            return None
        return {n: torch.from_numpy(v) for n, v in arrays(path).items()}


@dataclass(frozen=True)
class Site:
    """One site's folder."""

    path: Path
    name: str
    number: int
    model: str
    server: str
    share_model: bool
    experiment: Experiment
    task: Task

    @staticmethod
    def find(text: str) -> Path:
        """A site's folder by its path, or by its name in or below the current folder."""
        tried = [Path(text), Path("sites") / text, *sorted(Path().glob(f"*/sites/{text}"))]
        for path in tried:
            if (path / "site.toml").is_file():
                return path
        places = ("*/site.toml", "sites/*/site.toml", "*/sites/*/site.toml")
        known = sorted({p.parent.name for place in places for p in Path().glob(place)})
        raise unknown("site", text, known)

    @staticmethod
    def read(path: Path) -> Site:
        file = path / "site.toml"
        if not file.is_file():
            raise ValueError(f"{path} is no site's folder: site.toml is missing; the operator hands it over")
        table, experiment = load(file), read_experiment(path / "experiment.toml")
        with damage(file):
            site = Site(path, experiment=experiment, task=Task.read(table.pop("task")), **table)
            for name, kind in (("name", str), ("number", int), ("model", str), ("server", str), ("share_model", bool)):
                check_value(name, getattr(site, name), kind, 0 if kind is int else None)
            client_names([f"{site.name}={network(site.model, site.task.shape)}"])
        return site

    def write(self) -> None:
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("path", "experiment", "task")}
        with written_whole(self.path / "experiment.toml") as file:
            file.write(self.experiment.toml().encode())
        with written_whole(self.path / "site.toml") as file:
            file.write(dumps({**own, "task": _lists(asdict(self.task))}).encode())

    @property
    def state(self) -> Path:
        """What the site keeps for itself."""
        return self.path / "state"

    def terms(self) -> dict[str, Any]:
        return terms(self.experiment, self.task, self.number, self.model)


def terms(experiment: Experiment, task: Task, number: int, model: str) -> dict[str, Any]:
    """What server and site have agreed on: the values that decide what a client computes and sends."""
    values = experiment.values()
    agreed = {name: values[name] for name in AGREED} | asdict(task) | {"client": number, "model": model}
    return json.loads(json.dumps(agreed))  # type: ignore[no-any-return]


def disagreement(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str | None:
    """The first value in which two agreements differ, in words."""
    for name in (*mine, *theirs):
        a, b = theirs.get(name), mine.get(name)
        if isinstance(a, dict) and isinstance(b, dict) and a != b:
            return disagreement(a, b)
        if a != b:
            return f"{name} is {a} on the server and {b} here"
    return None


def read_experiment(path: Path) -> Experiment:
    """An experiment whose data may be the sites' own, of no known name."""
    table = load(path)
    with damage(path):
        method, settings = table.pop("method"), table.pop("settings", {})
        check_value("method", method, str)
        return Experiment.of(method, asdict(make(method, settings)), table)  # type: ignore[call-overload]


def client_names(given: list[str]) -> dict[str, str | None]:
    """``["a=resnet8", "b"]`` as names and networks."""
    clients: dict[str, str | None] = {}
    for text in given:
        name, equals, model = text.partition("=")
        if not re.fullmatch(NAME, name):
            raise ValueError(
                f"a client's name has letters, digits, '.', '_' and '-' and begins without these, got {name!r}"
            )
        if name in clients:
            raise ValueError(f"clients must have different names, got {name!r} twice")
        if equals and not model:
            raise ValueError(f"a client is given as NAME or NAME=MODEL, got {text!r}")
        clients[name] = model or None
    if not clients:
        raise ValueError("a federation needs at least one client: --client NAME[=MODEL], once for each")
    return clients


def arrays(path: Path, *names: str) -> dict[str, Any]:
    """The arrays of an NPZ file, these at least; objects are refused, as they would be unpickled."""
    with readable(path, "NPZ file"), np.load(path, allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
        if odd := [name for name, value in found.items() if not isinstance(value, np.ndarray)]:
            raise ValueError(f"{odd[0]} is no array")
    for name in names:
        if name not in found:
            raise ValueError(f"{path} must hold the arrays {', '.join(names)}, got {', '.join(found) or 'none'}")
    return found


def images_sha256(x: np.ndarray) -> str:
    digest = hashlib.sha256(repr((x.shape, x.dtype.str)).encode())
    digest.update(np.ascontiguousarray(x).data)
    return digest.hexdigest()


def _lists(values: Mapping[str, Any]) -> dict[str, Any]:
    return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}


def check_list(name: str, values: Any, kind: type, low: float | None = None) -> None:
    """Refuse what is no list, or has an entry of another kind or below ``low``."""
    if not isinstance(values, tuple):
        raise ValueError(f"{name} must be a list, got {values!r}")
    for value in values:
        check_value(name, value, kind, low)


@contextmanager
def damage(path: Path) -> Iterator[None]:
    """Whatever is wrong with the content of a file of settings is a ValueError that names the file."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is damaged: {reason}") from None


@contextmanager
def readable(path: Path, what: str) -> Iterator[None]:
    """Whatever keeps a file of data from being read is a ValueError that names it: readers of damaged ones may raise
    nearly anything."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path} is not there") from None
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} is no readable {what} ({reason[:200]})") from None
