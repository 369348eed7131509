"""Every method on the fused engine does what it does on the plain one: in float64, to 1e-8, ragged clients included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_methods import ONE_WIDTH, QUICK, everything
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedcc.core.model import Arch
from fedcc.core.requests import Fit, Init, Recipe
from fedcc.core.rng import Key
from fedcc.core.samples import Samples, View
from fedcc.engine import Plain
from fedcc.engine.fused import Fused
from fedcc.engine.jobs import Job
from fedcc.engine.lane_step import LaneStep
from fedcc.engine.seating import lane_count
from fedcc.engine.stack import unstackable_reason
from fedcc.gradients import Ascent, Clip
from fedcc.losses import CrossEntropy, SoftCrossEntropy
from fedcc.methods import METHODS, make
from fedcc.nets import ResNet
from recording import record
from tiny import Flat, Mlp, Tiny

RAGGED = ((0,) * 20, (1,) * 7 + (2,) * 3, (2,) * 9, (0, 1, 2) * 30, (1,) * 40, (2,) * 15 + (0,) * 2)


def assert_same_runs(make_tiny: Callable[[], Tiny], way: str, lanes: Sequence[int]) -> None:
    """Two rounds on both engines: all messages, models and scores agree, and the fused one trains all fits so."""
    expected = everything(make_tiny().run(2))
    for number in lanes:
        tiny, fused = make_tiny(), Fused("cpu", "fp64", lanes=number)
        tiny.executor = tiny.cohort.executor = fused  # type: ignore[assignment]
        asked = record(tiny)
        found = everything(tiny.run(2))
        assert not any(fused.alone.values())
        assert {fused.way(fit.model.arch) for fit in asked.fits("fit")} == {way}
        assert all(answer.steps for _, answer in asked.fitted())
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", METHODS)
def test_fused_agrees_with_plain(name: str) -> None:
    method = make(name, QUICK.get(name, {}))
    factories = (Mlp(),) if method.family == "parameters" else (Mlp(), Mlp(12), Mlp(8, norm=False))
    factories = factories[::2] if name in ONE_WIDTH else factories
    assert_same_runs(lambda: Tiny(method, labels=RAGGED, factories=factories), "stacked", lanes=(2, 64))


LEFT_OUT: dict[str, dict[str, Any]] = {
    "fedaux": {"method": {}, "images": View(pad=1, flip=True), "factories": (Flat(), Flat(12))},
    "fens": {"method": QUICK["fens"] | {"aggregator": "mlp"}, "factories": (Mlp(), Mlp(12))},
}
"""What the quick settings leave out: FedAUX's pretext task, FENS's hidden layer."""


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_quick_settings_leave_out_agrees_too(name: str) -> None:
    given = {**LEFT_OUT[name]}
    method = make(name, given.pop("method"))
    assert_same_runs(lambda: Tiny(method, labels=RAGGED, **given), "stacked", lanes=(2, 64))


def images(n: int, seed: int, augment: str = "standard", **columns: Tensor) -> Samples:
    x = torch.randint(0, 256, (n, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Samples({"x": x, **columns}, View(1 / 255, (0.5,), (0.2,), pad=2, flip=True).with_augment(augment))


def strong_streams(k: int) -> dict[str, Samples]:
    return {"private": images(9 + k, k, "strong", y=torch.arange(9 + k) % 5), "public": images(11, 50, "strong")}


def always(value: Any) -> Any:
    """The same for every client."""
    return lambda k: value  # noqa: ARG005


def fits(**changes: Any) -> list[Fit]:
    """Ragged clients of one small ResNet with two streams, augmented."""
    engine, arch = Plain("cpu", "fp64"), Arch((ResNet(8, 1),), 5, (1, 8, 8))
    found = []
    for k, n in enumerate((5, 30, 17, 9)):
        generator = torch.Generator().manual_seed(k)
        private = images(n, k, y=torch.randint(0, 5, (n,), generator=generator))
        target = torch.rand(11, 5, generator=generator, dtype=torch.float64)
        recipe = Recipe(lr=1e-2 / (k + 1), batch=6, epochs=1 + k % 2, schedule="cosine" if k == 2 else "constant")
        request: dict[str, Any] = {
            "model": engine.init(Init(arch, Key(0, 0, k))),
            "loss": CrossEntropy("private") + 0.5 * SoftCrossEntropy("public"),
            "streams": {"private": private, "public": images(11, 50, target=target)},
            "key": Key(0, 1, k, "fit"),
            "recipe": recipe,
        }
        found.append(Fit(**(request | {name: change(k) for name, change in changes.items()})))
    return found


CASES: dict[str, dict[str, Any]] = {
    "joint": {},
    "separate forwards": {"joint": always(False)},
    "one stream is not read": {"joint": always(False), "loss": always(CrossEntropy("private"))},
    "head only": {"only": always("head")},
    "SAM": {"gradient": always(Ascent(0.1))},
    "clipped": {"gradient": always(Clip(0.5))},
    "batches of two sizes": {"recipe": lambda k: Recipe(batch=6, steps=3 + k, batches=(("public", 4),))},
    "nothing to do for one": {"recipe": lambda k: Recipe(batch=6, steps=0 if k == 1 else 3)},
    "strong augmentation": {"streams": strong_streams, "loss": always(CrossEntropy("private"))},
    "SGD": {"recipe": lambda k: Recipe(lr=0.1, batch=6, steps=3 + k, momentum=0.0 if k == 3 else 0.9)},
    "Adam goes on": {"recipe": always(Recipe(batch=6, steps=2, reset="round"))},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lanes", [1, 3, 64])
def test_a_fit_agrees(case: str, lanes: int) -> None:
    plain, fused = Plain("cpu", "fp64"), Fused("cpu", "fp64", lanes=lanes)
    group = fits(**CASES[case])
    for _ in range(2):  # the second time every lane is used again
        expected, found = plain.serve(group), fused.serve(group)
    for a, b in zip(expected, found, strict=True):
        assert a.steps == b.steps
        assert a.trained == b.trained
        assert a.loss == pytest.approx(b.loss, abs=1e-9)
        assert a.optimizer.keys() == b.optimizer.keys()
        for name, value in a.model.state.items():
            torch.testing.assert_close(value, b.model.state[name], rtol=1e-7, atol=1e-8)
        for name, value in a.optimizer.items():
            torch.testing.assert_close(value, b.optimizer[name], rtol=1e-7, atol=1e-8)


def test_a_seat_without_a_client_stays_within_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven clients have twelve lanes; fits longer than a window of batches."""
    monkeypatch.setattr(Job, "WINDOW", 2)
    group = fits(recipe=always(Recipe(batch=6, steps=5))) * 3
    found = Fused("cpu", "fp64").serve(group[:11])
    assert [f.loss for f in found] == pytest.approx([f.loss for f in Plain("cpu", "fp64").serve(group[:11])], abs=1e-9)


