"""SCAFFOLD: control variates by the path or by gradients, under SGD and Adam (docs/deviations.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedcc.core.method import AnyMethod
from fedcc.core.model import Model
from fedcc.core.requests import Fit, Fitted, Init, Recipe
from fedcc.gradients import Clip
from fedcc.losses import CrossEntropy
from fedcc.methods import SCAFFOLD, FedAvg
from fedcc.methods.fednova import heavy_ball
from fedcc.methods.scaffold import Shift, mean_variate
from fedcc.nets import build
from private_steps import agrees_over_clients, draw, same, step
from recording import record
from tiny import DIMENSIONS, Tiny

SGD = Recipe(lr=0.05, batch=8, epochs=2, momentum=0.9)
ADAM = Recipe(lr=1e-2, batch=8, epochs=2)
both = pytest.mark.parametrize("recipe", [SGD, ADAM], ids=["SGD", "Adam"])


def weights(method: AnyMethod, rounds: int, **settings: Any) -> dict[str, Tensor]:
    return dict(Tiny(method, **settings).run(rounds).server.models["global"].state)


# -- the term


def test_the_gradient_is_the_shift_and_the_value_is_0_at_the_received_weights() -> None:
    w, shift = ({"a": draw(3, seed=k), "b": draw(2, 2, seed=k)} for k in (0, 5))
    params = {name: value.clone().requires_grad_() for name, value in w.items()}
    value = Shift()(step(draw(1, 2), torch.tensor([0]), params=params, constants={"w": w, "shift": shift}))
    assert float(value.detach()) == 0
    for name, grad in zip(params, torch.autograd.grad(value, list(params.values())), strict=True):
        assert torch.equal(grad, shift[name])
    elsewhere = {name: value + 1 for name, value in w.items()}
    far = Shift()(step(draw(1, 2), torch.tensor([0]), params=elsewhere, constants={"w": w, "shift": shift}))
    assert float(far) == pytest.approx(float(sum(s.sum() for s in shift.values())))


def test_many_clients_at_once() -> None:
    def one(k: int) -> dict[str, Any]:
        w, shift, params = ({"a": draw(3, seed=10 * k + i), "b": draw(2, 2, seed=10 * k + i)} for i in range(3))
        constants = {"w": w, "shift": shift}
        return {"logits": draw(4, 2), "y": torch.zeros(4).long(), "params": params, "constants": constants}

    agrees_over_clients(Shift(), [one(k) for k in range(3)])


# -- what it reduces to


@both
def test_one_client_is_fedavg_bit_for_bit(recipe: Recipe) -> None:
    alone = {"labels": ((0, 1, 2) * 8,), "recipe": recipe}
    assert same(weights(SCAFFOLD(), 3, **alone), weights(FedAvg(), 3, **alone))


@both
def test_the_first_round_is_fedavgs_and_the_second_is_not(recipe: Recipe) -> None:
    assert same(weights(SCAFFOLD(), 1, recipe=recipe), weights(FedAvg(), 1, recipe=recipe))
    assert not same(weights(SCAFFOLD(), 2, recipe=recipe), weights(FedAvg(), 2, recipe=recipe))


@both
def test_the_shifts_of_all_clients_add_up_to_0(recipe: Recipe) -> None:
    tiny = Tiny(SCAFFOLD(), recipe=recipe)
    asked = record(tiny)
    tiny.run(3)
    for t in (2, 3):
        shifts = [fit.constants["shift"] for fit in asked.fits("fit", round=t)]
        assert len(shifts) == 3
        for name in shifts[0]:
            assert float(shifts[0][name].abs().max()) > 0
            total = sum(shift[name] for shift in shifts)
            torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-12)


# -- quadratics


class Quadratic:
    """An engine whose clients minimise a_k (x - b_k)^2 / 2, or with b = None a_k x, by SGD with momentum."""

    def __init__(self, a: Sequence[float], b: Sequence[float] | None):
        self.a, self.b = a, b

    def serve(self, requests: Sequence[Any]) -> list[Any]:
        return [self.fit(r) if isinstance(r, Fit) else self.init(r) for r in requests]

    def init(self, request: Init) -> Model:
        return Model(request.arch, {"x": torch.tensor(3.0, dtype=torch.float64)})

    def fit(self, fit: Fit) -> Fitted:
        a, x, velocity = self.a[fit.key.client], fit.model.state["x"], 0.0
        shift = fit.constants["shift"]["x"] if fit.constants else 0.0
        for _ in range(fit.steps):
            slope = a * (x - self.b[fit.key.client]) if self.b else a
            velocity = (fit.recipe.momentum or 0) * velocity + slope + shift
            x = x - fit.recipe.lr * velocity
        return Fitted(fit.model.with_({"x": x}), fit.steps, 0.0, {}, ("x",))


def quadratic(method: AnyMethod, momentum: float, rounds: int = 160, b: Sequence[float] | None = (0, 1)) -> Tiny:
    recipe = Recipe(lr=0.05, batch=8, steps=20, momentum=momentum)
    tiny = Tiny(method, labels=((0,) * 8, (1,) * 8), recipe=recipe)
    tiny.executor = tiny.cohort.executor = Quadratic((1, 4), b)  # type: ignore[assignment]
    for client in tiny.clients:
        client.model = tiny.executor.serve([Init(client.arch, client.key)])[0]
    return tiny.run(rounds)


@pytest.mark.parametrize(("momentum", "drifted"), [(0.0, 0.6064), (0.9, 0.5462)])
def test_on_quadratics_it_ends_at_the_optimum_and_fedavg_does_not(momentum: float, drifted: float) -> None:
    found = {kind: float(quadratic(kind(), momentum).server.models["global"].state["x"]) for kind in (SCAFFOLD, FedAvg)}
    assert found[SCAFFOLD] == pytest.approx(0.8, abs=1e-6)
    assert found[FedAvg] == pytest.approx(drifted, abs=5e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_on_a_linear_loss_a_variate_is_the_gradient(momentum: float) -> None:
    """Only by the divisor of SGD with momentum; in later rounds the shift is taken out again."""
    tiny = quadratic(SCAFFOLD(), momentum, rounds=3, b=None)
    for done in tiny.rounds:
        assert [float(up.variate["x"]) for up in done.ups.values()] == pytest.approx([1.0, 4.0], abs=1e-12)
        assert float(done.downs[0].variate["x"]) == pytest.approx(2.5)
    assert heavy_ball(1_420, 0.9) == pytest.approx(14_110, abs=1)


def test_the_servers_rate() -> None:
    before, full, half = (
        float(quadratic(SCAFFOLD(server_rate=rate), 0.0, rounds=r).server.models["global"].state["x"])
        for rate, r in ((1.0, 0), (1.0, 1), (0.5, 1))
    )
    assert half == pytest.approx((before + full) / 2)


def test_running_statistics_are_averaged_whatever_the_servers_rate() -> None:
    full, half = (weights(SCAFFOLD(server_rate=rate), 1) for rate in (1.0, 0.5))
    differ = {name for name in full if not torch.equal(full[name], half[name])}
    assert differ == {name for name in full if "running" not in name and "tracked" not in name}


# -- variates


class Smooth(nn.Module):
    def __init__(self, outputs: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIMENSIONS, 8), nn.Tanh(), nn.Linear(8, outputs))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def test_variates_by_gradients_are_those_of_autograd() -> None:
    tiny = Tiny(SCAFFOLD(variates="gradient"), factories=(Smooth,), precision="fp32",
                labels=((0, 1, 2) * 8, (1,) * 16))  # fmt: skip
    asked = record(tiny)
    tiny.run(2)
    (fit,) = asked.fits("variate", client=0, round=2)
    assert same(fit.model.floating, tiny.rounds[0].downs[0].state)
    assert (fit.steps, fit.recipe.lr, fit.recipe.momentum) == (3, 1e-4, 0.0)
    module = build(fit.model.arch, fit.key)
    module.load_state_dict(fit.model.state)
    private = tiny.clients[0].private
    loss = nn.functional.cross_entropy(module(private.x).logits, private["y"])
    names, params = zip(*module.named_parameters(), strict=True)
    sent = tiny.rounds[1].ups[0].variate
    assert list(sent) == list(names)
    for name, grad in zip(names, torch.autograd.grad(loss, params), strict=True):
        assert float((sent[name] - grad).norm() / grad.norm()) < 0.01


def test_what_is_not_trained_has_no_variate() -> None:
    tiny = Tiny(SCAFFOLD()).run(1)
    up = tiny.rounds[0].ups[0]
    assert set(up.state) - set(up.variate) == {"trunks.0.1.running_mean", "trunks.0.1.running_var"}


def test_a_client_that_never_answered_counts_as_0() -> None:
    mean = mean_variate({2: {"x": torch.tensor(6.0)}, 0: {"x": torch.tensor(2.0)}}, 4)
    assert float(mean["x"]) == 2.0
    tiny = Tiny(SCAFFOLD(), options={"participation": 0.4}).run(1)  # one of three
    ((k, up),) = tiny.rounds[0].ups.items()
    for name, value in tiny.rounds[0].downs[k].variate.items():
        torch.testing.assert_close(value, up.variate[name] / 3)
    assert tiny.server.log["variate"] > 0


def test_a_client_keeps_its_variate_until_it_trains_again() -> None:
    tiny = Tiny(SCAFFOLD(), options={"participation": 0.7}).run(4)  # two of three
    last = {k: up.variate for done in tiny.rounds for k, up in done.ups.items()}
    assert len(last) == 3
    assert all(same(tiny.server.memory["variates"][k], last[k]) for k in last)
    assert all(same(tiny.clients[k].memory["variate"], last[k]) for k in last)
    mean = tiny.rounds[-1].downs[0].variate
    for name in mean:
        torch.testing.assert_close(mean[name], sum(own[name] for own in last.values()) / 3)


@both
def test_without_a_step_variates_stay_0(recipe: Recipe) -> None:
    tiny = Tiny(SCAFFOLD(), recipe=replace(recipe, epochs=0)).run(2)
    assert all(not value.any() for up in tiny.rounds[1].ups.values() for value in up.variate.values())


def test_a_late_client_is_shifted_by_the_mean_alone() -> None:
    tiny = Tiny(SCAFFOLD(), options={"participation": 0.4})
    asked = record(tiny)
    tiny.run(6)
    met: set[int] = set()
    for fit in asked.fits("fit")[1:]:
        if (k := fit.key.client) not in met and fit.key.round > 1 and fit.constants:
            assert same(fit.constants["shift"], tiny.rounds[fit.key.round - 2].downs[k].variate)
            break
        met.add(k)
    else:
        pytest.fail("no client is late")


def test_a_client_that_the_server_did_not_hear_is_shifted_by_its_own_variate_alone() -> None:
    asked = record(tiny := Tiny(SCAFFOLD()))
    downs = tiny.ask(tiny.method.start(tiny.server))
    lost = tiny.cohort.round(1, downs)[0]
    tiny.cohort.round(2, downs)
    (fit,) = asked.fits("fit", client=0, round=2)
    assert same(fit.constants["shift"], {name: -value for name, value in lost.variate.items()})


def test_gradients_are_measured_at_one_rate_whatever_the_run_has() -> None:
    asked = record(tiny := Tiny(SCAFFOLD(), recipe=replace(ADAM, schedule="cosine", reset="round", decay=0.5)))
    tiny.run(2)
    assert {(f.recipe.schedule, f.recipe.reset, f.recipe.lr) for f in asked.fits("variate")} == {
        ("constant", "phase", 1e-4)
    }


def test_where_variates_come_from() -> None:
    phases = {}
    for name, recipe in {"sgd": SGD, "cosine": replace(SGD, schedule="cosine"), "adam": ADAM}.items():
        asked = record(tiny := Tiny(SCAFFOLD(), recipe=recipe))
        tiny.run(1)
        phases[name] = len(asked.fits("variate"))
    assert phases == {"sgd": 0, "cosine": 3, "adam": 3}
    asked = record(tiny := Tiny(SCAFFOLD(variates="gradient"), recipe=SGD))
    tiny.run(1)
    assert len(asked.fits("variate")) == 3


@pytest.mark.parametrize("recipe", [ADAM, replace(SGD, schedule="cosine")], ids=["Adam", "cosine"])
def test_the_path_of_another_optimizer_is_no_gradient(recipe: Recipe) -> None:
    with pytest.raises(ValueError, match="variates=path"):
        Tiny(SCAFFOLD(variates="path"), recipe=recipe).run(1)


def test_clipping() -> None:
    for limit, rule in ((0.0, None), (2.0, Clip(2.0))):
        asked = record(tiny := Tiny(SCAFFOLD(clip=limit)))
        tiny.run(2)
        assert {fit.gradient for fit in asked.fits("fit")} == {rule}
        assert asked.fits("fit", round=2)[0].loss == CrossEntropy("private") + Shift()
