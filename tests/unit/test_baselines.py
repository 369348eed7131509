"""FedAvg, FedMD and the two bounds: what their papers say, and what follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedcc.core.messages import Predictions, Weights
from fedcc.core.model import Outputs
from fedcc.core.requests import Predict, Recipe
from fedcc.core.rng import SERVER, Key
from fedcc.core.samples import Samples, View
from fedcc.core.step import Batch, Step
from fedcc.losses import CrossEntropy, Distill, LogitDistance
from fedcc.methods import Centralized, FedAvg, FedMD, Local
from fedcc.methods.fedavg import average
from recording import record, same
from tiny import Mlp, Tiny

quickly = settings(max_examples=30)
LOGITS = FedMD(loss="l1", average="logits")  # as the authors' code has it
MIXED = [[0, 1] * 10, [1, 2] * 6, [0, 2] * 4]


@st.composite
def uplinks(draw: Any) -> list[Weights]:
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = draw(st.lists(st.integers(1, 1000), min_size=1, max_size=5))
    return [Weights({"w": torch.randn(3, 2, generator=g), "b": torch.randn(4, generator=g)}, n) for n in sizes]


# -- FedAvg


def test_fedavg_averages_by_number_of_samples() -> None:
    ups = [Weights({"w": torch.tensor([1.0, 0.0])}, 30), Weights({"w": torch.tensor([5.0, 2.0])}, 10)]
    assert average(ups)["w"].tolist() == pytest.approx([2.0, 0.5])


@quickly
@given(uplinks())
def test_fedavg_every_coordinate_is_between_the_clients(ups: list[Weights]) -> None:
    for name, value in average(ups).items():
        stacked = torch.stack([up.state[name] for up in ups])
        assert (value >= stacked.amin(0) - 1e-5).all()
        assert (value <= stacked.amax(0) + 1e-5).all()


@quickly
@given(uplinks())
def test_fedavg_twins_of_half_the_size_change_nothing(ups: list[Weights]) -> None:
    doubled = [Weights(up.state, 2 * up.samples) for up in ups]
    halves = [Weights(ups[0].state, ups[0].samples)] * 2 + doubled[1:]
    one, other = average(doubled), average(halves)
    assert all(torch.allclose(one[n], other[n], atol=1e-6) for n in one)


@quickly
@given(uplinks())
def test_fedavg_order_of_clients_does_not_matter(ups: list[Weights]) -> None:
    one, other = average(ups), average(ups[::-1])
    assert all(torch.allclose(one[n], other[n], atol=1e-6) for n in one)


def test_fedavg_without_epochs_leaves_the_weights() -> None:
    tiny = Tiny(FedAvg(), labels=MIXED, recipe=Recipe(epochs=0))
    asked = record(tiny)
    tiny.run(2)
    first = asked.answers[0][0]
    assert all(torch.allclose(v, first.state[n], atol=1e-12) for n, v in tiny.server.models["global"].floating.items())


def test_fedavg_identical_clients_give_the_weights_of_one() -> None:
    tiny = Tiny(FedAvg(), labels=[[0, 1, 2] * 4] * 3)
    for client in tiny.clients[1:]:
        client.private, client.key = tiny.clients[0].private, tiny.clients[0].key  # same data, same stream
    tiny.run(1)
    own = tiny.clients[0].model.floating
    assert all(torch.allclose(v, own[n], atol=1e-12) for n, v in tiny.server.models["global"].floating.items())


def test_fedavg_clients_start_from_the_global_model_every_round() -> None:
    tiny = Tiny(FedAvg(), labels=MIXED)
    asked = record(tiny)
    tiny.run(2)
    for client in range(3):
        begun = asked.fits("fit", client, 2)[0].model
        assert same(begun.floating, tiny.rounds[0].downs[client].state)
    expected = average([tiny.rounds[0].ups[k] for k in range(3)])
    assert same(tiny.rounds[0].downs[0].state, expected)
    assert [up.samples for up in tiny.rounds[0].ups.values()] == [20, 12, 8]


def test_fedavg_averages_running_statistics_and_keeps_counters_home() -> None:
    tiny = Tiny(FedAvg(), labels=MIXED).run(1)
    sent = tiny.rounds[0].ups[0].state
    assert any("running_var" in n for n in sent)
    assert not any("num_batches" in n for n in sent)
    assert int(tiny.clients[0].model.state["trunks.0.1.num_batches_tracked"]) == 6


def test_fedavg_all_share_the_first_weights() -> None:
    tiny = Tiny(FedAvg(), labels=MIXED)
    downs = tiny.ask(FedAvg().start(tiny.server))
    assert set(downs) == {0, 1, 2}
    assert same(downs[0].state, tiny.server.models["global"].floating)


def test_fedavg_predicts_with_the_averaged_model() -> None:
    tiny = Tiny(FedAvg(), labels=MIXED).run(1)
    expected = tiny.ask(_logits(tiny.server.models["global"], tiny.test))
    assert torch.equal(tiny.scores(), expected)


async def _logits(model: Any, samples: Samples) -> Tensor:
    return (await Predict(model, samples)).logits


# -- FedMD


def step(z: Tensor, target: Tensor) -> Step:
    return Step({"public": Batch(Outputs(z, z), {"target": target})})


def served(method: FedMD, values: list[Tensor]) -> Tensor:
    tiny = Tiny(method, labels=[[0]] * len(values))
    downs = tiny.ask(method.server(tiny.server, {k: Predictions(v) for k, v in enumerate(values)}))
    assert set(downs) == set(range(len(values)))
    found: Tensor = downs[0].values
    return found


def test_fedmd_averages_logits_unweighted_in_any_order() -> None:
    values = [torch.randn(24, 3, dtype=torch.float64) for _ in range(3)]
    assert torch.allclose(served(LOGITS, values), sum(values) / 3, atol=1e-12)  # type: ignore[arg-type]
    assert torch.allclose(served(LOGITS, values[::-1]), served(LOGITS, values), atol=1e-12)
    assert torch.equal(served(FedMD(), values), served(LOGITS, values))  # whatever it is that clients send


def test_fedmd_one_client_digests_its_own_logits_without_loss_or_gradient() -> None:
    """With running statistics (BatchNorm frozen, no augmentation): loss and gradient are exactly zero."""
    tiny = Tiny(LOGITS, labels=[[0, 1] * 10]).run(1)
    own = tiny.ask(_logits(tiny.clients[0].model, tiny.public))
    assert torch.equal(tiny.rounds[0].downs[0].values, own)
    z = own.clone().requires_grad_()
    loss = LOGITS.digest(step(z, tiny.rounds[0].downs[0].values))
    (grad,) = torch.autograd.grad(loss, z)
    assert float(loss.detach()) == 0
    assert not grad.any()


def test_fedmd_consensus_of_two_identical_clients_is_a_fixed_point() -> None:
    """Without BatchNorm: digesting what both already say moves no weight."""
    tiny = Tiny(replace(LOGITS, revisit_epochs=0), labels=[[0, 1] * 10] * 2, factories=(Mlp(norm=False),))
    tiny.clients[1].model = tiny.clients[0].model
    before = tiny.clients[0].model.state
    asked = record(tiny)
    tiny.run(2)
    assert len(asked.fits("sync")) == 2
    assert {a.loss for _, a in asked.fitted("sync")} == {0.0}
    assert all(same(c.model.state, before) for c in tiny.clients)


@pytest.mark.parametrize("loss", ["l1", "mse", "kl"])
def test_fedmd_digest_ignores_private_data_and_revisit_public(loss: Any) -> None:
    tiny = Tiny(FedMD(loss=loss, average="logits"), labels=MIXED)
    asked = record(tiny)
    tiny.run(2)
    assert {tuple(f.streams) for f in asked.fits("sync")} == {("public",)}
    assert {tuple(f.streams) for f in asked.fits("fit")} == {("private",)}
    assert [f.key.phase for f in asked.fits(client=0)] == ["fit", "sync", "fit"]


def test_fedmd_losses() -> None:
    z, t = torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 2.0]])
    squares = replace(LOGITS, loss="mse")
    assert (LOGITS.digest, squares.digest) == (LogitDistance("public", 1), LogitDistance("public", 2))
    assert FedMD().digest == Distill("public")
    assert float(LOGITS.digest(step(z, t))) == 1.5
    assert float(squares.digest(step(z, t))) == 2.5


@quickly
@given(st.integers(0, 2**31), st.booleans())
def test_fedmd_kl_has_no_gradient_if_and_only_if_the_softmaxes_agree(seed: int, agree: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(3, 4, dtype=torch.float64, generator=g)
    other = z + torch.randn(3, 1, dtype=torch.float64, generator=g)  # the same softmax
    if not agree:
        other = other + F.one_hot(torch.tensor([0, 1, 2]), 4)
    z.requires_grad_()
    (grad,) = torch.autograd.grad(FedMD().digest(step(z, other.softmax(-1))), z)
    assert bool((grad.abs() < 1e-12).all()) is agree


@pytest.mark.parametrize("average", ["logits", "probs"])
def test_fedmd_kl_targets_are_distributions(average: Any) -> None:
    tiny = Tiny(FedMD(loss="kl", average=average), labels=MIXED)
    asked = record(tiny)
    tiny.run(2)
    target = asked.fits("sync")[0].streams["public"]["target"]
    assert torch.allclose(target.sum(-1), torch.ones(24, dtype=torch.float64))
    sums = tiny.rounds[0].ups[0].values.sum(-1)
    assert torch.allclose(sums, torch.ones_like(sums)) is (average == "probs")


def test_fedmd_probabilities_cannot_be_compared_with_logits() -> None:
    with pytest.raises(ValueError, match=r"average=probs needs loss=kl .*got loss=l1"):
        FedMD(loss="l1", average="probs")


def test_fedmd_epochs_of_its_phases() -> None:
    tiny = Tiny(FedMD(digest_epochs=1, revisit_epochs=3), labels=MIXED)
    asked = record(tiny)
    tiny.run(2)
    assert {f.recipe.epochs for f in asked.fits("sync")} == {1}
    assert {f.recipe.epochs for f in asked.fits("fit")} == {3}


def test_fedmd_predicts_by_the_mean_logits() -> None:
    tiny = Tiny(LOGITS, labels=MIXED, factories=(Mlp(), Mlp(5))).run(1)
    each = [tiny.ask(_logits(c.model, tiny.test)) for c in tiny.clients]
    assert torch.allclose(tiny.scores(), torch.stack(each).mean(0), atol=1e-12)
    assert "mean-logits" not in LOGITS.readings(tiny.public)


def test_fedmd_shares_probabilities_and_is_read_by_mean_logits_too() -> None:
    tiny = Tiny(FedMD(), labels=MIXED, factories=(Mlp(), Mlp(5)))
    asked = record(tiny)
    tiny.run(2)
    sent = torch.stack([up.values for up in tiny.rounds[0].ups.values()])
    assert torch.allclose(sent.sum(-1), torch.ones_like(sent[..., 0]))
    assert {f.loss for f in asked.fits("sync")} == {Distill("public")}
    assert torch.allclose(asked.fits("sync")[0].streams["public"]["target"], sent.mean(0), atol=1e-12)
    each = torch.stack([tiny.ask(_logits(c.model, tiny.test)) for c in tiny.clients])
    assert torch.allclose(tiny.scores(), each.softmax(-1).mean(0), atol=1e-12)
    read = tiny.ask(FedMD().readings(tiny.public)["mean-logits"](tiny.cohort.trained_models(tiny.server), tiny.test))
    assert torch.allclose(read, each.mean(0), atol=1e-12)


# -- bounds


def test_local_is_each_client_alone() -> None:
    together, alone = Tiny(Local(), labels=MIXED).run(2), Tiny(Local(), labels=MIXED[:1]).run(2)
    assert same(together.clients[0].model.state, alone.clients[0].model.state)
    assert [(r.bytes_up, r.bytes_down) for r in together.rounds] == [(0, 0)] * 2
    each = [together.ask(_logits(c.model, together.test)) for c in together.clients]
    assert torch.equal(together.scores(), torch.stack(each))
    elsewhere = Tiny(Local(), labels=MIXED)
    for client in elsewhere.clients:
        client.public = client.public.with_(x=client.public.x + 1)
    elsewhere.run(2)
    for a, b in zip(together.clients, elsewhere.clients, strict=True):
        assert same(a.model.state, b.model.state)  # nor does it look at public data


def test_centralized_is_training_on_the_pool() -> None:
    """T times E epochs on all private samples, Adam anew every round: to the bit."""
    tiny = Tiny(Centralized(), labels=MIXED).run(2)
    pool = Samples({n: torch.cat([c.private[n] for c in tiny.clients]) for n in ("x", "y")})
    server = Tiny(Centralized(), labels=MIXED).server
    expected = tiny.ask(_pooled(server, pool))
    assert same(tiny.server.models["global"].state, expected.state)
    assert torch.equal(tiny.scores(), tiny.ask(_logits(expected, tiny.test)))


async def _pooled(server: Any, pool: Samples) -> Any:
    model = await server.init(server.archs[0])
    for t in (1, 2):
        server.begin(t)
        fit = server.fit_request("fit", model, CrossEntropy("private"), private=pool)
        assert fit.key == Key(0, t, SERVER, "fit")
        model = (await fit).model
    return model


def test_centralized_shows_the_pool_as_the_clients_would() -> None:
    """Scaled, normalised and augmented like all inputs."""
    tiny = Tiny(Centralized(), labels=MIXED)
    view = View(scale=0.5, mean=(1.0,) * 6, std=(2.0,) * 6)
    for role in (*tiny.clients, tiny.server):
        role.public = Samples(role.public.columns, view)
    for client in tiny.clients:
        client.private = Samples(client.private.columns, view)
    asked = record(tiny)
    tiny.run(1)
    (fit,) = asked.fits("fit")
    assert fit.streams["private"].view == view


def test_centralized_sends_every_sample_once() -> None:
    tiny = Tiny(Centralized(), labels=MIXED).run(3)
    samples = sum(map(len, MIXED))
    assert [r.bytes_up for r in tiny.rounds] == [samples * (6 * 4 + 8), 0, 0]
    assert [r.bytes_down for r in tiny.rounds] == [0, 0, 0]


def test_centralized_pools_those_that_come_later() -> None:
    tiny = Tiny(Centralized(), labels=MIXED, options={"participation": 0.34}).run(12)
    sent = [len(r.ups) - sum(up is None for up in r.ups.values()) for r in tiny.rounds]
    assert sum(sent) == len({k for r in tiny.rounds for k in r.ups})
    assert max(sent) == 1
