"""What a network's author froze stays frozen to the bit, whatever the method and the engine: a pretrained backbone."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_engines import CASES, always, fits
from test_methods import ONE_WIDTH, QUICK, everything
from torch import Tensor, nn

from fedcc.core.method import AnyMethod
from fedcc.core.model import Arch, Model
from fedcc.core.requests import Fit, Fitted, Init, Recalibrate, Recipe
from fedcc.core.rng import Key
from fedcc.core.samples import Samples
from fedcc.core.step import Loss, Step
from fedcc.engine import Plain
from fedcc.engine.fused import Fused
from fedcc.engine.stack import Stacked, unstackable_reason
from fedcc.flower.dry_run import network_state
from fedcc.losses import CrossEntropy, Proximal
from fedcc.methods import METHODS, make
from fedcc.nets import ResNet, build
from tiny import DIMENSIONS, Tiny

RAGGED = ((0,) * 20, (1,) * 7 + (2,) * 3, (2,) * 9, (0, 1, 2) * 30)


def pretrained(module: nn.Module) -> nn.Module:
    """The module with the same numbers every time, as if they were read from a file."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in (*module.parameters(), *module.buffers()):
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape, generator=generator) + 0.1)
    return module


def frozen(module: nn.Module) -> nn.Module:
    return pretrained(module).requires_grad_(False)


@dataclass(frozen=True)
class Backbone:
    """A factory: a frozen layer, a frozen BatchNorm, then layers and a head that are trained."""

    width: int = 8

    def __call__(self, outputs: int) -> nn.Module:
        fixed = nn.Sequential(nn.Linear(DIMENSIONS, self.width), nn.BatchNorm1d(self.width), nn.ReLU())
        frozen(fixed)[1].eval()  # type: ignore[index]
        own = nn.Sequential(nn.Linear(self.width, self.width, bias=False), nn.BatchNorm1d(self.width), nn.ReLU())
        return nn.Sequential(fixed, own, nn.Linear(self.width, outputs))


class Images(nn.Module):
    """Convolutions: one frozen, one not; BatchNorm in evaluation mode that learns, and the other way round."""

    def __init__(self, outputs: int):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.second, self.norm2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, outputs)
        frozen(self.first)
        pretrained(self.norm1).eval()
        frozen(self.norm2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.first(x)).relu()
        out: Tensor = self.head(self.norm2(self.second(x)).relu().mean((2, 3)))
        return out


class Forgetful(Images):
    """The same with dropout, which can't be stacked."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


IMAGES_FROZEN = [
    *("trunks.0.first.weight", "trunks.0.first.bias", "trunks.0.norm2.weight", "trunks.0.norm2.bias"),
    *(f"trunks.0.norm1.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")),
]


def ran(method: AnyMethod, reset: Any, lanes: int | None, **settings: Any) -> Tiny:
    one = method.family == "parameters" or method.name.lower() in ONE_WIDTH
    factories = (Backbone(),) if one else (Backbone(), Backbone(12))
    recipe = Recipe(lr=1e-2, batch=8, epochs=2, reset=reset)
    tiny = Tiny(method, labels=RAGGED, factories=factories, recipe=recipe, **settings)
    if lanes is not None:
        tiny.executor = tiny.cohort.executor = Fused("cpu", tiny.precision, lanes=lanes)  # type: ignore[assignment]
    return tiny.run(2)


def bits(value: Tensor) -> list[int]:
    return value.detach().contiguous().view(torch.uint8).flatten().tolist() if value.ndim else [int(value)]


def assert_still_frozen(model: Model, dtype: torch.dtype) -> None:
    """Every trunk holds the factory's own frozen numbers, to the bit."""
    for i, factory in enumerate(model.arch.trunks):
        for name, value in factory(2)[0].state_dict().items():  # type: ignore[index]
            expected = value.to(dtype) if value.is_floating_point() else value
            assert bits(model.state[f"trunks.{i}.0.{name}"]) == bits(expected), name


def models(tiny: Tiny) -> list[Model]:
    """All models but those on features."""
    every = [*(c.model for c in tiny.clients), *tiny.server.models.values()]
    return [model for model in every if model.arch.shape == tiny.clients[0].arch.shape]


