"""Properties of the distillation-based baselines on any input: votes, weights, knowledge, targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedcc.core.method import AnyMethod
from fedcc.methods import LSR, FedCT, FedDF, FedET, FedHKT
from fedcc.methods.fedct import ballot, tied
from fedcc.methods.feddf import ensemble
from fedcc.methods.fedet import confidence, dissent
from fedcc.methods.fedet import consensus as weighted
from fedcc.methods.fedhkt import confidence as certainty
from fedcc.methods.fedhkt import fused
from steps import close, draw, labels
from tiny import Mlp, Tiny

quickly = settings(max_examples=40)


@st.composite
def logits(draws: Any) -> Tensor:
    """Clients' logits [K, N, C], from flat to extreme."""
    k, n, c = draws(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(2, 6)))
    return draw(draws(st.integers(0, 2**31)), k, n, c, scale=draws(st.sampled_from([0.0, 1e-3, 1.0, 50.0])))


@st.composite
def votes(draws: Any) -> Tensor:
    """Clients' labels [K, N] of four classes."""
    return labels(draws(st.integers(0, 2**31)), 4, draws(st.integers(1, 6)), draws(st.integers(1, 30)))


@quickly
@given(votes(), st.randoms(use_true_random=False))
def test_a_vote_does_not_depend_on_the_order_of_clients(cast: Tensor, random: Any) -> None:
    order = list(range(len(cast)))
    random.shuffle(order)
    assert torch.equal(ballot(cast[order], 4), ballot(cast, 4))


@quickly
@given(votes())
def test_a_vote_returns_what_was_cast_and_unanimity_unchanged(cast: Tensor) -> None:
    assert (ballot(cast, 4).argmax(-1) == cast).any(0).all()
    assert torch.equal(ballot(cast[:1].expand(3, -1), 4).argmax(-1), cast[0])


@quickly
@given(votes(), st.permutations(range(4)))
def test_relabelled_classes_change_tied_samples_only(cast: Tensor, names: list[int]) -> None:
    rename = torch.tensor(names)
    before, after = ballot(cast, 4).argmax(-1), ballot(rename[cast], 4).argmax(-1)
    clear = ~tied(ballot(cast, 4))
    assert torch.equal(after[clear], rename[before][clear])


@quickly
@given(logits())
def test_targets_are_distributions(z: Tensor) -> None:
    one = torch.ones(z.shape[1], dtype=z.dtype)
    for target in (ensemble(z, "logits"), ensemble(z, "probs"), fused(z.softmax(-1))):
        assert (target >= 0).all()
        torch.testing.assert_close(target.sum(-1), one)
    rows = dissent(z, weighted(z), 1.0).sum(-1)
    assert torch.isclose(rows, one).logical_or(rows == 0).all()


@quickly
@given(logits())
def test_weights_are_shares(z: Tensor) -> None:
    for weights in (confidence(z), certainty(z.softmax(-1))):
        assert weights.shape == z.shape[:2]
        assert (weights >= 0).all()
        torch.testing.assert_close(weights.sum(0), torch.ones(z.shape[1], dtype=z.dtype))


@quickly
@given(logits(), st.randoms(use_true_random=False))
def test_the_order_of_clients_is_irrelevant(z: Tensor, random: Any) -> None:
    order = list(range(len(z)))
    random.shuffle(order)
    torch.testing.assert_close(ensemble(z[order], "logits"), ensemble(z, "logits"))
    torch.testing.assert_close(fused(z[order].softmax(-1)), fused(z.softmax(-1)))
    torch.testing.assert_close(confidence(z[order]), confidence(z)[order])
    y = weighted(z)
    torch.testing.assert_close(dissent(z[order], y, 1.0), dissent(z, y, 1.0))


# -- whole methods on awkward federations

METHODS = [FedDF(), FedDF(early_stop="kl"), LSR(), FedET(), FedHKT(), FedCT()]
named = pytest.mark.parametrize("method", METHODS, ids=str)
AWKWARD = ((0,) * 20, (1,), (2, 2, 0) * 4, (1, 0) * 5)  # one class, one sample; class 3 is nowhere


@named
def test_awkward_clients_give_finite_results(method: AnyMethod) -> None:
    tiny = Tiny(method, labels=AWKWARD, classes=4, factories=(Mlp(8), Mlp(12))).run(3)
    assert tiny.scores().isfinite().all()
    for round in tiny.rounds:
        for message in (*round.ups.values(), *round.downs.values()):
            arrays = message.state.values() if hasattr(message, "state") else [message.values]
            assert all(a.isfinite().all() for a in arrays)


@named
def test_missing_clients_are_coped_with(method: AnyMethod) -> None:
    tiny = Tiny(method, labels=AWKWARD, factories=(Mlp(8), Mlp(12)), options={"participation": 0.5}).run(4)
    assert {len(r.ups) for r in tiny.rounds} == {2}
    assert all(sorted(r.downs) == [0, 1, 2, 3] for r in tiny.rounds)
    assert tiny.scores().isfinite().all()


@named
def test_the_servers_answer_does_not_depend_on_the_order_of_uplinks(method: AnyMethod) -> None:
    answers = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        tiny = Tiny(method, labels=AWKWARD, factories=(Mlp(8), Mlp(12)))
        ups = tiny.cohort.round(1, tiny.ask(method.start(tiny.server)))
        tiny.server.begin(1)
        answers.append(tiny.ask(method.server(tiny.server, {k: ups[k] for k in order})))
    for k, first in answers[0].items():
        second = answers[1][k]
        if hasattr(first, "state"):
            assert close(first.state, second.state, 1e-6)
        else:
            torch.testing.assert_close(first.values, second.values)


@named
def test_the_same_seed_gives_the_same_result(method: AnyMethod) -> None:
    a, b = (Tiny(method, labels=AWKWARD, factories=(Mlp(8), Mlp(12))).run(2) for _ in range(2))
    assert torch.equal(a.scores(), b.scores())
    other = Tiny(method, labels=AWKWARD, factories=(Mlp(8), Mlp(12)), seed=1).run(2)
    assert not torch.equal(a.scores(), other.scores())
