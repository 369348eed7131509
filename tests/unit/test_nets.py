"""Networks: counts of parameters, and how anybody's network becomes trunks and a head."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcc.core.model import Arch
from fedcc.core.rng import Key
from fedcc.nets import NETWORKS, Network, ResNet, build, network
from fedcc.nets.resnet import Shortcut
from recording import changed, same

RGB = (3, 32, 32)


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# -- ResNets


@pytest.mark.parametrize(
    ("depth", "outputs", "count"),
    [
        (20, 10, 269_722),
        (20, 100, 275_572),
        (20, 200, 282_072),
        (14, 10, 172_506),
        (14, 100, 178_356),
        (14, 200, 184_856),
    ],
)
def test_parameter_counts(depth: int, outputs: int, count: int) -> None:
    assert parameters(build(Arch((network(f"resnet{depth}", RGB),), outputs, RGB), Key(0))) == count
    assert parameters(ResNet(depth)(outputs + 1)) == count + 65  # FedCC's "unknown"


def test_running_statistics_of_a_resnet20() -> None:
    state = build(Arch((ResNet(20),), 10, RGB), Key(0)).state_dict()
    assert sum(v.numel() for n, v in state.items() if "running" in n) == 1376


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 64, 64)])
def test_inputs_of_every_data_set(shape: tuple[int, ...]) -> None:
    net = build(Arch((network("resnet8", shape),), 5, shape), Key(0)).eval()
    logits, features = net(torch.rand(2, *shape))
    assert logits.shape == (2, 5)
    assert features.shape == (2, 64)
    assert (features >= 0).all()
    assert torch.equal(net.head(features), logits)


def test_three_stages_halve_the_image_twice() -> None:
    seen = []
    net = ResNet(14)(10)
    for block in net.blocks:  # type: ignore[attr-defined]
        block.register_forward_hook(lambda *call: seen.append(tuple(call[2].shape[1:])))
    net(torch.rand(2, *RGB))
    assert seen == [(16, 32, 32)] * 2 + [(32, 16, 16)] * 2 + [(64, 8, 8)] * 2


def test_shortcuts_have_no_parameters_and_pad_with_zero_channels() -> None:
    x = torch.rand(2, 4, 6, 6)
    shortcut = Shortcut(4, 8, 2)
    assert parameters(shortcut) == 0
    out = shortcut(x)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert not out[:, :2].any()
    assert not out[:, 6:].any()
    assert Shortcut(4, 4, 1)(x) is x


def test_no_bias_before_batchnorm() -> None:
    assert all(m.bias is None for m in ResNet(8)(10).modules() if isinstance(m, nn.Conv2d))


@pytest.mark.parametrize("depth", [2, 7, 10, 18, 51])
def test_a_depth_that_is_not_6n_plus_2(depth: int) -> None:
    with pytest.raises(ValueError, match=rf"6n \+ 2 .*got {depth}"):
        ResNet(depth)
    with pytest.raises(ValueError, match=rf"6n \+ 2 .*got {depth}"):
        network(f"resnet{depth}", RGB)


def test_networks_by_name() -> None:
    assert network("ResNet20", RGB) == ResNet(20)
    assert network("resnet26", RGB) == ResNet(26)  # not listed, but of the family
    assert network("resnet8", (1, 8, 8)) == ResNet(8, 1)
    assert all(str(network(name, RGB)) == name for name in NETWORKS)
    with pytest.raises(ValueError, match="unknown network 'resnt20'; did you mean 'resnet20'"):
        network("resnt20", RGB)


@pytest.mark.parametrize("shape", [(6,), (3, 32, 16), (2, 32, 32), (3, 4, 4)], ids=str)
def test_inputs_a_resnet_does_not_take(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="square images") as error:
        network("resnet14", shape)
    assert str(shape) in str(error.value)


def test_factories_are_values() -> None:
    assert Arch((ResNet(14),), 10, RGB) == Arch((network("resnet14", RGB),), 10, RGB)
    assert len({Arch((ResNet(d),), o, RGB) for d in (14, 20, 14) for o in (10, 11)}) == 4
    assert Arch((ResNet(14), ResNet(20)), 10, RGB).name == "resnet14+resnet20"


# -- anybody's network


class Nested(nn.Module):
    """Linear layers inside a submodule, the last of them the head."""

    def __init__(self, outputs: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
        self.top = nn.ModuleDict({"norm": nn.LayerNorm(5), "out": nn.Linear(5, outputs)})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.top["out"](self.top["norm"](self.body(x)))
        return out


class Backwards(nn.Module):
    """The head is registered first and used last."""

    def __init__(self, outputs: int):
        super().__init__()
        self.head_first = nn.Linear(4, outputs)
        self.body_last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head_first(F.relu(self.body_last(x)))
        return out


def sequential(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, outputs))


def linear(outputs: int) -> nn.Module:
    return nn.Linear(6, outputs)


@pytest.mark.parametrize(
    ("factory", "width"),
    [(sequential, 7), (Nested, 5), (Backwards, 4), (linear, 6)],
    ids=lambda f: getattr(f, "__name__", str(f)),
)
def test_a_network_is_split_before_its_last_linear_layer(factory: Callable[[int], nn.Module], width: int) -> None:
    arch = Arch((factory,), 3, (6,))
    net = build(arch, Key(4))
    with torch.random.fork_rng():
        torch.manual_seed(Key(4).integer())
        whole = factory(3)
    x = torch.randn(5, 6)
    logits, features = net.eval()(x)
    assert features.shape == (5, width)
    assert torch.equal(logits, whole.eval()(x))
    assert (net.head.in_features, net.head.out_features) == (width, 3)
    assert parameters(net) == parameters(whole)
    assert {n.partition(".")[0] for n in net.state_dict()} <= {"trunks", "head"}


def test_training_mode_survives_the_split() -> None:
    net = build(Arch((sequential,), 3, (6,)), Key(0))
    assert all(m.training for m in net.trunks.modules())
    assert int(net.state_dict()["trunks.0.1.num_batches_tracked"]) == 0  # trying it out moved no statistics
    assert not net.state_dict()["trunks.0.1.running_mean"].any()


def test_a_network_of_indices() -> None:
    def words(outputs: int) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(9, 5), nn.Linear(5, outputs))

    net = build(Arch((words,), 3, (4,), tokens=True), Key(0))
    assert net(torch.zeros(2, 4, dtype=torch.long)).features.shape == (2, 5)


class Bare(nn.Module):
    def __init__(self, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Pair(nn.Module):
    def __init__(self, outputs: int):
        super().__init__()
        self.linear = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x), x


class Named(Pair):
    """As Hugging Face's models: a mapping whose entries are attributes too."""

    def forward(self, x: Tensor) -> Any:
        return OrderedDict(hidden=x, logits=self.linear(x))


