"""Whether this checkout computes what another commit does: ``make same BASE=5a24957``.

Both run side by side on this machine, in the same environment and through the command line only: the digits settings
of ``results/``, the smoke sweep and the federation demo. Everything in ``metrics.jsonl``, ``summary.json``,
``rounds.jsonl`` (fingerprints of what clients sent), ``partition.npz`` and ``models.safetensors`` is compared bit for
bit, but for what ``IGNORED`` names. A number that only the base has is a difference; what else only one side has is
listed. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
IGNORED = {"seconds", "commit", "versions", "command", "sharing", "files", "sha256", "checkpoint_bytes", "checkpoints"}
"""Keys that may differ at any depth: times, what a run was made with, digests of files."""

DESCRIPTIONS = {"settings", "experiment"}
"""Keys below which an option that one side does not have is listed, and is no difference."""

RENAMED: dict[tuple[str, Any], Any] = {("augment", False): "none", ("augment", True): "standard"}
"""Values of options that are written in another way since."""

CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "fedmd": ({"loss": "l1", "average": "logits"}, "302ae8c: the default is KL on probabilities"),
    "fednova": ({"statistics": "average"}, "302ae8c: the default moves running statistics as weights"),
}
"""Methods whose default another issue changed: compared with the settings of the older one."""


REPLACED: dict[str, tuple[str, str, str]] = {
    "src/fedcc/methods/fedavg.py": (
        """    return {
        name: torch.stack([p * up.state[name] for p, up in zip(shares, uplinks, strict=True)]).sum(0)
        for name in uplinks[0].state
    }
""",
        """    averages = {}
    for name, first in uplinks[0].state.items():
        values = torch.stack([up.state[name] for up in uplinks])
        mean = torch.stack([p * value for p, value in zip(shares, values, strict=True)]).sum(0)
        averages[name] = torch.where((values == first).all(0), first, mean)
    return averages
""",
        "10b20e7: an average of equal numbers is that number, not rounded",
    )
}
"""Text of the base that another issue changed: replaced there, so that everything else is compared."""


@dataclass
class Comparison:
    """What was compared, what differs, and what only one side has."""

    values: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    gained: Counter[str] = field(default_factory=Counter)

    def compare(self, where: str, base: Any, head: Any, path: tuple[str, ...] = ()) -> None:
        """Two JSON values, down to their leaves."""
        if isinstance(base, dict) and isinstance(head, dict):
            for key in sorted(base.keys() | head.keys()):
                inner = (*path, key)
                if key in IGNORED:
                    continue
                if key in base and key in head:
                    self.compare(where, base[key], head[key], inner)
                elif key in head:
                    self.gained[general(inner)] += 1
                else:
                    self.lost[general(inner)] += 1
                    if not DESCRIPTIONS & set(path):
                        self.differences.append(f"{where}: {'.'.join(inner)} is only in the base")
        elif isinstance(base, list) and isinstance(head, list) and len(base) == len(head):
            for i, (mine, theirs) in enumerate(zip(base, head, strict=True)):
                self.compare(where, mine, theirs, (*path, str(i)))
        else:
            self.values[where.split(":")[0]] += 1
            renamed = RENAMED.get((path[-1], base), base) if path and not isinstance(base, dict | list) else base
            if json.dumps(renamed) != json.dumps(head):
                self.differences.append(f"{where}: {'.'.join(path)} is {short(base)}, now {short(head)}")


def general(path: tuple[str, ...]) -> str:
    """A path without the numbers of rounds and clients."""
    return ".".join("*" if key.isdigit() else key for key in path)


def short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def content(path: Path) -> Any:
    """What a file holds, as JSON: digests instead of arrays."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: [str(a.dtype), list(a.shape), digest(a.tobytes())] for name, a in arrays.items()}
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + size :]
    return {
        name: [about["dtype"], about["shape"], digest(body[slice(*about["data_offsets"])])]
        for name, about in header.items()
    }


def digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


FILES = ("metrics.jsonl", "summary.json", "rounds.jsonl", "partition.npz", "models.safetensors")


