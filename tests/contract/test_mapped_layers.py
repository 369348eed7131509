"""Usual layers keep their lanes: each trains by vmap, and does what it does alone, in float64 and near it in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_engines import CASES, always
from test_mapped import arch_of, assert_equal_fits, with_network
from torch import Tensor, nn

from fedcc.core.model import Arch
from fedcc.core.requests import Fit, Init, Predict, Recipe
from fedcc.core.rng import Key
from fedcc.core.samples import Samples
from fedcc.engine import Plain, mapped, stack
from fedcc.engine.fused import Fused
from fedcc.engine.jobs import Job, SamplePools
from fedcc.engine.lane_step import LaneStep
from fedcc.engine.lanes import Compute, Lanes
from fedcc.engine.mapped import AloneWarning, unmappable_reason
from fedcc.engine.stack import unstackable_reason
from fedcc.errors import error_line
from fedcc.losses import CrossEntropy
from fedcc.nets import ResNet


class Encoder(nn.Module):
    """torch's own encoder layer, with its dropout of 0.1 in four places, one of them within the attention."""

    def __init__(self, outputs: int):
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x[:, 0]).mean(1))
        return out


class Named(nn.Module):
    """States handed over by name, to an LSTM, a GRU and an RNN."""

    def __init__(self, outputs: int, nonlinearity: str = "tanh"):
        super().__init__()
        self.lstm, self.gru = nn.LSTM(8, 4, batch_first=True), nn.GRU(4, 4, batch_first=True)
        self.rnn = nn.RNN(4, 4, 2, nonlinearity=nonlinearity, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(1, len(x), 4)
        y, (h, _) = self.lstm(x[:, 0], hx=(zeros, zeros))
        y, h = self.gru(input=y, hx=h)
        y, _ = self.rnn(y, hx=h.repeat(4, 1, 1))
        out: Tensor = self.head(y[:, -1])
        return out


def relu_rnn(outputs: int) -> nn.Module:
    return Named(outputs, "relu")


class Cells(nn.Module):
    """Each kind of cell, from no state and from one."""

    def __init__(self, outputs: int):
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(8, 4), nn.GRUCell(4, 4, bias=False)
        self.tanh, self.relu = nn.RNNCell(4, 4), nn.RNNCell(4, 4, nonlinearity="relu")
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        states: list[Any] = [None] * 4
        for t in range(3):
            y, states[0] = x[:, 0, t], self.lstm(x[:, 0, t], states[0])
            y = states[1] = self.gru(states[0][0], states[1])
            y = states[2] = self.tanh(y, states[2])
            y = states[3] = self.relu(input=y, hx=states[3])
        out: Tensor = self.head(y)
        return out


class Warped(nn.Module):
    """PReLU, and images sampled at places that the network computes."""

    def __init__(self, outputs: int):
        super().__init__()
        self.conv, self.act, self.where = nn.Conv2d(1, 4, 3, padding=1), nn.PReLU(4), nn.Linear(4, 2)
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv(x))
        grid = self.where(x.mean((2, 3))).tanh()[:, None, None].expand(-1, 8, 8, -1)
        out: Tensor = self.head(F.grid_sample(x, grid, align_corners=False).mean((2, 3)))
        return out


class Shared(nn.Module):
    """A BatchNorm layer that runs twice in a forward pass, and one that does not run."""

    def __init__(self, outputs: int):
        super().__init__()
        self.flat, self.norm, self.unused = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.layer, self.head = nn.LayerNorm(8), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.flat(x.flatten(1))).relu()
        out: Tensor = self.head(self.layer(self.norm(x)))
        return out


@pytest.mark.parametrize("factory", [Encoder, Named, relu_rnn, Cells, Warped, Shared])
def test_layers_train_and_predict_together(factory: Any) -> None:
    group, fused, plain = with_network(factory), Fused("cpu", "fp64", lanes=2), Plain("cpu", "fp64")
    assert_equal_fits(plain.serve(group), fused.serve(group))
    questions = [Predict(fit.model, group[0].streams["public"]) for fit in group]
    for a, b in zip(plain.serve(questions), fused.serve(questions), strict=True):
        torch.testing.assert_close(a.logits, b.logits, rtol=1e-8, atol=1e-8)
    assert fused.way(arch_of(factory)) == "vmap"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("factory", [Encoder, Named, Cells, Warped, Shared])
