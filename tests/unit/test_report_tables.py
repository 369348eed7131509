"""Tables from records: what shares a cell, what is marked, what is missing, and that odd files do no harm."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import json
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import synthetic
from fedcc.methods import BEYOND, METHODS
from fedcc.report import gallery, latex, markdown, paper, spreadsheet, style
from fedcc.report.cells import Table
from fedcc.report.page import SCRIPTS, TEMPLATE, page, page_script
from fedcc.report.page_data import archive, as_json, packed, run_groups
from fedcc.report.paper import Value
from fedcc.report.records import Records, RunRecord, find_records
from fedcc.report.standings import Margin, filled, leads, nearest_rivals, standings
from fedcc.report.style import look
from fedcc.report.tables import client_table, reading_tables, tables

CIFAR = {"data": "cifar10", "skew": "classes:1"}
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>|`[x](javascript:1)\n# &"


def read(place: Path, *records: dict[str, Any]) -> Records:
    for i, made in enumerate(records):
        synthetic.write(made, place / f"r{i}.json")
    return find_records([place])


def built(place: Path, *records: dict[str, Any]) -> list[Table]:
    return tables(read(place, *records).runs)


# ------------------------------------------------------------------------------------------------- the paper's numbers


def test_the_papers_marks_follow_from_the_numbers() -> None:
    """Bold and underlined in the paper's Table I, read there by eye: a slip of a digit would move one of them."""
    best = ["fedcc", "fedcc", "fedcc", "fedcc", "fedmr", "fedcc", "fedcc", "fedcc", "fedrs", "fedcc", "fedcc", "fedcc"]
    second = [
        "fedlc",
        "fedsam",
        "fedavg",
        "fedmd",
        "fedavg",
        "fedlc",
        "fedlc",
        "fedmd",
        "fedmr",
        "fedmr",
        "fedmd",
        "fedconcat",
    ]
    for scenario, first, then in zip(paper.SCENARIOS, best, second, strict=True):
        ranked = sorted(paper.METHODS, key=lambda m: -paper.TABLE1[m, scenario].mean)
        assert ranked[:2] == [first, then], scenario
    assert len(paper.TABLE1) == 16 * 12
    assert tuple(METHODS)[:16] == paper.METHODS


def test_the_papers_numbers_sum_to_what_they_should() -> None:
    """Sums that were added up from the paper's source by other means."""
    sums = [round(sum(paper.TABLE1[m, s].mean for m in paper.METHODS), 1) for s in paper.SCENARIOS]
    assert sums == [503.9, 371.4, 427.5, 235.3, 668.9, 458.1, 519.3, 320.8, 1109.6, 683.0, 643.0, 226.8]
    assert sum(v.spread for v in paper.TABLE1.values()) == pytest.approx(249.4)
    assert sum(v.mean for v in paper.TABLE2.values()) == pytest.approx(1617.1)
    assert sum(v.spread for v in paper.TABLE2.values()) == pytest.approx(96.7)


def test_table_two_agrees_with_its_own_arithmetic() -> None:
    """A baseline that knows its own classes alone has a tenth (N=10) or a fifth (N=20) of its local accuracy."""
    for method in ("fedavg", "fedlc", "fedmr", "ssl"):
        for skew, share in (("classes:10", 0.1), ("classes:20", 0.2)):
            at = (method, ("cifar100", skew))
            assert paper.TABLE2["global", *at].mean == pytest.approx(share * paper.TABLE2["local", *at].mean, abs=0.8)
    assert len(paper.TABLE2) == 2 * 5 * 4


# ---------------------------------------------------------------------------------------------------- finding, reading


def test_runs_are_found_wherever_they_lie(tmp_path: Path) -> None:
    synthetic.write(synthetic.record("fedcc", **CIFAR), tmp_path / "runs" / "deep" / "fedcc" / "seed0", analysed=True)
    synthetic.write(synthetic.record("fedavg", **CIFAR), tmp_path / "results" / "a.json", analysed=True)
    synthetic.write(synthetic.record("fedmd", **CIFAR), tmp_path / "single.json")
    found = find_records(
        [tmp_path / "runs", tmp_path / "results", tmp_path / "single.json", tmp_path / "results" / "a.json"]
    )
    assert [r.name for r in found.runs] == ["results/a.json", "runs/deep/fedcc/seed0", "single.json"]
    assert found.problems == ()
    by_method = {r.method: r for r in found.runs}
    assert by_method["fedcc"].analysis is not None
    assert set(by_method["fedavg"].analysis or ()) == {"margins", "embeddings"}  # no example without "unknown"
    assert by_method["fedmd"].analysis is None
    with pytest.raises(ValueError, match="does not exist"):
        find_records([tmp_path / "nowhere"])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1, 2]", "must be an object"),
        ('{"name": "a package"}', "not a record of a run"),
        ('{"format": 2, "method": "FedCC"}', "format 2"),
        ('{"format": 1, "method": "FedCC"}', "experiment must be an object"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_foreign_files_are_said_and_passed_over(content: str | bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_bytes(content.encode() if isinstance(content, str) else content)
    found = read(tmp_path, synthetic.record())
    assert len(found.runs) == 1
    ((name, said),) = found.problems
    assert name.endswith("/odd.json")
    assert reason in said


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("accuracy", "final"), float("nan")),
        (("accuracy", "final"), 101.0),
        (("accuracy", "rounds"), "many"),
        (("accuracy", "rounds"), [1.0, "2"]),
        (("seed",), "0"),
        (("skew",), ["classes:1"]),
        (("settings",), None),
        (("experiment", "method"), 3),
    ],
)
def test_a_record_with_a_wrong_value_does_not_count(path: tuple[str, ...], value: Any, tmp_path: Path) -> None:
    made = synthetic.record()
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    found = read(tmp_path, made)
    assert found.runs == ()
    assert path[-1] in found.problems[0][1]


