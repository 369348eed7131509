"""Selective-FD: the density ratio, who answers, ambiguity, and the reductions (docs/deviations.md)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcc.core.messages import Rows
from fedcc.core.rng import Key
from fedcc.methods import FedMD, SelectiveFD
from fedcc.methods.abstention import targets
from fedcc.methods.density import fitted, kernel, looks_own, median_distance
from fedcc.methods.selectivefd import mean_answer
from steps import equal
from tiny import Mlp, Tiny

LABELS = ([0, 1] * 8, [1, 2] * 8, [2, 0] * 8)
WIDTH, LAM = 0.7, 0.1


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -- the density ratio


def test_the_ratio_minimises_its_objective() -> None:
    """Where the derivative is zero: mean_i r(a_i) k(z, a_i) - mean_j k(z, y_j) + lambda r(z) = 0 for every z."""
    a, y, z = draw(0, 40, 2), draw(1, 15, 2), draw(2, 30, 2)
    r = fitted(a, y, WIDTH, LAM)
    derivative = kernel(z, a, WIDTH) @ r(a) / len(a) - kernel(z, y, WIDTH).mean(-1) + LAM * r(z)
    assert derivative.abs().max() < 1e-10


def test_it_finds_the_ratio_of_two_densities() -> None:
    """Own points uniform in a quarter of the noise's interval: 4 inside, 0 outside."""
    a, y = torch.linspace(0, 1, 200).double()[:, None], torch.linspace(0.25, 0.5, 200).double()[:, None]
    r = fitted(a, y, 0.05, 1e-3)
    assert float(r(torch.tensor([[0.375]]).double())) == pytest.approx(4.0, abs=0.4)
    assert float(r(torch.tensor([[0.8]]).double())) == pytest.approx(0.0, abs=0.2)


def test_the_official_codes_ratio_is_twice_too_large() -> None:
    """A true ratio of 4 with its lambda: 7.6 instead of 2.9, as it multiplies the inverse by the matrix itself."""
    n, width, z = 250, 0.057, torch.tensor([[0.375]], dtype=torch.float64)
    a, y = torch.linspace(0, 1, n).double()[:, None], torch.linspace(0.25, 0.5, n).double()[:, None]
    lam = n**-0.5
    matrix = kernel(a, a, width) / n + lam * torch.eye(n, dtype=torch.float64)
    alpha = -torch.linalg.inv(matrix) @ matrix @ kernel(a, y, width).mean(-1) / (n * lam)
    official = kernel(z, a, width) @ alpha + kernel(z, y, width).mean(-1) / lam
    assert float(official) == pytest.approx(7.6, abs=0.05)
    assert float(fitted(a, y, width, lam)(z)) == pytest.approx(2.9, abs=0.1)


def test_a_large_lambda_makes_it_a_density_estimate() -> None:
    """R tends to mean_j k(z, y_j) / lambda, which no longer compares with the noise."""
    a, y, z = draw(0, 40, 2), draw(1, 15, 2), draw(2, 30, 2)
    torch.testing.assert_close(1e6 * fitted(a, y, WIDTH, 1e6)(z), kernel(z, y, WIDTH).mean(-1), rtol=0, atol=1e-6)


def test_it_is_linear_in_the_own_points_and_does_not_depend_on_the_scale() -> None:
    a, y, other, z = draw(0, 30, 2), draw(1, 10, 2), draw(3, 10, 2), draw(2, 20, 2)
    both = fitted(a, torch.cat([y, other]), WIDTH, LAM)(z)
    torch.testing.assert_close(both, (fitted(a, y, WIDTH, LAM)(z) + fitted(a, other, WIDTH, LAM)(z)) / 2)
    torch.testing.assert_close(fitted(9 * a, 9 * y, 9 * WIDTH, LAM)(9 * z), fitted(a, y, WIDTH, LAM)(z))


def test_the_kernel_by_hand() -> None:
    assert float(kernel(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), 5.0)) == pytest.approx(math.exp(-0.5))
    assert median_distance(torch.tensor([[0.0], [1.0], [4.0]]).double()) == 3.0
    assert median_distance(torch.tensor([[0.0], [0.0], [0.0], [3.0]]).double()) == 1.5
    assert median_distance(torch.zeros(3, 1).double()) == median_distance(torch.zeros(1, 1).double()) == 1.0


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def test_it_refuses_the_quantile_of_the_own_samples_and_what_is_far() -> None:
    own, alike, far = draw(0, 600, 2), draw(1, 2000, 2), draw(2, 50, 2) + 6
    for quantile in (0.1, 0.25, 0.5):
        assert float(looks_own(alike, own, 250, quantile, generator()).double().mean()) == pytest.approx(
            1 - quantile, abs=0.08
        )
    assert not looks_own(far, own, 250, 0.25, generator()).any()


def test_the_scale_of_the_data_does_not_matter() -> None:
    own, public = draw(0, 100, 3), 2 * draw(1, 200, 3)
    plain = looks_own(public, own, 50, 0.25, generator())
    assert 0 < plain.sum() < 200
    assert looks_own(1000 * public + 7, 1000 * own + 7, 50, 0.25, generator()).equal(plain)


