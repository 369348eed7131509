"""Images processed: counted from the requests, whatever engine serves them."""

from __future__ import annotations

from typing import Any

import pytest

from fedcc.engine import Fused, Plain
from fedcc.engine.counting import Counting
from fedcc.methods import make
from tiny import Tiny

MIXED = [[0, 1] * 10, [1, 2] * 6, [0, 2] * 4]


def counted(name: str, engine: Any = None, **settings: Any) -> dict[str, Any]:
    tiny = Tiny(make(name, settings), labels=MIXED)
    counting = Counting(engine or tiny.executor)
    tiny.executor = tiny.cohort.executor = counting
    tiny.run(1)
    return counting.take()


def test_a_second_gradient_counts_twice() -> None:
    plain, sharp = counted("fedavg")["trained"], counted("fedsam")["trained"]
    assert plain["fit"] > 0
    assert sharp == {"fit": 2 * plain["fit"]}


def test_a_teacher_in_training_predicts() -> None:
    found = counted("fedvls")
    assert found["predicted"] >= found["trained"]["fit"] > 0


def test_engines_count_alike() -> None:
    one, other = (counted("fedcc", kind("cpu", "fp64")) for kind in (Plain, Fused))
    assert one == other
    assert one["trained"].keys() == {"fit", "refine"}


def test_what_was_taken_is_not_counted_again() -> None:
    counting = Counting(Plain("cpu"))
    tiny = Tiny(make("fedavg"), labels=MIXED)
    tiny.executor = tiny.cohort.executor = counting
    tiny.run(1)
    assert counting.take()["trained"] != {}
    assert counting.take() == {"trained": {}, "predicted": 0}


@pytest.mark.parametrize("name", ["local", "centralized"])
def test_bounds_count_too(name: str) -> None:
    assert counted(name)["trained"]["fit"] > 0