def test_an_odd_part_is_left_out_and_the_rest_counts(tmp_path: Path) -> None:
    made = synthetic.record(rounds=2)
    made["log"], made["counts"], made["bytes"]["rounds"] = (
        {"alpha": [1]},
        {"0": [1, 2], "1": [1]},
        {"up": 1, "down": []},
    )
    found = read(tmp_path, made)
    (run,) = found.runs
    assert (run.log, run.counts, run.traffic.total) == ({}, (), None)
    assert [said.partition(" left out")[0] for _, said in found.problems] == ["bytes", "log", "counts"]
    averaged = synthetic.record("fedavg", rounds=2)
    averaged["accuracy"]["readings"]["re-estimated"]["best"] = "high"
    found = read(tmp_path, averaged)
    assert found.runs[0].readings == {}
    assert found.problems[0][1].startswith("readings left out: accuracy.readings.re-estimated.best")


@pytest.mark.parametrize(
    ("part", "inner", "value"),
    [
        ("example", "image", "https://example.org/a.png"),
        ("example", "image", "data:image/svg+xml;base64,PHN2Zz4="),
        ("example", "image", "data:image/png;base64,AAAA"),
        ("example", "classes", ["one"]),
        ("margins", "edges", [0, 1]),
        ("embeddings", "labels", [1]),
    ],
)
def test_an_odd_analysis_is_left_out(part: str, inner: str, value: Any, tmp_path: Path) -> None:
    file = synthetic.write(synthetic.record(), tmp_path / "a.json", analysed=True)
    beside = file.with_name("a.analysis.json")
    stored = json.loads(beside.read_text())
    stored[part][inner] = value
    beside.write_text(json.dumps(stored))
    found = find_records([tmp_path])
    assert found.runs[0].analysis is None
    assert "a.analysis.json left out" in found.problems[0][1]


def test_an_unfinished_run_and_a_repeated_one_are_said(tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "experiment.toml").touch()
    again = synthetic.record(final=1.0, **CIFAR, engine="fused") | {"device": "another"}
    found = read(tmp_path, synthetic.record(final=50.0, **CIFAR), again)
    assert [r.final for r in found.runs] == [50.0]
    said = dict(found.problems)
    assert "not finished" in said[f"{tmp_path.name}/half"]
    assert "repeats" in said[f"{tmp_path.name}/r1.json"]


# -------------------------------------------------------------------------------------------------------------- tables


def test_mean_and_spread_over_seeds(tmp_path: Path) -> None:
    (table,) = built(
        tmp_path, *(synthetic.record("fedcc", f, seed=i, **CIFAR) for i, f in enumerate((60.0, 62.0, 67.0)))
    )
    cell = next(r for r in table.rows if r.method == "fedcc").cells["cifar10", "classes:1"]
    assert cell.final == Value(63.0, pytest.approx(3.6056, abs=1e-4))
    assert str(cell.final) == "63.0 ±3.6"
    assert [r.seed for r in cell.runs] == [0, 1, 2]
    assert cell.printed == {"final": Value(67.3, 1.8)}
    assert (table.slug, table.of_paper, filled(table)) == ("table1", True, 1)
    assert len(table.rows) == 16
    assert len(table.scenarios) == 12


def test_final_and_best_round_are_told_apart(tmp_path: Path) -> None:
    made = synthetic.record(**CIFAR)
    curve = [10.0, 20.0, 70.0, *[30.0] * 11, 40.0]
    made["accuracy"] |= {"final": 40.0, "best": 70.0, "best_round": 3, "rounds": curve}
    (table,) = built(tmp_path, made)
    cell = table.rows[-1].cells["cifar10", "classes:1"]
    assert (cell.value("final"), cell.value("best")) == (Value(40.0), Value(70.0))
    assert [run.best_round for run in cell.runs] == [3]


@pytest.mark.parametrize(
    ("given", "slug", "paper_beside"),
    [
        ({"rounds": 10}, "table1-t-10", False),
        ({"epochs": 10}, "table1-e-10", False),
        ({"clients": 20, "skew": "dirichlet:0.5"}, "table1-20-clients", False),
        ({"fraction": 0.5}, "table1-0.5-of-the-training-set", False),
        ({"participation": 0.5}, "table1-0.5-of-the-clients-a-round", False),
        ({"lr": 0.01}, "table1-lr-0.01", False),
        ({"models": "resnet8"}, "table1-resnet8", False),
        ({"augment": False}, "table1-no-crop-and-flip", True),  # as older records spell it
        ({"augment": "none"}, "table1-no-crop-and-flip", True),
        ({"augment": "strong"}, "table1-strong-augmentation", True),
        ({"validation": 0.1}, "table1-on-10-of-the-private-samples-held-out", False),
        ({"wire": "fp16"}, "table1-wire-fp16", True),
        ({"optimizer": "sgd", "lr": 0.01}, "table1-optimizer-sgd-lr-0.01", False),
    ],
)
def test_another_protocol_has_a_table_of_its_own(
    given: dict[str, Any], slug: str, paper_beside: bool, tmp_path: Path
) -> None:
    first, second = built(tmp_path, synthetic.record(**CIFAR), synthetic.record(**CIFAR | given))
    assert (first.slug, second.slug) == ("table1", slug)
    assert [len(t.runs) for t in (first, second)] == [1, 1]
    assert second.with_paper is paper_beside
    assert f"{'SGD' if 'optimizer' in given else 'Adam'} {given.get('lr', 0.001):g}" in second.protocol
    assert [r.method for r in second.rows] == ["fedcc"]


