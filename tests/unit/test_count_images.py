"""experiments/count_images.py: what it counts without training is what a run counts, whatever the method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedcc
from fedcc.methods import METHODS, make
from fedcc.report.records import RunRecord, find_records
from scripts import loaded

REFUSED = {"fedhkt", "selectivefd"}
SHORT: dict[str, dict[str, Any]] = {"fedconcat": {"classifier_rounds": 2}, "fens": {"aggregator_rounds": 3}}


@pytest.fixture(scope="module")
def script() -> Any:
    return loaded("experiments/count_images.py")


def finished(folder: Path, name: str, settings: dict[str, Any], **options: Any) -> tuple[RunRecord, dict[str, Any]]:
    """A real run of two rounds, as its record has it; clients have different numbers of samples."""
    federation = fedcc.Federation.named("digits", "dirichlet:0.5", 3, "mlp", seed=1, fraction=0.1)
    usual = {"rounds": 2, "epochs": 1, "batch": 8, "device": "cpu", "threads": 1, "seed": 1, "readings": False}
    fedcc.run(make(name, settings), federation, out=folder, **{**usual, **options})
    (run,) = find_records([folder]).runs
    return run, json.loads(run.file.read_text())


@pytest.mark.parametrize("name", [name for name in METHODS if name not in REFUSED])
def test_every_methods_count_is_the_runs(tmp_path: Path, script: Any, name: str) -> None:
    record, content = finished(tmp_path / name, name, SHORT.get(name, {}))
    assert script.counted(record, content) == content["images"]
    assert sum(content["images"]["rounds"]["trained"]) > 0


@pytest.mark.parametrize(
    ("name", "settings", "options"),
    [
        ("fedcc", {"bn_recalibrate": "public", "probe_kind": "noise"}, {}),
        ("fedcc", {"probe_kind": "labels", "refine_joint_batch": False, "guard_votes": True}, {}),
        ("fedcc", {}, {"participation": 0.7, "wire": "int8", "rounds": 4}),
        ("fedcc", {}, {"share": "noisy"}),
        ("fedmd", {"average": "logits", "loss": "l1", "digest_epochs": 0, "revisit_epochs": 3}, {}),
        ("fedconcat", {"clusters": 1, "classifier_rounds": 1}, {}),
        ("fedct", {"public_batch": 3}, {"optimizer": "sgd"}),
        ("feddf", {"steps": 7}, {}),
        ("fedmr", {"mode": "paper"}, {}),
    ],
)
def test_options_count(
    tmp_path: Path, script: Any, name: str, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    record, content = finished(tmp_path / name, name, settings, **options)
    assert script.counted(record, content) == content["images"]


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("fedhkt", {}, "its server trains on the public samples whose targets are sure"),
        ("feddf", {"early_stop": "kl"}, "early_stop=kl ends"),
        ("fedaux", {"early_stop": "kl"}, "early_stop=kl ends"),
        ("selectivefd", {}, "so its bytes cannot be compared"),
        ("fedconcat", {"histogram": "inferred", "classifier_rounds": 1}, r"sends [\d,]+ bytes in this run"),
    ],
)
def test_what_depends_on_outcomes_is_refused(
    tmp_path: Path, script: Any, name: str, settings: dict[str, Any], reason: str
) -> None:
    record, content = finished(tmp_path / name, name, settings)
    with pytest.raises(script.NotCounted, match=reason):
        script.counted(record, content)


def test_a_record_whose_messages_were_others_is_refused(tmp_path: Path, script: Any) -> None:
    """Its method had another algorithm then, and perhaps other phases."""
    record, content = finished(tmp_path / "run", "fedmd", {})
    with pytest.raises(script.NotCounted, match=r"today's fedmd sends [\d,]+ bytes in this run"):
        script.counted(record, {**content, "public": content["public"] + 1})


def old(folder: Path, content: dict[str, Any], *without: str) -> Path:
    """A record of a version without digests, which lacks these keys."""
    folder.mkdir()
    kept = {name: value for name, value in content.items() if name not in ("sha256", "files", "images", *without)}
    (folder / "old.json").write_text(json.dumps(kept, indent=1) + "\n")
    return folder


@pytest.mark.parametrize("without", [(), ("counts", "public")])
def test_old_records_are_filled_once(
    tmp_path: Path, script: Any, capsys: pytest.CaptureFixture[str], without: tuple[str, ...]
) -> None:
    """Those without counts too: the data set is split again."""
    _, content = finished(tmp_path / "run", "fedcc", {})
    records = old(tmp_path / "records", content, *without)
    script.fill([records])
    assert capsys.readouterr().out == "1 records filled, 0 left as they are\n"
    found = json.loads((records / "old.json").read_text())["images"]
    assert found.pop("counted").startswith("afterwards, by experiments/count_images.py at commit ")
    assert found == content["images"]
    read = find_records([records])
    assert read.problems == ()
    assert read.runs[0].work.afterwards
    script.fill([records])
    assert capsys.readouterr().out == "0 records filled, 0 left as they are\n"
    assert [script.check([path]) for path in (records, tmp_path / "run")] == [0, 0]
    assert capsys.readouterr().out == (
        "0 records equal, 0 different\nfedcc: 1 equal, 0 different\n1 records equal, 0 different\n"
    )  # what was filled in proves nothing


def test_another_split_is_refused(tmp_path: Path, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, content = finished(tmp_path / "run", "local", {})
    records = old(tmp_path / "records", {**content, "partition_sha256": "0" * 64}, "counts", "public")
    before = (records / "old.json").read_bytes()
    script.fill([records])
    assert "the split of today have other fingerprints" in capsys.readouterr().out
    assert (records / "old.json").read_bytes() == before


def test_a_difference_is_a_failure(tmp_path: Path, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, content = finished(tmp_path / "run", "fedavg", {})
    records = old(tmp_path / "records", content)
    images = content["images"]
    rounds = {**images["rounds"], "predicted": [1, 0]}
    content = json.loads((records / "old.json").read_text()) | {"images": {**images, "predicted": 1, "rounds": rounds}}
    (records / "old.json").write_text(json.dumps(content))
    assert script.check([records]) == 1
    assert "fedavg: 0 equal, 1 different" in capsys.readouterr().out


@pytest.mark.slow
def test_all_runs_that_counted_agree(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A method's counts may be filled in only while each of its records that has counts of its own agrees."""
    assert script.check([script.RESULTS]) == 0
    assert "\nfedcc: 2 equal, 0 different\n" in capsys.readouterr().out
