"""What a run leaves behind: probabilities, votes, abstaining, a student, and one file that predicts without torch."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcc
from fedcc.core.rng import Key
from fedcc.data import load
from fedcc.experiments.distil import distil, mixtures
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.export import export
from fedcc.experiments.run import execute
from fedcc.exported import Exported
from fedcc.nets import network
from program import call

ROOT = Path(__file__).resolve().parents[2]
Capsys = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def federation() -> fedcc.Federation:
    return fedcc.Federation.named("digits", skew="classes:2", clients=5, models="mlp", seed=0)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return load("digits").test_x[:60]


def trained(name: str, federation: fedcc.Federation) -> fedcc.Result:
    return fedcc.run(name, federation, rounds=1, epochs=2, device="cpu", threads=1)


@pytest.fixture(scope="module")
def result(federation: fedcc.Federation) -> fedcc.Result:
    return fedcc.run("fedcc", federation, rounds=2, epochs=5, device="cpu", threads=1)


@pytest.mark.parametrize("name", ["fedcc", "fedavg", "fedmd", "fedconcat", "fedct", "lsr", "local"])
def test_probabilities_add_up_and_agree_with_predict(
    name: str, federation: fedcc.Federation, images: np.ndarray
) -> None:
    result = trained(name, federation)
    p = result.predict_proba(images)
    assert p.shape[-2:] == (60, 10)
    assert torch.allclose(p.sum(-1), torch.ones(p.shape[:-1]), atol=1e-5)
    assert float((p.argmax(-1) == result.predict(images)).float().mean()) > 0.98  # ties
    assert (result.confidence(images) >= 0).all()
    assert (result.confidence(images) <= 1).all()


def test_explained_votes_make_the_prediction(result: fedcc.Result, images: np.ndarray) -> None:
    explanation = result.explain(images)
    assert explanation.clients == tuple(f"client {k}" for k in range(5))
    assert torch.allclose(explanation.trust.sum(0), torch.ones(60), atol=1e-5)
    combined = (explanation.trust[..., None] * explanation.votes).sum(0)
    assert torch.allclose(combined / combined.sum(-1, keepdim=True), result.predict_proba(images), atol=1e-5)
    answer = result.answer(images)
    assert answer.unknown is not None
    assert torch.allclose(combined.sum(-1) + answer.unknown, torch.ones(60), atol=1e-5)
    assert torch.equal(answer.confidence, explanation.votes.amax((0, 2)))
    assert "client" in repr(explanation)
    assert len(repr(explanation).splitlines()) <= 7


def test_the_server_s_model_has_no_votes(federation: fedcc.Federation, images: np.ndarray) -> None:
    with pytest.raises(ValueError, match="no client votes"):
        trained("fedavg", federation).explain(images)


def test_below_the_threshold_the_answer_is_unknown(result: fedcc.Result, images: np.ndarray) -> None:
    sure = result.confidence(images)
    threshold = float(sure.median())
    answers = result.predict(images, abstain=threshold)
    assert torch.equal(answers == -1, sure < threshold)
    assert torch.equal(answers[sure >= threshold], result.predict(images)[sure >= threshold])
    with pytest.raises(ValueError, match="abstain must be"):
        result.predict(images, abstain=1.5)


# ------------------------------------------------------------------------------------------------------------- student


def test_a_student_learns_what_the_ensemble_knows(result: fedcc.Result, federation: fedcc.Federation) -> None:
    student = distil(result, federation.public, network("mlp", federation.public.shape), epochs=20)
    assert len(student.models) == 1
    test = federation.test
    right = [float((r.predict(test.x) == test["y"]).float().mean()) for r in (result, student)]
    assert right[1] > right[0] - 0.08, right


def test_mixtures_lie_between_two_samples() -> None:
    x = torch.tensor([[0], [100], [200]], dtype=torch.uint8)
    mixed = mixtures(x, 50, Key(0))
    assert mixed.dtype == torch.uint8
    assert len(mixed.unique()) > 10
    assert int(mixed.max()) <= 200
    assert torch.equal(mixed, mixtures(x, 50, Key(0)))
    assert not len(mixtures(torch.zeros(3, 4, dtype=torch.int64), 50, Key(0)))


def test_a_student_of_many_opinions_is_refused(federation: fedcc.Federation) -> None:
    with pytest.raises(ValueError, match="one model per client"):
        distil(trained("local", federation), federation.public, network("mlp", (1, 8, 8)))


def test_a_student_of_samples_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    """A run's data may be elsewhere, as in a federation."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    rows = [f"{a:.3f},{b:.3f},{'high' if a > b else 'low'}" for a, b in rng.random((80, 2))]
    Path("points.csv").write_text("\n".join(["a,b,kind", *rows]))
    words = ("--data", "./points.csv", "--label", "kind", "--clients", 2, "--skew", "iid", "--rounds", 1, "--epochs", 1)
    assert call(capsys, "run", "fedcc", *words, "--device", "cpu", "--out", "run").code == 0
    Path("points.csv").rename("more.csv")
    call(capsys, "distil", "run").refused("the run's public samples cannot be had here", "give some with --public")
    assert not Path("run/student").exists()
    done = call(capsys, "distil", "run", "--public", "more.csv", "--epochs", 1)
    assert (done.code, done.out) == (0, "mlp on 80 public samples: no test samples, run/student\n"), done
    assert json.loads(Path("run/student/student.json").read_text())["accuracy"]["student"] is None
    call(capsys, "distil", "run", "--public", "none.csv").refused("none.csv: no such file or folder")
    Path("run/experiment.toml").rename("kept.toml")
    call(capsys, "distil", "run", "--public", "more.csv").failed("experiment.toml", code=2)
    Path("kept.toml").rename("run/experiment.toml")
    Path("more.csv").rename("points.csv")
    assert "(its teacher" in call(capsys, "distil", "run", "--public", "points.csv", "--epochs", 1).out


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table and a run on it."""
    place = tmp_path_factory.mktemp("points")
    rows = [f"{a:.3f},{b:.3f},{'high' if a > b else 'low'}" for a, b in np.random.default_rng(0).random((80, 2))]
    (place / "points.csv").write_text("\n".join(["a,b,kind", *rows]))
    experiment = Experiment.resolve(
        "fedcc", data=str(place / "points.csv"), label="kind", clients=2, skew="iid", rounds=1, epochs=1, device="cpu"
    )
    execute(experiment, place / "run")
    return place


@pytest.fixture
def run_folder(points: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, in the current folder."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(points / "run", "run"))


def test_a_student_replaces_a_student_and_nothing_else(run_folder: Path, capsys: Capsys) -> None:
    shutil.copytree(run_folder, "other")
    Path("notes").mkdir()
    Path("notes/text.txt").write_text("mine")
    before = Path("run/models.safetensors").read_bytes()
    for out, message in {
        "run": "run holds the run that the student learns from; choose another --out",
        "other": "other holds another run; choose another --out",
        "notes": "notes holds other files (text.txt); choose another --out",
        "notes/text.txt": "notes/text.txt is a file; --out must name a folder",
    }.items():
        call(capsys, "distil", "run", "--epochs", 1, "--out", out).refused(message)
    assert [Path(f"{name}/models.safetensors").read_bytes() for name in ("run", "other")] == [before] * 2
    for seed in (0, 1):
        assert call(capsys, "distil", "run", "--epochs", 1, "--seed", seed, "--out", "s").code == 0
        assert json.loads(Path("s/student.json").read_text())["seed"] == seed
    call(capsys, "distil", "s").refused(
        "s holds a student, which cannot be distilled again; give the folder of its run"
    )
    Path("run/experiment.toml").unlink()
    call(capsys, "distil", "run").refused("fedcc: run holds no run: experiment.toml is missing")


def test_a_student_needs_the_data_of_its_run(points: Path, run_folder: Path, capsys: Capsys) -> None:
    table = points / "points.csv"
    text = table.read_text()
    table.write_text(text + "\n0.5,0.4,high")
    try:
        call(capsys, "distil", run_folder).refused("the data has changed since the run", "give some with --public")
        assert not Path("run/student").exists()
        done = call(capsys, "distil", "run", "--epochs", 1, "--public", table)
        assert "no test samples" in done.out, done  # those of the run are gone too
    finally:
        table.write_text(text)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_targets_need_a_finite_power(value: str, run_folder: Path, capsys: Capsys) -> None:
    call(capsys, "distil", run_folder, "--sharpness", value).refused(f"sharpness must be a finite number, got {value}")


def test_a_report_passes_over_students(run_folder: Path, capsys: Capsys) -> None:
    assert call(capsys, "distil", run_folder, "--epochs", 1).code == 0
    done = call(capsys, "report", run_folder, "--out", "report", "--no-figures")
    assert (done.code, done.err) == (0, "")


def test_a_table_can_be_analysed(run_folder: Path, capsys: Capsys) -> None:
    done = call(capsys, "analyse", run_folder, "--device", "cpu")
    assert (done.code, done.err) == (0, "")
    assert "the public samples are no images, so there is no example" in done.out
    assert json.loads(Path("run/analysis.json").read_text())["example"] is None
    done = call(capsys, "report", run_folder, "--out", "report", "--no-figures")
    assert (done.code, done.err) == (0, "")


# ------------------------------------------------------------------------------------------------------------ exported


@pytest.mark.parametrize("name", ["fedcc", "fedavg", "fedmd", "fedconcat", "fedct"])
def test_an_exported_file_predicts_the_same(
    name: str, federation: fedcc.Federation, images: np.ndarray, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    result = trained(name, federation)
    export(result, tmp_path / "model.onnx")
    exported = Exported.open(tmp_path / "model.onnx")
    assert exported.classes == tuple(map(str, range(10)))
    for number in (1, 60):
        answer = exported.answer(images[:number])
        expected = result.answer(images[:number])
        assert np.abs(answer["probabilities"] - expected.probabilities.numpy()).max() < 1e-4
        assert np.abs(answer["confidence"] - expected.confidence.numpy()).max() < 1e-4
        assert ("unknown" in answer) == (name == "fedcc")


def test_an_exported_program_predicts_the_same(result: fedcc.Result, images: np.ndarray, tmp_path: Path) -> None:
    export(result, tmp_path / "model.pt2")
    extra = {"fedcc.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra).module()
    assert '"FedCC"' in extra["fedcc.json"]
    probabilities, confidence, unknown = program(torch.from_numpy(images))
    expected = result.answer(images)
    assert torch.allclose(probabilities, expected.probabilities, atol=1e-5)
    assert torch.allclose(confidence, expected.confidence, atol=1e-5)
    assert expected.unknown is not None
    assert torch.allclose(unknown, expected.unknown, atol=1e-5)


def test_what_cannot_be_exported_is_said(
    result: fedcc.Result, federation: fedcc.Federation, tmp_path: Path, capsys: Capsys
) -> None:
    with pytest.raises(ValueError, match=r"FILE\.onnx or a FILE\.pt2"):
        export(result, tmp_path / "model.zip")
    with pytest.raises(ValueError, match="no common prediction"):
        export(trained("local", federation), tmp_path / "model.onnx")
    with pytest.raises(ValueError, match=r"the folder .*nowhere does not exist"):
        export(result, tmp_path / "nowhere" / "model.onnx")
    assert not list(tmp_path.iterdir())
    assert export(trained("fedavg", federation), tmp_path / "model.pt2") == 1, "the clients' networks are not needed"
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    call(capsys, "predict", tmp_path / "bad.onnx", tmp_path).refused("expected a model of `fedcc export`")
    call(capsys, "predict", tmp_path / "none.onnx", tmp_path).refused("no such file")


WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch cannot be imported here")
sys.meta_path.insert(0, Refuse())
from fedcc.cli import main
main()
"""