def test_methods_beyond_the_paper_leave_table1_alone(tmp_path: Path) -> None:
    """They have a table of their own, next to the paper's methods in the scenarios that they were run in."""
    given = [synthetic.record("fedcc", 60.0, **CIFAR), synthetic.record("fedmd", 40.0, **CIFAR)]
    given += [synthetic.record("dsfl", 50.0, **CIFAR), synthetic.record("dsfl", 45.0, {"temperature": 1.0}, **CIFAR)]
    given += [synthetic.record("fedcc", 70.0, data="cifar10", skew="classes:2")]
    found = read(tmp_path, *given)
    table1, beyond, variants = tables(found.runs)
    assert [t.slug for t in (table1, beyond, variants)] == ["table1", "beyond", "beyond-variants"]
    assert [t.title for t in (beyond, variants)] == ["Beyond the paper", "Beyond the paper, variants"]
    assert tuple(row.method for row in table1.rows) == paper.METHODS
    assert [row.method for row in beyond.rows] == ["fedmd", "fedcc", "dsfl"]
    dsfl = "DSFL (reconstruction from a port)"
    assert [row.title for row in variants.rows] == [dsfl, f"{dsfl}, temperature=1.0"]
    assert beyond.scenarios == (("cifar10", "classes:1"),)
    assert [row.cells["cifar10", "classes:1"].marks.get("final") for row in beyond.rows] == [None, 1, 2]
    assert [row.method for row in beyond.new_rows] == ["dsfl"]
    assert [lead.margins["final"][1].rival for t in (table1, beyond) for lead in leads(t)] == ["FedMD", dsfl]
    assert not beyond.of_paper
    own = client_table(beyond)
    assert own is not None
    assert own.slug == "beyond-clients"
    text = markdown.page(found, tables(found.runs), tmp_path)
    assert text.count("Is FedCC ahead?") == 2
    assert f"1 of {len(BEYOND)} |" in text
    assert "DSFL" not in markdown.readme_block(tables(found.runs), tmp_path)
    assert [t.slug for t in built(tmp_path / "alone", given[2])] == ["beyond"]


def test_how_it_was_computed_is_no_protocol(tmp_path: Path) -> None:
    gpu = synthetic.record(seed=1, **CIFAR, precision="bf16")
    (table,) = built(tmp_path, synthetic.record(**CIFAR), gpu)
    assert len(table.rows[-1].cells["cifar10", "classes:1"].runs) == 2


def test_other_settings_are_variants_beside_the_method_as_it_comes(tmp_path: Path) -> None:
    plain, varied = built(
        tmp_path,
        synthetic.record(final=60.0, **CIFAR),
        synthetic.record("fedavg", **CIFAR),
        synthetic.record(final=20.0, settings={"lam": 0.0}, **CIFAR),
    )
    assert len(plain.runs) == 2
    assert [(r.title, str(r.cells["cifar10", "classes:1"].final)) for r in varied.rows] == [
        ("FedCC", "60.0"),
        ("FedCC, lam=0.0", "20.0"),
    ]
    assert varied.slug == "table1-variants"


def test_a_whole_number_is_no_other_setting(tmp_path: Path) -> None:
    told = [
        synthetic.record(final=60.0 + s, settings={"lam": v}, **{**CIFAR, "seed": s}) for s, v in ((0, 1), (1, 1.0))
    ]
    (varied,) = built(tmp_path, *told)
    assert [(r.title, len(r.cells["cifar10", "classes:1"].runs)) for r in varied.rows] == [("FedCC, lam=1.0", 2)]


def test_the_budget_matched_row(tmp_path: Path) -> None:
    matched = synthetic.record("fedavg", 30.0, epochs=85, **CIFAR)
    other = synthetic.record("fedavg", 30.0, epochs=84, **CIFAR)
    first, second = built(tmp_path, matched, other, synthetic.record("fedavg", 20.0, **CIFAR))
    assert [r.title for r in first.rows][:2] == ["FedAvg", "FedAvg, E=85 (budget-matched)"]
    assert first.rows[1].cells["cifar10", "classes:1"].printed == {}
    assert first.protocol.startswith("10 clients, T=15, E=20")
    assert second.slug == "table1-e-84"


def test_marks_leave_out_bounds_and_ties_share_them(tmp_path: Path) -> None:
    finals = {"fedcc": 70.04, "fedavg": 70.0, "fedmd": 50.0, "fedprox": 40.0, "centralized": 95.0, "ssl": 90.0}
    (table,) = built(tmp_path, *(synthetic.record(m, f, **CIFAR) for m, f in finals.items()))
    marks = {r.method: r.cells["cifar10", "classes:1"].marks.get("final", 0) for r in table.rows if r.method in finals}
    assert marks == {"fedcc": 1, "fedavg": 1, "fedmd": 2, "fedprox": 0, "centralized": 0, "ssl": 0}
    (lead,) = leads(table)
    assert (lead.scenario, lead.rivals) == (("cifar10", "classes:1"), 3)
    assert lead.margins["final"][1] == Margin("FedAvg", pytest.approx(0.04), 1, 1)
    assert lead.printed == Margin("FedConcat", pytest.approx(67.3 - 12.7), 1, 1)  # of all that the paper printed


