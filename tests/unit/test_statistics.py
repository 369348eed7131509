"""BatchNorm's statistics taken anew from given samples: exact, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedcc.core.model import Arch, Model
from fedcc.core.requests import Init, Recalibrate
from fedcc.core.rng import Key
from fedcc.core.samples import Samples, View
from fedcc.engine import Plain
from fedcc.engine.fused import Fused
from fedcc.engine.plain import PREDICT_BATCH
from recording import changed, same
from tiny import Mlp

STATISTICS = {"running_mean", "running_var"}


def convolutions(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, outputs),
    )  # fmt: skip


def made(factory: Callable[[int], nn.Module], shape: tuple[int, ...], engine: Any) -> Model:
    model: Model = engine.serve([Init(Arch((factory,), 3, shape), Key(0, 0, 1, "init"))])[0]
    return model


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 3 + 1


@pytest.mark.parametrize("number", [2, PREDICT_BATCH, PREDICT_BATCH + 1, 3 * PREDICT_BATCH - 7])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_they_are_the_exact_mean_and_variance(number: int, precision: Any) -> None:
    engine, x = Plain("cpu", precision), drawn(number, 6)
    x += torch.arange(number)[:, None] / number  # a drift: the parts' means differ, which their variances do not tell
    model = made(Mlp(), (6,), engine)
    (found,) = engine.serve([Recalibrate(model, Samples({"x": x}))])
    entering = x.double() @ model.state["trunks.0.0.weight"].double().T
    for name, exact in (("mean", entering.mean(0)), ("var", entering.var(0))):
        torch.testing.assert_close(found.state[f"trunks.0.1.running_{name}"].double(), exact, atol=1e-6, rtol=1e-6)


def test_a_deeper_layer_sees_what_the_new_statistics_normalise() -> None:
    """As torch's own BatchNorm in training sees one batch, dropout aside."""
    engine, x = Plain("cpu", "fp64"), drawn(50, 3, 8, 8)
    model = made(convolutions, (3, 8, 8), engine)
    (found,) = engine.serve([Recalibrate(model, Samples({"x": x}))])
    first, norm, second = (model.state[f"trunks.0.{n}"] for n in ("0.weight", "1.weight", "4.weight"))
    entered = nn.functional.conv2d(x.double(), first, model.state["trunks.0.0.bias"])
    normed = nn.functional.batch_norm(entered, None, None, norm, model.state["trunks.0.1.bias"], training=True)
    deeper = nn.functional.conv2d(normed.relu(), second, model.state["trunks.0.4.bias"]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(found.state["trunks.0.5.running_mean"], deeper.mean(1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.state["trunks.0.5.running_var"], deeper.var(1), atol=1e-6, rtol=1e-6)


def test_statistics_alone_change_and_nothing_is_drawn() -> None:
    engine, samples = Plain("cpu", "fp64"), Samples({"x": drawn(50, 3, 8, 8)}, View(pad=2, flip=True))
    model = made(convolutions, (3, 8, 8), engine)
    before, generator = {n: v.clone() for n, v in model.state.items()}, torch.get_rng_state()
    one, other = engine.serve([Recalibrate(model, samples), Recalibrate(model, samples)])
    assert torch.equal(torch.get_rng_state(), generator)
    assert same(model.state, before)
    assert {name.rpartition(".")[2] for name in changed(before, one.state)} == STATISTICS
    assert same(one.state, other.state)
    (clean,) = engine.serve([Recalibrate(model, Samples(samples.columns))])
    assert same(one.state, clean.state)  # neither cropped nor flipped


def test_without_batchnorm_the_model_comes_back() -> None:
    engine = Plain("cpu", "fp64")
    model = made(Mlp(norm=False), (6,), engine)
    assert engine.serve([Recalibrate(model, Samples({"x": drawn(4, 6)}))])[0] is model


def test_one_sample_is_enough_and_none_is_an_error() -> None:
    engine = Plain("cpu", "fp64")
    model = made(Mlp(), (6,), engine)
    (found,) = engine.serve([Recalibrate(model, Samples({"x": drawn(1, 6)}))])
    assert all(value.isfinite().all() for value in found.state.values())
    with pytest.raises(ValueError, match="nothing to take statistics from"):
        engine.serve([Recalibrate(model, Samples({"x": drawn(0, 6)}))])


def test_the_fused_engine_serves_it_too() -> None:
    plain, fused, samples = Plain("cpu", "fp64"), Fused("cpu", "fp64"), Samples({"x": drawn(700, 6)})
    models = [made(Mlp(), (6,), plain), made(Mlp(5), (6,), plain)]
    asked = [Recalibrate(model, samples) for model in models]
    for a, b in zip(plain.serve(asked), fused.serve(asked), strict=True):
        assert same(a.state, b.state)
