"""MOON: the contrast between the received model's features and the previous one's (docs/deviations.md)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedcc.core.model import Outputs
from fedcc.core.requests import Fit
from fedcc.core.step import Batch, Step
from fedcc.losses import CrossEntropy
from fedcc.methods import MOON, FedAvg
from fedcc.methods.moon import ModelContrast, contrast
from private_steps import draw, same
from recording import changed, record
from tiny import Tiny


def naive(h: Tensor, received: Tensor, previous: Tensor, kappa: float) -> float:
    total = 0.0
    for a, g, p in zip(h.tolist(), received.tolist(), previous.tolist(), strict=True):
        near, far = (
            math.exp(sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b) / kappa)
            for b in (g, p)
        )
        total -= math.log(near / (near + far))
    return total / len(h)


@pytest.mark.parametrize("kappa", [0.5, 2.0])
def test_the_contrast_against_a_loop(kappa: float) -> None:
    h, received, previous = (draw(6, 4, seed=k) for k in range(3))
    assert float(contrast(h, received, previous, kappa)) == pytest.approx(naive(h, received, previous, kappa))
    at = Step(
        {"private": Batch(Outputs(h, h), {})},
        seen={"received": Outputs(h, received), "previous": Outputs(h, previous)},
    )
    assert float(ModelContrast(kappa)(at)) == pytest.approx(naive(h, received, previous, kappa))


def test_where_both_models_agree_it_is_ln_2_and_has_no_gradient() -> None:
    h, same_features = draw(6, 4).requires_grad_(), draw(6, 4, seed=1)
    value = contrast(h, same_features, same_features, 0.5)
    (grad,) = torch.autograd.grad(value, h)
    assert float(value.detach()) == pytest.approx(math.log(2), abs=1e-15)
    assert float(grad.abs().max()) < 1e-15


def test_its_bounds_are_reached() -> None:
    h = draw(6, 4)
    assert float(contrast(h, h, -h, 0.5)) == pytest.approx(math.log1p(math.exp(-4)))  # 0.0181
    assert float(contrast(h, -h, h, 0.5)) == pytest.approx(math.log1p(math.exp(4)))  # 4.0181


def test_the_length_of_features_does_not_matter() -> None:
    h, received, previous = (draw(6, 4, seed=k) for k in range(3))
    scales = [draw(6, 1, seed=9 + k).abs() for k in range(3)]
    scaled = contrast(h * scales[0], received * scales[1], previous * scales[2], 0.5)
    torch.testing.assert_close(scaled, contrast(h, received, previous, 0.5))


def test_features_of_zero_have_a_loss_of_ln_2() -> None:
    h = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    value = contrast(h, draw(2, 4), draw(2, 4, seed=1), 0.5)
    assert float(value.detach()) == pytest.approx(math.log(2))
    assert torch.autograd.grad(value, h)[0].isfinite().all()


def second_round(method: MOON) -> tuple[Tiny, Fit]:
    tiny = Tiny(method)
    asked = record(tiny)
    tiny.run(2)
    return tiny, asked.fits("fit", client=1, round=2)[0]


def test_the_received_model_is_near_and_the_clients_own_of_before_is_far() -> None:
    tiny, fit = second_round(MOON(mu=0.25))
    seen = {name: frozen.model.floating for name, frozen in fit.frozen.items()}
    assert same(seen["received"], tiny.rounds[0].downs[1].state)
    assert same(seen["previous"], tiny.rounds[0].ups[1].state)
    assert {frozen.stream for frozen in fit.frozen.values()} == {"private"}
    assert same(fit.model.floating, seen["received"])
    assert fit.loss == CrossEntropy("private") + 0.25 * ModelContrast(0.5)


def test_its_teachers_do_not_change() -> None:
    """Not even BatchNorm's running statistics, while the student's do."""
    tiny = Tiny(MOON()).run(1)
    client, down = tiny.clients[1], tiny.rounds[0].downs[1]
    teachers = {"received": down.state, "previous": client.model.floating}
    before = {name: {n: v.clone() for n, v in state.items()} for name, state in teachers.items()}
    asked = record(tiny)
    client.begin(2)
    tiny.ask(tiny.method.client(client, down))
    ((fit, fitted),) = asked.fitted("fit")
    for name, state in before.items():
        assert same(fit.frozen[name].model.floating, state)
        assert same(teachers[name], state)
    assert any("running" in name for name in changed(fit.model.state, fitted.model.state))


def test_the_first_round_is_fedavgs() -> None:
    assert same(Tiny(MOON()).run(1).server.models["global"].state, Tiny(FedAvg()).run(1).server.models["global"].state)


def test_a_client_has_no_contrast_in_its_first_round_whenever_that_is() -> None:
    tiny = Tiny(MOON(), options={"participation": 0.4})
    asked = record(tiny)
    tiny.run(6)
    met: set[int] = set()
    for fit in asked.fits("fit"):
        assert bool(fit.frozen) is (fit.key.client in met)
        met.add(fit.key.client)
    assert len(met) > 1


@pytest.mark.parametrize(("classes", "mu"), [(10, 5.0), (11, 1.0)])
def test_the_weight_depends_on_the_number_of_classes(classes: int, mu: float) -> None:
    tiny = Tiny(MOON(), classes=classes)
    asked = record(tiny)
    tiny.run(2)
    assert asked.fits("fit", round=2)[0].loss == CrossEntropy("private") + mu * ModelContrast(0.5)
