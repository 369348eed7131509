"""Records that contradict themselves, files of every kind, repeats and their analyses: what counts and what is said."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import synthetic
from fedcc.report.figures import save
from fedcc.report.gallery import pictures
from fedcc.report.page import page
from fedcc.report.records import Records, find_records
from fedcc.report.tables import tables
from program import call

CIFAR = {"data": "cifar10", "skew": "classes:1"}
Record = dict[str, Any]


@pytest.fixture(scope="module")
def honest() -> Record:
    return synthetic.record(**CIFAR)


def edited(record: Record, path: str, value: Any) -> Record:
    """A copy with another value at a path such as ``accuracy.rounds.0``; a function makes it from the old one."""
    made = json.loads(json.dumps(record))
    *outer, last = path.split(".")
    inner: Any = made
    for key in outer:
        inner = inner[int(key) if isinstance(inner, list) else key]
    key = int(last) if isinstance(inner, list) else last
    inner[key] = value(inner[key]) if callable(value) else value
    return made


def beside_another(folder: Path, record: Record | str | bytes) -> Records:
    """What is found in a folder with this record and a good one."""
    synthetic.write(synthetic.record("fedavg", **CIFAR), folder / "good.json")
    content = json.dumps(record) if isinstance(record, dict) else record
    (folder / "odd.json").write_bytes(content.encode() if isinstance(content, str) else content)
    return find_records([folder])


# --------------------------------------------------------------------------------------- what a record says twice


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("accuracy.final", 99.0, "accuracy.final is 99.0, but the last of accuracy.rounds is"),
        ("accuracy.best", 99.0, "accuracy.best is 99.0, but the highest of accuracy.rounds is"),
        ("accuracy.best_round", lambda t: t % 15 + 1, "accuracy.best_round is"),
        ("accuracy.rounds.0", 99.5, "the highest of accuracy.rounds is 99.5"),
        ("accuracy.rounds", lambda c: [*c, c[-1]], "rounds is 15, but the number of accuracy.rounds is 16"),
        ("accuracy.rounds", lambda c: [None] * len(c), "the last of accuracy.rounds is None"),
        ("accuracy.targets", lambda c: c[1:], "the number of accuracy.targets is 14"),
        ("accuracy.clients.3", 55.5, "accuracy.clients.3 is 55.5, but accuracy.table2.global.3 is"),
        ("accuracy.table2.local.3", 55.5, "but accuracy.table2.local.3 is 55.5"),
        ("accuracy.table2.valid.77", 5.0, "has client 77, but there are 10 clients"),
        ("accuracy.readings.mirror.final", 0.5, "accuracy.readings.mirror.final is 0.5"),
        ("accuracy.readings.mirror.best_round", lambda t: t % 15 + 1, "accuracy.readings.mirror.best_round is"),
        ("accuracy.readings.mirror.rounds", lambda c: [0.0, *c], "accuracy.readings.mirror.best_round is"),
        ("bytes.up", 5, "bytes.up is 5, but the sum of bytes.rounds.up is"),
        ("bytes.rounds.down.0", 5, "but the sum of bytes.rounds.down is"),
        ("bytes.rounds.up", [1], "the number of bytes.rounds.up is 1, but that of accuracy.rounds is 15"),
        ("log.alpha.0", [0.5], "the number of log.alpha.0 is 1"),
        ("images.predicted", 5, "images.predicted is 5, but the sum of images.rounds.predicted is"),
        ("images.trained.fit", 5, "images.trained is 5, but the sum of images.rounds.trained is"),
        ("images.rounds.trained", [1], "the number of images.rounds.trained is 1"),
        ("known.77", [0.5] * 10, "has client 77, but there are 10 clients"),
        ("counts", lambda c: {"0": c["0"]}, "the number of counts is 1, but experiment.clients is 10"),
        ("rounds", 12, "rounds is 12"),
        ("experiment.rounds", 12, "rounds is 15, but the number that fedcc needs for T=12 is 12"),
        ("data", "cifar100", "data is cifar100, but experiment.data is cifar10"),
        ("skew", "classes:9", "skew is classes:9"),
        ("seed", 7, "seed is 7, but experiment.seed is 0"),
        ("epochs", 85, "epochs is 85"),
        ("settings.lam", 0.25, "settings.lam is 0.25, but experiment.settings.lam is"),
        ("method", "FedAvg", "method is fedavg, but experiment.method is fedcc"),
        ("family", "parameters", "family is parameters"),
        ("command", lambda c: c.replace("--seed 0", "--seed 3"), "the command's --seed is 3, but experiment.seed is 0"),
        ("command", lambda c: c.replace("--augment standard", "--no-augment"), "the command's --augment is none"),
        ("command", lambda c: c + " --set lam=9", "the command's lam is 9, but settings.lam is"),
    ],
)
def test_a_record_that_contradicts_itself_is_left_out(
    path: str, value: Any, said: str, honest: Record, tmp_path: Path
) -> None:
    found = beside_another(tmp_path, edited(honest, path, value))
    assert [r.method for r in found.runs] == ["fedavg"]
    ((name, reason),) = found.problems
    assert name == f"{tmp_path.name}/odd.json"
    assert reason.startswith("contradicts itself: ")
    assert said in reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("seed", 0.5, "seed must be a whole number"),
        ("seed", 10**400, "seed must be a whole number from 0"),
        ("seed", -1, "seed must be a whole number from 0"),
        ("accuracy.best_round", 1.5, "best_round must be a whole number"),
        ("accuracy.final", 10**400, "accuracy.final must be a number below 2^63"),
        ("experiment.lr", 10**400, "experiment.lr must be a number below 2^63"),
        ("settings.lam", 10**400, "lam must be a number below 2^63"),
        ("experiment.fraction", "much", "experiment.fraction must be a number, got 'much'"),
        ("experiment.rounds", "15", "experiment.rounds must be a whole number"),
        ("experiment.wire", "a\nb\x1b[31m" + 200 * "x", "experiment.wire must be"),
        ("command", "fedcc 'run", "command is not a command line"),
        ("family", "\ud800", "holds a text that is not Unicode"),
    ],
)
def test_a_record_with_an_impossible_value_is_left_out(
    path: str, value: Any, said: str, honest: Record, tmp_path: Path
) -> None:
    found = beside_another(tmp_path, edited(honest, path, value))
    assert [r.method for r in found.runs] == ["fedavg"]
    assert said in found.problems[0][1]
    assert found.problems[0][1].isprintable()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("bytes.up", 10**400),
        ("bytes.models", -1),
        ("counts.0.0", 10**400),
        ("log.alpha.0.0", 10**400),
        ("seconds", 10**400),
        ("images.predicted", -1),
        ("images.counted", True),
        ("known.0.0", 1.5),
        ("known.0", [0.5]),
    ],
)
def test_a_part_with_an_impossible_value_is_left_out(path: str, value: Any, honest: Record, tmp_path: Path) -> None:
    found = beside_another(tmp_path, edited(honest, path, value))
    assert sorted(r.method for r in found.runs) == ["fedavg", "fedcc"]
    ((_, reason),) = found.problems
    assert reason.startswith(f"{path.partition('.')[0]} left out: ")


# -------------------------------------------------------------------------------------------------- files of every kind


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"format": 1, "format": 1, "method": "FedCC"}', "the key 'format' appears twice"),
        ("[" * 100 + "]" * 100, "nested deeper than 32 levels"),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, "nested deeper than 32 levels"),
        ("9" * 5000, "is not valid JSON"),
        ("[]", "must be an object, got []"),
        ("{}", "not a record of a run"),
        ("null", "must be an object, got None"),
        ("", "is not valid JSON"),
    ],
)
def test_odd_content_is_said_with_the_files_name(content: str, said: str, tmp_path: Path) -> None:
    found = beside_another(tmp_path, content)
    assert len(found.runs) == 1
    ((name, reason),) = found.problems
    assert (name, said in reason) == (f"{tmp_path.name}/odd.json", True), reason
    (tmp_path / "run").mkdir()
    (tmp_path / "odd.json").rename(tmp_path / "run" / "summary.json")
    ((name, reason),) = find_records([tmp_path]).problems
    assert (name, said in reason) == (f"{tmp_path.name}/run/summary.json", True), reason


def _link_to_itself(place: Path) -> None:
    place.symlink_to(place.name)


def _link_to_nothing(place: Path) -> None:
    place.symlink_to("nowhere")


def _huge(place: Path) -> None:
    with place.open("wb") as file:
        file.truncate(10 * 2**30)  # a hole: nothing on the disk


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "is not a regular file"),
        (_link_to_itself, "cannot be read: Too many levels"),
        (_link_to_nothing, "cannot be read: No such file"),
        (_huge, "is larger than 64 MB"),
        (lambda place: place.symlink_to("/dev/zero"), "is not a regular file"),
        (Path.mkdir, "is a folder"),
    ],
)
def test_a_summary_that_is_no_file_is_said(make: Callable[[Path], Any], said: str, tmp_path: Path) -> None:
    synthetic.write(synthetic.record(**CIFAR), tmp_path / "runs" / "good")
    (tmp_path / "runs" / "odd").mkdir()
    make(tmp_path / "runs" / "odd" / "summary.json")
    found = find_records([tmp_path / "runs"])
    assert len(found.runs) == 1
    ((name, reason),) = found.problems
    assert (name, said in reason) == ("runs/odd/summary.json", True), reason


def test_a_folder_or_file_that_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root everything can be read, so the refusals are the system's in name only."""
    for name in ("a", "b", "good"):
        synthetic.write(synthetic.record(**CIFAR), tmp_path / "runs" / name)
    scandir, opened = os.scandir, os.open

    def refuse(real: Callable[..., Any], place: Path) -> Callable[..., Any]:
        def guarded(path: Any, *rest: Any, **more: Any) -> Any:
            if Path(os.fsdecode(path)) == place:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *rest, **more)

        return guarded

    monkeypatch.setattr(os, "scandir", refuse(scandir, tmp_path / "runs" / "a"))
    monkeypatch.setattr(os, "open", refuse(opened, tmp_path / "runs" / "b" / "summary.json"))
    found = find_records([tmp_path / "runs"])
    assert [r.name for r in found.runs] == ["runs/good"]
    assert sorted(found.problems) == [
        ("runs/a", "cannot be read: Permission denied"),
        ("runs/b/summary.json", "cannot be read: Permission denied"),
    ]


