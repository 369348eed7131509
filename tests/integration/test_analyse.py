"""From runs to figures: ``fedcc analyse`` and what is drawn from it, on digits, end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedcc
from fedcc.core.digests import write_json
from fedcc.experiments.analyse import analyse
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.run import execute
from fedcc.experiments.store import RunFolder
from fedcc.report import analysis_figures, figures
from fedcc.report.records import find_records
from program import QUICK, call

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """FedCC and FedAvg as the demo runs them, with a round less."""
    places = {name: tmp_path_factory.mktemp("runs") / name for name in ("fedavg", "fedcc")}
    for name, place in places.items():
        execute(Experiment.resolve(name, data="digits", skew="classes:1", rounds=2, device="cpu"), place)
    return places


@pytest.fixture(scope="module")
def analyses(runs: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {name: analyse(place, device="cpu") for name, place in runs.items()}


def test_the_digits_are_separated_by_fedccs_global_model(analyses: dict[str, dict[str, Any]]) -> None:
    purity = {
        name: {panel["name"]: panel["purity"] for panel in analysis["embeddings"]["panels"]}
        for name, analysis in analyses.items()
    }
    assert purity["fedcc"]["global"] >= 0.9
    assert max(purity["fedavg"].values()) < 0.85
    assert purity["fedcc"]["local"] < purity["fedcc"]["global"]


def test_fedccs_margins_lie_further_right(analyses: dict[str, dict[str, Any]]) -> None:
    mean = {
        (name, model["name"]): model["mean"]
        for name, analysis in analyses.items()
        for model in analysis["margins"]["models"]
    }
    assert mean["fedcc", "global"] > 0 > mean["fedavg", "global"]
    assert mean["fedcc", "clients"] > mean["fedavg", "clients"]


def test_the_file_is_what_was_returned_and_is_the_same_again(
    runs: dict[str, Path], analyses: dict[str, dict[str, Any]]
) -> None:
    for name, place in runs.items():
        assert json.loads((place / "analysis.json").read_text()) == analyses[name]
        assert analyse(place, device="cpu") == analyses[name]


def test_the_example_is_a_public_sample(runs: dict[str, Path], analyses: dict[str, dict[str, Any]]) -> None:
    """Its picture, its hidden label, and what the saved models say of it."""
    example = analyses["fedcc"]["example"]
    federation = Experiment.read(runs["fedcc"] / "experiment.toml").federation()
    assert federation.partition is not None
    row = federation.partition.public.tolist().index(example["public"])
    assert example["classes"] == [*"0123456789"]
    assert example["label"] == int(federation.hidden[row])  # type: ignore[index]
    stored = federation.public.x[row, 0].numpy()
    np.testing.assert_array_equal(
        analysis_figures.decoded(example["image"]), (stored * (255 / 16)).round().astype(np.uint8)
    )

    ours = fedcc.load(runs["fedcc"]).scores(federation.public.x[row : row + 1])[0]
    np.testing.assert_allclose(example["aggregates"]["unknown"], ours / ours.sum(), atol=1e-5)
    assert int(ours.argmax()) == example["label"]
    mean = np.mean([client["plain"] for client in example["clients"]], 0)
    np.testing.assert_allclose(example["aggregates"]["plain"], mean, atol=1e-5)
    assert mean.argmax() != example["label"]
    known = np.array([1 - client["unknown"][-1] for client in example["clients"]])
    np.testing.assert_allclose([client["weight"] for client in example["clients"]], known / known.sum(), atol=1e-4)


def test_another_example_client_and_number_of_samples(runs: dict[str, Path], capsys: Capsys) -> None:
    federation = Experiment.read(runs["fedcc"] / "experiment.toml").federation()
    assert federation.partition is not None
    index = int(federation.partition.public[3])
    options = ("--samples", 50, "--client", 4, "--public-index", index)
    before = (runs["fedcc"] / "analysis.json").read_bytes() if (runs["fedcc"] / "analysis.json").exists() else b""
    try:
        found = json.loads(call(capsys, "analyse", runs["fedcc"], *options, "--json", "--device", "cpu").out)
    finally:
        (runs["fedcc"] / "analysis.json").write_bytes(before)
    assert found["example"]["public"] == index
    assert found["embeddings"]["samples"] == len(found["embeddings"]["panels"][0]["points"]) == 50
    assert found["embeddings"]["panels"][0]["client"] == 4
    assert found["command"].endswith(f"--samples 50 --variance 0.9 --client 4 --public-index {index}")


def test_all_figures_are_drawn(runs: dict[str, Path], analyses: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    records = {run.label: run for run in find_records(list(runs.values())).runs}
    made = {
        "margins": analysis_figures.margins_figure({a["method"]: a["margins"] for a in analyses.values()}),
        "embeddings": analysis_figures.embeddings_figure({a["method"]: a["embeddings"] for a in analyses.values()}),
        "example": analysis_figures.example_figure(analyses["fedcc"]["example"]),
        "bytes": figures.bytes_figure(records),
        "log": figures.log_figure(records["FedCC"].log),
    }
    for name, figure in made.items():
        with Image.open(figures.save(figure, tmp_path / f"{name}.png")) as image:
            assert len(np.unique(np.asarray(image))) > 20
        assert figures.save(figure, tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF-")


# -------------------------------------------------------------------------------------------------------------- the cli


def test_several_runs_are_analysed_and_what_is_missing_is_said(tmp_path: Path, capsys: Capsys) -> None:
    for name in ("fedavg", "local"):
        assert call(capsys, "run", name, *QUICK, "--out", tmp_path / name).code == 0
    done = call(capsys, "analyse", tmp_path / "fedavg", tmp_path / "local", "--samples", 20, "--device", "cpu")
    assert done.code == 0
    assert "FedAvg: mean margin global" in done.out
    assert "Local has no global model" in done.out
    again = call(capsys, "run", "fedavg", *QUICK, "--out", tmp_path / "fedavg", "--overwrite")
    assert again.code == 0
    assert not (tmp_path / "fedavg" / "analysis.json").exists()  # it was the other run's


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--client", 10), "client must be one of the run's, 0 to 9, got 10"),
        (("--public-index", 100_000), "public_index must be the position of a public sample, got 100000"),
        (("--samples", 3), "samples must be at least 20, got 3"),
        (("--variance", 1.5), "variance must be from 0 to 1, got 1.5"),
    ],
)
def test_wrong_options_are_refused(options: tuple[Any, ...], words: str, runs: dict[str, Path], capsys: Capsys) -> None:
    before = sorted(p.name for p in runs["fedcc"].iterdir())
    call(capsys, "analyse", runs["fedcc"], *options, "--device", "cpu").refused(words)
    assert sorted(p.name for p in runs["fedcc"].iterdir()) == before


def test_folders_that_cannot_be_analysed(runs: dict[str, Path], tmp_path: Path, capsys: Capsys) -> None:
    """Nothing is computed for the others then."""
    times = {p: p.stat().st_mtime_ns for p in runs["fedcc"].iterdir()}
    call(capsys, "analyse", runs["fedcc"], tmp_path / "nowhere").refused("nowhere holds no run")
    assert {p: p.stat().st_mtime_ns for p in runs["fedcc"].iterdir()} == times
    place = tmp_path / "r"
    assert call(capsys, "run", "fedavg", *QUICK, "--no-save-models", "--out", place).code == 0
    call(capsys, "analyse", place).refused("holds no models", "--no-save-models")
    (place / "summary.json").rename(place / "kept")
    call(capsys, "analyse", place).refused("unfinished", f"fedcc resume {place}")
    call(capsys, "analyse").refused("RUN")


def test_a_run_from_a_gpu_on_other_data(tmp_path: Path, capsys: Capsys) -> None:
    """The device of the run need not be here; its data must be."""
    place = tmp_path / "r"
    assert call(capsys, "run", "fedavg", *QUICK, "--out", place).code == 0
    summary = RunFolder(place).summary()
    assert summary is not None
    summary["experiment"]["device"] = "cuda:7"
    write_json(place / "summary.json", summary)
    assert not (torch.cuda.device_count() > 7)
    assert call(capsys, "analyse", place, "--samples", 20, "--device", "cpu").code == 0
    write_json(place / "summary.json", summary | {"partition_sha256": "0" * 64})
    call(capsys, "analyse", place, "--device", "cpu").refused("run on different data", "partition_sha256")
