"""What a record and an analysis say, for all of METHODS: a new one is covered the day it is listed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from fedcc.experiments.analyse import analyse
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.options import Analysis
from fedcc.experiments.run import execute
from fedcc.experiments.store import RunFolder
from fedcc.methods import METHODS, FedMD, make
from tiny import Tiny

QUICK: dict[str, dict[str, Any]] = {
    "fedconcat": {"classifier_rounds": 2},
    "fens": {"aggregator_rounds": 20},
    "fedaux": {"pretrain": "none"},
}
CLIENTS = ["0", "1", "2"]

every = pytest.mark.parametrize("name", list(METHODS))


@pytest.fixture(scope="module")
def analysed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    """The summary and the analysis of a small run."""
    place = tmp_path_factory.mktemp("runs") / request.param
    small: dict[str, Any] = {"rounds": 1, "epochs": 2, "clients": 3, "models": "resnet8", "fraction": 0.2}
    execute(
        Experiment.resolve(
            request.param, skew="dirichlet:0.5", settings=QUICK.get(request.param), device="cpu", **small
        ),
        place,
    )
    analyse(place, Analysis(samples=40, client=1), device="cpu")
    summary = RunFolder(place).summary()
    assert summary is not None
    return summary, json.loads((place / "analysis.json").read_text(), parse_constant=pytest.fail)


runs = pytest.mark.parametrize("analysed", list(METHODS), indirect=True, scope="module")


def alone(summary: dict[str, Any]) -> bool:
    return summary["method"] in ("Local", "SSL")


@runs
def test_table2(analysed: tuple[dict[str, Any], ...]) -> None:
    accuracy = analysed[0]["accuracy"]
    if analysed[0]["method"] == "Centralized":
        assert "table2" not in accuracy
        return
    extra = {"FedCC": ["valid", "valid_labels", "local_full"], "FedOV": ["valid_labels", "local_full"]}
    unknown = extra.get(analysed[0]["method"], [])  # FedOV has "unknown", but no majority classes
    assert list(accuracy["table2"]) == ["local", "global", *unknown]
    assert accuracy["table2"]["local"] == accuracy["local"]
    assert accuracy["table2"]["global"] == accuracy["clients"]
    for values in accuracy["table2"].values():
        assert list(values) == CLIENTS
        assert all(0 <= v <= 100 for v in values.values())


@runs
def test_margins_are_those_of_the_models_that_were_evaluated(analysed: tuple[dict[str, Any], ...]) -> None:
    summary, analysis = analysed
    models = {m["name"]: m for m in analysis["margins"]["models"]}
    clients = [] if summary["method"] == "Centralized" else [f"client {k}" for k in CLIENTS]
    assert list(models) == ["global"] * (not alone(summary)) + clients + ["clients"] * bool(clients)

    def right(name: str) -> float:
        """By the bins at 0 and above."""
        return 100 * sum(models[name]["counts"][20:]) / sum(models[name]["counts"])

    if not alone(summary):
        assert sum(models["global"]["counts"]) == 355
        assert right("global") == pytest.approx(summary["accuracy"]["final"], abs=0.3)  # one tie at most
    for name in clients:
        assert right(name) == pytest.approx(summary["accuracy"]["clients"][name.split()[1]], abs=0.3)
    assert all(-1 <= m["mean"] <= 1 for m in models.values())


@runs
def test_the_rest_is_well_formed(analysed: tuple[dict[str, Any], ...]) -> None:
    summary, analysis = analysed
    for name in ("method", "data", "skew", "seed", "data_sha256", "partition_sha256"):
        assert analysis[name] == summary[name]
    embeddings = analysis["embeddings"]
    names = ["local"] * (summary["method"] != "Centralized") + ["global"] * (not alone(summary))
    assert [p["name"] for p in embeddings["panels"]] == names
    assert (embeddings["samples"], len(embeddings["labels"])) == (40, 40)
    for panel in embeddings["panels"]:
        assert np.asarray(panel["points"]).shape == (40, 2)
        assert 0 <= panel["purity"] <= 1
        assert panel.get("client") == (1 if panel["name"] == "local" else None)
    assert (analysis["example"] is None) == (summary["method"] != "FedCC")
    missing = (summary["method"] == "Centralized") + alone(summary) + (summary["method"] != "FedCC")
    assert len(analysis["notes"]) == missing
    assert list(summary["counts"]) == CLIENTS
    assert sum(map(sum, summary["counts"].values())) + summary["public"] == 288
    for way in ("up", "down"):
        assert sum(summary["bytes"]["rounds"][way]) == summary["bytes"][way]
        assert len(summary["bytes"]["rounds"][way]) == summary["rounds"]
    for by_client in summary["log"].values():
        assert all(len(values) == summary["rounds"] for values in by_client.values())


@every
def test_scores_become_probabilities(name: str) -> None:
    """Distributions that keep the prediction; methods whose scores are probabilities give these back."""
    tiny = Tiny(make(name, QUICK.get(name))).run(1)
    scores = tiny.scores()
    found = tiny.method.probabilities(scores)
    assert (found >= 0).all()
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found.sum(-1)))
    assert found.argmax(-1).equal(scores.argmax(-1))
    if (scores >= 0).all() and scores.sum(-1).sub(1).abs().max() < 1e-9:
        torch.testing.assert_close(found, scores)


def test_fedmd_knows_what_it_averages() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    assert FedMD(loss="l1", average="logits").probabilities(logits).equal(logits.softmax(-1))
    assert FedMD().probabilities(logits).tolist() == [[pytest.approx(1 / 3), pytest.approx(2 / 3)]]