def test_layers_train_together_on_a_gpu(factory: Any) -> None:
    """Captured as a graph, in float64, and without an error in bf16, where inputs are images of the kernel's kind."""
    group, fused = with_network(factory), Fused("cuda", "fp64", lanes=2)
    found = [f.model.to("cpu") for f in fused.serve(group)]
    for a, b in zip(Plain("cpu", "fp64").serve(group), found, strict=True):
        for name, value in a.model.state.items():
            torch.testing.assert_close(value, b.state[name], rtol=1e-6, atol=1e-7)
    rough = Fused("cuda", "bf16")
    rough.serve(group)
    assert [engine.way(arch_of(factory)) for engine in (fused, rough)] == ["vmap"] * 2


@pytest.mark.parametrize("factory", [Encoder, Named, Cells, Warped])
def test_layers_train_together_in_low_precision(factory: Any) -> None:
    group = with_network(factory, recipe=always(Recipe(batch=6, steps=2)))
    rough, exact = (Fused("cpu", precision, kernels=False) for precision in ("bf16", "fp64"))
    for a, b in zip(exact.serve(group), rough.serve(group), strict=True):
        assert a.loss == pytest.approx(b.loss, rel=0.05)
    assert rough.way(arch_of(factory)) == "vmap"


class Padded(nn.Module):
    """An embedding one of whose rows stands for nothing and is not trained."""

    def __init__(self, outputs: int, padding: int):
        super().__init__()
        self.embedding = nn.Embedding(8, 6, padding_idx=padding)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.embedding(x).mean(1)))
        return out


def first(outputs: int) -> nn.Module:
    return Padded(outputs, 0)


def fifth(outputs: int) -> nn.Module:
    return Padded(outputs, 5)


def last(outputs: int) -> nn.Module:
    return Padded(outputs, -1)


@pytest.mark.parametrize(("factory", "padding"), [(first, 0), (fifth, 5), (last, 7)])
def test_a_padding_row_stays_in_every_lane(factory: Any, padding: int) -> None:
    plain, fused, arch = Plain("cpu", "fp64"), Fused("cpu", "fp64"), Arch((factory,), 3, (6,), tokens=True)
    generator, group = torch.Generator().manual_seed(0), []
    for k, n in enumerate((4, 9, 6)):
        samples = Samples({"x": torch.randint(0, 8, (n, 6), generator=generator), "y": torch.arange(n) % 3})
        assert (samples.x == padding).any()
        model = plain.init(Init(arch, Key(0, 0, k)))
        group.append(Fit(model, CrossEntropy("private"), {"private": samples}, Key(0, 1, k, "fit"), Recipe(batch=4)))
    found = fused.serve(group)
    assert_equal_fits(plain.serve(group), found)
    assert fused.way(arch) == "vmap"
    for fit, fitted in zip(group, found, strict=True):
        name = "trunks.0.embedding.weight"
        assert torch.equal(fit.model.state[name][padding], fitted.model.state[name][padding])


def cumulative(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, outputs))


class Warming(nn.Module):
    """A step counter in Python: it is in no state, and clients in lanes are at different steps."""

    def __init__(self, outputs: int):
        super().__init__()
        self.norm, self.head, self.calls = nn.LayerNorm(64), nn.Linear(64, outputs), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        out: Tensor = self.head(self.norm(x.flatten(1)) / (1 + self.calls))
        return out


@pytest.mark.parametrize(("factory", "reason"), [(cumulative, "momentum=None"), (Warming, "how often it was called")])
def test_what_counts_for_itself_trains_alone(factory: Any, reason: str) -> None:
    assert reason in unmappable_reason(arch_of(factory))
    group, fused = with_network(factory, recipe=always(Recipe(batch=6, steps=2))), Fused("cpu", "fp64")
    with pytest.warns(AloneWarning, match=reason):
        found = fused.serve(group)
    assert_equal_fits(Plain("cpu", "fp64").serve(group), found)


def test_the_proof_tries_the_padding_token(monkeypatch: pytest.MonkeyPatch) -> None:
    arch = Arch((fifth,), 3, (6,), tokens=True)
    assert not unmappable_reason(arch)
    monkeypatch.setattr(mapped, "_embedding", F.embedding)
    assert "one by one" in unmappable_reason.__wrapped__(arch)