def test_the_threshold_is_taken_where_the_ratio_was_not_fitted() -> None:
    """The whole rule by hand: half of few own points fit the ratio, noise fills their box, the others set the limit."""
    own, public, number = 3 * draw(0, 30, 2) + 1, 9 * draw(1, 200, 2), 40
    draws = generator()
    scaled, others = ((z - own.mean(0)) / own.std(0, correction=0) for z in (own, public))
    order = torch.from_numpy(draws.permutation(30))
    low, high = scaled.amin(0), scaled.amax(0)
    noise = low + (high - low) * torch.from_numpy(draws.random((number, 2)))
    y, rest = scaled[order[:15]], scaled[order[15:]]
    r = fitted(noise, y, median_distance(y), 1 / math.sqrt(number))
    for quantile in (0.1, 0.6):
        expected = r(others) > torch.quantile(r(rest), quantile)
        assert 0 < expected.sum() < 200
        assert looks_own(public, own, number, quantile, generator()).equal(expected)


@pytest.mark.parametrize("n", [1, 2, 3, 19])
def test_few_own_samples(n: int) -> None:
    found = looks_own(draw(0, 30, 4), draw(1, n, 4), 250, 0.25, generator())
    assert found.shape == (30,)
    assert found.dtype == torch.bool


def test_own_samples_that_do_not_differ_choose_everything() -> None:
    assert looks_own(draw(0, 9, 4), torch.ones(5, 4), 250, 0.25, generator()).all()


# -- the method


def ran(method: Any, rounds: int = 3, **given: Any) -> Tiny:
    return Tiny(method, **{"labels": LABELS, "factories": (Mlp(8), Mlp(12))} | given).run(rounds)


class All(SelectiveFD):
    """Every client answers for everything."""

    async def chosen(self, c: Any, features: Tensor) -> Tensor:
        return torch.arange(len(features), dtype=torch.int32)


def test_who_answers_for_everything_is_in_fedmd_to_the_bit() -> None:
    mine, theirs = ran(All()), ran(FedMD(loss="kl", average="probs"))
    assert all(equal(a.model.state, b.model.state) for a, b in zip(mine.clients, theirs.clients, strict=True))
    assert torch.equal(mine.scores(), theirs.scores())
    chosen = ran(SelectiveFD())
    assert not any(equal(a.model.state, b.model.state) for a, b in zip(chosen.clients, theirs.clients, strict=True))


def test_the_servers_rule_is_fedccs_with_hard_abstention() -> None:
    p, s = draw(0, 4, 20, 3).softmax(-1), (draw(1, 4, 20) > 0).double()
    s[:, 0] = 0  # nobody answers for the first
    answers = [Rows(own.nonzero()[:, 0].int(), q[own > 0]) for own, q in zip(s, p, strict=True)]
    q, answered = mean_answer(answers, 20)
    votes = torch.cat([s[..., None] * p, 1 - s[..., None]], -1)
    torch.testing.assert_close(q[answered], targets(votes)[answered], rtol=0, atol=1e-15)
    assert answered.tolist() == s.any(0).tolist()
    assert not q[0].any()


def test_ambiguous_answers_teach_nobody() -> None:
    """The distance from (0.7, 0.2, 0.1) to its own one-hot is 0.6."""
    values = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.3, 0.3], [1.0, 0.0, 0.0]], dtype=torch.float64)
    up = {0: Rows(torch.tensor([1, 2, 5], dtype=torch.int32), values)}
    for limit, kept in ((2.0, [1, 2, 5]), (1.2, [1, 5]), (0.6, [5]), (0.61, [1, 5]), (0.0, [])):
        tiny = Tiny(SelectiveFD(ambiguity=limit))
        down = tiny.ask(tiny.method.server(tiny.server, up))[0]
        assert down.rows.tolist() == kept
        assert tiny.server.log == {"answered": 3 / 24, "clear": len(kept) / 24}


def test_clients_choose_what_looks_like_theirs() -> None:
    """On blobs, after some training: samples of a client's own classes rather than others'."""
    for space in ("own", "pixels"):
        tiny = ran(SelectiveFD(space=space, quantile=0.1), 1, labels=([0] * 40, [1] * 40, [2] * 40), publics=90)
        for k, up in tiny.rounds[0].ups.items():
            chosen = up.mask(90)
            own = tiny.hidden == k
            assert chosen[own].double().mean() > 0.6
            assert chosen[~own].double().mean() < 0.3
            assert tiny.clients[k].log["chosen"] == pytest.approx(float(chosen.double().mean()))


def test_inputs_are_compared_as_the_network_sees_them() -> None:
    tiny = ran(SelectiveFD(space="pixels", quantile=0.4, points=6), 2)
    for t, done in enumerate(tiny.rounds, 1):
        for k, up in done.ups.items():
            own, draws = tiny.clients[k].private.x, Key(0, t, k, "density").generator()
            assert up.mask(24).equal(looks_own(tiny.public.x, own, 6, 0.4, draws))
    assert not torch.equal(up.mask(24), ran(SelectiveFD(quantile=0.4, points=6), 2).rounds[1].ups[k].mask(24))


def test_the_choice_is_made_once_or_every_round() -> None:
    once, anew = ran(SelectiveFD(when="once")), ran(SelectiveFD())
    rows = [[done.ups[0].rows.tolist() for done in tiny.rounds] for tiny in (once, anew)]
    assert rows[0] == [rows[0][0]] * 3
    assert rows[1][0] == rows[0][0]
    assert rows[1] != rows[0]
    assert "chosen" not in anew.clients[0].memory


def test_a_client_that_chooses_nothing_sends_nothing() -> None:
    class Nothing(SelectiveFD):
        async def chosen(self, c: Any, features: Tensor) -> Tensor:
            return torch.zeros(0, dtype=torch.int32)

    tiny = ran(Nothing(), 2)
    assert all(done.bytes_up == 0 for done in tiny.rounds)
    assert tiny.rounds[0].downs[0].values.shape == (0, 3)
