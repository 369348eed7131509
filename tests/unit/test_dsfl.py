"""DS-FL: sharpening of mean probabilities, and the server's own model (docs/deviations.md)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcc.core.roles import Client
from fedcc.core.samples import Samples
from fedcc.losses import Distill
from fedcc.methods import DSFL, FedMD
from fedcc.methods.abstention import entropy
from fedcc.methods.sharpen import enhanced_era, era
from steps import equal
from tiny import Mlp, Tiny

P = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
EXACT = {"rtol": 0.0, "atol": 1e-12}


def spread(classes: int, first: float) -> Tensor:
    """This much on the first class, the rest in equal parts."""
    return torch.full((classes,), (1 - first) / (classes - 1), dtype=torch.float64).index_fill(
        0, torch.tensor(0), first
    )


# -- sharpening


def test_the_specified_values() -> None:
    torch.testing.assert_close(era(P, 0.1), torch.tensor([0.9909, 0.0067, 0.0025]).double(), rtol=0, atol=5e-5)
    torch.testing.assert_close(enhanced_era(P, 2), torch.tensor([0.9074, 0.0741, 0.0185]).double(), rtol=0, atol=5e-5)
    torch.testing.assert_close(enhanced_era(P, 2), P**2 / (P**2).sum(), **EXACT)


@pytest.mark.parametrize(
    ("classes", "one_hot", "half"), [(10, 0.9996, 0.904), (100, 0.9955, 0.588), (200, 0.9910, 0.421)]
)
def test_with_many_classes_the_softmax_of_probabilities_flattens(classes: int, one_hot: float, half: float) -> None:
    assert float(era(spread(classes, 1.0), 0.1)[0]) == pytest.approx(one_hot, abs=5e-5)
    assert float(era(spread(classes, 0.5), 0.1)[0]) == pytest.approx(half, abs=5e-4)
    assert float(entropy(era(spread(100, 0.999), 0.1))) == pytest.approx(0.050, abs=1e-3)
    assert float(entropy(spread(100, 0.999))) == pytest.approx(0.0125, abs=1e-3)


def test_it_raises_the_entropy_of_nearly_all_sparse_predictions() -> None:
    """Of 50 classes, drawn from Dirichlet(0.2): 99 %; a power raises none."""
    draws = torch.from_numpy(np.random.default_rng(0).dirichlet([0.2] * 50, 2000))
    assert float((entropy(era(draws, 0.1)) > entropy(draws)).double().mean()) == pytest.approx(0.99, abs=0.01)
    assert (entropy(enhanced_era(draws, 2.0)) <= entropy(draws)).all()


@pytest.mark.parametrize("sharpened", [lambda p: era(p, 0.1), lambda p: enhanced_era(p, 2.0)], ids=["era", "enhanced"])
def test_uniform_stays_uniform_and_the_order_of_classes_is_kept(sharpened: object) -> None:
    assert callable(sharpened)
    torch.testing.assert_close(sharpened(torch.full((4,), 0.25)), torch.full((4,), 0.25))
    rows = torch.rand(50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert sharpened(rows).argsort(-1).equal(rows.argsort(-1))
    torch.testing.assert_close(sharpened(rows).sum(-1), torch.ones(50, dtype=torch.float64), **EXACT)


def test_limits_of_the_temperature() -> None:
    torch.testing.assert_close(era(P, 1e9), torch.full((3,), 1 / 3, dtype=torch.float64))
    ties = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    torch.testing.assert_close(era(ties, 1e-4), torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64), **EXACT)


def test_a_power_keeps_zeros_one_hots_and_rows_without_an_answer() -> None:
    rows = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
    assert enhanced_era(rows, 3.0).equal(rows)
    assert enhanced_era(P, 1) is P


# -- the method


def ran(method: DSFL | FedMD, rounds: int = 2) -> Tiny:
    return Tiny(method, labels=([0, 1] * 8, [1, 2] * 8, [2, 0] * 8), factories=(Mlp(8), Mlp(12))).run(rounds)


def test_clients_learn_the_sharpened_mean_of_what_they_sent() -> None:
    tiny = ran(DSFL(temperature=0.3))
    for done in tiny.rounds:
        mean = torch.stack([up.values for up in done.ups.values()]).mean(0)
        torch.testing.assert_close(mean.sum(-1), torch.ones(24, dtype=torch.float64))
        for down in done.downs.values():
            torch.testing.assert_close(down.values, (mean / 0.3).softmax(-1), **EXACT)
    assert tiny.server.log["entropy, mean"] == pytest.approx(float(entropy(mean).mean()))
    assert tiny.server.log["entropy, target"] == pytest.approx(float(entropy((mean / 0.3).softmax(-1)).mean()))


def test_the_first_round_is_fedmds_and_later_ones_are_not() -> None:
    mine, theirs = ran(DSFL(), 1), ran(FedMD(), 1)
    assert all(equal(a.model.state, b.model.state) for a, b in zip(mine.clients, theirs.clients, strict=True))
    mine, theirs = ran(DSFL()), ran(FedMD())
    assert not any(equal(a.model.state, b.model.state) for a, b in zip(mine.clients, theirs.clients, strict=True))


def test_one_client_learns_its_own_sharpened_prediction() -> None:
    tiny = Tiny(DSFL(), labels=([0, 1, 2] * 6,)).run(1)
    torch.testing.assert_close(tiny.rounds[0].downs[0].values, era(tiny.rounds[0].ups[0].values, 0.1), **EXACT)


def test_the_servers_model_learns_the_targets_and_lives_on() -> None:
    tiny, fresh = ran(DSFL()), ran(DSFL(), 0)
    model = fresh.server.models["global"]
    assert model.arch == tiny.clients[1].arch  # the last distinct one
    for t, done in enumerate(tiny.rounds, 1):
        fresh.server.begin(t)
        public = tiny.public.with_(target=done.downs[0].values)
        fit = fresh.server.fit_request("distil", model, Distill("public"), public=public)
        model = fresh.executor.fit(fit).model
    assert equal(model.state, tiny.server.models["global"].state)


def test_the_mean_of_the_clients_is_another_reading() -> None:
    tiny, x = ran(DSFL()), ran(DSFL(), 0).test.only("x")
    reading = tiny.ask(DSFL().readings(tiny.public)["clients-mean"](tiny.cohort.trained_models(tiny.server), x))
    outputs = [tiny.ask(own(c, x)) for c in tiny.clients]
    torch.testing.assert_close(reading, torch.stack(outputs).mean(0))


async def own(c: Client, samples: Samples) -> Tensor:
    return (await c.predict(samples)).logits.softmax(-1)
