"""Networks that surgery cannot stack train together by vmap, and do what they do alone: in float64, to 1e-8."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from test_engines import CASES, always, assert_same_runs, fits
from test_methods import QUICK
from torch import Tensor, nn

from fedcc import Federation, run
from fedcc.core.model import Arch
from fedcc.core.requests import Fit, Init, Predict, Recipe
from fedcc.core.rng import Key
from fedcc.core.samples import Samples
from fedcc.engine import Plain
from fedcc.engine.fused import Fused
from fedcc.engine.mapped import AloneWarning, LowPrecision, unmappable_reason
from fedcc.engine.stack import unstackable_reason
from fedcc.losses import CrossEntropy
from fedcc.methods import METHODS, make
from fedcc.nets.small import Bag
from recording import changed
from tiny import Tiny


class Groups(nn.Module):
    """GroupNorm, channels that mix outside modules, BatchNorm with statistics, and dropout."""

    def __init__(self, outputs: int):
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(1, 4, 3, padding=1)
        self.group, self.batch = nn.GroupNorm(2, 8), nn.BatchNorm2d(8)
        self.drop, self.channels = nn.Dropout(0.3), nn.Dropout2d(0.2)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.group(torch.cat([self.a(x), self.b(x)], 1)).relu()
        out: Tensor = self.head(self.drop(self.channels(self.batch(x)).mean((2, 3))))
        return out


class Attention(nn.Module):
    """Patches, a learned position, an encoder layer with LayerNorm and dropout outside the attention."""

    def __init__(self, outputs: int):
        super().__init__()
        self.patch, self.position = nn.Conv2d(1, 8, 4, 4), nn.Parameter(torch.zeros(1, 4, 8))
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = self.head((x + self.mlp(self.norm2(x))).mean(1))
        return out


class Recurrent(nn.Module):
    """An LSTM in both directions, whose last states begin a GRU of two layers without biases."""

    def __init__(self, outputs: int, dropout: float = 0.0):
        super().__init__()
        self.lstm = nn.LSTM(8, 4, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(8, 4, num_layers=2, bias=False, dropout=dropout)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y, (h, c) = self.lstm(x[:, 0])
        z, last = self.gru(y.transpose(0, 1), h + c)
        out: Tensor = self.head(torch.cat([z[-1], last[0]], -1))
        return out


def dropping(outputs: int) -> nn.Module:
    """Dropout between recurrent layers, which no layer does either."""
    return Recurrent(outputs, 0.5)


def plain_dropout(outputs: int) -> nn.Module:
    """Dropout that no layer does: its draws depend on who else draws."""

    class Functional(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(nn.functional.dropout(x, 0.5, self.training))
            return out

    return Functional(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, outputs))


class Counting(nn.Module):
    """A buffer that counts steps and changes what is computed."""

    calls: Tensor

    def __init__(self, outputs: int):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, outputs)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        out: Tensor = self.head(self.norm(x.flatten(1)))
        return out


def arch_of(factory: Any) -> Arch:
    return Arch((factory,), 5, (1, 8, 8))


def with_network(factory: Any, **changes: Any) -> list[Fit]:
    engine = Plain("cpu", "fp64")
    return fits(**changes, model=lambda k: engine.init(Init(arch_of(factory), Key(0, 0, k))))


def assert_equal_fits(expected: list[Any], found: list[Any]) -> None:
    for a, b in zip(expected, found, strict=True):
        assert (a.steps, a.trained) == (b.steps, b.trained)
        assert a.loss == pytest.approx(b.loss, abs=1e-9)
        for own, other in ((a.model.state, b.model.state), (a.optimizer, b.optimizer)):
            assert own.keys() == other.keys()
            for name, value in own.items():
                torch.testing.assert_close(value, other[name], rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("factory", [Groups, Attention])
@pytest.mark.parametrize("case", CASES)
def test_a_fit_agrees(case: str, factory: Any) -> None:
    group, fused = with_network(factory, **CASES[case]), Fused("cpu", "fp64", lanes=3)
    for _ in range(2):  # the second time every lane is used again
        found = fused.serve(group)
    assert_equal_fits(Plain("cpu", "fp64").serve(group), found)
    assert fused.way(arch_of(factory)) == "vmap"


def test_recurrent_layers_agree() -> None:
    group, fused = with_network(Recurrent), Fused("cpu", "fp64", lanes=2)
    expected = Plain("cpu", "fp64").serve(group)
    assert_equal_fits(expected, fused.serve(group))
    assert fused.way(arch_of(Recurrent)) == "vmap"
    for fit, fitted in zip(group, expected, strict=True):
        assert changed(fit.model.state, fitted.model.state) == set(fitted.model.state)  # recurrent weights learn, too


def test_tokens_agree() -> None:
    plain, arch = Plain("cpu", "fp64"), Arch((Bag(20),), 3, (6,), tokens=True)
    generator, group = torch.Generator().manual_seed(0), []
    for k, n in enumerate((4, 9, 6)):
        samples = Samples({"x": torch.randint(0, 25, (n, 6), generator=generator), "y": torch.arange(n) % 3})
        model = plain.init(Init(arch, Key(0, 0, k)))
        group.append(Fit(model, CrossEntropy("private"), {"private": samples}, Key(0, 1, k, "fit"), Recipe(batch=4)))
    fused = Fused("cpu", "fp64")
    assert_equal_fits(plain.serve(group), fused.serve(group))
    questions = [Predict(fit.model, group[1].streams["private"]) for fit in group]
    for a, b in zip(plain.serve(questions), fused.serve(questions), strict=True):
        torch.testing.assert_close(a.logits, b.logits, rtol=1e-8, atol=1e-8)
    assert fused.way(arch) == "vmap"


@pytest.mark.parametrize("factory", [Groups, Attention, Recurrent])
def test_predictions_agree(factory: Any) -> None:
    group = with_network(factory)
    questions, fused = [Predict(fit.model, group[0].streams["public"]) for fit in group], Fused("cpu", "fp64")
    for a, b in zip(Plain("cpu", "fp64").serve(questions), fused.serve(questions), strict=True):
        torch.testing.assert_close(a.logits, b.logits, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(a.features, b.features, rtol=1e-8, atol=1e-8)
    assert fused.way(arch_of(factory)) == "vmap"


def test_dropout_does_not_depend_on_lanes_or_order() -> None:
    group = with_network(Groups)
    together = Fused("cpu", "fp64").serve(group)
    assert_equal_fits(list(reversed(Fused("cpu", "fp64", lanes=2).serve(group[::-1]))), together)
    without = Fused("cpu", "fp64").serve(with_network(Groups, key=lambda k: Key(1, 1, k, "fit")))
    assert together[0].loss != without[0].loss


def normed(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, outputs))


class Attending(nn.Module):
    """Attention over two halves of the input, with dropout, and BatchNorm with running statistics.

    Without biases: that of the keys has no effect, so its gradient is rounding, which Adam and FedProx make large.
    """

    def __init__(self, outputs: int):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, bias=False, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.view(len(x), 2, 3))
        out: Tensor = self.head(self.norm(self.attention(x, x, x)[0].flatten(1)).relu())
        return out


@pytest.mark.parametrize("factory", [normed, Attending])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_agrees(name: str, factory: Any) -> None:
    """Ragged clients, with a lane for each and with fewer."""
    method, labels = make(name, QUICK.get(name, {})), ((0,) * 12, (1,) * 7 + (2,) * 3, (0, 1, 2) * 6)
    assert_same_runs(lambda: Tiny(method, labels=labels, factories=(factory,)), "vmap", lanes=(2, 64))


def test_fedcc_on_tokens_agrees() -> None:
    """A whole run of a network with a padding token and a mask for it."""
    rng = np.random.default_rng(0)
    clients = [(rng.integers(0, 9, (n, 4)), np.arange(n) % 3) for n in (7, 12, 5)]
    federation = Federation.of(clients, rng.integers(0, 9, (10, 4)), clients[0], models=Words)
    fedcc, words = make("fedcc", {}), {"rounds": 2, "epochs": 2, "batch": 4, "device": "cpu", "precision": "fp64"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", AloneWarning)
        plain, fused = (run(fedcc, federation, engine=engine, **words) for engine in ("plain", "fused"))
    torch.testing.assert_close(plain.scores(clients[1][0]), fused.scores(clients[1][0]), rtol=1e-8, atol=1e-8)


class Words(nn.Module):
    """Token 3 is padding."""

    def __init__(self, outputs: int):
        super().__init__()
        self.words, self.layer = (
            nn.Embedding(9, 8, padding_idx=3),
            nn.TransformerEncoderLayer(8, 2, 8, batch_first=True),
        )
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.words(x), src_key_padding_mask=x == 3).mean(1))
        return out


def test_low_precision_is_near_full_precision() -> None:
    """Convolutions and products in bf16, norms in fp32: as the plain engine does with autocast."""
    for factory in (Groups, Attention, Recurrent):
        group = with_network(factory, recipe=always(Recipe(batch=6, steps=2)))
        engines = [Fused("cpu", precision, kernels=False) for precision in ("fp64", "bf16")]
        exact, rough = (engine.serve(group) for engine in engines)
        assert [engine.way(arch_of(factory)) for engine in engines] == ["vmap"] * 2
        for a, b in zip(exact, rough, strict=True):
            assert a.loss != b.loss
            assert a.loss == pytest.approx(b.loss, rel=0.05)


def test_what_cannot_be_mapped_says_why_and_trains_alone() -> None:
    for factory, reason in (
        (dropping, "gru"), (plain_dropout, "random"), (Counting, "changes in training"),
    ):  # fmt: skip
        arch, fused = arch_of(factory), Fused("cpu", "fp64")
        assert unstackable_reason(arch)
        assert reason in unmappable_reason(arch), unmappable_reason(arch)
        group = with_network(factory)
        with pytest.warns(AloneWarning, match=reason):
            found = fused.serve(group)
        for a, b in zip(Plain("cpu", "fp64").serve(group), found, strict=True):
            assert all(torch.equal(value, b.model.state[name]) for name, value in a.model.state.items())
        assert reason in fused.alone[arch]


@pytest.mark.parametrize("clients", [1, 2])
def test_groups_of_channels_that_lie_last(clients: int) -> None:
    """A convolution may leave images so, as it does for one client; vmap's rule takes the other layout only."""
    x = torch.stack([torch.rand(9, 8, 5, 5).to(memory_format=torch.channels_last) for _ in range(clients)])
    x = x if clients > 1 else torch.rand(9, 8, 5, 5).to(memory_format=torch.channels_last)[None]
    with LowPrecision(torch.float32, torch.float32):
        found = torch.vmap(lambda image: nn.functional.group_norm(image, 4))(x)
    torch.testing.assert_close(found, torch.stack([nn.functional.group_norm(image, 4) for image in x]))