def test_a_lead_of_another_method_is_said(tmp_path: Path) -> None:
    twice = [synthetic.record("fedavg", 81.0, epochs=85, **CIFAR), synthetic.record("fedavg", 60.0, **CIFAR)]
    (table,) = built(tmp_path, synthetic.record("fedcc", 70.0, **CIFAR), *twice)
    (lead,) = leads(table)
    assert lead.rivals == 1
    assert lead.margins["final"][1] == Margin("FedAvg, E=85 (budget-matched)", pytest.approx(-11.0), 1, 1)
    assert "| 1 of 15 | 70.0 | FedAvg, E=85 (budget-matched) | -11.0 |" in markdown.lead_section(table)


def test_a_margin_is_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    mine = [synthetic.record("fedcc", f, **{**CIFAR, "seed": s}) for s, f in enumerate((70.0, 80.0, 90.0))]
    (table,) = built(
        tmp_path,
        *mine,
        synthetic.record("fedavg", 65.0, **CIFAR),
        synthetic.record("fedmd", 66.0, **{**CIFAR, "seed": 2}),
    )
    (lead,) = leads(table)
    value, margin = lead.margins["final"]
    assert (str(value), margin) == ("80.0 ±10.0", Margin("FedAvg", pytest.approx(5.0), 1, 3))  # FedMD's seed was kinder
    assert lead.reread == Margin("FedAvg", pytest.approx(2.0), 1, 3)
    assert "| 80.0 ±10.0 | FedAvg | **+5.0** (1 of 3 seeds) |" in markdown.lead_section(table)
    assert "| +2.0 (FedAvg, 1 of 3 seeds) |" in markdown.lead_section(table)
    (table,) = built(tmp_path / "apart", mine[0], mine[1], synthetic.record("fedavg", 65.0, **{**CIFAR, "seed": 7}))
    assert leads(table)[0].margins["final"][1] == Margin("FedAvg", pytest.approx(10.0), 0, 2)  # between the means
    assert "**+10.0** (other seeds)" in markdown.lead_section(table)


def test_variants_have_rows_where_they_ran(tmp_path: Path) -> None:
    varied = [
        synthetic.record("fedcc", 20.0, settings={"lam": 0.0}, **CIFAR),
        synthetic.record("fedmd", 30.0, settings={"average": "logits"}, **{**CIFAR, "data": "cifar100"}),
    ]
    (table,) = built(tmp_path, *varied)
    for data, title in (("cifar10", "FedCC, lam=0.0"), ("cifar100", "FedMD, average=logits")):
        lines = markdown.comparison(table, data, tmp_path).splitlines()[2:]
        assert [line.split(" | ")[0] for line in lines if line.startswith("|")] == [f"| {title}"]


def test_one_method_alone_is_not_marked(tmp_path: Path) -> None:
    (table,) = built(tmp_path, synthetic.record(**CIFAR), synthetic.record("centralized", **CIFAR))
    assert all(not c.marks for r in table.rows for c in r.cells.values())
    assert not leads(table)


def test_digits_have_a_table_of_their_own_without_the_paper(tmp_path: Path) -> None:
    made = [synthetic.record(m, data="digits", skew=s) for m in ("fedavg", "fedcc") for s in ("iid", "classes:1")]
    (table,) = built(tmp_path, *made)
    assert (table.slug, table.with_paper, table.of_paper) == ("digits", False, False)
    assert table.scenarios == (("digits", "classes:1"), ("digits", "iid"))


def test_what_is_open(tmp_path: Path) -> None:
    (table,) = built(
        tmp_path, synthetic.record("fedavg", 5.0, **CIFAR), *(synthetic.record(seed=s, **CIFAR) for s in range(3))
    )
    assert table.data == ["cifar10", "tiny-imagenet", "cifar100"]  # those with runs first
    last = standings(table)[3]
    assert last.scenario == ("cifar10", "classes:1")
    assert len(last.missing) == 14
    assert last.fewer == (("FedAvg", 1),)
    assert dict(last.below)["FedAvg"] == pytest.approx(-6.0)
    assert len(standings(table)[-1].missing) == 16


def test_an_unknown_method_and_data_set_are_shown_as_they_are(tmp_path: Path) -> None:
    made = synthetic.record(data="digits")
    made |= {"method": "Mine", "family": "parameters", "data": "my data", "settings": {"x": 1}}
    made["experiment"] |= {"method": "mine", "data": "my data", "settings": {"x": 1}}
    made["command"] = "mine --data 'my data'"
    (table,) = built(tmp_path, made)
    assert table.title.startswith("my data")
    assert table.rows[0].title == "Mine, x=1"


# ------------------------------------------------------------------------------------------------------------ Table II