@pytest.mark.parametrize("reset", ["phase", "round"])
@pytest.mark.parametrize("name", METHODS)
def test_a_pretrained_backbone_works_with_every_method(name: str, reset: str) -> None:
    method = make(name, QUICK.get(name))
    plain, fused = ran(method, reset, None), ran(method, reset, 2)
    for tiny in (plain, fused):
        for model in models(tiny):
            assert_still_frozen(model, torch.float64)
    assert not any(fused.executor.alone.values())  # type: ignore[attr-defined]
    for a, b in zip(everything(plain), everything(fused), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    untrained = Tiny(method, labels=RAGGED, factories=(Backbone(),)).clients[0].model.state
    if name != "centralized":  # which trains no client's model
        assert not torch.equal(plain.clients[0].model.state["trunks.0.1.0.weight"], untrained["trunks.0.1.0.weight"])


@pytest.mark.parametrize("name", ["fedavg", "fednova", "fedconcat", "feddf", "fedhkt"])
def test_averages_of_single_precision_leave_it_frozen(name: str) -> None:
    for model in models(ran(make(name, QUICK.get(name)), "phase", None, precision="fp32")):
        assert_still_frozen(model, torch.float32)


@pytest.mark.parametrize("settings", [{"statistics": "normalised"}, {"server_momentum": 0.5}])
def test_fednova_leaves_it_frozen(settings: dict[str, Any]) -> None:
    for model in models(ran(make("fednova", settings), "phase", None)):
        assert_still_frozen(model, torch.float64)


# -- one fit


@dataclass(frozen=True)
class Names(Loss):
    """The cross entropy; what it may read is noted."""

    seen: list[str]

    def __call__(self, step: Step) -> Tensor:
        self.seen[:] = list(step.params)
        return CrossEntropy("private")(step)

    def __hash__(self) -> int:
        return 0


def asked(factory: Any, **changes: Any) -> list[Fit]:
    """Ragged clients of this network; they start from other weights, as in the middle of a run."""
    engine, arch = Plain("cpu", "fp64"), Arch((factory,), 5, (1, 8, 8))
    first = engine.serve([Init(arch, Key(0, 0, k)) for k in range(4)])
    return fits(**{"model": lambda k: first[k]} | changes)


def assert_untouched(request: Fit, fitted: Fitted, names: list[str]) -> None:
    before, after = request.model.state, fitted.model.state
    assert all(bits(before[name]) == bits(after[name]) for name in names)
    assert not set(names) & set(fitted.trained)
    assert not [n for n in fitted.optimizer if n.partition("/")[2] in names]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lanes", [3, 64])
def test_a_fit_leaves_frozen_parts_alone_and_engines_agree(case: str, lanes: int) -> None:
    assert not unstackable_reason(Arch((Images,), 5, (1, 8, 8)))
    requests = asked(Images, **CASES[case])
    expected, found = (engine.serve(requests) for engine in (Plain("cpu", "fp64"), Fused("cpu", "fp64", lanes=lanes)))
    for request, a, b in zip(requests, expected, found, strict=True):
        assert a.trained == b.trained
        assert_untouched(request, a, IMAGES_FROZEN)
        assert_untouched(request, b, IMAGES_FROZEN)
        for name, value in a.model.state.items():
            torch.testing.assert_close(value, b.model.state[name], rtol=1e-7, atol=1e-8)
        if a.steps and request.only is None:
            for name in ("second.weight", "norm1.weight", "norm1.bias", "norm2.running_mean"):
                assert not torch.equal(request.model.state[f"trunks.0.{name}"], a.model.state[f"trunks.0.{name}"])


def test_a_network_that_cannot_be_stacked_is_frozen_too() -> None:
    assert unstackable_reason(Arch((Forgetful,), 5, (1, 8, 8)))
    requests = asked(Forgetful)
    for request, fitted in zip(requests, Fused("cpu", "fp64").serve(requests), strict=True):
        assert_untouched(request, fitted, IMAGES_FROZEN)


def test_frozen_parameters_are_no_part_of_the_proximal_term() -> None:
    requests = asked(Images, loss=always(CrossEntropy("private") + 0.5 * Proximal()))
    requests = [Fit(**{**vars(r), "constants": {"w": dict(r.model.floating)}}) for r in requests]
    for engine in (Plain("cpu", "fp64"), Fused("cpu", "fp64")):
        for request, fitted in zip(requests, engine.serve(requests), strict=True):
            assert_untouched(request, fitted, IMAGES_FROZEN)


@pytest.mark.parametrize("engine", [Plain("cpu", "fp64"), Fused("cpu", "fp64")])
def test_a_loss_sees_what_is_trained_and_nothing_else(engine: Any) -> None:
    (fitted,) = engine.serve(asked(Images, loss=always(loss := Names([])))[:1])
    trained = ("second.weight", "second.bias", "norm1.weight", "norm1.bias")
    assert sorted(loss.seen) == sorted([*(f"trunks.0.{n}" for n in trained), "head.weight", "head.bias"])
    assert loss.seen == list(fitted.trained)


@pytest.mark.parametrize("engine", [Plain("cpu", "fp64"), Fused("cpu", "fp64")])
def test_statistics_of_a_frozen_norm_are_not_taken_anew(engine: Any) -> None:
    request = asked(Images)[0]
    (found,) = engine.serve([Recalibrate(request.model, request.streams["private"])])
    before, after = request.model.state, found.state
    moved = {name for name in before if bits(before[name]) != bits(after[name])}
    assert moved == {"trunks.0.norm2.running_mean", "trunks.0.norm2.running_var"}

    def all_norms(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, outputs))

    model = engine.serve([Init(Arch((all_norms,), 3, (6,)), Key(0))])[0]
    assert engine.serve([Recalibrate(model, Samples({"x": torch.ones(4, 6)}))])[0] is model


