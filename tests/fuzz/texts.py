"""What people type: experiment files, sweep files, ``--set`` and the other options of the command line."""

from __future__ import annotations

import random
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, fields
from io import StringIO
from pathlib import Path
from typing import Any

import click
import typer

from fedcc import cli
from fedcc.cli import program
from fedcc.data.dataset import DataError
from fedcc.experiments import sweep
from fedcc.experiments.experiment import Experiment, parse_settings
from fedcc.experiments.options import OPTIONS
from fedcc.methods import METHODS
from fuzz.harness import Case, Target, Wrong
from fuzz.mutate import RAW_TOML, VALUES, mutated_bytes, mutated_tree, to_toml

WORDS = (
    *METHODS, "digits", "fashion", "cifar100", "tiny", "classes:2", "dirichlet:0.5", "iid", "resnet14", "alternate",
    "halves", "phase", "round", "fp32", "int8-stochastic", "bf16", "fused", "plain", "cuda", "auto",
)  # fmt: skip
LONG = (
    "9" * 5000, "1e" + "9" * 50, "٣", "1_0", "0x1", "a/" * 2000, "classes:" + "9" * 400, "dirichlet:" + "9" * 400,
    "resnet" + "8" * 50, "," * 100, "resnet8," * 5000, "b" * 5000,
)  # fmt: skip


def experiments() -> list[dict[str, Any]]:
    """Valid descriptions, as tables: one of each method, over all data sets."""
    datas = ("digits", "fashion", "cifar10", "cifar100", "tiny-imagenet")
    found = [Experiment.resolve(m, data=datas[n % 5], device="cpu", seed=n) for n, m in enumerate(METHODS)]
    return [without_none(asdict(e)) for e in found]


def without_none(tree: dict[str, Any]) -> dict[str, Any]:
    """TOML has no such value."""
    return {k: without_none(v) if isinstance(v, dict) else v for k, v in tree.items() if v is not None}