def test_links_between_folders_end(tmp_path: Path) -> None:
    synthetic.write(synthetic.record(**CIFAR), tmp_path / "runs" / "a")
    synthetic.write(synthetic.record("fedavg", **CIFAR), tmp_path / "elsewhere")
    (tmp_path / "runs" / "a" / "loop").symlink_to("..")
    (tmp_path / "runs" / "away").symlink_to(tmp_path / "elsewhere")
    found = find_records([tmp_path / "runs"])
    assert [r.name for r in found.runs] == ["runs/a"]
    ((name, reason),) = found.problems
    assert (name, "not searched" in reason) == ("runs/away", True)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_names_that_are_not_utf8(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / os.fsdecode(b"r\xff\n")
    if kind == "folder":
        synthetic.write(synthetic.record(**CIFAR), place / "run", analysed=True)
    else:
        synthetic.write(synthetic.record(**CIFAR), place / os.fsdecode(b"\xfe.json"))
    (place / os.fsdecode(b"odd\xfd.json")).write_text("[]")
    done = call(capsys, "report", place, "--out", place / "out", "--no-figures")
    assert done.code == 0, done
    assert done.err.startswith("fedcc: warning: r\\xff\\n/odd\\xfd.json: the file must be an object, got []\n")
    content = json.loads(synthetic.packed((place / "out" / "index.html").read_text(), "content"))
    assert content["runs"][0]["files"][0][1] == ("../run/summary.json" if kind == "folder" else "../%FE.json")
    assert "r\\xff\\n/" in (place / "out" / "tables" / "runs.csv").read_text()
    done = call(capsys, "report", tmp_path / os.fsdecode(b"\xff"), "--out", place / "out")
    done.refused("\\xff does not exist")


# ------------------------------------------------------------------------------------------------------- later rounds


def test_figures_know_how_many_rounds_were_asked_for(tmp_path: Path) -> None:
    for method in ("fedconcat", "fedavg"):
        synthetic.write(synthetic.record(method, **CIFAR), tmp_path / f"{method}.json")
    made = tables(find_records([tmp_path]).runs)
    curves = dict(pictures(made))["table1_cifar10-classes-1_curves"]().axes[0]
    assert curves.get_xlim()[1] < 18
    assert sum("after 215 rounds" in str(line.get_label()) for line in curves.lines) == 1
    content = json.loads(synthetic.packed(page(find_records([tmp_path]), made, tmp_path, "Title"), "content"))
    assert [len(row["runs"]) for row in content["scenes"][0]["rows"]] == [1, 1]
    assert {run["method"]: (run["asked"], len(run["curve"])) for run in content["runs"]} == {
        "fedavg": (15, 15), "fedconcat": (15, 215)
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ repeats and analyses


def with_fingerprints(record: Record, partition: str = "b" * 64) -> Record:
    return record | {"data_sha256": "a" * 64, "partition_sha256": partition}


def test_the_analysis_of_a_copy_serves(honest: Record, tmp_path: Path) -> None:
    """The record in results/ is the run's in runs/, which has the analysis."""
    made = with_fingerprints(honest)
    synthetic.write(made, tmp_path / "results" / "a.json")
    synthetic.write(made, tmp_path / "runs" / "a", analysed=True)
    found = find_records([tmp_path / "results", tmp_path / "runs"])
    (run,) = found.runs
    assert run.name == "results/a.json"
    assert set(run.analysis or ()) == {"margins", "embeddings", "example"}
    assert found.problems == (("runs/a", "repeats results/a.json, which is the one that counts; its analysis is used"),)
    content = json.loads(synthetic.packed(page(found, tables(found.runs), tmp_path, "Title"), "content"))
    assert content["runs"][0]["files"] == [["a.json", "results/a.json"], ["analysis.json", "runs/a/analysis.json"]]


@pytest.mark.parametrize(
    ("again", "said"),
    [
        (lambda _: with_fingerprints(synthetic.record(final=33.0, **CIFAR)), "their accuracies differ"),
        (lambda r: with_fingerprints(r, "c" * 64), "the two have different data or partitions"),
        (lambda r: r, "fingerprints of data and partition are not in both"),
        (lambda _: with_fingerprints(synthetic.record(**CIFAR, precision="bf16")), "the two differ in precision"),
    ],
)
def test_the_analysis_of_another_run_does_not(
    again: Callable[[Record], Record], said: str, honest: Record, tmp_path: Path
) -> None:
    synthetic.write(with_fingerprints(honest), tmp_path / "results" / "a.json")
    synthetic.write(again(honest), tmp_path / "runs" / "a", analysed=True)
    found = find_records([tmp_path / "results", tmp_path / "runs"])
    (run,) = found.runs
    assert run.analysis is None
    ((_, reason),) = found.problems
    assert "its analysis is left out" in reason
    assert said in reason


def test_an_analysis_beside_the_record_of_another_run_is_left_out(honest: Record, tmp_path: Path) -> None:
    synthetic.write(honest, tmp_path / "a", analysed=True)
    other = synthetic.analysis(synthetic.record(**CIFAR, seed=3))
    (tmp_path / "a" / "analysis.json").write_text(json.dumps(other))
    found = find_records([tmp_path])
    assert found.runs[0].analysis is None
    assert found.problems[0][1] == "analysis.json left out: is of another run: seed is 3, but the run's is 0"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("embeddings.labels.0", 2**40),
        ("embeddings.panels.0.points.0.0", 1e308),
        ("embeddings.panels", []),
        ("margins.models.0.mean", 10**400),
        ("margins.edges.0", -1e308),
        ("example.clients", []),
    ],
)
def test_an_analysis_that_cannot_be_drawn_is_left_out(path: str, value: Any, honest: Record, tmp_path: Path) -> None:
    file = synthetic.write(honest, tmp_path / "a" / "summary.json", analysed=False)
    stored = edited(synthetic.analysis(honest), path, value)
    file.with_name("analysis.json").write_text(json.dumps(stored))
    found = find_records([tmp_path])
    assert found.runs[0].analysis is None
    assert found.problems[0][1].startswith("analysis.json left out: ")


