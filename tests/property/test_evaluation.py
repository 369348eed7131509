"""Statements about the evaluation that hold for all inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedcc.core.method import shares
from fedcc.evaluate.accuracy import valid
from fedcc.evaluate.embeddings import purity
from fedcc.evaluate.example import example
from fedcc.evaluate.margins import histogram, margins

quickly = settings(max_examples=40)


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def cases(draw: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Answers among C + 1, labels among C, and a mask of classes."""
    classes, n = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    numbers = np.random.default_rng(draw(st.integers(0, 2**31)))
    made = numbers.integers(0, classes + 1, n), numbers.integers(0, classes, n), numbers.random(classes) < 0.5
    return tuple(map(torch.from_numpy, made))  # type: ignore[return-value]


@quickly
@given(cases())
def test_valid_answers_are_those_of_a_loop(case: tuple[Tensor, Tensor, Tensor]) -> None:
    answers, labels, majority = case
    inside = {c for c, m in enumerate(majority.tolist()) if m}
    pairs = zip(answers.tolist(), labels.tolist(), strict=True)
    expected = [a == y or (a == len(majority) and y not in inside) for a, y in pairs]
    assert valid(answers, labels, majority).tolist() == expected


@quickly
@given(cases())
def test_fewer_majority_classes_make_more_answers_valid(case: tuple[Tensor, Tensor, Tensor]) -> None:
    answers, labels, majority = case
    nothing, everything = torch.zeros_like(majority), torch.ones_like(majority)
    plain = answers == labels
    assert valid(answers, labels, everything).equal(plain)
    assert (valid(answers, labels, majority) >= plain).all()
    assert (valid(answers, labels, nothing) >= valid(answers, labels, majority)).all()


@quickly
@given(st.integers(0, 2**31), st.integers(2, 8), st.integers(1, 30), st.sampled_from([0.5, 3.0, 12.0]))
def test_margins_are_above_zero_where_the_prediction_is_right(seed: int, classes: int, n: int, scale: float) -> None:
    p = normal(seed, n, classes, scale=scale).softmax(-1)
    labels = torch.from_numpy(np.random.default_rng(seed).integers(0, classes, n))
    found = margins(p, labels)
    assert ((found > 0) == (p.argmax(-1) == labels)).all()
    assert (found.abs() <= 1).all()
    assert sum(histogram(found)["counts"]) == n
    assert sum(histogram(found)["counts"][20:]) == int((found >= 0).sum())
    order = torch.randperm(classes, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(margins(p[:, order.argsort()], order[labels]), found)


@quickly
@given(st.integers(0, 2**31), st.integers(12, 40), st.integers(1, 4))
def test_purity_survives_moving_and_renaming(seed: int, n: int, classes: int) -> None:
    draws = np.random.default_rng(seed)
    points, labels = draws.normal(size=(n, 2)), draws.integers(0, classes, n)
    found = purity(points, labels)
    assert 0 <= found <= 1
    assert found == pytest.approx(purity(5 * points[:, ::-1] + 3, 7 - labels))
    assert purity(points, np.zeros(n, int)) == 1


@quickly
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 6), st.integers(2, 6))
def test_an_example_is_made_of_distributions(seed: int, clients: int, n: int, classes: int) -> None:
    labels = torch.from_numpy(np.random.default_rng(seed).integers(0, classes, n))
    found = example(normal(seed, clients, n, classes + 1, scale=4), labels)
    assert 0 <= found["row"] < n
    assert sum(c["weight"] for c in found["clients"]) == pytest.approx(1, abs=1e-5)
    for values, length in [(c["unknown"], classes + 1) for c in found["clients"]] + [
        (v, classes) for v in (*(c["plain"] for c in found["clients"]), *found["aggregates"].values())
    ]:
        assert len(values) == length
        assert min(values) >= 0
        assert sum(values) == pytest.approx(1, abs=1e-5)


@quickly
@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 6))
def test_shares_add_up_to_one_and_keep_the_order(seed: int, n: int, classes: int) -> None:
    scores = normal(seed, n, classes).clamp(min=0)
    found = shares(scores)
    assert torch.allclose(found.sum(-1), torch.ones(n, dtype=found.dtype))
    assert (found.argmax(-1) == scores.argmax(-1)).all()
    assert shares(torch.zeros(1, 4)).tolist() == [[0.25] * 4]
