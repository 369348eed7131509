"""One run's description: every value that decides its numbers.

It survives a round trip through TOML, and one command line repeats it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedcc.code import check_allowed, code_digests
from fedcc.core.disclosure import share_reason
from fedcc.core.method import AnyMethod
from fedcc.core.naming import shortened
from fedcc.core.options import check_names, check_value, options_of, setting_text
from fedcc.core.samples import View
from fedcc.engine import choose_device, default_engine, default_precision
from fedcc.experiments.options import GROUPS, OPTIONS, Machine, Measurement, Split, Training, current_values, group_of
from fedcc.experiments.toml import dumps, load
from fedcc.federation import Federation, several
from fedcc.methods import METHODS, build_method, find_method, method_name, recorded_settings
from fedcc.nets import network

UNSAID = {name: OPTIONS[name].default for name in ("resize", "validation", "label", "test", "share", "answer_epsilon")}
"""Options that a command line leaves out where they have these values."""


@dataclass(frozen=True)
class Experiment:
    """A run with every option resolved. Make one with :meth:`resolve`.

    >>> e = Experiment.resolve("fedcc", data="digits")
    >>> e.split.skew, e.split.clients, e.split.models, e.training.rounds
    ('classes:1', 10, 'resnet8,resnet14', 3)
    """

    method: str
    split: Split
    training: Training
    measurement: Measurement
    machine: Machine
    settings: Mapping[str, Any] = field(default_factory=dict)  # the method's hyper-parameters

    def __post_init__(self) -> None:
        View().with_augment(self.split.augment)

    @staticmethod
    def resolve(method: str, *, settings: Mapping[str, Any] | None = None, **options: Any) -> Experiment:
        """An experiment; options that are not given, or None, come from the data set, the method and the machine."""
        from fedcc.data import describe
        from fedcc.data.skew import parse

        check_names("setting of a run", options, OPTIONS)
        values = current_values({name: value for name, value in options.items() if value is not None})
        for name, value in {"method": method, **values}.items():
            check_value(name, value, OPTIONS[name].hint if name in OPTIONS else str)
        if not isinstance(settings, Mapping | None):
            raise ValueError(f"settings must be a table of names and values, got {shortened(settings)}")
        instance = build_method(method, settings)
        if reason := share_reason(instance, values.get("share", "predictions")):
            raise ValueError(reason)
        reading = {name: values[name] for name in ("label", "test") if name in values}
        description = describe(values.get("data", "digits"), resize=values.get("resize") or None, **reading)
        defaults = description.defaults.options(instance.one_network)
        values = defaults | values | {"data": description.name}
        values["skew"] = str(parse(values["skew"]))
        for name in map(str, several(values["models"])):
            network(name, description.shape)
        return Experiment.of(method_name(method), asdict(instance), resolve_machine(values))  # type: ignore[call-overload]

    @staticmethod
    def of(method: str, settings: Mapping[str, Any], values: Mapping[str, Any]) -> Experiment:
        """An experiment from options by name, none resolved; those that an older file lacks get their defaults."""
        values = {name: value for name, value in current_values(values).items() if name != "version"}
        check_names("setting of a run", values, OPTIONS)
        if missing := [n for n, o in OPTIONS.items() if o.default is MISSING and n not in values]:
            raise ValueError(f"{missing[0]} is missing")
        parts = {group.__name__.lower(): group_of(group, values) for group in GROUPS}
        return Experiment(method, settings=settings, **parts)  # type: ignore[arg-type]

    @staticmethod
    def stored(table: Mapping[str, Any]) -> Experiment:
        """An experiment as a record holds it, whatever machine made it."""
        values = dict(table)
        return Experiment.of(values.pop("method"), values.pop("settings"), values)

    @staticmethod
    def read(path: Path) -> Experiment:
        """Read ``experiment.toml``."""
        table = load(path)
        if "method" not in table:
            raise ValueError(f"{path} names no method")
        try:
            method, settings, version = table.pop("method"), table.pop("settings", None), table.pop("version", None)
            if version is not None:
                settings, reason = recorded_settings(method, settings or {}, version)
                if reason:
                    raise ValueError(reason)
            experiment = Experiment.resolve(method, settings=settings, **table)
            now = experiment.kind.version
            if version not in (None, now) and experiment.method not in METHODS:
                raise ValueError(f"version {version} of {method} is another algorithm than version {now}")
            return experiment
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def values(self) -> dict[str, Any]:
        """Everything as one flat table, as files hold it."""
        groups = (self.split, self.training, self.measurement, self.machine)
        options = {name: value for group in groups for name, value in asdict(group).items()}
        version = self.kind.version
        return {"method": self.method, "version": version, **options, "settings": dict(self.settings)}

    def with_options(self, **options: Any) -> Experiment:
        """The experiment with some options changed."""
        values = self.values() | options
        parts: dict[str, Any] = {group.__name__.lower(): group_of(group, values) for group in GROUPS}
        return replace(self, settings=values["settings"], **parts)

    def toml(self) -> str:
        return dumps(self.values())

    @property
    def kind(self) -> type[AnyMethod]:
        """The method's class."""
        return find_method(self.method)

    def build_method(self) -> AnyMethod:
        """The method with its settings."""
        return build_method(self.method, self.settings)

    def federation(self, folder: Path | None = None) -> Federation:
        """The data, split."""
        options = asdict(self.split) | {"resize": self.split.resize or None}
        check_allowed(self.split.data, *map(str, several(self.split.models)))  # ``named`` takes them from the user
        return Federation.named(seed=self.training.seed, folder=folder, **options)

    def code_digests(self) -> dict[str, str]:
        """The digests of the files of imported code that it uses."""
        return code_digests([self.method, self.split.data, *map(str, several(self.split.models))])

    def foreign_defaults(self) -> dict[str, dict[str, Any]]:
        """Defaults of a method and of data that are not in this package, so that a report can tell what was changed."""
        from fedcc.data import DATASETS, describe

        split, defaults = self.split, {}
        if self.method not in METHODS:
            usual = {f.name: f.default for f in fields(self.kind)}  # type: ignore[arg-type]
            defaults["settings"] = {name: value for name, value in usual.items() if value is not MISSING}
        if split.data not in DATASETS:
            with suppress(ValueError):  # a federation's data are at its sites
                about = describe(split.data, resize=split.resize or None, label=split.label, test=split.test)
                defaults["options"] = about.defaults.options(self.build_method().one_network)
        return defaults

    @property
    def folder(self) -> Path:
        """Where its run folder belongs below a folder of runs."""
        skew = self.split.skew.replace(":", "-").replace(",", "_").replace("=", "-")
        data, method = (re.sub(r"[^\w.-]+", "-", Path(name).name) for name in (self.split.data, self.method))
        return Path(f"{data}_{skew}") / method / f"seed{self.training.seed}"

    def command(self) -> str:
        """The command line that repeats this run, in full."""
        words = ["fedcc", "run", self.method]
        for name, value in self.values().items():
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{flag[2:]}")
            elif name not in ("method", "version", "settings") and UNSAID.get(name) != value:
                words += [flag, str(value)]
        defaults = {f.name: f.default for f in fields(self.kind)}  # type: ignore[arg-type]
        for name, value in self.settings.items():
            if value != defaults[name]:
                words += ["--set", f"{name}={setting_text(value)}"]
        return shlex.join(words)