@pytest.mark.filterwarnings("ignore:constrained_layout not applied")
@pytest.mark.parametrize("words", [r"$\frac{x$ y$", "x" * 190])
def test_texts_of_others_can_be_drawn_and_name_files(words: str, tmp_path: Path) -> None:
    made = synthetic.record(data="digits", rounds=1)
    made |= {"method": words, "data": words, "skew": words, "command": "another program"}
    made["experiment"] |= {"method": words, "data": words, "skew": words, "wire": words}
    synthetic.write(made, tmp_path / "a.json")
    found = find_records([tmp_path])
    assert len(found.runs) == 1
    for name, make in pictures(tables(found.runs)):
        assert save(make(), tmp_path / f"{name}.png").is_file()


def test_classes_metrics_and_foreign_defaults_are_read(honest: Record, tmp_path: Path) -> None:
    """The right answers of a confusion matrix are the final accuracy, or none of the record counts."""
    final = honest["accuracy"]["final"]
    right = round(final * 100)  # of 10,000 samples, final having two digits
    matrix = [[right, 10_000 - right], [0, 0]]
    record = honest | {"confusion": matrix, "classes": ["cat", "dog"], "metrics": {"f1": [None] * 14 + [0.5]}}
    (run,) = (r for r in beside_another(tmp_path / "a", record).runs if r.confusion)
    assert (run.class_names, run.metrics["f1"][-1]) == (("cat", "dog"), 0.5)
    wrong = record | {"confusion": [[right - 50, 10_050 - right], [0, 0]]}
    found = beside_another(tmp_path / "b", wrong)
    assert any("confusion does not give the accuracy" in reason for _, reason in found.problems)
    found = beside_another(tmp_path / "c", record | {"confusion": [[1, 2], [3]], "metrics": {"f1": [0.5]}})
    assert any("the number of metrics.f1 is 1" in reason for _, reason in found.problems)
    found = beside_another(tmp_path / "d", record | {"confusion": [[1, 2], [3]]})
    assert any("as many columns as rows" in reason for _, reason in found.problems)


def test_a_method_of_another_package_is_a_row_with_its_own_defaults(honest: Record, tmp_path: Path) -> None:
    """Nothing of it is imported: what it has by default is in the record."""
    record = edited(edited(honest, "experiment.method", "nobody:Theirs"), "method", "Theirs")
    record["command"] = record["command"].replace("fedcc run fedcc", "fedcc run nobody:Theirs")
    record["defaults"] = {"settings": dict(record["settings"])}
    (run,) = (r for r in beside_another(tmp_path, record).runs if r.label == "Theirs")
    assert (run.method, run.changed_settings) == ("nobody:Theirs", ())
    assert "nobody" not in sys.modules