class Silent(nn.Module):
    """Channels mix, which surgery gets wrong, before two layers that start at 0 and so hide it and its gradients."""

    def __init__(self, outputs: int):
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 3)
        self.c, self.d = nn.Conv2d(8, 4, 1, bias=False), nn.Conv2d(4, 4, 1, bias=False)
        nn.init.zeros_(self.c.weight)
        nn.init.zeros_(self.d.weight)
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        out: Tensor = self.head((a + self.d(self.c(torch.cat([a, b], 1)))).mean((2, 3)))
        return out


@pytest.mark.parametrize("large", [False, True])
def test_the_proof_leaves_the_first_weights(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr(stack, "LARGE", 0)
    assert "one by one" in unstackable_reason.__wrapped__(arch_of(Silent))
    assert not unmappable_reason.__wrapped__(arch_of(Silent))


def test_memory_does_not_decide_how_networks_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("somebody else is here")

    monkeypatch.setattr(mapped, "_trial", full)
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        Fused("cpu", "fp64").serve(with_network(Encoder))
    assert error_line(caught.value) == "the GPU has not enough free memory: somebody else is here"


@pytest.mark.parametrize(("factory", "by_kernel"), [(Encoder, False), (ResNet(8, 1), True)])
def test_mapped_networks_see_inputs_that_are_not_rounded(factory: Any, by_kernel: bool) -> None:
    """The kernel that makes batches of images writes bf16; these networks round where they compute in bf16."""
    fit = with_network(factory)[0]
    compute = Compute(torch.device("cpu"), torch.float32, torch.bfloat16, kernels=True, graphs=False)
    jobs = [Job(fit)]
    assert LaneStep(Lanes(SamplePools(jobs, compute.device), 1, compute), compute).images == by_kernel


def test_a_prediction_without_memory_takes_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    group, sizes, outputs = with_network(Encoder), list[int](), Compute.outputs

    def scarce(compute: Compute, networks: Any, x: Tensor) -> Any:
        sizes.append(x.shape[1])
        if x.shape[1] > most:
            raise torch.cuda.OutOfMemoryError("no room")
        return outputs(compute, networks, x)

    monkeypatch.setattr(Compute, "outputs", scarce)
    questions, most = [Predict(fit.model, group[0].streams["public"]) for fit in group], 3
    found = Fused("cpu", "fp64").serve(questions)
    assert sizes == [11, 5, 2, 2, 2, 2, 2, 1]
    for a, b in zip(Plain("cpu", "fp64").serve(questions), found, strict=True):
        torch.testing.assert_close(a.logits, b.logits, rtol=1e-8, atol=1e-8)
    most = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        Fused("cpu", "fp64").serve(questions)


class Small(nn.Module):
    """A small CNN with GroupNorm, and dropout of both kinds, also right before the head and in evaluation mode."""

    def __init__(self, outputs: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Dropout2d(0.3), nn.Dropout(0.9).eval(),
            nn.MaxPool2d(2), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, outputs),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.parametrize("case", ["joint", "separate forwards", "SAM", "head only"])
def test_group_norm_and_dropout_by_surgery(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off until it is measured on a GPU: the same numbers as by vmap and alone."""
    group, expected = with_network(Small, **CASES[case]), Plain("cpu", "fp64")
    for more, way in ((False, "vmap"), (True, "stacked")):
        monkeypatch.setattr(stack, "MORE_SURGERY", more)
        unstackable_reason.cache_clear()
        fused = Fused("cpu", "fp64", lanes=2)
        assert_equal_fits(expected.serve(group), fused.serve(group))
        assert fused.way(arch_of(Small)) == way
    rough = Fused("cpu", "bf16", kernels=False)
    for a, b in zip(expected.serve(group), rough.serve(group), strict=True):
        assert a.loss == pytest.approx(b.loss, rel=0.05)
    questions = [Predict(fit.model, group[0].streams["public"]) for fit in group]
    for a, b in zip(expected.serve(questions), fused.serve(questions), strict=True):
        torch.testing.assert_close(a.logits, b.logits, rtol=1e-8, atol=1e-8)
    unstackable_reason.cache_clear()


def test_group_norm_without_weights_is_not_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "MORE_SURGERY", True)
    layers = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4, affine=False), nn.Flatten()
    arch = arch_of(lambda outputs: nn.Sequential(*layers, nn.Linear(144, outputs)))
    assert "GroupNorm without weights" in unstackable_reason.__wrapped__(arch)
