"""A package of somebody else's (tests/packages/neighbour): its method, network and data set are found by their entry
points, swept and reported, without a word about it in this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from synthetic import packed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests" / "packages" / "neighbour"
SWEEP = """
methods = ["sharpened", "fedmd", "fedavg"]
data = "rings"
seeds = [0, 1]
rounds = 2
epochs = 2
device = "cpu"

[[variant]]
method = "sharpened"
name = "flat"
settings = {temperature = 1.0}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, built and installed into a folder of its own."""
    place = tmp_path_factory.mktemp("installed")
    source = place / "source"
    for path in PACKAGE.rglob("*"):
        if path.suffix in (".py", ".toml"):
            target = source / path.relative_to(PACKAGE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    words = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *words, "--target", place / "site", source], check=True, timeout=120
    )
    return place / "site"


def fedcc(place: Path, *words: object, site: Path | None) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / "src"), *([str(site)] if site else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "fedcc", *map(str, words)],
        cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_package_of_somebody_elses_is_swept_and_reported(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(SWEEP)
    done = fedcc(tmp_path, "sweep", "sweep.toml", site=installed)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted((tmp_path / "runs" / "rings_classes-1").iterdir())
    assert [run.name for run in runs] == ["fedavg", "fedmd", "sharpened", "sharpened-flat"]
    summary = json.loads((runs[2] / "seed0" / "summary.json").read_text())
    assert summary["method"] == "Sharpened"
    assert summary["classes"] == ["innermost", "inner", "outer", "outermost"]
    assert sorted(summary["code"]) == ["rings", "sharpened", "sine"]
    assert summary["experiment"]["models"] == "sine,mlp"

    # reported where the package is not installed: nothing of it is imported
    done = fedcc(tmp_path, "report", "runs", "--out", "report", "--no-figures", site=None)
    assert done.returncode == 0, done.stderr
    tables = {path.stem: path.read_text() for path in (tmp_path / "report" / "tables").glob("*.md")}
    whole = next(text for name, text in tables.items() if name.startswith("rings") and "variants" not in name)
    assert all(label in whole for label in ("Sharpened", "FedMD", "FedAvg")), whole
    assert any("temperature=1.0" in text for name, text in tables.items() if "variants" in name)
    assert b"innermost" in packed((tmp_path / "report" / "index.html").read_text(), "content")

    # its models are used where it is installed, and only there; no --code, as an installed package is no surprise
    code = f"import fedcc; r = fedcc.load({str(runs[2] / 'seed0')!r}); print(r.method, r.predict([[1.0, 0.0]]).shape)"
    for site, expected in ((installed, 0), (None, 1)):
        paths = [str(ROOT / "src"), *([str(site)] if site else [])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        loaded = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert loaded.returncode == expected, loaded.stderr
        assert ("Sharpened(temperature=0.1) torch.Size([1])" in loaded.stdout) == (expected == 0)
    assert "unknown method 'sharpened'" in loaded.stderr

    listed = fedcc(tmp_path, "methods", site=installed).stdout
    assert "neighbour.sharpened:Sharpened" in listed
    assert "sharpens mean probabilities" in fedcc(tmp_path, "methods", "sharpened", site=installed).stdout
    assert "neighbour.data:rings" in fedcc(tmp_path, "data", "list", site=installed).stdout
    again = fedcc(tmp_path, "resume", runs[2] / "seed0", "--rounds", 3, site=installed)
    assert again.returncode == 0, again.stderr