def test_table_two_keeps_the_two_spreads_apart(tmp_path: Path) -> None:
    made = []
    for seed, (a, b) in enumerate(((10.0, 20.0), (20.0, 30.0))):
        one = synthetic.record(data="cifar100", skew="classes:10", seed=seed)
        one["accuracy"]["table2"] = {
            "local": {"0": a, "1": b},
            "global": {"0": 1.0, "1": 1.0},
            "valid": {"0": 80.0, "1": 70.0},
            "valid_labels": {"0": 60.0, "1": 50.0},
        }
        one["accuracy"] |= {"local": {"0": a, "1": b}, "clients": {"0": 1.0, "1": 1.0}}
        made.append(one)
    found = read(tmp_path, *made)
    first = tables(found.runs)[0]
    table = client_table(first)
    assert table is not None
    scenario = ("cifar100", "classes:10")
    cell = table.rows[-1].cells[scenario]
    local, valid, held = (cell.own(test) for test in ("local", "valid", "valid_labels"))
    assert local is not None
    assert (local.mean, len(cell.tested("local"))) == (20.0, 2)
    assert local.spread == pytest.approx(7.0711, abs=1e-4)
    assert local.over_seeds == pytest.approx(7.0711, abs=1e-4)
    assert valid is not None
    assert (valid.mean, valid.over_seeds) == (75.0, 0.0)
    assert held is not None
    assert (held.mean, held.spread) == (55.0, pytest.approx(7.0711, abs=1e-4))
    assert cell.printed == {"final": Value(42.6, 1.3), "local": Value(76.6, 3.3), "valid": Value(77.9, 3.8)}
    html = page(found, [first], tmp_path, "Title")
    for text in (markdown.clients(table, "cifar100"), latex.clients(table), html):
        assert text.count("unknown valid (labels)") == 1
        assert "55.0" in text
    assert ",valid_labels,2,55.0000," in spreadsheet.clients(table)
    assert (table.rows[-1].method, table.slug, table.scenarios) == ("fedcc", "table2", (scenario,))


def test_without_unknown_the_rule_changes_nothing(tmp_path: Path) -> None:
    made = [synthetic.record(m, **CIFAR) for m in ("fedavg", "fedcc", "centralized")]
    del made[1]["accuracy"]["table2"]  # a record from before it was stored
    table = client_table(built(tmp_path, *made)[0])
    assert table is not None
    assert [r.method for r in table.rows] == ["fedavg", "fedcc"]  # centralized trains no client
    for row, same in zip(table.rows, (True, False), strict=True):
        cell = row.cells["cifar10", "classes:1"]
        for test in ("valid", "valid_labels"):
            assert (cell.own(test) == cell.own("global")) is same
            assert (cell.own(test) is None) is not same


def test_averaged_models_stand_twice_in_a_table_of_their_own(tmp_path: Path) -> None:
    old = synthetic.record("fedavg", seed=2, **CIFAR)
    del old["accuracy"]["readings"]  # a record from before there was one
    kept = [synthetic.record(m, final=20.0 + s, seed=s, **CIFAR) for m in ("fedavg", "fedcc") for s in range(2)]
    (table,) = built(tmp_path, old, *kept)
    again = reading_tables(table)[0]
    assert [row.title for row in again.rows] == ["FedAvg, averaged", "FedAvg, re-estimated"]
    assert again.scenarios == (("cifar10", "classes:1"),)
    averaged, anew = (row.cells["cifar10", "classes:1"] for row in again.rows)
    assert (str(averaged.final), str(anew.final)) == ("20.5 ±0.7", "23.5 ±0.7")
    assert [r.readings["re-estimated"].best for r in anew.runs] == [r.best for r in anew.runs]
    text = markdown.page(Records(tuple(table.runs), ()), [table], tmp_path)
    assert "| FedAvg, averaged | 20.5 ±0.7" in text
    assert "| FedAvg, re-estimated | 23.5 ±0.7" in text
    assert "averaged" not in markdown.readme_block([table])
    rows = list(csv.DictReader(io.StringIO(spreadsheet.comparison(again))))
    assert [(row["variant"], row["final"]) for row in rows if row["seeds"] != "0"] == [
        ("averaged", "20.5000"), ("re-estimated", "23.5000")
    ]  # fmt: skip


def test_the_nearest_rivals_are_ranked_where_all_baselines_have_run(tmp_path: Path) -> None:
    """By seed 0: no scenario that one of them lacks, no other seed and no other method counts."""
    own = [method for method in paper.METHODS if method != "fedcc"]
    some = [synthetic.record(m, 99.0, data="cifar10", skew="classes:1") for m in own[1:]]
    (table,) = built(tmp_path / "some", *some)
    assert nearest_rivals(table) is None
    every = [synthetic.record(m, 10.0 + i, data="cifar10", skew="classes:2") for i, m in enumerate(own)]
    others = [
        synthetic.record(own[0], 98.0, data="cifar10", skew="classes:2", seed=1),
        synthetic.record("fedcc", 97.0, **CIFAR),
    ]
    (table,) = built(tmp_path / "all", *some, *every, *others)
    ranking = nearest_rivals(table)
    assert ranking is not None
    assert ranking.means == tuple((METHODS[own[i]]().label, 10.0 + i) for i in (14, 13, 12))
    assert (ranking.scenarios, ranking.of) == ((("cifar10", "classes:2"),), 2)


def test_a_lead_is_measured_against_re_estimated_baselines_too(tmp_path: Path) -> None:
    kept = [synthetic.record(m, final=f, **CIFAR) for m, f in (("fedavg", 20.0), ("fedcc", 21.0))]
    (table,) = built(tmp_path, *kept)
    (lead,) = leads(table)
    assert lead.margins["final"][1] == Margin("FedAvg", pytest.approx(1.0), 1, 1)
    assert lead.reread == Margin("FedAvg", pytest.approx(-2.0), 1, 1)  # the record's reading is 3 above its accuracy
    assert "| -2.0 (FedAvg) |" in markdown.lead_section(table)


def test_a_record_of_an_earlier_algorithm_does_not_count(tmp_path: Path) -> None:
    old = synthetic.record("fedconcat", **CIFAR)
    del old["settings"]["classifier_lr"], old["experiment"]["version"]
    found = read(tmp_path, old, synthetic.record("fedconcat", **{**CIFAR, "seed": 1}))
    assert [r.seed for r in found.runs] == [1]
    ((_, said),) = found.problems
    assert said == "does not count: version 1 of FedConcat is another algorithm than version 2"