def test_a_client_that_recalibrates_keeps_it() -> None:
    for model in models(ran(make("fedcc", {"bn_recalibrate": "public"}), "phase", None)):
        assert_still_frozen(model, torch.float64)


# -- the network


def evaluated(module: nn.Module) -> set[str]:
    return {name for name, part in module.named_modules() if not part.training}


@pytest.mark.parametrize("change", [lambda n: n, copy.deepcopy, lambda n: n.eval().train(), lambda n: n.double()])
def test_flags_and_modes_survive(change: Any) -> None:
    network = build(Arch((Images,), 5, (1, 8, 8)), Key(0))
    network.load_state_dict(network.state_dict())
    network = change(network)
    assert evaluated(network) == {"trunks.0.norm1"}
    still = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    assert still == {n for n in IMAGES_FROZEN if not re.search("running|tracked", n)}
    assert not network.eval().training
    assert not any(part.training for part in network.modules())


def test_they_survive_concatenation() -> None:
    network = build(Arch((Images,), 5, (1, 8, 8)).times(3), Key(0))
    assert evaluated(network) == {f"trunks.{i}.norm1" for i in range(3)}
    trained = [n for n in network.trainable if "norm1" in n]
    assert trained == [f"trunks.{i}.norm1.{n}" for i in range(3) for n in ("weight", "bias")]
    network.train_part("head")
    assert [name for name, part in network.named_modules() if part.training] == ["head"]


def without_head(outputs: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, outputs))
    module[2].requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (lambda n: nn.Linear(6, n).requires_grad_(False), "all its parameters are frozen"),
        (without_head, "its last nn.Linear must be trainable, but it is frozen"),
    ],
)
def test_a_head_that_cannot_learn_is_refused(factory: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        build(Arch((factory,), 3, (6,)), Key(0))


def test_a_part_that_cannot_learn_is_refused() -> None:
    request = asked(Images, only=always("trunks.0.first"))[:1]
    for engine in (Plain("cpu", "fp64"), Fused("cpu", "fp64")):
        with pytest.raises(ValueError, match=r"nothing to train in 'trunks\.0\.first'"):
            engine.serve(request)


def resnet(outputs: int) -> nn.Module:
    module = ResNet(8, 1)(outputs)
    module.conv.requires_grad_(False)  # type: ignore[union-attr]
    return module


def still_resnet(outputs: int) -> nn.Module:
    module = ResNet(8, 1)(outputs)
    module.bn.eval()  # type: ignore[union-attr]
    return module


def test_our_kernels_serve_whole_networks_only() -> None:
    assert Stacked(Arch((ResNet(8, 1),), 5, (1, 8, 8)), kernels=True).fast
    for factory in (resnet, still_resnet):
        assert not Stacked(Arch((factory,), 5, (1, 8, 8)), kernels=True).fast


def test_a_stand_in_of_a_client_knows_what_is_trained() -> None:
    assert network_state(Arch((Images,), 5, (1, 8, 8)))[1] == build(Arch((Images,), 5, (1, 8, 8)), Key(0)).trainable


def test_predictions_of_a_network_left_in_evaluation_mode() -> None:
    """All of it: nothing but its weights is trained."""
    arch = Arch((lambda n: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, n)).eval(),), 3, (6,))
    tiny = Tiny(make("fedavg"), factories=arch.trunks).run(1)
    state: Mapping[str, Tensor] = tiny.server.models["global"].state
    assert not state["trunks.0.1.running_mean"].any()
    assert int(tiny.clients[0].model.state["trunks.0.1.num_batches_tracked"]) == 0
