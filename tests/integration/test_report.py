"""`fedcc report`: the command, the documents made by it and a large report."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path
from typing import Any

import pytest

import synthetic
from fedcc.report import markdown, paper
from fedcc.report.records import find_records
from fedcc.report.tables import tables
from fedcc.report.write import picture_description
from program import QUICK, call
from scripts import loaded

ROOT = Path(__file__).resolve().parents[2]
AGAIN = "run `fedcc report results --readme README.md --markdown docs/results.md`"
SOME = (("cifar10", "classes:2"), ("cifar10", "classes:1"), ("cifar100", "classes:10"))


def test_the_documents_are_up_to_date() -> None:
    found = find_records([ROOT / "results"])
    assert found.problems == ()
    made = tables(found.runs)
    assert (ROOT / "docs" / "results.md").read_text() == markdown.page(found, made, ROOT / "docs"), AGAIN
    readme = (ROOT / "README.md").read_text()
    assert readme == markdown.replace_block(readme, markdown.readme_block(made), "README.md"), AGAIN
    assert escape(picture_description(made), quote=False) in (ROOT / markdown.PICTURE).read_text(), AGAIN


def test_a_cell_is_drawn_by_its_seed_alone() -> None:
    draw, runs = (
        loaded("experiments/draw_cell.py").drawn,
        find_records([ROOT / "results"]).runs,
    )
    drawn = [draw(runs, seed) for seed in range(20)]
    assert [draw(runs, seed) for seed in range(20)] == drawn
    assert len({run.name for run in drawn}) > 10
    for run in drawn:
        assert (run.method, run.scenario) in paper.TABLE1
        assert not run.protocol
        assert (ROOT / "results" / run.file.name).is_file()


def test_the_command_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.folders(
        tmp_path / "runs", ("fedavg", "fedcc"), [("digits", "classes:1")], 1, analysed=("fedavg", "fedcc")
    )
    synthetic.write(synthetic.record("fedcc", **dict(zip(("data", "skew"), SOME[0], strict=True))), tmp_path / "c.json")
    (tmp_path / "runs" / "broken.json").write_text("{")
    out = tmp_path / "report"
    done = call(capsys, "report", tmp_path / "runs", tmp_path / "c.json", "--out", out)
    assert done.code == 0, done
    assert "warning: runs/broken.json: is not valid JSON" in done.err
    names = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    tabular = {
        f"tables/{n}.{e}"
        for n in (
            "digits",
            "digits-clients",
            "digits-re-estimated",
            "digits-readings",
            "table1",
            "table1-readings",
            "table2",
        )
        for e in ("md", "csv", "tex")
    }
    assert tabular | {"index.html", "tables/runs.csv", "tables/report.tex", "tables/table1-paper.tex"} <= names
    drawn = {n.partition("_digits-classes-1_")[2].removesuffix(".pdf") for n in names if n.endswith(".pdf")}
    assert {"curves", "bytes", "partition", "fedcc_log", "margins", "embeddings", "fedcc_example"} <= drawn
    assert {n for n in names if n.endswith(".png")} == {n[:-3] + "png" for n in names if n.endswith(".pdf")}
    html = (out / "index.html").read_text()
    runs = json.loads(synthetic.packed(html, "content"))["runs"]
    assert ["summary.json", "../runs/digits_classes-1/fedcc/seed0/summary.json"] in [
        f for r in runs for f in r["files"]
    ]
    assert "broken.json" in html
    assert "averaged" in html
    assert html.count("re-estimated on the public images") == 1
    assert html.count("<small>read with mirror,trust=4</small>") == 2  # digits, and Table I


def test_a_run_of_now_is_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "run", "fedcc", *QUICK, "--out", tmp_path / "runs" / "a").code == 0
    found = find_records([tmp_path / "runs"])
    assert found.problems == ()
    (run,) = found.runs
    stored = json.loads((tmp_path / "runs" / "a" / "summary.json").read_text())
    assert run.final == stored["accuracy"]["final"]
    assert run.protocol == (("models", "resnet8"), ("rounds", "1"), ("epochs", "1"), ("fraction", "0.2"))
    assert set(run.tests) == {"local", "global", "valid", "valid_labels", "local_full"}
    assert len(run.counts) == 10
    assert sum(run.traffic.rounds) == run.traffic.total
    assert {"majority", "alpha", "unknown"} <= set(run.log)


def test_the_readmes_block_and_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "results", tmp_path / "results")
    readme = tmp_path / "README.md"
    readme.write_text("nothing to see\n")
    call(capsys, "report", "results", "--readme", readme).failed("README.md must have one line", markdown.BEGIN, code=2)
    assert readme.read_text() == "nothing to see\n"
    readme.write_text(f"above\n{markdown.BEGIN}\n{markdown.END}\nbelow\n")
    assert call(capsys, "report", "results", "--readme", "README.md", "--markdown", "docs/results.md").code == 0
    text = readme.read_text()
    assert text.startswith(f"above\n{markdown.BEGIN}\n")
    assert text.endswith(f"{markdown.END}\nbelow\n")
    record = json.loads(Path("results/cifar10_classes-1_fedcc_seed0.json").read_text())
    assert re.search(rf"^\| CIFAR-10, N = 1 \| \d+ \| {record['accuracy']['final']:.1f}", text, re.M)
    assert "| 67.3 ±1.8 | 12.7 ±0.7 (FedConcat) | **+54.6** |" in text  # the paper's
    assert markdown.MISSING not in text
    assert (tmp_path / "docs" / "results.md").read_text() == (ROOT / "docs" / "results.md").read_text()
    assert (tmp_path / markdown.PICTURE).read_text().startswith("<?xml")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "docs", "results"]  # and no report/


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_nothing_to_report_is_an_error(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    call(capsys, "report", tmp_path / name, "--out", tmp_path / "r").refused(name)
    assert not (tmp_path / "r").exists()


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex")
def test_latex_compiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.folders(tmp_path / "runs", ("fedavg", "fedhkt", "fedcc"), SOME, 2)
    assert call(capsys, "report", tmp_path / "runs", "--out", tmp_path / "r", "--no-figures").code == 0
    done = subprocess.run(
        ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "report.tex"],
        cwd=tmp_path / "r" / "tables", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.slow
def test_the_whole_of_table_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.folders(tmp_path / "runs", analysed=("fedavg", "fedcc"))
    done = call(capsys, "report", tmp_path / "runs", "--out", tmp_path / "r")
    assert done.code == 0, done
    assert "576 runs" in done.out
    assert (tmp_path / "r" / "index.html").stat().st_size < 6e6  # mostly records of many classes
