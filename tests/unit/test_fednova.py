from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedcc.core.messages import Weights, nbytes
from fedcc.core.requests import Recipe
from fedcc.methods import FedAvg, FedNova
from fedcc.methods.fedavg import shares
from fedcc.methods.fednova import Update, coefficients, extrapolated, heavy_ball
from private_steps import initial
from tiny import Tiny

UNEQUAL = ((0,) * 40 + (1,) * 9, (1,) * 8, (2,) * 20)


def test_the_specified_example() -> None:
    n = [3000, 200, 1300]
    steps = [20.0 * math.ceil(k / 64) for k in n]
    found = coefficients(shares(n), steps)
    assert [round(value, 3) for value in found] == [0.533, 0.418, 0.517]
    assert sum(found) == pytest.approx(1.467, abs=1e-3)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 1.0])
def test_momentum_counts_as_its_recurrence(rho: float) -> None:
    c = a = 0.0
    for steps in range(1, 30):
        c = rho * c + 1
        a += c
        assert heavy_ball(steps, rho) == pytest.approx(a, rel=1e-9)


def naive(w: Tensor, received: list[tuple[Tensor, int, float]]) -> Tensor:
    """W - tau_eff sum_k p_k (w - w_k) / a_k, written out."""
    total = sum(n for _, n, _ in received)
    tau_eff = sum(n / total * a for _, n, a in received)
    update = torch.zeros_like(w)
    for w_k, n, a in received:
        update += n / total * (w - w_k) / a
    return w - tau_eff * update


@pytest.mark.parametrize("normaliser", ["steps", "momentum"])
def test_weights_are_normalised_and_running_statistics_averaged(normaliser: str) -> None:
    tiny = Tiny(FedNova(normaliser=normaliser, statistics="average"), labels=UNEQUAL)  # type: ignore[arg-type]
    before = initial(tiny)
    (done,) = tiny.run().rounds
    ups: list[Update] = list(done.ups.values())
    assert [up.steps for up in ups] == [14, 2, 6]
    assert [up.samples for up in ups] == [49, 8, 20]
    after = tiny.server.models["global"].state
    for name, w in before.items():
        if "running" in name:
            expected = sum(up.samples / 77 * up.statistics[name] for up in ups)
        else:
            a = [heavy_ball(up.steps, 0.9) if normaliser == "momentum" else up.steps for up in ups]
            expected = naive(w, [(up.weights[name], up.samples, a_k) for up, a_k in zip(ups, a, strict=True)])
        torch.testing.assert_close(after[name], expected)
    assert {name for name in before if "running" in name} == set(ups[0].statistics)
    assert set(ups[0].weights) | set(ups[0].statistics) == set(before)


def test_statistics_follow_the_rule_of_the_weights() -> None:
    tiny = Tiny(FedNova(), labels=UNEQUAL).run()
    before, after = initial(tiny), tiny.server.models["global"].state
    ups: list[Update] = list(tiny.rounds[0].ups.values())
    for name in ups[0].statistics:
        expected = naive(before[name], [(up.statistics[name], up.samples, up.steps) for up in ups])
        torch.testing.assert_close(after[name], expected)
    name = "head.weight"
    torch.testing.assert_close(after[name], naive(before[name], [(u.weights[name], u.samples, u.steps) for u in ups]))


def test_an_extrapolated_variance_does_not_fall_below_zero() -> None:
    w, values = torch.tensor([1.0, 1.0, 1.0]), [torch.tensor([0.1, 0.8, -0.1]), torch.tensor([0.3, 0.6, 0.5])]
    # twice the mean move: 1 + 2 (0.2 - 1) would be -0.6; where a client has a negative value it is no variance
    torch.testing.assert_close(extrapolated(w, [1.0, 1.0], values), torch.tensor([0.0, 0.4, -0.6]))
    assert float(extrapolated(torch.tensor(1.0), [2.0], [torch.tensor(0.0)])) == 0.0


def test_with_equal_sizes_it_is_fedavg() -> None:
    labels = ((0,) * 20, (1,) * 5 + (2,) * 15, (2,) * 20)
    nova, plain = Tiny(FedNova(), labels=labels).run(2), Tiny(FedAvg(), labels=labels).run(2)
    torch.testing.assert_close(nova.server.models["global"].state, plain.server.models["global"].state)


def test_equal_steps_are_enough_whatever_the_sizes() -> None:
    recipe = Recipe(lr=1e-2, batch=8, steps=5)
    nova, plain = (Tiny(m, labels=UNEQUAL, recipe=recipe).run() for m in (FedNova(), FedAvg()))
    torch.testing.assert_close(nova.server.models["global"].state, plain.server.models["global"].state)


def test_one_client_is_fedavg() -> None:
    nova, plain = (Tiny(m, labels=UNEQUAL[:1]).run(2) for m in (FedNova(), FedAvg()))
    torch.testing.assert_close(nova.server.models["global"].state, plain.server.models["global"].state)


def test_the_normaliser_is_the_number_of_steps_and_at_least_one() -> None:
    assert [FedNova().normalised(steps) for steps in (0, 1, 2, 7)] == [1.0, 1.0, 2.0, 7.0]


def test_no_step_leaves_the_weights() -> None:
    tiny = Tiny(FedNova(), labels=UNEQUAL, recipe=Recipe(epochs=0)).run()
    torch.testing.assert_close(tiny.rounds[0].downs[0].state, initial(tiny))


def test_the_servers_momentum_adds_the_last_move() -> None:
    tiny = Tiny(FedNova(server_momentum=0.5), labels=UNEQUAL).run(2)
    first = tiny.rounds[0].downs[0].state
    name = "head.weight"
    w0 = initial(tiny)[name]
    plain = naive(first[name], [(u.weights[name], u.samples, u.steps) for u in tiny.rounds[1].ups.values()])
    torch.testing.assert_close(tiny.rounds[1].downs[0].state[name], plain + 0.5 * (first[name] - w0))


def test_the_uplink_costs_what_fedavgs_does() -> None:
    tiny = Tiny(FedNova()).run()
    assert tiny.rounds[0].bytes_up == 3 * nbytes(Weights.of(tiny.server.models["global"]))
