"""``fedcc.run(..., out=FOLDER)`` writes the folder that `fedcc run` writes; runs are resumed and extended there."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcc
from fedcc.experiments.store import RunFolder
from program import QUICK, call

Capsys = pytest.CaptureFixture[str]
SPLIT: dict[str, Any] = {"skew": "iid", "clients": 3, "models": "resnet8", "fraction": 0.2}
WORDS = ("--data", "digits", "--skew", "iid", "--clients", 3, *QUICK)
DESCRIPTION = {"experiment.toml", "environment.json", "metrics.jsonl", "summary.json", "models.json"}


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k not in ("seconds", "sharing")} for r in RunFolder(folder).metrics()]


def files(folder: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in folder.iterdir()}


@dataclass(eq=False)
class StopAfter(fedcc.Observer):
    """Leaves a run unfinished after a round."""

    t: int

    def round(self, done: fedcc.FinishedRound) -> fedcc.Stop | None:
        return fedcc.Pause("the test says so") if done.t == self.t else None


def narrow(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs))


def wide(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, outputs))


def own_federation(seed: int = 0, models: Any = (narrow, wide)) -> fedcc.Federation:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(90, 6, generator=generator), torch.arange(90) % 3
    x[:, 0] += 3 * y
    parts = [(x[k::3][:20], y[k::3][:20] if k else (y[k::3][:20] + 0)) for k in range(3)]
    return fedcc.Federation.of(parts, public=x[60:], test=(x, y), models=models)


def test_a_named_federation_gives_the_folder_of_the_command_line(tmp_path: Path, capsys: Capsys) -> None:
    """Rounds, models and description; the command line resumes it, and reports it."""
    federation = fedcc.Federation.named("digits", **SPLIT)
    ours, theirs = tmp_path / "python", tmp_path / "words"
    result = fedcc.run(fedcc.FedCC(lam=0.3), federation, rounds=2, epochs=1, device="cpu", out=ours, progress=True)
    assert "round 2/2  accuracy" in capsys.readouterr().out
    assert call(capsys, "run", "fedcc", *WORDS, "--rounds", 2, "--set", "lam=0.3", "--out", theirs).code == 0
    assert numbers(ours) == numbers(theirs)
    assert files(ours) == files(theirs)
    for name in ("experiment.toml", "models.safetensors", "partition.npz"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (ours, theirs)]
    assert summaries[0]["command"] == summaries[1]["command"]
    assert result.accuracy == summaries[1]["accuracy"]["final"]
    again = fedcc.run(fedcc.FedCC(lam=0.3), federation, rounds=2, epochs=1, device="cpu", out=ours, resume=True)
    assert again.rounds == result.rounds  # it was finished: read, not run
    done = call(capsys, "resume", ours, "--rounds", 3)
    assert "resuming after round 2" in done.out
    longer = fedcc.run("fedcc", federation, rounds=3, epochs=1, device="cpu", out=tmp_path / "3", metrics={"n": n})
    assert [r["metrics"] for r in longer.rounds] == [{"n": 355.0}] * 3
    assert call(capsys, "report", tmp_path, "--out", tmp_path / "report", "--no-figures").code == 0


def n(_: Tensor, labels: Tensor) -> int:
    return len(labels)


def test_objects_of_ones_own_are_resumed_by_the_same_call(tmp_path: Path, capsys: Capsys) -> None:
    options: dict[str, Any] = {"rounds": 3, "epochs": 1, "device": "cpu"}
    whole, folder = tmp_path / "whole", tmp_path / "r"
    fedcc.run(fedcc.FedCC(), own_federation(), **options, out=whole)
    with pytest.raises(Exception, match="stopped after round 2 of 3"):
        fedcc.run(fedcc.FedCC(), own_federation(), **options, out=folder, observers=[StopAfter(2)])
    call(capsys, "resume", folder).refused("was an object in Python", "fedcc.run(..., out=FOLDER, resume=True)")
    call(capsys, "analyse", whole).failed("your own network", code=2)
    with pytest.raises(ValueError, match="holds a run already; pass resume=True"):
        fedcc.run(fedcc.FedCC(), own_federation(), **options, out=folder)
    with pytest.raises(ValueError, match="holds another run: data is own:data_"):
        fedcc.run(fedcc.FedCC(), own_federation(seed=1), **options, out=folder, resume=True)
    with pytest.raises(ValueError, match=r"holds another run: lam is 0\.2 there, 0\.4 here"):
        fedcc.run(fedcc.FedCC(lam=0.4), own_federation(), **options, out=folder, resume=True)
    with pytest.raises(ValueError, match=r"holds another run: models is own:narrow,own:wide there"):
        fedcc.run(fedcc.FedCC(), own_federation(models=narrow), **options, out=folder, resume=True)
    result = fedcc.run(fedcc.FedCC(), own_federation(), **options, out=folder, resume=True)
    assert len(result.rounds) == 3
    assert numbers(folder) == numbers(whole)
    assert (folder / "models.safetensors").read_bytes() == (whole / "models.safetensors").read_bytes()
    assert files(whole) >= DESCRIPTION
    assert call(capsys, "report", tmp_path, "--out", tmp_path / "report", "--no-figures").code == 0
    assert any("own_data" in p.name or "own-data" in p.name for p in (tmp_path / "report" / "tables").iterdir())


def test_networks_that_checkpoints_could_not_tell_apart_are_refused(tmp_path: Path) -> None:
    federation = own_federation(models=[lambda n: narrow(n), lambda n: wide(n)])
    with pytest.raises(ValueError, match="networks need different names"):
        fedcc.run(fedcc.FedCC(), federation, rounds=1, out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_federation_that_was_changed_is_no_longer_a_named_one(tmp_path: Path) -> None:
    """What Federation.named was asked for does not describe it."""
    federation = fedcc.Federation.named("digits", **SPLIT)
    fedcc.run("fedavg", replace(federation, private=federation.private[:2]), rounds=1, epochs=0, out=tmp_path / "r")
    assert 'data = "own:digits"' in (tmp_path / "r" / "experiment.toml").read_text()


@pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}, {"track": ["tensorboard"]}])
def test_options_of_a_folder_need_one(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="pass out=FOLDER"):
        fedcc.run("fedavg", own_federation(models=narrow), rounds=1, **options)


# ---------------------------------------------------------------------------------------------------- more rounds


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("fedcc", ("--participation", 0.7, "--set", "majority_source=labels")),
        (
            "fedavg",
            ("--evaluate-every", 2, "--schedule", "cosine", "--decay", 0.9),
        ),  # round 3 is evaluated only if last
        ("local", ()),
    ],
)
def test_an_extended_run_is_the_longer_run(method: str, words: tuple[Any, ...], tmp_path: Path, capsys: Capsys) -> None:
    """Bit for bit, whatever only a last round records."""
    short, long = tmp_path / "short", tmp_path / "long"
    common = ("run", method, *WORDS, *words)
    done = call(capsys, *common, "--rounds", 3, "--out", short)
    assert "(checkpoint: " in done.out.splitlines()[-1]
    assert "confusion" in numbers(short)[-1]
    assert call(capsys, *common, "--rounds", 5, "--out", long).code == 0
    done = call(capsys, "resume", short, "--rounds", 5)
    assert (done.code, done.err) == (0, "")
    assert "resuming after round 3" in done.out
    assert numbers(short) == numbers(long)
    for name in ("models.safetensors", "experiment.toml"):
        assert (short / name).read_bytes() == (long / name).read_bytes()
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (short, long)]
    for summary in summaries:
        for name in ("seconds", "sharing", "commit", "files", "sha256", "checkpoints", "checkpoint_bytes"):
            summary.pop(name, None)
    assert summaries[0] == summaries[1]
    assert "holds a finished run" in call(capsys, "resume", short, "--rounds", 5).out


def test_runs_that_cannot_be_extended(tmp_path: Path, capsys: Capsys) -> None:
    common = (*WORDS, "--epochs", 0, "--out")
    assert call(capsys, "run", "fedconcat", "--set", "classifier_rounds=1", *common, tmp_path / "a").code == 0
    before = (tmp_path / "a" / "summary.json").read_bytes()
    call(capsys, "resume", tmp_path / "a", "--rounds", 2).refused("FedConcat does", "depends on the number of rounds T")
    assert (tmp_path / "a" / "summary.json").read_bytes() == before
    assert call(capsys, "run", "local", *common, tmp_path / "b", "--no-keep").code == 0
    assert not list((tmp_path / "b").glob("checkpoint*"))
    call(capsys, "resume", tmp_path / "b", "--rounds", 2).refused("it holds no checkpoint (--no-keep)")
    assert call(capsys, "run", "local", *common, tmp_path / "c").code == 0
    call(capsys, "resume", tmp_path / "c", "--rounds", 0).refused("rounds must be more than the run's 1, got 0")


def test_a_method_that_reads_the_number_of_rounds_has_to_say_so() -> None:
    @dataclass(frozen=True)
    class Curious(fedcc.FedAvg):
        async def server(self, s: Any, ups: Any) -> Any:
            assert s.rounds
            return await super().server(s, ups)

    with pytest.raises(RuntimeError, match="depends_on_rounds = True"):
        fedcc.run(Curious(), own_federation(models=narrow), rounds=1, epochs=0)


# ------------------------------------------------------------------------------------------------ metrics of one's own


def test_a_metric_of_ones_own_is_recorded_in_every_evaluated_round(tmp_path: Path) -> None:
    def error(probabilities: Tensor, labels: Tensor) -> float:
        assert torch.allclose(probabilities.sum(-1), torch.ones(len(labels)))
        return 100 * float((probabilities.argmax(-1) != labels).float().mean())

    options: dict[str, Any] = {"rounds": 3, "epochs": 1, "device": "cpu", "metrics": {"error": error}}
    result = fedcc.run("fedcc", own_federation(), **options, evaluate_every=2, out=tmp_path / "r")
    assert ["metrics" in r for r in result.rounds] == [False, True, True]
    assert result.rounds[-1]["metrics"]["error"] == pytest.approx(100 - result.accuracy, abs=1e-3)
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["metrics"] == {"error": [None, *(r["metrics"]["error"] for r in result.rounds[1:])]}
    local = fedcc.run("local", own_federation(), **options)  # the mean over the clients, as its accuracy
    assert local.rounds[-1]["metrics"]["error"] == pytest.approx(100 - local.accuracy, abs=1e-3)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda *_: float("nan"), r"the metric mine must be a finite number, got \[nan, nan, nan\]"),
        (lambda *arguments: arguments[0], "the metric mine failed"),
    ],
)
def test_a_metric_that_is_no_number_is_an_error(metric: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fedcc.run("local", own_federation(), rounds=1, epochs=0, metrics={"mine": metric})


def test_accuracy_by_class_is_in_the_record(tmp_path: Path) -> None:
    result = fedcc.run("fedcc", own_federation(), rounds=1, epochs=2, out=tmp_path / "r")
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    shares, rows = summary["accuracy"]["classes"], summary["confusion"]
    assert shares == [round(100 * row[c] / sum(row), 4) for c, row in enumerate(rows)]
    weights = [sum(row) for row in rows]
    mean = sum(w * s for w, s in zip(weights, shares, strict=True)) / sum(weights)
    assert mean == pytest.approx(result.accuracy, abs=1e-3)
    assert summary["classes"] == ["0", "1", "2"]