def test_a_record_from_before_an_option_has_what_its_method_did_then(tmp_path: Path) -> None:
    old = synthetic.record("fednova", **CIFAR)
    del old["settings"]["statistics"], old["experiment"]["settings"]["statistics"], old["experiment"]["version"]
    authors = synthetic.record("fedmd", settings={"loss": "l1", "average": "logits"}, **CIFAR)
    table, variants = built(tmp_path, old, authors, synthetic.record("fednova", **{**CIFAR, "seed": 1}))
    assert [(r.method, r.seed) for r in table.runs] == [("fednova", 1)]
    assert {r.method: r.changed_settings for r in variants.runs if r.changed_settings} == {
        "fednova": (("statistics", "average"),),
        "fedmd": (("loss", "l1"), ("average", "logits")),
    }


def test_data_sets_with_more_runs_come_first(tmp_path: Path) -> None:
    other = {**CIFAR, "data": "cifar100", "skew": "classes:10"}
    kept = [synthetic.record("fedcc", **other), *(synthetic.record(m, **CIFAR) for m in ("fedavg", "fedcc"))]
    (table,) = built(tmp_path, *kept)
    assert table.data == ["cifar10", "cifar100", "tiny-imagenet"]


def test_other_readings_stand_below_the_table_but_not_in_a_readme(tmp_path: Path) -> None:
    old = synthetic.record("fedcc", seed=2, **CIFAR)
    del old["accuracy"]["readings"]  # a record from before there were any
    kept = [synthetic.record("fedcc", final=20.0 + s, seed=s, **CIFAR) for s in range(2)]
    varied = synthetic.record("fedcc", settings={"trust": 2.0}, **CIFAR)
    table, variants = built(tmp_path, old, *kept, varied)
    (found,) = reading_tables(table)
    assert (found.slug, found.title) == ("table1-readings", "Table I: Other readings")
    assert found.scenarios == (("cifar10", "classes:1"),)
    shown = {row.title: str(row.cells["cifar10", "classes:1"].final) for row in found.rows}
    assert shown == {  # the synthetic readings are 3, 4, 5 and 6 points higher
        "FedCC": "20.5 ±0.7",
        "FedCC, read with trust=2": "23.5 ±0.7",
        "FedCC, read with trust=4": "24.5 ±0.7",
        "FedCC, read with mirror": "25.5 ±0.7",
        "FedCC, read with mirror,trust=4": "26.5 ±0.7",
    }
    assert reading_tables(variants) == []  # each would have five rows
    page = markdown.page(Records(tuple(table.runs), ()), [table], tmp_path)
    assert page.count("### Other readings\n") == 1
    assert page.index("## Table I") < page.index("| FedCC, read with mirror | 25.5 ±0.7") < page.index("## Records")
    assert "read with" not in markdown.readme_block([table])
    rows = list(csv.DictReader(io.StringIO(spreadsheet.comparison(found))))
    assert [row["variant"] for row in rows if row["seeds"] != "0"][-1] == "read with mirror,trust=4"
    assert "FedCC, read with trust=2 & $23.5_{\\pm0.7}$" in latex.comparison(found)


def test_all_rows_of_readings_are_of_the_same_runs(tmp_path: Path) -> None:
    """Where one seed lacks a reading, its cell is empty: the mean of the others would be of other seeds."""
    kept = [synthetic.record("fedcc", final=20.0 + 9 * s, seed=s, **CIFAR) for s in range(2)]
    del kept[1]["accuracy"]["readings"]["trust=2"]
    (found,) = reading_tables(built(tmp_path, *kept)[0])
    shown = {row.title: len(row.cells["cifar10", "classes:1"].runs) for row in found.rows}
    assert shown.pop("FedCC, read with trust=2", 0) == 0
    assert set(shown.values()) == {2}


def test_a_page_has_readings_of_some_seeds_alone(tmp_path: Path) -> None:
    """The first seed was run before there were any: numbers still link to the runs of their cell."""
    old, *new = [synthetic.record(m, seed=s, **CIFAR) for m in ("fedcc", "fedavg") for s in range(2)]
    del old["accuracy"]["readings"], new[1]["accuracy"]["readings"]
    made = built(tmp_path, old, *new)
    html = page(Records(tuple(made[0].runs), ()), made, tmp_path, "Title")
    linked = re.search(r"read with mirror</small>.*?href=\"#(runs-\d+)\"", html, re.DOTALL)
    assert linked is not None
    assert html.count(f'id="{linked[1]}"') == 1


# ------------------------------------------------------------------------------------------------------------- writers


@pytest.fixture
def made(tmp_path: Path) -> list[Table]:
    kept = [synthetic.record(m, seed=s, **CIFAR) for m in ("fedavg", "fedcc", "local") for s in range(2)]
    kept += [synthetic.record(settings={"lam": 0.5}, **CIFAR), synthetic.record("fedcc", data="digits")]
    return built(tmp_path, *kept)