def first_difference(other: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first entry of two tables, or of tables inside them, that differs: its name and both values."""
    for name in {**own, **other}:
        values = other.get(name, "missing"), own.get(name, "missing")
        if name not in other or name not in own or values[0] != values[1]:
            inner = first_difference(*values) if all(isinstance(v, Mapping) for v in values) else None
            return inner or (name, *values)
    return None


def resolve_machine(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the device found, and the engine and precision that suit it unless they are given."""
    device = choose_device(options.get("device", "auto"))
    found = {"engine": default_engine(device), **options, "device": str(device)}
    return found if "precision" in found else found | {"precision": default_precision(device)}


def parse_settings(method: str, pairs: Sequence[str]) -> dict[str, Any]:
    """``["lam=0.5", "sync_head=restricted"]`` as settings of a method, each in its own type.

    >>> parse_settings("fedcc", ["lam=1", "refine_joint_batch=false"])
    {'lam': 1.0, 'refine_joint_batch': False}
    """
    kind = find_method(method)
    declared = options_of(kind)
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_").replace(".", "_")
        if not equals:
            raise ValueError(f"a setting is given as name=value, got {pair!r}")
        if not declared:
            raise ValueError(f"{kind.__name__} has no settings, got {pair!r}")
        check_names(f"setting of {kind.__name__}", {name: text}, declared)
        settings[name] = declared[name].parse(text.strip())
    return settings
