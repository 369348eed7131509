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
from fedcc.evaluate import evaluate
from fedcc.evaluate.accuracy import percent
from fedcc.methods import METHODS, FedAvg
from recording import changed, record, same
from tiny import Mlp, Tiny

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


# -- the second number of a round


def test_which_methods_predict_with_an_average() -> None:
    averaged = {name for name, method in METHODS.items() if method.averaged}
    assert averaged == {"fedavg", "fedprox", "fednova", "fedrs", "fedsam", "fedlc", "fedmr", "fedvls"}


@pytest.mark.parametrize("name", ["fedavg", "fednova", "feddf", "fedmd"])
def test_an_averaged_model_is_evaluated_twice(name: str) -> None:
    tiny = Tiny(METHODS[name]()).run(2)
    trained, asked = tiny.cohort.trained(tiny.server), record(tiny)
    before = {n: dict(m.state) for n, m in tiny.server.models.items()}
    found = evaluate(tiny.method, trained, tiny.test, tiny.executor, public=tiny.public)
    assert found.accuracy == percent(tiny.scores().argmax(-1) == tiny.test["y"])
    assert all(same(before[n], m.state) for n, m in tiny.server.models.items())
    assert evaluate(tiny.method, trained, tiny.test, tiny.executor).recalibrated is None
    if not tiny.method.averaged:
        assert found.recalibrated is None
        return
    requests = [r for group in asked.groups for r in group if isinstance(r, Recalibrate)]
    assert [r.samples for r in requests] == [tiny.public]
    state = {n: v.float() for n, v in trained.server["global"].state.items() if n.startswith("trunks")}
    entering = tiny.public.x @ state["trunks.0.0.weight"].T
    x = (tiny.test.x @ state["trunks.0.0.weight"].T - entering.mean(0)) / (entering.var(0) + 1e-5).sqrt()
    features = (x * state["trunks.0.1.weight"] + state["trunks.0.1.bias"]).relu()
    head = (trained.server["global"].state[f"head.{n}"].float() for n in ("weight", "bias"))
    answers = nn.functional.linear(features, *head).argmax(-1)
    assert found.recalibrated == percent(answers == tiny.test["y"])


def test_the_second_evaluation_leaves_training_as_it_is() -> None:
    class Once(FedAvg):
        averaged = False

    import fedcc

    x, y = drawn(60, 6), torch.arange(60) % 3
    clients = [(x[k::3], y[k::3]) for k in range(3)]  # one class each
    federation = fedcc.Federation.of(clients, drawn(30, 6), (x, y), Mlp())
    twice, once = (fedcc.run(m, federation, 3, epochs=1, device="cpu") for m in (FedAvg(), Once()))
    assert same(twice.trained.server["global"].state, once.trained.server["global"].state)
    assert [r.pop("accuracy_recalibrated") for r in twice.rounds] != [r["accuracy"] for r in once.rounds]
    for a, b in zip(twice.rounds, once.rounds, strict=True):
        assert a.keys() == b.keys()
        assert {**a, "seconds": {}} == {**b, "seconds": {}}
