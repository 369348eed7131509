"""FedAUX: certainty scores, the weighted teacher, the pretext task, and the reduction to FedDF (docs/deviations.md)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcc.core.rng import SERVER, Key
from fedcc.core.roles import Client
from fedcc.core.samples import Samples, View
from fedcc.engine.plan import Plan
from fedcc.methods import FedAUX, FedAvg, FedDF, fedaux
from fedcc.methods.fedaux import certainty, penalised, regression, weighted
from fedcc.methods.feddf import ensemble
from fedcc.methods.pretext import rotation_reason, turned
from recording import record
from steps import equal
from tiny import Flat, Mlp, Tiny

LABELS = ([0, 1] * 8, [1, 2] * 8, [2, 0] * 8)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ran(method: Any, rounds: int = 2) -> Tiny:
    return Tiny(method, LABELS, factories=(Mlp(8), Mlp(12))).run(rounds)


# -- the teacher


def test_equal_scores_are_feddf(monkeypatch: pytest.MonkeyPatch) -> None:
    async def equally(_: FedAUX, c: Client) -> Tensor:
        return torch.full((len(c.public),), 0.3, dtype=torch.float64)

    theirs, scored = ran(FedDF()), ran(FedAUX(pretrain="none"))
    monkeypatch.setattr(FedAUX, "certainty", equally)
    mine = ran(FedAUX(pretrain="none"))
    torch.testing.assert_close(mine.scores(), theirs.scores())
    assert not torch.allclose(scored.scores(), theirs.scores())


def test_without_distillation_and_with_one_network_it_is_fedavg() -> None:
    labels = ((0,) * 20, (1,) * 7 + (2,) * 3, (2,) * 9)
    mine, theirs = (Tiny(method, labels=labels).run(3) for method in (FedAUX(pretrain="none", steps=0), FedAvg()))
    for name, value in mine.server.models["global"].state.items():
        torch.testing.assert_close(value, theirs.server.models["global"].state[name])
    torch.testing.assert_close(mine.scores(), theirs.scores())
    distilled = Tiny(FedAUX(pretrain="none"), labels=labels).run(3)
    assert not torch.allclose(distilled.scores(), theirs.scores())


@pytest.mark.parametrize("average", ["logits", "probs"])
def test_the_weighted_teacher(average: str) -> None:
    z, s = draw(0, 3, 10, 4), draw(1, 3, 10).sigmoid()
    torch.testing.assert_close(weighted(z, torch.full_like(s, 0.2), average), ensemble(z, average))
    torch.testing.assert_close(weighted(z, 7 * s, average), weighted(z, s, average))
    torch.testing.assert_close(weighted(z + draw(2, 3, 1, 1), s, average), weighted(z, s, average))
    alone = torch.tensor([1.0, 1e-12, 1e-12], dtype=torch.float64)[:, None].expand(3, 10)
    torch.testing.assert_close(weighted(z, alone, average), z[0].softmax(-1))
    by_hand = [sum(float(s[k, 0] / s[:, 0].sum()) * z[k, 0] for k in range(3))]
    if average == "logits":
        torch.testing.assert_close(weighted(z, s, average)[0], by_hand[0].softmax(-1))


# -- the scores


def test_the_regressions_gradient_is_zero_at_its_solution() -> None:
    for scale in (1.0, 100.0):  # the second is separable: only the penalty bounds it
        h, y = scale * draw(0, 50, 5), (draw(1, 50) > 0).double()
        y = y if scale == 1 else (h[:, 0] > 0).double()
        w = regression(h, y, 0.01).requires_grad_()
        (gradient,) = torch.autograd.grad(penalised(w, h, y, 0.01), w)
        assert gradient.abs().max() < 1e-7


def test_the_regressions_objective_by_hand() -> None:
    w, h, y = (torch.tensor(v, dtype=torch.float64) for v in ([1.0, -2.0], [[1.0, 0.0], [1.0, 1.0]], [1.0, 0.0]))
    losses = math.log1p(math.exp(-1)) + math.log1p(math.exp(-1))  # margins 1 and -1
    assert float(penalised(w, h, y, 0.4)) == pytest.approx(losses + 0.2 * 5)


def test_samples_like_the_own_score_higher() -> None:
    own, public = draw(0, 40, 3) + 3, torch.cat([draw(1, 50, 3) + 3, draw(2, 50, 3) - 3])
    s = certainty(own, public, torch.arange(0, 100, 5), 0.01)
    assert s.shape == (100,)
    assert (s > 0).all()
    assert (s <= 1 + 1e-8).all()
    assert s[:50].min() > s[50:].max()
    torch.testing.assert_close(certainty(9 * own, 9 * public, torch.arange(0, 100, 5), 0.01), s)  # by the largest norm


def test_features_without_information_score_by_numbers() -> None:
    s = certainty(torch.zeros(3, 2), torch.zeros(10, 2), torch.arange(2), 0.01)
    torch.testing.assert_close(s, torch.full((10,), 0.5 + 1e-8, dtype=torch.float64), rtol=0, atol=1e-12)


def test_scores_are_sent_once_and_counted_in_every_round() -> None:
    tiny = Tiny(FedAUX(pretrain="none"), LABELS, options={"participation": 0.67})
    seen: dict[int, Tensor] = {}
    tiny.run(4)
    for done in tiny.rounds:
        for k, up in done.ups.items():
            assert (up.scores is None) == (k in seen)
            if up.scores is not None:
                seen[k] = up.scores
        assert {k: down.asked for k, down in done.downs.items()} == {k: int(k not in seen) for k in done.downs}
    assert all(torch.equal(tiny.server.memory["scores"][k], s) for k, s in seen.items())
    first = tiny.rounds[0]
    assert all(tiny.clients[k].log.get("score") is None for k in tiny.rounds[-1].ups if k in first.ups)


def test_a_fifth_of_the_public_samples_are_everyones_negatives(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noted(own: Tensor, public: Tensor, negatives: Tensor, ridge: float) -> Tensor:
        seen.append((negatives.tolist(), ridge))
        return certainty(own, public, negatives, ridge)

    monkeypatch.setattr(fedaux, "certainty", noted)
    Tiny(FedAUX(pretrain="none", ridge=0.5), LABELS).run(2)
    drawn = Key(0, 0, SERVER, "negatives").generator().permutation(24)[:5].tolist()
    assert seen == [(drawn, 0.5)] * 3


def test_scores_come_from_the_received_features_before_training() -> None:
    tiny = Tiny(FedAUX(pretrain="none"), LABELS)
    asked = record(tiny)
    tiny.run(1)
    own = [r for group in asked.groups for r in group if getattr(r, "key", None) and r.key.client == 0]
    assert [type(r).__name__ for r in own] == ["Predict", "Predict", "Fit"]
    assert [len(r.samples) for r in own[:2]] == [16, 24]


# -- the start


def test_images_are_turned_four_ways() -> None:
    images = Samples({"x": torch.arange(8, dtype=torch.uint8).view(2, 1, 2, 2)})
    four = turned(images)
    assert four["y"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert four.x[::2].flatten(1).tolist() == [[0, 1, 2, 3], [1, 3, 0, 2], [3, 2, 1, 0], [2, 0, 3, 1]]
    assert not rotation_reason(images)


def test_a_turned_image_is_cropped_but_not_flipped_in_training() -> None:
    """Flipped after a quarter turn, it is its mirror image after three: labels 1 and 3 would be one."""
    view = View(1 / 255, (0.5,), (0.2,), pad=1, flip=True, hole=0.5)
    x = torch.randint(0, 256, (5, 1, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    four = turned(Samples({"x": x}, view))
    assert four.view == replace(view, flip=False)
    assert Samples({"x": x}, view).mirrored.x.rot90(3, (2, 3)).equal(x.rot90(1, (2, 3)).flip(-1))
    draws = Plan(Key(0), samples=20, batch=20, view=four.view).augmentation(5)
    assert (draws[..., 2] == 0).all()
    assert (draws[..., :2] > 0).any()


@pytest.mark.parametrize("x", [torch.zeros(2, 6), torch.zeros(2, 1, 4, 6)])
def test_what_is_not_square_is_refused_with_the_default_start(x: Tensor) -> None:
    assert FedAUX().unusable_reason(Samples({"x": x})) == (
        f"rotations are for square images, got inputs of shape {list(x.shape[1:])}; set pretrain=none"
    )
    assert not FedAUX(pretrain="none").unusable_reason(Samples({"x": x}))
    assert "needs public samples" in FedAUX().unusable_reason(Samples({"x": x[:0]}))


def test_trunks_start_from_the_pretext_task_and_heads_do_not() -> None:
    """On two shapes of network; the clients of one get the same start."""
    starts = {}
    for pretrain in ("rotation", "none"):
        method, factories = FedAUX(pretrain=pretrain), (Flat(8), Flat(8), Flat(12))  # type: ignore[arg-type]
        tiny = Tiny(method, LABELS, images=View(pad=1, flip=True), factories=factories)
        asked = record(tiny)
        starts[pretrain] = tiny.ask(tiny.method.start(tiny.server))
        phases = [fit.key.phase for fit in asked.fits()]
        assert phases == (["pretext"] * 2 if pretrain == "rotation" else [])
        assert {fit.streams["public"].view for fit in asked.fits()} <= {View(pad=1)}
    for k in range(3):
        trained, plain = starts["rotation"][k].state, starts["none"][k].state
        for name, value in trained.items():
            assert torch.equal(value, plain[name]) == name.startswith("head."), name
    assert equal(starts["rotation"][0].state, starts["rotation"][1].state)