def program_without_torch(*words: Any, cwd: Path) -> str:
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, words)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_exported_file_needs_no_torch(result: fedcc.Result, images: np.ndarray, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    export(result, tmp_path / "model.onnx")
    np.savez(tmp_path / "x.npz", x=images)
    rows = list(csv.DictReader(io.StringIO(program_without_torch("predict", "model.onnx", "x.npz", cwd=tmp_path))))
    assert [int(row["class"]) for row in rows] == result.predict(images).tolist()


# -------------------------------------------------------------------------------------------------------------- README


@pytest.mark.slow
def test_five_commands_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    section = (ROOT / "README.md").read_text().partition("\n## Your own data\n")[2].partition("\n## ")[0]
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^\$ fedcc (.*)$", section, re.MULTILINE)]
    assert [words[0] for words in commands] == ["run", "predict", "distil", "export", "predict"]
    monkeypatch.chdir(tmp_path)
    assert "`python examples/make_images.py imgs`" in section
    subprocess.run([sys.executable, ROOT / "examples" / "make_images.py", "imgs"], check=True)
    written: list[Path] = []
    for words in commands:
        done = call(capsys, *words)
        assert done.code == 0, done.err
        if words[0] == "run":
            match = re.search(r"final ([\d.]+) %", done.out)
            assert match is not None
            assert float(match[1]) >= 70
        elif words[0] == "predict":
            written.append(Path(words[words.index("--out") + 1]))
    first, second = (list(csv.DictReader(path.open())) for path in written)
    assert len(first) == len(second) == sum(1 for path in Path("imgs").rglob("*.*"))
    assert [row["class"] for row in first] == [row["class"] for row in second]
    for name in ("probability", "unknown", "confidence"):
        assert max(abs(float(a[name]) - float(b[name])) for a, b in zip(first, second, strict=True)) < 2e-4
    assert sum(row["input"].startswith(row["class"]) for row in first) / len(first) > 0.9