def test_csv_has_every_number(made: list[Table]) -> None:
    rows = list(csv.DictReader(io.StringIO(spreadsheet.comparison(made[0]))))
    assert len(rows) == len(made[0].rows) * 12
    row = next(r for r in rows if (r["method"], r["data"], r["skew"]) == ("FedCC", "cifar10", "classes:1"))
    cell = next(r for r in made[0].rows if r.method == "fedcc").cells["cifar10", "classes:1"]
    assert cell.final is not None
    assert float(row["final"]) == pytest.approx(cell.final.mean, abs=1e-4)
    assert (row["seeds"], row["paper"], len(row["records"].split())) == ("2", "67.3", 2)
    missing = next(r for r in rows if (r["method"], r["skew"]) == ("FedMD", "classes:1"))
    assert (missing["seeds"], missing["final"], missing["paper"]) == ("0", "", "10.7")


def test_a_text_is_no_formula_in_a_spreadsheet(made: list[Table]) -> None:
    run = replace(made[0].runs[0], name="=cmd()")
    assert list(csv.reader(io.StringIO(spreadsheet.runs([run], Path()))))[1][0] == "'=cmd()"


@pytest.mark.parametrize("with_paper", [True, False])
def test_latex_is_whole(with_paper: bool, made: list[Table]) -> None:
    for text in (latex.comparison(made[0], with_paper=with_paper), latex.clients(client_table(made[0]))):  # type: ignore[arg-type]
        assert text.count("{") == text.count("}")
        assert text.count("$") % 2 == 0
        assert text.isascii()
        columns = len(re.search(r"\\begin\{tabular\}\{(l?c+)\}", text)[1])  # type: ignore[index]
        for line in text.splitlines():
            if line.endswith(r"\\"):
                widths = [int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line)]
                assert line.count("&") - line.count(r"\&") + sum(widths) == columns - 1, line
        assert set(re.findall(r"\\(begin|end)\{(\w+\*?)\}", text)) == {
            (w, n) for w in ("begin", "end") for n in ("table*", "tabular")
        }
    assert latex.text("50 % of a_b & {c} \\ 中") == r"50 \% of a\_b \& \{c\} \textbackslash{} ?"


def test_markdown_links_each_number_to_its_record(made: list[Table], tmp_path: Path) -> None:
    text = markdown.section(made[0], tmp_path / "docs")
    (line,) = [x for x in text.splitlines() if x.startswith("| FedCC |")]
    links = re.findall(r"\((\.\./r\d\.json)\)", line)
    assert len(links) == 2
    assert all((tmp_path / "docs" / name).resolve().is_file() or (tmp_path / name[3:]).is_file() for name in links)
    assert "67.3 ±1.8" in line
    assert markdown.MISSING in line


def test_a_page_in_markdown_has_records_commands_and_what_is_open(made: list[Table], tmp_path: Path) -> None:
    found = Records(tuple(r for t in made for r in t.runs), (("x.json", "is not valid JSON"),))
    text = markdown.page(found, made, tmp_path)
    for run in found.runs:
        assert run.name.rpartition("/")[2] in text
        assert f"`{run.command}`" in text
    assert "What is missing" in text
    assert "no run yet" in text
    assert "`x.json`: is not valid JSON" in text
    assert str(tmp_path) not in text


def test_the_block_of_a_readme_is_replaced_and_nothing_else() -> None:
    page = f"before\n{markdown.BEGIN}\nold\n{markdown.END}\nafter\n"
    assert (
        markdown.replace_block(page, "new\n", "README.md") == f"before\n{markdown.BEGIN}\nnew\n{markdown.END}\nafter\n"
    )
    for odd in ("nothing", markdown.BEGIN, f"{markdown.END}\n{markdown.BEGIN}", page + page):
        with pytest.raises(ValueError, match=r"README.md must have one line"):
            markdown.replace_block(odd, "new\n", "README.md")


# ---------------------------------------------------------------------------------------------------------------- page


