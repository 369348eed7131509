"""One run's description: every value that decides its numbers. It survives TOML, and a command line makes it again."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from fedcc.core.method import AnyMethod, check_value
from fedcc.core.naming import shortened, unknown
from fedcc.core.requests import Recipe
from fedcc.core.samples import View
from fedcc.core.wire import WIRE
from fedcc.engine import ENGINES, PRECISIONS, usual_engine, usual_precision
from fedcc.experiments.toml import dumps, load
from fedcc.federation import Assignment, Federation, several
from fedcc.methods import METHODS, make
from fedcc.nets import network


@dataclass(frozen=True)
class Experiment:
    """A run, resolved: nothing is left to defaults. Make one with :meth:`resolved`.

    >>> e = Experiment.resolved("fedcc", data="digits")
    >>> e.skew, e.clients, e.models, e.rounds
    ('classes:1', 10, 'resnet8,resnet14', 3)
    """

    method: str
    data: str
    skew: str
    clients: int
    models: str
    rounds: int
    epochs: int
    assignment: Assignment = "alternate"
    public: float = 0.1
    stratified: bool = False
    fraction: float = 1.0
    augment: str = "none"
    validation: float = 0.0  # share of each client's samples that is held out and evaluated instead of the test set
    resize: int = 0  # Tiny ImageNet's side in pixels; 0 keeps the data set's own
    lr: float = 1e-3
    batch: int = 64
    reset: Literal["phase", "round"] = "phase"
    participation: float = 1.0
    wire: str = "fp32"
    client_accuracy: bool = True
    seed: int = 0
    device: str = "cpu"
    precision: str = "fp32"
    threads: int = 1
    engine: str = "plain"
    deterministic: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_types({f.name: getattr(self, f.name) for f in fields(self)})
        for name, (low, high) in _RANGES.items():
            if not low <= getattr(self, name) <= high:
                limit = f"at least {low}" if getattr(self, name) < low else f"at most {high:,}"
                raise ValueError(f"{name} must be {limit}, got {shortened(getattr(self, name))}")
        for name in ("public", "fraction", "participation"):
            if not 0 < getattr(self, name) <= 1 or (name == "public" and self.public == 1):
                below = "below" if name == "public" else "at most"
                raise ValueError(f"{name} must be above 0 and {below} 1, got {getattr(self, name)}")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation must be at least 0 and below 1, got {self.validation}")
        View().with_augment(self.augment)
        for name, known in (("wire", WIRE), ("precision", PRECISIONS), ("engine", ENGINES)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)

    @staticmethod
    def resolved(method: str, *, settings: Mapping[str, Any] | None = None, **given: Any) -> Experiment:
        """The experiment with what is not given (or None) taken from the data set, the method and the machine."""
        from fedcc.data import find
        from fedcc.data.skew import parse
        from fedcc.engine import choose_device

        known = [f.name for f in fields(Experiment) if f.name not in ("method", "settings")]
        for name in given:
            if name not in known:
                raise unknown("setting of a run", name, known)
        values = present_spelling({name: value for name, value in given.items() if value is not None})
        _check_types({"method": method, "settings": {} if settings is None else settings, **values})
        made = make(method, settings)
        about = find(values.get("data", "digits"))
        defaults = about.defaults
        one = made.family == "parameters" or made.name == "Centralized"
        values["data"] = about.name
        values["skew"] = str(parse(values.get("skew", defaults.skew)))
        values.setdefault("clients", defaults.clients)
        values.setdefault("rounds", defaults.rounds)
        values.setdefault("epochs", defaults.epochs)
        values.setdefault("models", defaults.shared_model if one else defaults.models)
        values.setdefault("augment", "standard" if defaults.augment else "none")
        device = choose_device(values.get("device", "auto"))
        values["device"] = str(device)
        values.setdefault("engine", usual_engine(device))
        values.setdefault("precision", usual_precision(device))
        for name in map(str, several(values["models"])):
            network(name, about.shape)
        return Experiment(method=method.lower(), settings=asdict(made), **values)  # type: ignore[call-overload]

    @staticmethod
    def read(path: Path) -> Experiment:
        """Read ``experiment.toml``."""
        table = load(path)
        if "method" not in table:
            raise ValueError(f"{path} names no method")
        try:
            return Experiment.resolved(table.pop("method"), settings=table.pop("settings", None), **table)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def toml(self) -> str:
        return dumps(asdict(self))

    def made(self) -> AnyMethod:
        """The method with its settings."""
        return make(self.method, self.settings)

    def recipe(self) -> Recipe:
        """How fits train."""
        return Recipe(lr=self.lr, batch=self.batch, epochs=self.epochs, reset=self.reset)

    def federation(self, folder: Path | None = None) -> Federation:
        """The data, split."""
        return Federation.named(
            self.data,
            self.skew,
            self.clients,
            self.models,
            self.seed,
            public=self.public,
            stratified=self.stratified,
            fraction=self.fraction,
            augment=self.augment,
            validation=self.validation,
            assignment=self.assignment,
            resize=self.resize or None,
            folder=folder,
        )

    @property
    def place(self) -> Path:
        """Where its folder lies below a folder of runs."""
        skew = self.skew.replace(":", "-").replace(",", "_").replace("=", "-")
        return Path(f"{self.data}_{skew}") / self.method / f"seed{self.seed}"

    def command(self) -> str:
        """The command line that makes this run again, in full."""
        words = ["fedcc", "run", self.method]
        for f in fields(self):
            if f.name in ("method", "settings"):
                continue
            value, flag = getattr(self, f.name), "--" + f.name.replace("_", "-")
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{flag[2:]}")
            elif not (f.name in ("resize", "validation") and value == 0):
                words += [flag, str(value)]
        defaults = asdict(METHODS[self.method]())  # type: ignore[call-overload]
        for name, value in self.settings.items():
            if value != defaults[name]:
                words += ["--set", f"{name}={setting_text(value)}"]
        return shlex.join(words)


_RANGES = {  # the upper ends stop slips of the finger that would fill the memory before anything is said
    "clients": (1, 1_000_000),
    "rounds": (1, 100_000),
    "epochs": (0, 100_000),
    "batch": (1, 65_536),
    "threads": (1, 1_024),
    "seed": (0, 2**63 - 1),
    "lr": (0, math.inf),
    "resize": (0, 64),
}


def _check_types(values: Mapping[str, Any]) -> None:
    hints = get_type_hints(Experiment)
    for name, value in values.items():
        if name != "settings":
            check_value(name, value, hints[name])
        elif not isinstance(value, Mapping):
            raise ValueError(f"settings must be a table of names and values, got {shortened(value)}")


def present_spelling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options as they are spelled today: ``augment`` used to be true or false."""
    spelled = dict(values)
    if isinstance(spelled.get("augment"), bool):
        spelled["augment"] = "standard" if spelled["augment"] else "none"
    return spelled