class Toml(Target):
    """A TOML file."""

    file: str
    trees: list[dict[str, Any]]

    def prepare(self, folder: Path) -> None:
        self.trees = self.examples()
        self.texts = [to_toml(tree) for tree in self.trees]

    def examples(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    def make(self, rng: random.Random) -> Case:
        n = rng.randrange(len(self.trees))
        if rng.random() < 0.25:
            return {self.file: mutated_bytes(rng, self.texts[n], self.texts)}
        return {self.file: to_toml(mutated_tree(rng, self.trees[n], RAW_TOML, self.trees, WORDS))}

    def path(self, case: Case, folder: Path) -> Path:
        content = case[self.file]
        assert content is not None
        (folder / self.file).write_bytes(content)
        return folder / self.file


class Config(Toml):
    """``fedcc run --config FILE``; what is accepted says the same when it is written and read again."""

    name, file = "config", "experiment.toml"

    def examples(self) -> list[dict[str, Any]]:
        return experiments()

    def check(self, case: Case, folder: Path) -> bool:
        e = Experiment.read(self.path(case, folder))
        e.build_method(), e.folder, e.command()
        again = folder / "again.toml"
        again.write_text(e.toml())
        if Experiment.read(again) != e:
            raise Wrong("written and read again it is another experiment")
        return True


class SweepFile(Toml):
    """``fedcc sweep FILE``."""

    name, file = "sweep", "sweep.toml"

    def examples(self) -> list[dict[str, Any]]:
        return [
            {"methods": ["fedavg", "fedcc"], "seeds": [0, 1], "data": "digits", "skew": ["classes:1", "iid"]},
            {
                "methods": ["local"],
                "rounds": 2,
                "scenario": [{"name": "few", "data": "digits", "clients": 3}, {"data": "cifar10", "skew": "classes:2"}],
                "variant": [
                    {"method": "fedcc", "name": "trust", "settings": {"trust": 2.0}},
                    {"method": "fedprox", "name": "strong", "settings": {"mu": 1.0}, "epochs": 3, "lr": 0.01},
                ],
            },
        ]

    def check(self, case: Case, folder: Path) -> bool:
        runs = sweep.read(self.path(case, folder))
        for run in runs[:3]:
            run.state(folder)
        sweep.shard(runs, "1/2")
        return True


class Settings(Target):
    """``--set name=value`` and the values of a run's options, as Python takes them."""

    name, names_files = "set", False

    def prepare(self, folder: Path) -> None:
        self.known = {m: [f.name for f in fields(kind)] for m, kind in METHODS.items()}  # type: ignore[arg-type]
        self.options = list(OPTIONS)

    def make(self, rng: random.Random) -> Case:
        chosen = rng.choice(tuple(METHODS))
        pairs = []
        for _ in range(rng.choice((1, 1, 2, 4))):
            name = rng.choice(self.known[chosen] or ["x"]) if rng.random() < 0.95 else text(rng)
            pairs.append(name + ("=" if rng.random() < 0.98 else "") + text(rng))
        return {"method": chosen.encode(), **{f"set-{n}": encoded(pair) for n, pair in enumerate(pairs)}}

    def check(self, case: Case, folder: Path) -> bool:
        pairs = [decoded(v) for name, v in case.items() if name.startswith("set-")]
        name = decoded(case["method"])
        e = Experiment.resolve(name, settings=parse_settings(name, pairs), device="cpu")
        told = [word.partition("=") for word in shlex.split(e.command()) if "=" in word]
        if parse_settings(name, ["".join(pair) for pair in told]) != {n: e.settings[n] for n, _, _ in told}:
            raise Wrong("the command that makes the run again sets other values")
        return True


IMPOSSIBLE = "[\x00\ud800-\udc7f\udd00-\udfff]"  # what no argument of a program holds


class Options(Target):
    """Whole command lines, as far as the point where something would be run or written."""

    name, names_files, fast = "options", False, False
    refusals = (ValueError, click.UsageError, DataError, OSError)

    def prepare(self, folder: Path) -> None:
        self.command = typer.main.get_command(cli.app)
        commands = self.command.commands  # type: ignore[attr-defined]
        self.words = {
            name: [o for p in commands[name].params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")]
            for name in ("run", "sweep", "resume", "analyse", "methods", "report")
        }

    def fault(self, error: BaseException, folder: Path) -> str:
        if isinstance(error, click.UsageError):
            return "" if program.usage(error).strip() else "the refusal says nothing"
        return super().fault(error, folder)

    def begin(self, folder: Path) -> None:
        (folder / "file").write_text("in the way\n")
        (folder / "sweep.toml").write_text('methods = ["fedavg", "local"]\nseeds = [0, 1]\n')

    def make(self, rng: random.Random) -> Case:
        name = rng.choice(("run", "run", "run", "sweep", "sweep", "resume", "analyse", "methods", "report"))
        words = [name]
        for _ in range(rng.choice((1, 2, 2, 4))):
            option = rng.choice(self.words[name])
            if option not in ("--help", "--json", "--out", "--readme", "--markdown", "--address", "--on", "--data-dir"):
                words += [option, text(rng)] if rng.random() < 0.9 else [f"{option}={text(rng)}"]
        if name in ("run", "methods") and rng.random() < 0.95:
            words.insert(1, rng.choice(tuple(METHODS)) if rng.random() < 0.95 else text(rng))
        if name in ("resume", "analyse", "report"):
            words.insert(1, text(rng))
        return {f"{n:02d}": encoded(word) for n, word in enumerate(words)}

    def check(self, case: Case, folder: Path) -> bool:
        words = [re.sub(IMPOSSIBLE, "", decoded(case[n])) for n in sorted(case)]
        if words[0] == "run":
            words += ["--out", f"{folder}/file"]
        elif words[0] == "sweep":
            words += [f"{folder}/sweep.toml", "--dry-run", "--out", f"{folder}/runs"]
        elif words[0] in ("resume", "analyse", "report"):
            words = [words[0], f"{folder}/nowhere/{words[1]}", *words[2:]]
        try:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                self.command.main(args=words, prog_name="fedcc", standalone_mode=False)
        except click.exceptions.Exit as error:
            return error.exit_code == 0
        except ValueError as error:
            if "is a file; --out must name a folder" in str(error):
                return True
            raise
        return True


def text(rng: random.Random) -> str:
    """A word as someone might type it."""
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(WORDS)
    if kind < 0.5:
        return str(rng.choice((rng.randrange(-2, 20), rng.random(), 10 ** rng.randrange(-330, 330))))
    if kind < 0.6:
        return "".join(rng.choice("0123456789.,:=-+e_ xnaif\udcff\t") for _ in range(rng.randrange(12)))
    if kind < 0.65:
        return rng.choice(LONG)
    value = rng.choice(VALUES)
    return value if isinstance(value, str) else str(value)


def encoded(word: str) -> bytes:
    return word.encode("utf-8", "surrogatepass")


def decoded(word: bytes | None) -> str:
    return (word or b"").decode("utf-8", "surrogatepass")
