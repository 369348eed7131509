"""The vocabulary: samples and views, keys, models, losses, messages, options, roles."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from fedcc.core.messages import Data, Labels, Predictions, Weights, carried, nbytes
from fedcc.core.method import Method, option
from fedcc.core.model import Arch, Model, Outputs, factory_name
from fedcc.core.requests import Fit, Recipe
from fedcc.core.rng import SERVER, Key
from fedcc.core.samples import Samples, View
from fedcc.core.step import Batch, Loss, Step, Sum
from fedcc.losses import CrossEntropy, Distill, LogitDistance, SoftCrossEntropy
from fedcc.methods import METHODS, FedAvg, FedCC, make
from tiny import Mlp, Tiny

# -- samples


def test_samples_are_columns_of_equal_length() -> None:
    s = Samples({"x": torch.zeros(3, 2, 4), "y": torch.arange(3)}, View(scale=0.5))
    assert len(s) == 3
    assert s.shape == (2, 4)
    assert torch.equal(s["y"], torch.arange(3))
    with pytest.raises(ValueError, match=r"equally long, got \{'x': 3, 'y': 2\}"):
        Samples({"x": torch.zeros(3), "y": torch.zeros(2)})
    with pytest.raises(ValueError, match="equally long"):
        s.with_(target=torch.zeros(4))


def test_samples_do_not_change() -> None:
    columns = {"x": torch.zeros(3)}
    s = Samples(columns)
    columns["y"] = torch.zeros(3)
    assert list(s.columns) == ["x"]
    with pytest.raises(TypeError):
        s.columns["y"] = torch.zeros(3)  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        s.view = View()  # type: ignore[misc]


def test_samples_with_and_without_columns() -> None:
    s = Samples({"x": torch.zeros(3), "y": torch.arange(3)}, View(scale=0.5))
    more = s.with_(target=torch.ones(3), y=torch.zeros(3))
    assert sorted(more.columns) == ["target", "x", "y"]
    assert torch.equal(more["y"], torch.zeros(3))
    assert sorted(s.columns) == ["x", "y"]
    assert list(more.only("x").columns) == ["x"]
    assert {more.view, more.only("x").view, more.to("cpu").view} == {s.view}


def test_samples_have_mirror_images() -> None:
    s = Samples({"x": torch.arange(24).view(2, 1, 3, 4).to(torch.uint8), "y": torch.arange(2)}, View(scale=0.5))
    assert s.mirrored["x"][1, 0, 2].tolist() == [23, 22, 21, 20]
    assert s.mirrored["y"] is s["y"]
    assert (s.mirrored.view, s.mirrored.x.dtype) == (s.view, torch.uint8)
    assert s.mirrored is s.mirrored  # so that what was predicted for them is found again
    assert torch.equal(s.mirrored.mirrored.x, s.x)


@pytest.mark.parametrize("shape", [(3, 6), (3, 4, 4), (3, 1, 4, 1), (3, 1, 2, 4, 4)])
def test_only_images_have_mirror_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"mirror images are for images .* of two or more columns") as error:
        _ = Samples({"x": torch.zeros(shape)}).mirrored
    assert str(error.value).endswith(f"got inputs of shape {list(shape[1:])}")


# -- views


def test_a_view_scales_and_normalises_by_channel() -> None:
    view = View(1 / 255, (0.5, 0.25), (0.5, 0.25))
    x = torch.tensor([0, 255], dtype=torch.uint8).view(1, 2, 1, 1)
    assert view.clean(x).flatten().tolist() == pytest.approx([-1.0, 3.0])
    assert view.clean(x, torch.float64).dtype == torch.float64
    assert view.normalised(torch.ones(1, 2)).tolist() == [pytest.approx([1.0, 3.0])]  # vectors have channels too


def test_a_view_without_mean_only_scales() -> None:
    assert View(1 / 16).clean(torch.full((1, 1, 1, 1), 8, dtype=torch.uint8)).item() == 0.5


def test_the_identity_leaves_indices_alone() -> None:
    assert View().clean(torch.arange(3)).dtype == torch.long
    assert View().clean(torch.zeros(3), torch.float64).dtype == torch.float64


def test_views_are_values() -> None:
    assert View(0.5, (1.0,), (2.0,), 4, True) == View(0.5, (1.0,), (2.0,), 4, True)
    assert [View(pad=1).augments, View(flip=True).augments, View(0.5, (1.0,), (1.0,)).augments] == [True, True, False]


# -- keys


def test_keys_are_values_and_every_field_counts() -> None:
    base = Key(1, 2, 3, "fit", "private")
    changes = {"seed": 9, "round": 9, "client": 9, "phase": "x", "stream": "x"}
    others = [base.of(**{name: value}) for name, value in changes.items()]
    assert len({k.integer() for k in [base, *others]}) == 6
    assert base == Key(1, 2, 3, "fit", "private")
    assert base.integer() == Key(1, 2, 3, "fit", "private").integer()
    assert 0 <= base.integer() < 2**63
    assert base.generator().random() == base.generator().random()


def test_fields_of_a_key_do_not_run_together() -> None:
    assert Key(1, 11, 1).integer() != Key(11, 1, 1).integer() != Key(1, 1, 11).integer()
    assert Key(0, phase="ab", stream="c").integer() != Key(0, phase="a", stream="bc").integer()


def test_a_key_is_the_same_on_every_machine() -> None:
    """Frozen numbers: another hash or another order of fields would shift every draw of every stored run."""
    assert Key(0, 1, 3, "fit", "private").integer() == 3068779779621076743
    assert Key(0).generator().integers(0, 1000, 4).tolist() == [645, 195, 577, 190]


def test_a_key_for_people() -> None:
    assert str(Key(0, 7, 3, "fit")) == "client 3, round 7, 'fit'"
    assert str(Key(0, 7, SERVER)) == "server, round 7"


# -- models


ARCH = Arch((Mlp(),), 3, (6,))


def test_a_model_with_other_entries() -> None:
    model = Model(ARCH, {"w": torch.zeros(2, 3), "n": torch.tensor(4)})
    new = model.with_({"w": torch.ones(2, 3)})
    assert torch.equal(new.state["w"], torch.ones(2, 3))
    assert int(new.state["n"]) == 4
    assert not model.state["w"].any()
    assert list(model.floating) == ["w"]
    with pytest.raises(ValueError, match=r"no entries named \['v'\]"):
        model.with_({"v": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"w must have shape \(2, 3\), got \(3, 2\)"):
        model.with_({"w": torch.zeros(3, 2)})


# -- losses


def step(n: int = 4, c: int = 3, seed: int = 0) -> Step:
    g = torch.Generator().manual_seed(seed)
    z, q = (torch.randn(n, c, dtype=torch.float64, generator=g) for _ in range(2))
    return Step({"private": Batch(Outputs(z, z), {"y": torch.arange(n) % c, "target": q.softmax(-1)})})


A, B, C = CrossEntropy("private"), SoftCrossEntropy("private"), LogitDistance("private")


def test_losses_add_and_scale() -> None:
    s = step()
    assert torch.allclose((A + 0.5 * B)(s), A(s) + 0.5 * B(s))
    assert torch.allclose((2 * (A + 3 * B) + -1 * C)(s), 2 * A(s) + 6 * B(s) - C(s))


def test_zero_times_a_loss_is_no_term() -> None:
    @dataclass(frozen=True)
    class Never(Loss):
        def __call__(self, step: Step) -> Tensor:
            raise AssertionError("a term of weight zero was computed")

    s = step()
    assert A + 0 * Never() == A
    assert 0.0 * Never() + A == A
    assert torch.equal((A + 0 * Never())(s), A(s))
    assert (0 * Never()).terms == ()  # type: ignore[attr-defined]
    assert (0 * (A + Never())).terms == ()  # type: ignore[attr-defined]
    assert float((0 * Never())(s)) == 0
    assert float((0 * Never() + 0 * Never())(s)) == 0


def test_nothing_has_a_gradient_of_exactly_zero() -> None:
    z = torch.randn(2, 3, requires_grad=True)
    loss = (0 * A)(Step({"private": Batch(Outputs(z, z), {})}))
    (grad,) = torch.autograd.grad(loss, z)
    assert not grad.any()


def test_sums_flatten() -> None:
    left, right = (A + B) + C, A + (B + C)
    assert left == right == Sum(((1.0, A), (1.0, B), (1.0, C)))
    assert Sum(((2.0, A), (6.0, B))) == 2 * (A + 3 * B)


def test_losses_are_values() -> None:
    assert hash(A + 0.2 * B) == hash(CrossEntropy("private") + 0.2 * SoftCrossEntropy("private"))
    assert CrossEntropy("private") + 0.2 * SoftCrossEntropy("private") == A + 0.2 * B
    assert len({A, CrossEntropy("public"), CrossEntropy("private", 2), B, A + B, A + 2 * B}) == 6


def test_losses_against_naive_loops() -> None:
    s = step(5, 4)
    z, y, q = s["private"].logits, s["private"]["y"], s["private"]["target"]
    p = z.softmax(-1)
    known = z[:, :2].softmax(-1)
    n = range(5)
    assert torch.allclose(A(s), -sum(p[i, y[i]].log() for i in n) / 5)
    assert torch.allclose(B(s), -sum(q[i, c] * p[i, c].log() for i in n for c in range(4)) / 5)
    kl = sum(q[i, c] * (q[i, c] / p[i, c]).log() for i in n for c in range(4)) / 5
    assert torch.allclose(Distill("private")(s), kl)
    assert torch.allclose(LogitDistance("private")(s), sum((z - q)[i, c].abs() for i in n for c in range(4)) / 20)
    assert torch.allclose(LogitDistance("private", 2)(s), sum((z - q)[i, c] ** 2 for i in n for c in range(4)) / 20)
    two = Step({"private": Batch(Outputs(z, z), {"y": y % 2, "target": q[:, :2]})})
    assert torch.allclose(CrossEntropy("private", 2)(two), -sum(known[i, y[i] % 2].log() for i in n) / 5)
    kl = sum(q[i, c] * (q[i, c] / known[i, c]).log() for i in n for c in range(2)) / 5
    assert torch.allclose(Distill("private", 2)(two), kl)


def test_distilling_certain_targets_is_finite() -> None:
    z = torch.randn(2, 3, requires_grad=True)
    hard = torch.tensor([[1.0, 0, 0], [0, 0, 0]])
    loss = Distill("public")(Step({"public": Batch(Outputs(z, z), {"target": hard})}))
    (grad,) = torch.autograd.grad(loss, z)
    assert loss.isfinite()
    assert grad.isfinite().all()
    assert not grad[1].any()  # a target of zeros is no target


# -- messages


def test_bytes_of_messages() -> None:
    model = Model(ARCH, {"w": torch.zeros(2, 3, dtype=torch.float64), "m": torch.zeros(5), "n": torch.tensor(4)})
    assert nbytes(Weights.of(model, 7)) == 4 * 11  # the counter stays at home, doubles count as the wire's floats
    assert nbytes(Weights.of(model, 7), "fp16") == 2 * 11
    assert nbytes(Predictions(torch.zeros(5000, 11))) == 220_000
    assert nbytes(Labels(torch.zeros(100, dtype=torch.uint8))) == 100
    assert nbytes(Labels(torch.zeros(100, dtype=torch.int16)), "fp16") == 200
    assert nbytes(Data(torch.zeros(3, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.long))) == 12 + 24
    assert [nbytes(m) for m in (None, 3, 2.5, "text", True)] == [0] * 5
    with pytest.raises(TypeError, match="got list"):
        nbytes([torch.zeros(3)])


def test_bytes_of_a_new_message_follow_its_fields() -> None:
    @dataclass(frozen=True)
    class Both:
        weights: Weights
        labels: Labels | None
        extra: dict[str, Tensor]
        steps: int = 3

    message = Both(Weights({"w": torch.zeros(3)}), None, {"a": torch.zeros(2), "b": torch.zeros(1)})
    assert nbytes(message) == 4 * 6
    third = Both(
        Weights({"w": torch.tensor([1 / 3])}), Labels(torch.tensor([300])), {"a": torch.tensor([1 / 3])}, 70001
    )
    came = carried(third, "fp16")
    rounded = torch.tensor([1 / 3]).half().float()
    assert torch.equal(came.weights.state["w"], rounded)
    assert torch.equal(came.extra["a"], rounded)
    assert came.labels.values.tolist() == [300]
    assert came.steps == 70001


def test_what_fp16_carries_is_rounded_in_its_own_type() -> None:
    sent = Predictions(torch.tensor([[1 / 3, 2 / 3]], dtype=torch.float64))
    came = carried(sent, "fp16").values
    assert came.dtype == torch.float64
    assert not torch.equal(came, sent.values)
    assert torch.allclose(came, sent.values, rtol=1e-3)
    assert carried(sent, "fp32") is sent
    assert carried(None, "fp16") is None


# -- methods


@dataclass(frozen=True)
class Options(FedAvg):
    number: float = option(0.5, "", low=0, high=1)
    least: float = option(0.5, "", low=0)
    most: float = option(0.5, "", high=1)
    free: float = 0.5
    count: int = option(3, "", low=1)
    maybe: int | None = option(None, "", low=0)
    switch: bool = option(True, "")
    kind: Literal["a", "b"] = option("a", "")


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("number", -1, "number must be from 0 to 1, got -1"),
        ("number", 1.5, "number must be from 0 to 1, got 1.5"),
        ("number", float("nan"), "number must be a finite number, got nan"),
        ("number", "0.5", "number must be a number, got '0.5'"),
        ("number", True, "number must be a number, got True"),
        ("number", None, "number must be a number, got None"),
        ("least", -0.1, "least must be at least 0, got -0.1"),
        ("most", 1.1, "most must be at most 1, got 1.1"),
        ("free", float("nan"), "free must be a finite number, got nan"),
        ("count", 0, "count must be at least 1, got 0"),
        ("count", 2.0, "count must be a whole number, got 2.0"),
        ("count", True, "count must be a whole number, got True"),
        ("maybe", -1, "maybe must be at least 0, got -1"),
        ("maybe", "x", "maybe must be a whole number, got 'x'"),
        ("switch", 1, "switch must be true or false, got 1"),
        ("switch", "true", "switch must be true or false, got 'true'"),
        ("kind", "c", "kind must be one of a, b, got 'c'"),
        ("kind", None, "kind must be one of a, b, got None"),
    ],
)
def test_an_option_out_of_its_rule_is_refused_with_value_and_rule(name: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError) as error:
        Options(**{name: value})
    assert str(error.value) == rule


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("number", 0),
        ("number", 1.0),
        ("least", 1e9),
        ("most", -5),
        ("free", -5),
        ("count", 1),
        ("maybe", None),
        ("maybe", 0),
        ("switch", False),
        ("kind", "b"),
    ],
)
def test_an_option_within_its_rule_is_kept(name: str, value: Any) -> None:
    assert getattr(Options(**{name: value}), name) == value


def test_the_options_of_fedcc_have_rules() -> None:
    for settings in (
        {"lam": -1},
        {"delta": 2},
        {"majority_threshold": 1.5},
        {"trust": -1},
        {"probe_kind": "pink"},
    ):
        with pytest.raises(ValueError, match=next(iter(settings))):
            FedCC(**settings)  # type: ignore[arg-type]


def test_methods_by_name() -> None:
    assert make("fedcc") == FedCC()
    assert make("FedCC", {"lam": 0.5}) == FedCC(lam=0.5)
    assert all(type(make(name)) is kind for name, kind in METHODS.items())
    with pytest.raises(ValueError, match="unknown method 'fedprx'; did you mean 'fedprox'"):
        make("fedprx")
    with pytest.raises(ValueError, match="unknown setting of FedCC 'lamb'; did you mean 'lam'"):
        make("fedcc", {"lamb": 1})
    with pytest.raises(ValueError, match="Local has no settings, got 'lam'"):
        make("local", {"lam": 1})


def test_a_name_nothing_is_near_to() -> None:
    with pytest.raises(ValueError) as error:
        make("zzzzzz")
    assert "did you mean" not in str(error.value)
    assert all(name in str(error.value) for name in METHODS)


def test_a_network_is_named_with_its_arguments() -> None:
    assert factory_name(partial(nn.Linear, 8, bias=False)) == "Linear(8, bias=False)"


def test_a_method_is_abstract() -> None:
    with pytest.raises(TypeError):
        Method()  # type: ignore[abstract]


# -- roles


def test_a_role_makes_requests_with_its_key_and_recipe() -> None:
    tiny = Tiny(FedAvg())
    client, server = tiny.clients[1], tiny.server
    client.begin(4)
    fit = client.fit_request("refine", client.model, CrossEntropy("private"), private=client.private)
    assert isinstance(fit, Fit)
    assert fit.key == Key(0, 4, 1, "refine")
    assert fit.recipe == client.recipe
    assert fit.joint
    assert (fit.constants, fit.frozen, fit.gradient, fit.only) == ({}, {}, None, None)
    other = server.fit_request(
        "fit", client.model, CrossEntropy("x"), x=client.private, recipe=Recipe(epochs=1), only="head"
    )
    assert other.key.client == SERVER
    assert (other.recipe.epochs, other.only) == (1, "head")


def test_a_recipe_with_some_values_changed() -> None:
    client = Tiny(FedAvg()).clients[0]
    assert client.recipe_with(epochs=None, lr=None) == client.recipe
    assert client.recipe_with(epochs=0).epochs == 0
    assert client.recipe_with(lr=0.5) == Recipe(lr=0.5, batch=8, epochs=2)


def test_a_round_begins_with_an_empty_log_and_a_full_memory() -> None:
    client = Tiny(FedAvg()).clients[0]
    client.log["a"], client.memory["b"] = 1.0, 2
    client.begin(3)
    assert (client.round, client.log, client.memory) == (3, {}, {"b": 2})


def test_a_client_counts_its_classes() -> None:
    client = Tiny(FedAvg(), labels=[[0, 0, 2]], classes=4).clients[0]
    assert client.counts().tolist() == [2, 0, 1, 0]


def test_a_client_without_a_model_says_so() -> None:
    client = Tiny(FedAvg()).clients[2]
    client._model = client.first_model = None
    with pytest.raises(RuntimeError, match="client 2 has no model yet"):
        _ = client.model


def test_memories_are_not_shared() -> None:
    a, b = Tiny(FedAvg()).clients[:2]
    a.memory["x"] = a.log["x"] = 1
    assert b.memory == b.log == {}


def test_a_server_sees_neither_models_nor_data_of_clients() -> None:
    server = Tiny(FedAvg()).server
    held = {name for name in dir(server) if not name.startswith("_")}
    assert held == {
        *("archs", "begin", "classes", "fit_request", "init", "key", "log", "memory"),
        *("models", "networks", "public", "recipe", "recipe_with", "round", "rounds", "to_all"),
    }
    assert server.to_all("x") == {0: "x", 1: "x", 2: "x"}
    assert server.init(ARCH, "second").key == Key(0, 0, SERVER, "second")