def test_texts_of_records_cannot_become_code(tmp_path: Path) -> None:
    made = synthetic.record(data="digits")
    made |= {"method": EVIL, "device": EVIL, "command": EVIL, "skew": EVIL, "commit": EVIL, "data": EVIL}
    made["experiment"] |= {"method": EVIL, "wire": EVIL, "data": EVIL, "skew": EVIL}
    made["versions"] = {EVIL: EVIL}
    found = read(tmp_path, made)
    assert len(found.runs) == 1
    html = page(found, tables(found.runs), tmp_path, EVIL)
    own = f"<script>{page_script()}</script>"
    assert html.count(own) == 1
    markup = html.replace(own, "")
    assert "<script>" not in markup
    assert "<img" not in markup
    assert "alert(1)" in markup  # it is there, as text
    assert set(re.findall(r"<script ([^>]*)>", markup)) == {
        f'type="text/plain" id="{i}"' for i in ("content", "archive")
    }
    digest = base64.b64encode(hashlib.sha256(page_script().encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in html  # and nothing else may run
    assert "alert(2)" in json.loads(synthetic.packed(html, "content"))["runs"][0]["command"]
    text = markdown.page(found, tables(found.runs), tmp_path)
    assert "\n# &" not in text
    assert "<script>" not in re.sub(r"`[^\n]*`", "", text)


def test_packed_data_survives_and_is_the_same_each_time() -> None:
    value = {"a": "</script>&<!-- \u2028 é", "b": [1.5, None]}
    text = packed(as_json(value))
    assert json.loads(gzip.decompress(base64.b64decode(text))) == value
    assert re.fullmatch(r"[A-Za-z0-9+/]+=*", text)
    assert packed(as_json(value)) == text
    with pytest.raises(ValueError):
        as_json({"a": float("nan")})


def test_a_page_holds_the_records_byte_for_byte(tmp_path: Path) -> None:
    """A mailed page is enough: its archive, unpacked, gives the same report. Only large matrices are left out."""
    place = tmp_path / "runs"
    synthetic.folders(place, ("fedavg", "fedcc"), [("cifar10", "classes:1"), ("tiny-imagenet", "classes:20")], 1)
    synthetic.write(synthetic.record(data="digits"), place / "bare.json")
    found = find_records([place])
    tar, places = archive(run_groups(tables(found.runs))[0])
    for run in found.runs:
        start, size = places[run.name]
        record, stored = json.loads(tar[start : start + size]), json.loads(run.file.read_text())
        large = stored.pop("confusion") if run.data == "tiny-imagenet" else None
        assert record == stored
        assert large is not None or tar[start : start + size] == run.file.read_bytes()
    html = page(found, tables(found.runs), tmp_path, "Title")
    assert synthetic.packed(html, "archive") == tar
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        opened.extractall(tmp_path / "again", filter="data")
    again = find_records([tmp_path / "again"])
    assert again.problems == ()
    key = lambda run: (run.method, run.scenario, run.final, run.curve, run.known, run.work)  # noqa: E731
    assert sorted(map(str, map(key, again.runs))) == sorted(map(str, map(key, found.runs)))


def test_the_page_is_light_and_its_script_is_in_short_files(tmp_path: Path) -> None:
    """With 300 records like those of this repository it stays below 2 MB."""
    found = find_records([Path(__file__).parents[2] / "results"])
    size = len(page(found, tables(found.runs), tmp_path, "Title").encode())
    assert size * 300 / len(found.runs) < 2_000_000
    for name in SCRIPTS:
        assert len((TEMPLATE / f"{name}.js").read_text().splitlines()) <= 400
    assert {f"{name}.js" for name in SCRIPTS} == {file.name for file in TEMPLATE.glob("*.js")}
    assert "innerHTML" not in page_script()


def test_fedcc_stands_first_and_what_has_no_run_is_marked(tmp_path: Path) -> None:
    found = read(tmp_path, *(synthetic.record(m, **CIFAR) for m in ("fedavg", "fedcc")))
    html = page(found, tables(found.runs), tmp_path, "Title")
    body = html.partition('<table class="sortable" data-name="table1">')[2].partition("</table>")[0]
    rows = re.findall(r'<tr data-method="(\w+)"[^>]*?(data-empty)?>', body)
    assert rows[0] == ("fedcc", "")
    assert {method for method, empty in rows if not empty} == {"fedavg", "fedcc"}
    heads = re.findall(r'<th scope="col" data-data="[^"]+" data-skew="([^"]+)"( data-empty)?', body)
    assert len(heads) == len(paper.SCENARIOS)
    assert [skew for skew, empty in heads if not empty] == ["classes:1"]


def test_every_method_has_a_look_of_its_own() -> None:
    looks = [look(m) for m in METHODS]
    assert len({(x.colour, x.dash) for x in looks}) == len(METHODS)
    assert look("fedcc").width > max(look(m).width for m in METHODS if m != "fedcc")


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_lines_stand_out_from_their_backgrounds() -> None:
    css = (TEMPLATE / "page.css").read_text()
    backgrounds = re.findall(r"--(?:back|card): light-dark\((#\w{6}), (#\w{6})\)", css)
    assert len(backgrounds) == 2
    methods = [*METHODS, "a method of one's own"]
    for method in methods:
        assert contrast(str(look(method).print["color"]), "#ffffff") >= 3, method
    for method in methods:
        for light, dark in backgrounds:
            assert contrast(look(method).colour.light, light) >= 3, method
            assert contrast(look(method).colour.dark, dark) >= 3, method
    for name in ("ink", "soft", "link"):  # text
        (words,) = re.findall(rf"--{name}: light-dark\((#\w{{6}}), (#\w{{6}})\)", css)
        for light, dark in backgrounds:
            assert min(contrast(words[0], light), contrast(words[1], dark)) >= 4.5, name
    for light, dark in backgrounds:
        assert all(contrast(c.light, light) >= 3 and contrast(c.dark, dark) >= 3 for c in style.PALETTE)
    for number in (1, 10, 11, 20, 100):
        colours = style.distinct_colours(number)
        assert len(set(colours)) == number
        assert min(contrast(c, "#ffffff") for c in colours) >= 3


@pytest.mark.parametrize(
    ("given", "title"),
    [
        ({"data": "digits"}, "Digits, N = 1"),
        ({"data": "digits", "rounds": 2}, "Digits: T=2, N = 1"),
        ({**CIFAR, "skew": "classes:2"}, "Table I: CIFAR-10, N = 2"),
    ],
)
def test_a_figures_title_names_the_data_once(given: dict[str, Any], title: str, tmp_path: Path) -> None:
    made = built(tmp_path, synthetic.record(**given))
    drawn = {name.rpartition("_")[2]: make for name, make in gallery.pictures(made)}
    for name in ("curves", "bytes"):
        assert drawn[name]().axes[0].get_title() == title


def test_old_records_are_still_read(tmp_path: Path) -> None:
    made = synthetic.record(**CIFAR)
    for key in ("log", "counts", "public", "note", "versions", "commit"):
        del made[key]
    del made["accuracy"]["table2"], made["bytes"]["rounds"], made["accuracy"]["targets"]
    found = read(tmp_path, made)
    run: RunRecord = found.runs[0]
    assert found.problems == ()
    assert (run.log, run.counts, run.traffic.rounds, run.targets) == ({}, (), (), ())
    assert page(found, tables(found.runs), tmp_path, "old").startswith("<!doctype html>")
