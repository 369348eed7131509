"""Three sites with tables and networks of their own, and the same federation for the simulator."""

from __future__ import annotations

import csv
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from fedcc import Federation
from fedcc.flower.create import create_federation
from fedcc.flower.folder import FederationFolder
from fedcc.flower.programs import free_port
from fedcc.inputs.tables import Encoding, read_csv

SITES = ("north", "east", "south")
CLASSES = tuple(f"digit {y}" for y in range(6))
NETWORKS = """
from torch import nn


def small(outputs):
    return nn.Sequential(nn.Linear(66, 24), nn.ReLU(), nn.Linear(24, outputs))


def deep(outputs):
    return nn.Sequential(nn.Linear(66, 32), nn.Tanh(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, outputs))


class Skip(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(66), nn.Linear(66, 66), nn.GELU())
        self.last = nn.Linear(66, outputs)

    def forward(self, x):
        return self.last(x + self.inner(x))
"""
FACTORIES = {"north": "small", "east": "deep", "south": "Skip"}


@dataclass(frozen=True)
class OwnSites:
    """A federation, each site's table and the folder of its code, and the simulator's federation."""

    folder: FederationFolder
    tables: dict[str, Path]
    code: dict[str, Path]
    simulated: Federation

    def config(self) -> dict[str, dict[str, str]]:
        """What the clients' apps are told."""
        return {
            name: {"data": str(self.tables[name]), "label": "name", "network": f"site_nets:{FACTORIES[name]}",
                   "code": str(self.code[name])}
            for name in SITES
        }  # fmt: skip


def write_table(path: Path, rows: Any, *, label: bool = True) -> Path:
    """Digits as rows of text: 64 numbers, a column of categories with gaps, and the name of the class."""
    digits = load_digits()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"p{i}" for i in range(64)), "side", *(["name"] if label else [])])
        for i in rows:
            y = digits.target[i]
            side = ("left", "right", "")[i % 3]
            writer.writerow([*digits.images[i].ravel(), side, *([f"digit {y}"] if label else [])])
    return path


def make_own_sites(place: Path, method: str = "fedcc", **options: Any) -> OwnSites:
    """A federation on digits 0 to 5 as tables, two classes at each site."""
    y = load_digits().target
    rows = np.flatnonzero(y < 6)[:480]
    public, test, rest = rows[:80], rows[80:200], rows[200:]
    files = {name: write_table(place / name / "samples.csv", rest[y[rest] // 2 == k]) for k, name in enumerate(SITES)}
    write_table(place / "operator" / "public.csv", public, label=False)
    write_table(place / "operator" / "test.csv", test)
    for name in SITES:
        (place / name / "site_nets.py").write_text(NETWORKS)
    folder = create_federation(
        place / "fed",
        method,
        dict.fromkeys(SITES, "own"),
        options={"device": "cpu", "rounds": 2, "epochs": 3, "lr": 0.01, "label": "name", **options},
        port=free_port(),
        rules={"quorum": 3, "grace": 5.0, "deadline": 120.0},
        public_file=place / "operator" / "public.csv",
        test_file=place / "operator" / "test.csv",
        class_names=CLASSES,
        make_keys=True,
    )
    return OwnSites(folder, files, {name: place / name for name in SITES}, simulated_federation(place))


def simulated_federation(place: Path) -> Federation:
    """The same rows, encoding and networks by other means: fitted and read here."""
    public = read_csv(place / "operator" / "public.csv")
    encoding = Encoding.fit(public)

    def pair(path: Path) -> tuple[Any, Any]:
        table = read_csv(path)
        return encoding.encode(table), np.array([CLASSES.index(name) for name in table.column("name")])

    spec = importlib.util.spec_from_file_location("simulated_nets", place / "north" / "site_nets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Federation.of(
        [pair(place / name / "samples.csv") for name in SITES],
        encoding.encode(public),
        pair(place / "operator" / "test.csv"),
        [getattr(module, FACTORIES[name]) for name in SITES],
        classes=len(CLASSES),
    )
