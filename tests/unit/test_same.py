"""What ``make same`` calls a difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from same import Comparison, Side, compared, content


def comparison(base: Any, head: Any) -> Comparison:
    result = Comparison()
    result.compare("a run: summary.json", base, head)
    return result


RECORD = {"accuracy": {"final": 91.5, "rounds": [90.0, 91.5]}, "seconds": 3.2, "commit": "a", "settings": {"mu": 0.1}}


def test_equal_records_are_equal_whatever_their_times() -> None:
    same = comparison(RECORD, RECORD | {"seconds": 4.1, "commit": "b"})
    assert (same.differences, same.values["a run"]) == ([], 4)


@pytest.mark.parametrize(
    "accuracy",
    [
        {"final": 91.50000000000001, "rounds": [90.0, 91.5]},
        {"final": 91.5, "rounds": [90.0]},
        {"final": 91.5, "rounds": [90.0, None]},
        {"final": 91.5},
        {},
    ],
)
def test_a_number_that_differs_or_is_lost_is_a_difference(accuracy: dict[str, Any]) -> None:
    assert comparison(RECORD, RECORD | {"accuracy": accuracy}).differences


def test_what_one_side_does_not_know_is_listed() -> None:
    found = comparison(RECORD, RECORD | {"settings": {"nu": 0.1}, "images": {"1": 10, "2": 20}})
    assert found.differences == []
    assert (dict(found.lost), dict(found.gained)) == ({"settings.mu": 1}, {"settings.nu": 1, "images": 1})


def test_options_that_are_written_in_another_way_are_equal() -> None:
    assert comparison({"experiment": {"augment": False}}, {"experiment": {"augment": "none"}}).differences == []
    assert comparison({"experiment": {"augment": False}}, {"experiment": {"augment": "standard"}}).differences


def test_files_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    sides = [Side(name, tmp_path, tmp_path / name) for name in ("base", "head")]
    for side, last in zip(sides, (3, 4), strict=True):
        folder = side.out / "results" / "digits_iid" / "fedavg-x" / "seed0"
        folder.mkdir(parents=True)
        np.savez(folder / "partition.npz", public=np.array([1, 2]), client=np.array([0, last]))
        (folder / "metrics.jsonl").write_text('{"round": 1, "accuracy": 50.0}\n')
    [difference] = compared(sides).differences
    assert "partition.npz: client" in difference
    assert content(sides[0].out / "results/digits_iid/fedavg-x/seed0/metrics.jsonl") == [{"round": 1, "accuracy": 50.0}]
    (sides[1].out / "results/digits_iid/fedavg-x/seed0/metrics.jsonl").unlink()
    assert any("only in the base" in line for line in compared(sides).differences)