def present_words(words: list[str]) -> list[str]:
    """A command line as it is spelled today: commands of older records have ``--augment`` and ``--no-augment``."""
    spelled = []
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        spelled += ["--augment", "none"] if word == "--no-augment" else [word]
        if word == "--augment" and after.startswith("--"):
            spelled.append("standard")
    return spelled


def setting_text(value: Any) -> str:
    """A setting as it is typed behind ``--set name=``."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_settings(method: str, pairs: list[str]) -> dict[str, Any]:
    """``["lam=0.5", "sync_head=restricted"]`` as settings of a method, each in its own type.

    >>> parse_settings("fedcc", ["lam=1", "majority_recompute=false", "epochs_fit=none"])
    {'lam': 1.0, 'majority_recompute': False, 'epochs_fit': None}
    """
    if method.lower() not in METHODS:
        raise unknown("method", method, METHODS)
    kind = METHODS[method.lower()]
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_").replace(".", "_")
        if not equals:
            raise ValueError(f"a setting is given as name=value, got {pair!r}")
        if name not in known:
            if not known:
                raise ValueError(f"{kind.__name__} has no settings, got {pair!r}")
            raise unknown(f"setting of {kind.__name__}", name, known)
        settings[name] = _typed(name, text.strip(), hints[name])
    return settings


def _typed(name: str, text: str, hint: Any) -> Any:
    kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
    if type(None) in kinds and text.lower() in ("none", ""):
        return None
    if bool in kinds:
        if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
            raise ValueError(f"{name} must be true or false, got {shortened(text)}")
        return text.lower() in ("true", "yes", "1")
    for kind, words in ((int, "a whole number"), (float, "a number")):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                raise ValueError(f"{name} must be {words}, got {shortened(text)}") from None
    return text