def records(folder: Path) -> dict[str, Path]:
    """The files to compare, by their place in the folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.name in FILES]
    return {re.sub(r"/[0-9a-f]{16}/", "/RUN/", str(path.relative_to(folder))): path for path in paths}  # a random name


# -- what is run


def results_sweep(base: Path) -> str:
    """A sweep of the digits settings of ``results/``, each once, whatever the seeds of its records."""
    variants: dict[str, dict[str, Any]] = {}
    for path in sorted((base / "results").glob("digits_*.json")):
        experiment = json.loads(path.read_text())["experiment"]
        options = {k: v for k, v in experiment.items() if k not in ("settings", "seed", "threads")}
        settings = {k: v for k, v in experiment["settings"].items() if v is not None}
        variant = {**options, "settings": older(options["method"]) | settings}
        name = path.stem.removeprefix("digits_").rpartition("_")[0].replace("_", "-")
        variants.setdefault(json.dumps(variant, sort_keys=True), {"name": name, **variant})
    return "".join(f"[[variant]]\n{table(variant)}" for variant in variants.values())


def smoke_sweep(base: Path) -> str:
    """The smoke sweep, changed methods with the settings of the older ones."""
    sweep = tomllib.loads((base / "experiments" / "smoke.toml").read_text())
    moved = [name for name in sweep["methods"] if name in CHANGED]
    sweep["methods"] = [name for name in sweep["methods"] if name not in CHANGED]
    variants = [{"method": name, "name": "older", "settings": older(name)} for name in moved]
    return table(sweep) + "".join(f"[[variant]]\n{table(variant)}" for variant in variants)


def older(method: str) -> dict[str, Any]:
    return CHANGED[method][0] if method in CHANGED else {}


def replace_text(base: Path) -> None:
    for name, (before, after, _) in REPLACED.items():
        path = base / name
        path.write_text(path.read_text().replace(before, after))


def table(values: dict[str, Any]) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    inner = [
        f"{key} = {{ {', '.join(f'{k} = {json.dumps(v)}' for k, v in value.items())} }}"
        for key, value in values.items()
        if isinstance(value, dict)
    ]
    return "\n".join([*lines, *inner]) + "\n"


@dataclass
class Side:
    """One checkout, and the folder for what it computes."""

    name: str
    checkout: Path
    out: Path

    def start(self, log: str, *arguments: str) -> subprocess.Popen[bytes]:
        """``python -m fedcc`` of this checkout as a process of its own."""
        environment = os.environ | {"PYTHONPATH": str(self.checkout / "src"), "OMP_NUM_THREADS": "1"}
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / log).open("wb") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "fedcc", *arguments],
                cwd=self.checkout,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )


def together(sides: list[Side], log: str, *arguments: str) -> list[str]:
    """Run a command on both sides at once; why one failed."""
    processes = [side.start(log, *arguments, "--out", str(side.out / Path(log).stem)) for side in sides]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.terminate()
    return [
        f"{side.name}: fedcc {arguments[0]} ended with status {code}:\n{(side.out / log).read_text()[-2000:]}"
        for side, code in zip(sides, codes, strict=True)
        if code
    ]


def compared(sides: list[Side]) -> Comparison:
    comparison = Comparison()
    base, head = (records(side.out) for side in sides)
    for name in sorted(base.keys() | head.keys()):
        if name not in head or name not in base:
            comparison.differences.append(f"{name} is only in the {'base' if name in base else 'head'}")
        else:
            comparison.compare(f"{Path(name).parent}: {Path(name).name}", content(base[name]), content(head[name]))
    return comparison


def groups(comparison: Comparison) -> Iterator[tuple[str, int, int, int]]:
    """For each method: runs, values compared, differences."""
    names: dict[str, list[str]] = {}
    for run in comparison.values:
        parts = run.split("/")
        method = parts[1] if parts[0] == "demo" else parts[2].split("-")[0]
        names.setdefault(f"{method} (federation)" if parts[0] == "demo" else method, []).append(run)
    for name, runs in sorted(names.items()):
        different = sum(line.split(":")[0] in runs for line in comparison.differences)
        yield name, len(runs), sum(comparison.values[run] for run in runs), different


def report(comparison: Comparison, failures: list[str]) -> int:
    """The table; 1 if anything differs or failed."""
    print(f"{'method':<22} | folders | values | differences")
    for name, runs, values, different in groups(comparison):
        print(f"{name:<22} | {runs:7} | {values:6} | {different:11}")
    for name, (settings, reason) in CHANGED.items():
        text = ", ".join(f"{key}={value}" for key, value in settings.items())
        print(f"{name} is compared with {text} ({reason})")
    for name, (*_, reason) in REPLACED.items():
        print(f"{name} of the base is changed ({reason})")
    for what, names in (("base", comparison.lost), ("head", comparison.gained)):
        if names:
            print(f"only in the {what}: {', '.join(f'{name} ({n})' for name, n in sorted(names.items()))}")
    for line in [*failures, *comparison.differences[:50]]:
        print(f"DIFFERENT {line}")
    total = len(comparison.differences) + len(failures)
    if not comparison.values:
        print("nothing was compared")
    else:
        print(f"{total} differences" if total else f"{comparison.values.total()} values, all equal")
    return int(bool(total) or not comparison.values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--only", action="append", default=[], help="runs whose folder matches, or 'demo'")
    parser.add_argument("--keep", type=Path, help="keep both sides' folders here")
    options = parser.parse_args()

    machine = ("--device", "cpu", "--threads", "1")
    begun, failures = time.monotonic(), list[str]()
    with tempfile.TemporaryDirectory(prefix="fedcc-same-") as name:
        checkout, out = Path(name) / "base", options.keep or Path(name) / "out"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(checkout), options.base], check=True)
        try:
            replace_text(checkout)
            sides = [Side("base", checkout, out / "base"), Side("head", ROOT, out / "head")]
            patterns = [pattern for pattern in options.only if pattern != "demo"]
            only = [argument for pattern in patterns for argument in ("--only", pattern)]
            for kind, text in (("results", results_sweep(checkout)), ("smoke", smoke_sweep(checkout))):
                file = Path(name) / f"{kind}.toml"
                file.write_text(text)
                if patterns or not options.only:
                    failures += together(sides, f"{kind}.log", "sweep", str(file), *machine, *only)
            if "demo" in options.only or not options.only:
                failures += together(sides, "demo.log", "federation", "demo")
            if len(failures) < 4:  # a pattern need not match runs of both sweeps
                failures = [failure for failure in failures if "runs matches" not in failure]
            status = report(compared(sides), failures)
        finally:
            subprocess.run([*git, "remove", "--force", str(checkout)], check=False)
            shutil.rmtree(checkout, ignore_errors=True)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{time.monotonic() - begun:.0f} s, {spent.ru_utime + spent.ru_stime:.0f} s of CPU time")
    return status


if __name__ == "__main__":
    sys.exit(main())
