"""Every method learns real digits that are split by ``dirichlet:0.5``: far above chance in three short rounds."""

from __future__ import annotations

from typing import Any

import pytest
from test_methods import every

import fedcc
from fedcc.federation import Federation
from fedcc.methods import make

SHORT: dict[str, dict[str, Any]] = {
    "fedconcat": {"classifier_rounds": 40},
    "fens": {"aggregator_rounds": 40, "aggregator": "weights"},
}


@pytest.fixture(scope="module")
def digits() -> Federation:
    return Federation.named("digits", skew="dirichlet:0.5", clients=5, models="mlp")


@every
def test_learns_digits_above_chance(name: str, digits: Federation) -> None:
    method = make(name, SHORT.get(name))
    result = fedcc.run(method, digits, rounds=3, epochs=5, lr=3e-3, client_accuracy=False, device="cpu")
    assert result.accuracy > 50  # a tenth is chance
