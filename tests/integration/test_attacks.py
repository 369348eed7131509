"""A client that lies, from the upload to the operator; and ``guard_votes`` wherever a trained federation goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import fedcc
from fedcc.core.digests import DamagedFile
from fedcc.core.messages import Predictions
from fedcc.core.roles import Client
from fedcc.experiments.export import export
from fedcc.experiments.rounds import FinishedRound, Observer, Pause, Paused
from fedcc.experiments.saved import TENSORS
from fedcc.experiments.store import RunFolder
from fedcc.exported import Exported
from fedcc.flower import cohort as cohort_module
from fedcc.flower.demo import simulate
from fedcc.methods import FedCC
from federation import NAMES, LocalTransport, make
from program import call
from synthetic import packed
from tiny import blobs

GUARDED = FedCC(guard_votes=True)
SHORT: dict[str, Any] = {"rounds": 3, "epochs": 3, "lr": 0.01, "batch": 8, "device": "cpu", "threads": 1}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort_module, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(cohort_module, "ONLINE_SECONDS", 0.0)


def own_data() -> fedcc.Federation:
    clients = [(blobs([c] * 20, 3, seed=k).numpy(), np.full(20, c)) for k, c in enumerate((0, 0, 1, 2))]
    labels = np.arange(30) % 3
    public, test = (blobs(torch.from_numpy(labels), 3, seed=s).numpy() for s in (7, 8))
    return fedcc.Federation.of(clients, public, (test, labels), "mlp8", classes=3)


@pytest.fixture(scope="module")
def federation() -> fedcc.Federation:
    return own_data()


@pytest.fixture(scope="module")
def result(federation: fedcc.Federation) -> fedcc.Result:
    return fedcc.run(GUARDED, federation, **SHORT)


class Constant(FedCC):
    """FedCC whose client 0 always answers class 0, certain."""

    async def client(self, c: Client, down: Predictions | None) -> Predictions:
        if c.id:
            return await super().client(c, down)
        bias = torch.tensor([50.0, 0.0, 0.0, 0.0])
        zero = torch.zeros_like(c.model.state["head.weight"])
        c.model = c.model.with_({**c.model.floating, "head.weight": zero, "head.bias": bias})
        return Predictions((await c.predict(c.public)).logits.softmax(-1))


def test_a_constant_client_ruins_fedcc_but_not_with_guarded_votes_and_is_named(federation: fedcc.Federation) -> None:
    ruined, defended = (fedcc.run(Constant(guard_votes=c), federation, **SHORT) for c in (False, True))
    assert ruined.accuracy <= 50
    assert defended.accuracy >= 70
    for record in (*ruined.rounds, *defended.rounds):
        assert record["warnings"].keys() == {"0"}
        assert record["uploads"]["0"]["known"] == 1.0
    assert defended.rounds[-1]["uploads"]["0"]["trust"] < 0.5 * ruined.rounds[-1]["uploads"]["0"]["trust"]


def test_what_uploads_say_changes_no_number(result: fedcc.Result) -> None:
    assert all("warnings" not in record for record in result.rounds)
    last = result.rounds[-1]["uploads"]
    assert list(last) == ["0", "1", "2", "3"]
    assert sum(signs["trust"] for signs in last.values()) == pytest.approx(1, abs=1e-3)


def test_a_saved_result_has_the_mean_votes(result: fedcc.Result, federation: fedcc.Federation, tmp_path: Path) -> None:
    loaded = fedcc.load(result.save(tmp_path))
    x = federation.test.x
    assert torch.equal(loaded.scores(x), result.scores(x))
    assert {k: v.tolist() for k, v in loaded.trained.baseline.items()} == {
        k: v.tolist() for k, v in result.trained.baseline.items()
    }
    assert torch.equal(result.to("cpu").scores(x), result.scores(x))
    plain = fedcc.run(FedCC(), federation, **{**SHORT, "rounds": 1})
    plain.save(tmp_path / "plain")
    assert not [n for n in safetensors.torch.load_file(tmp_path / "plain" / TENSORS) if n.startswith("baseline")]


@pytest.mark.parametrize("wrong", [torch.zeros(2), torch.full((3,), 2.0), torch.full((3,), torch.nan)])
def test_mean_votes_that_are_none_are_refused(result: fedcc.Result, wrong: torch.Tensor, tmp_path: Path) -> None:
    result.save(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / TENSORS)
    safetensors.torch.save_file({**tensors, "baseline/1": wrong}, tmp_path / TENSORS)
    about = json.loads((tmp_path / "models.json").read_text())
    about = {k: v for k, v in about.items() if k not in ("files", "sha256")}
    (tmp_path / "models.json").write_text(json.dumps(about))
    with pytest.raises(DamagedFile, match="mean vote of client 1"), pytest.warns(UserWarning, match="without a digest"):
        fedcc.load(tmp_path)


def test_a_resumed_run_has_the_same_mean_votes(
    result: fedcc.Result, federation: fedcc.Federation, tmp_path: Path
) -> None:
    class Leave(Observer):
        def round(self, done: FinishedRound) -> Pause:
            return Pause("for a test")

    with pytest.raises(Paused):
        fedcc.run(GUARDED, federation, out=tmp_path / "r", observers=[Leave()], **SHORT)
    with pytest.raises(Paused):
        fedcc.run(GUARDED, federation, out=tmp_path / "r", resume=True, observers=[Leave()], **SHORT)
    resumed = fedcc.run(GUARDED, federation, out=tmp_path / "r", resume=True, **SHORT)
    assert torch.equal(resumed.scores(federation.test.x), result.scores(federation.test.x))
    summary = RunFolder(tmp_path / "r").summary()
    assert summary is not None
    assert summary["uploads"]["trust"]["2"] == [r["uploads"]["2"]["trust"] for r in result.rounds]
    assert "warnings" not in summary


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_an_exported_file_has_the_mean_votes(
    result: fedcc.Result, federation: fedcc.Federation, suffix: str, tmp_path: Path
) -> None:
    x, target = federation.test.x, tmp_path / f"model.{suffix}"
    expected = result.answer(x)
    if suffix == "onnx":
        pytest.importorskip("onnxruntime")
    export(result, target)
    if suffix == "onnx":
        answer = Exported.open(target).answer(x.numpy())
        probabilities, confidence = (torch.from_numpy(answer[n]) for n in ("probabilities", "confidence"))
    else:
        probabilities, confidence, _ = torch.export.load(target).module()(x)
    assert torch.allclose(probabilities, expected.probabilities, atol=1e-4)
    assert torch.allclose(confidence, expected.confidence, atol=1e-4)


def test_a_federation_predicts_with_mean_votes_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make(tmp_path / "f", settings={"guard_votes": True})
    transport = LocalTransport(folder, share={"north"})
    transport.server().train()
    found = RunFolder(folder.run).summary()
    assert found is not None
    assert found["accuracy"]["final"] == simulate(folder.experiment).accuracy
    x = folder.test()["x"][:7].numpy()  # type: ignore[index]
    np.savez(tmp_path / "in.npz", x=x)
    transport.server().query(tmp_path / "in.npz", tmp_path / "out.npz")
    assert np.load(tmp_path / "out.npz")["scores"].max() > 0
    status = json.loads((folder.operator / "status.json").read_text())["clients"]
    last = RunFolder(folder.run).metrics()[-1]["uploads"]
    assert [status[name]["uploads"] for name in NAMES] == [last[str(k)] for k in range(len(NAMES))]
    said = call(capsys, "federation", "status", folder.path).out
    assert "agreement" in said
    assert f"{last['0']['trust']:.2f}" in said


def test_the_operator_is_told_who_answers_without_looking(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "fedcc.experiments.record.upload_warnings", lambda _: {"2": "its answers have nothing to do with ..."}
    )
    folder = make(tmp_path / "f", rounds=1)
    LocalTransport(folder).server().train()
    assert "warning: round 1: south: its answers" in (folder.operator / "run.log").read_text()
    assert "warning: south, round 1: its answers" in call(capsys, "federation", "status", folder.path).out
    summary = RunFolder(folder.run).summary()
    assert summary is not None
    assert [(w["round"], w["client"]) for w in summary["warnings"]] == [(1, "2")]
    call(capsys, "report", folder.run, "--out", tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text()
    assert "round 1, client 2: its answers have nothing to do with ..." in packed(page, "content").decode()
    assert "last upload says" in page