class Only(Pair):
    def forward(self, x: Tensor) -> Any:
        return {"out": self.linear(x), "note": "the only tensor"}


class Attribute(Pair):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(logits=self.linear(x), loss=None)


class Ambiguous(Pair):
    def forward(self, x: Tensor) -> Any:
        return {"out": self.linear(x), "hidden": x}


@pytest.mark.parametrize("factory", [Pair, Named, Only, Attribute])
def test_logits_are_found_in_what_a_network_returns(factory: Any) -> None:
    net = build(Arch((factory,), 3, (6,)), Key(0))
    x = torch.randn(5, 6)
    logits, features = net(x)
    assert torch.equal(features, x)
    assert torch.equal(logits, net.head(x))


def convolved(outputs: int) -> nn.Module:
    """The head is a convolution, after a linear layer."""
    return nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (8, 1)), nn.Conv1d(8, outputs, 1), nn.Flatten())


class Positions(nn.Module):
    """A linear layer over a sequence, of whose scores the largest are the answer."""

    def __init__(self, outputs: int):
        super().__init__()
        self.linear = nn.Linear(3, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.view(len(x), 2, 3)).amax(1)
        return out


def softmaxed(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, outputs), nn.Softmax(-1))


def narrow(_: int) -> nn.Module:
    return nn.Linear(6, 2)


def nothing(_: int) -> Any:
    return None


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        (Bare, ValueError, "Bare uses no nn.Linear"),
        (narrow, ValueError, r"narrow\(3\) must return logits of shape \(batch, 3\), got \(2, 2\)"),
        (softmaxed, ValueError, "softmaxed: its last nn.Linear must .* give the logits themselves"),
        (Ambiguous, ValueError, r"Ambiguous\(3\) must return logits of shape \(batch, 3\), got dict"),
        (convolved, ValueError, "convolved: its last nn.Linear must .* give the logits themselves, but 0 does not"),
        (Positions, ValueError, "Positions: its last nn.Linear must take features"),
        (nothing, ValueError, r"nothing\(3\) must return an nn.Module, got NoneType"),
    ],
)
def test_networks_that_cannot_be_split(factory: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(Arch((factory,), 3, (6,)), Key(0))


def test_a_network_that_does_not_take_the_inputs_says_which_and_what() -> None:
    with pytest.raises(ValueError, match=r"sequential does not take a batch of two inputs of shape \(5,\)"):
        build(Arch((sequential,), 3, (5,)), Key(0))


def test_several_trunks_share_one_head() -> None:
    net = build(Arch((sequential, Nested), 3, (6,)), Key(0)).eval()
    x = torch.randn(4, 6)
    logits, features = net(x)
    assert features.shape == (4, 12)
    assert torch.equal(features, torch.cat([t(x) for t in net.trunks], -1))
    assert torch.equal(logits, net.head(features))
    assert isinstance(net, Network)


def test_weights_depend_on_the_key_alone_and_leave_torchs_generator() -> None:
    arch = Arch((sequential,), 3, (6,))
    state = torch.get_rng_state()
    one = build(arch, Key(1)).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert same(one, build(arch, Key(1)).state_dict())
    other = changed(one, build(arch, Key(1, client=3)).state_dict())
    assert {"trunks.0.0.weight", "head.weight"} <= other


def test_a_factory_may_be_a_frozen_dataclass() -> None:
    @dataclass(frozen=True)
    class Wide:
        width: int

        def __call__(self, outputs: int) -> nn.Module:
            return nn.Sequential(nn.Linear(6, self.width), nn.Linear(self.width, outputs))

    assert build(Arch((Wide(11),), 3, (6,)), Key(0)).head.in_features == 11
    assert "width=11" in Arch((Wide(11),), 3, (6,)).name
