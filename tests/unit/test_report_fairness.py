"""Comparisons paired by seed and at equal compute, from records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_report_tables import read

import synthetic
from fedcc.experiments.sweep import read as sweep
from fedcc.report import markdown
from fedcc.report.fairness import compute_tables, paired_comparisons, reading_comparisons, strong_comparisons
from fedcc.report.tables import tables
from fedcc.report.write import write_report

CIFAR = {"data": "cifar10", "skew": "classes:2"}
SCENARIO = ("cifar10", "classes:2")


def finals(method: str, *accuracies: float, **given: Any) -> list[dict[str, Any]]:
    return [synthetic.record(method, a, **{**CIFAR, **given, "seed": s}) for s, a in enumerate(accuracies)]


def with_curve(made: dict[str, Any], curve: list[float], trained: list[int]) -> dict[str, Any]:
    made["accuracy"] |= {"rounds": curve, "final": curve[-1], "best": max(curve)}
    made["accuracy"]["best_round"] = 1 + curve.index(max(curve))
    made["images"] |= {
        "trained": {"fit": sum(trained)},
        "rounds": {**made["images"]["rounds"], "trained": trained},
    }
    return made


def test_differences_are_taken_seed_by_seed(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        *finals("fedcc", 70.0, 80.0, 90.0),
        *finals("fedavg", 60.0, 71.0, 82.0),
        *finals("fedcc", 71.0, 82.0, settings={"trust": 0.0}),
        *finals("fedcc", 73.0, 83.0, 93.0, augment="strong"),
        *finals("fedmd", 50.0),
    )
    by_name = {(c.kind, c.reference): c.differences[SCENARIO] for c in paired_comparisons(found.runs)}
    assert set(by_name) == {
        ("FedAvg", "FedCC"),
        ("FedCC, trust=0.0", "FedCC"),
        ("FedCC, augment=strong", "FedCC"),
    }  # FedMD has one seed
    other = by_name["FedAvg", "FedCC"]
    assert (other.seeds, other.final.mean, other.final.spread) == (3, pytest.approx(-9.0), pytest.approx(1.0))
    assert (by_name["FedCC, trust=0.0", "FedCC"].seeds, by_name["FedCC, trust=0.0", "FedCC"].final.mean) == (2, 1.5)
    assert by_name["FedCC, augment=strong", "FedCC"].final.spread == pytest.approx(0.0)
    text = markdown.paired_section(found)
    assert "| FedAvg | FedCC | -9.0 ±1.0 / " in text
    assert " (3) |" in text


def test_runs_on_other_samples_are_not_paired(tmp_path: Path) -> None:
    """A share of the data, other clients, held-out samples, or a data set that changed since; augmentation is none."""
    other = [*finals("fedcc", 3.0, 4.0), *finals("fedavg", 3.0, 4.0, augment="none")]
    for options in ({"fraction": 0.5}, {"clients": 5}, {"validation": 0.1}, {"public": 0.2}):
        other += finals("fedcc", 1.0, 2.0, **options)
    for made in other[:2]:
        made |= {"data_sha256": "a" * 64, "partition_sha256": "b" * 64}
    changed = finals("fedavg", 5.0, 6.0)
    for made in changed:
        made |= {"data_sha256": "a" * 64, "partition_sha256": "c" * 64}
    found = read(tmp_path, *other, *changed)
    assert [(c.kind, c.reference) for c in paired_comparisons(found.runs)] == [("FedAvg, augment=none", "FedAvg")]


def test_readings_are_compared_with_the_predictions_of_the_same_models(tmp_path: Path) -> None:
    made = finals("fedcc", 70.0, 80.0)
    for seed, record in enumerate(made):
        final = (72.0, 85.0)[seed]
        reading = {"final": final, "best": final, "best_round": 15, "rounds": [0.0] * 14 + [final]}
        record["accuracy"]["readings"] = {"mirror": reading, **({"trust=2": reading} if seed else {})}
    found = read(tmp_path, *made, *finals("fedcc", 1.0, 2.0, settings={"lam": 0.5}))
    (comparison,) = reading_comparisons(found.runs)  # trust=2 has one seed
    assert (comparison.kind, comparison.reference) == ("FedCC, read with mirror", "FedCC")
    assert comparison.differences[SCENARIO].final == (3.5, pytest.approx(4.5**0.5), None)
    assert "## Other readings, paired by seed" in markdown.paired_section(found)


def test_strong_augmentation_less_standard(tmp_path: Path) -> None:
    """One seed is enough; settings, and whatever else the protocol changes, are the same on both sides."""
    strong = {"augment": "strong"}
    found = read(
        tmp_path,
        *finals("fedcc", 70.0),
        *finals("fedcc", 73.0, **strong),
        *finals("fedcc", 60.0, settings={"lam": 0.5}),
        *finals("fedcc", 61.0, settings={"lam": 0.5}, **strong),
        *finals("fedcc", 50.0, rounds=4, **strong),
        *finals("lsr", 65.0, **strong),
    )
    by_name = {(c.kind, c.reference): c.differences[SCENARIO].final for c in strong_comparisons(found.runs)}
    assert by_name == {
        ("FedCC, augment=strong", "FedCC"): (3.0, None, None),
        ("FedCC, lam=0.5, augment=strong", "FedCC, lam=0.5"): (1.0, None, None),
    }
    text = markdown.paired_section(found)
    assert text.startswith("## Strong augmentation minus standard")
    assert "| FedCC, augment=strong | FedCC | +3.0 / " in text


def test_the_last_three_rounds_are_compared_by_their_mean(tmp_path: Path) -> None:
    mine, theirs = finals("fedcc", 0.0, 0.0, rounds=4), finals("fedavg", 0.0, 0.0, rounds=4)
    images = [10, 10, 10, 10]
    curves = [[99.0, 60.0, 70.0, 80.0], [99.0, 62.0, 70.0, 80.0]]
    found = read(
        tmp_path,
        *(with_curve(made, curve, images) for made, curve in zip(mine, curves, strict=True)),
        *(with_curve(made, [0.0, 60.0, 60.0, 60.0], images) for made in theirs),
    )
    (comparison,) = paired_comparisons(found.runs)
    (difference,) = comparison.differences.values()
    assert difference.final == (pytest.approx(-20.0), pytest.approx(0.0), None)
    assert difference.last is not None
    assert difference.last.mean == pytest.approx(-(10 + 32 / 3) / 2)
    assert "-20.0 ±0.0 / -10.3 ±0.5 (2)" in markdown.paired_section(found)


def test_fedcc_after_the_rounds_that_cost_no_more(tmp_path: Path) -> None:
    short = {**CIFAR, "rounds": 3}
    found = read(
        tmp_path,
        with_curve(synthetic.record("fedcc", **short), [50.0, 60.0, 70.0], [100_000, 80_000, 80_000]),
        with_curve(synthetic.record("fedavg", **short), [10.0, 20.0, 30.0], [60_000, 60_000, 60_000]),
        with_curve(synthetic.record("fedmd", **short), [10.0, 20.0, 40.0], [30_000, 30_000, 39_000]),
    )
    (table,) = tables(found.runs)
    (costs,) = compute_tables([table])
    rows = {row[SCENARIO].row.method: row[SCENARIO] for row in costs.rows}
    assert {name: (c.images, c.final, c.fedcc, c.rounds) for name, c in rows.items()} == {
        "fedcc": (260_000, 70.0, 70.0, "3"),
        "fedavg": (180_000, 30.0, 60.0, "2"),  # 100,000 + 80,000
        "fedmd": (99_000, 40.0, None, "0"),
    }
    assert [rows[name].needs_public for name in ("fedcc", "fedavg", "fedmd")] == [True, False, True]
    assert [rows[name].predictor for name in ("fedcc", "fedavg")] == ["all clients' networks", "one network"]
    text = markdown.compute_section([table])
    assert "| FedAvg | 0.180 | 66.0 | one network | no | 30.0 | **60.0** (2) |" in text
    assert "| FedMD | 0.099 | 12.0 | all clients' networks | yes | 40.0 | – |" in text
    assert "†" not in text
    names = {path.name for path in write_report(found, [table], tmp_path / "report", figures=False)}
    assert "compute.md" in names
    assert "paired.md" not in names  # one seed
    assert "At equal compute" in markdown.page(found, [table], tmp_path)


def test_fedcc_is_read_after_the_last_evaluated_round_that_it_can_afford(tmp_path: Path) -> None:
    fedcc = finals("fedcc", 90.0, 90.0, rounds=4)
    for made, curve in zip(fedcc, ([None, 60.0, None, 90.0], [50.0, 70.0, 80.0, 90.0]), strict=True):
        with_curve(made, [v or 0.0 for v in curve], [10_000] * 4)
        made["accuracy"]["rounds"] = curve
    methods = {
        "fedavg": (35_000, "**70.0** (2 to 3)"),
        "fedprox": (15_000, "–"),
    }  # no evaluated round of the first seed
    rivals = [
        with_curve(made, [1.0, 2.0, 3.0, 40.0], [0, 0, 0, images])
        for method, (images, _) in methods.items()
        for made in finals(method, 40.0, 40.0, rounds=4)
    ]
    text = markdown.compute_section(tables(read(tmp_path, *fedcc, *rivals).runs))
    for method, (_, said) in zip(("FedAvg", "FedProx"), methods.values(), strict=True):
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {method} "))
        assert line.endswith(f"| 40.0 (2 seeds) | {said} |")


def test_scenarios_of_a_data_set_share_a_table_of_costs(tmp_path: Path) -> None:
    """A mark says that images were counted after the run."""
    short: dict[str, Any] = {"data": "cifar10", "rounds": 2}
    images = [2_000_000, 2_000_000]
    runs = [
        with_curve(synthetic.record("fedcc", skew=skew, seed=seed, **short), [50.0, 60.0], images)
        for skew, seed in (("classes:1", 0), ("classes:2", 0), ("classes:2", 1))
    ]
    for skew, seed, final in (("classes:1", 0, 55.0), ("classes:2", 0, 40.0), ("classes:2", 1, 42.0)):
        runs.append(with_curve(synthetic.record("fedavg", skew=skew, seed=seed, **short), [9.0, final], [10**6] * 2))
    runs.append(with_curve(synthetic.record("fedmd", skew="classes:2", **short), [9.0, 70.0], [10**6] * 2))
    for skew, each in (("classes:1", 10**6), ("classes:2", 2 * 10**6)):
        runs.append(with_curve(synthetic.record("feddf", skew=skew, **short), [9.0, 30.0], [each] * 2))
    runs[0]["images"]["counted"] = "afterwards, by a script"
    found = read(tmp_path, *runs)
    assert [run.work.afterwards for run in found.runs].count(True) == 1
    text = markdown.compute_section(tables(found.runs))
    head, fedavg, fedmd, feddf, fedcc = (line for line in text.splitlines() if line.startswith("| "))
    assert head == (
        "| method | images | MB | predicts with | public | `classes:2` final | FedCC (rounds) | `classes:1` final "
        "| FedCC (rounds) |"
    )
    assert fedavg == "| FedAvg | 2.0 | 44.0 | one network | no | 41.0 (2 seeds) | **50.0** (1) | **55.0** | 50.0 (1) |"
    assert fedmd == "| FedMD | 2.0 | 8.0 | all clients' networks | yes | **70.0** | 50.0 (1) | – | – |"
    assert feddf.startswith("| FedDF | 2.0 to 4.0 |")  # a mean would be of other scenarios than FedMD's
    assert fedcc.startswith("| FedCC | 4.0 † | 8.0 | all clients' networks | yes | 60.0 (2 seeds) | 60.0 (2) |")
    assert "† In some of the runs images were counted afterwards" in text


def test_rivals_with_fedccs_compute_stand_beside_fedcc_as_it_comes(tmp_path: Path) -> None:
    """They have other rounds, epochs or settings, which FedCC does not have."""
    file = Path(__file__).parents[2] / "experiments" / "compute.toml"
    runs = [synthetic.record(r.method, 40.0, settings=dict(r.settings), **r.options) for r in sweep(file)]
    found = read(
        tmp_path, *runs, *finals("fedcc", 80.0), *finals("fedmd", 50.0), *finals("fedcc", 79.0, settings={"trust": 2.0})
    )
    text = markdown.compute_section(tables(found.runs))
    usual, plain = text.split("### ")[1:]
    names = [line.split(" | ")[0].removeprefix("| ") for line in usual.splitlines() if line.endswith(" |")]
    assert names[1:] == [
        "FedAvg, T=64",
        "FedConcat, E=85",
        "FedMD",
        "FedMD, revisit\\_epochs=65",
        "FedCC",
        "Local",
        "Centralized",
    ]
    assert "| FedAvg, T=64 | 63.9 | 1408.0 | one network | no | 40.0 | **80.0** (15) |" in usual
    assert plain.startswith("Table I: no crop and flip: CIFAR-10\n")
    assert plain.count("\n| Fed") == 2