def test_a_loss_that_is_not_finite_names_its_client() -> None:
    group = fits(recipe=lambda k: Recipe(lr=1e200 if k == 2 else 1e-3, batch=6, steps=4))
    with pytest.raises(FloatingPointError) as caught:
        Fused("cpu", "fp64").serve(group)
    assert "client 2, round 1, 'fit'" in caught.value.__notes__


def test_weights_that_are_not_finite_in_an_empty_lane_matter_to_nobody() -> None:
    group, fused = (fits(recipe=always(Recipe(batch=6, steps=3))) * 3)[:11], Fused("cpu", "fp64")
    fused.serve(group)
    (groups,) = fused.groups.values()
    groups.step(12).lanes.params.fill_(torch.inf)
    found = [f.loss for f in fused.serve(group)]
    assert not groups.step(12).lanes.params.isfinite().all()
    assert found == pytest.approx([f.loss for f in Plain("cpu", "fp64").serve(group)], abs=1e-9)


def test_clients_enter_and_leave_lanes_in_few_calls() -> None:
    """With a thousand clients of few steps, the host's calls are what a round takes."""

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls[-1] += not func.is_view
            return func(*args, **(kwargs or {}))

    group, calls = fits(recipe=always(Recipe(batch=6, steps=3))), [0]
    for number in (1, 2):
        fused = Fused("cpu", "fp64", lanes=4 * number)
        fused.serve(group * number)
        calls.append(0)
        with Calls():
            fused.serve(group * number)
    tensors = len(group[0].model.state)
    assert (calls[2] - calls[1]) / len(group) < tensors  # of one more client: fewer than one for each of its tensors


def test_out_of_memory_halves_the_lanes_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """In mid-fit: clients that were under way begin again, and the result is the same."""
    group, once, widths = fits(), LaneStep.once, []

    def scarce(step: LaneStep) -> None:
        widths.append(step.lanes.width)
        if step.lanes.width > 2 and len(widths) > 1:
            raise torch.cuda.OutOfMemoryError("no room")
        once(step)

    monkeypatch.setattr(LaneStep, "once", scarce)
    found = Fused("cpu", "fp64").serve(group)
    assert widths[:2] == [4, 4]
    assert max(widths[2:]) == 2
    for a, b in zip(Plain("cpu", "fp64").serve(group), found, strict=True):
        for name, value in a.model.state.items():
            torch.testing.assert_close(value, b.model.state[name], rtol=1e-7, atol=1e-8)


def test_lanes_are_few_more_than_clients() -> None:
    for clients in range(1, 65):
        assert clients <= lane_count(clients) <= max(clients, 1.15 * clients)
    assert lane_count(1000) == 64


class Mixing(nn.Module):
    """Channels mix outside a module: surgery would get this wrong."""

    def __init__(self, outputs: int):
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 3)
        self.c, self.head = nn.Conv2d(8, 4, 3), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.c(torch.cat([self.a(x), self.b(x)], 1)).mean((2, 3)))
        return out


class Forgetful(nn.Module):
    def __init__(self, outputs: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, outputs))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Pooling(nn.Module):
    """Layers that surgery knows, and a flatten before a linear layer."""

    def __init__(self, outputs: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, groups=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, outputs),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def test_networks_are_proved_before_they_are_stacked() -> None:
    assert not unstackable_reason(Arch((Pooling,), 5, (1, 8, 8)))
    assert not unstackable_reason(Arch((ResNet(8, 1), ResNet(14, 1)), 5, (1, 8, 8)))
    assert "one by one" in unstackable_reason(Arch((Mixing,), 5, (1, 8, 8)))
    assert "SeededDropout" in unstackable_reason(Arch((Forgetful,), 5, (6,)))
    with_layer_norm = Arch((lambda n: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, n)),), 5, (6,))
    assert "LayerNorm" in unstackable_reason(with_layer_norm)
