"""COMET: clusters of predictions, whose centroid is whose, and the reduction to FedMD (docs/deviations.md)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedcc.core.requests import Recipe
from fedcc.methods import COMET, FedMD
from fedcc.methods.comet import centroids, members
from recording import record
from steps import equal
from tiny import Mlp, Tiny

LABELS = ([0, 1] * 8, [1, 2] * 8, [2, 0] * 8)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).softmax(-1)


def ran(method: Any, rounds: int = 3, **given: Any) -> Tiny:
    return Tiny(method, **{"labels": LABELS, "factories": (Mlp(8), Mlp(12))} | given).run(rounds)


@pytest.mark.parametrize("level", ["sample", "client"])
def test_one_cluster_is_fedmd(level: Any) -> None:
    mine, theirs = ran(COMET(clusters=1, level=level)), ran(FedMD(loss="kl", average="probs"))
    for a, b in zip(mine.clients, theirs.clients, strict=True):
        for name, value in a.model.state.items():
            torch.testing.assert_close(value, b.model.state[name], rtol=1e-6, atol=1e-8)
    assert not torch.allclose(ran(COMET(level=level)).scores(), theirs.scores())


def test_as_many_clusters_as_clients_give_everyone_its_own_prediction() -> None:
    p = draw(0, 4, 30, 5)
    torch.testing.assert_close(centroids(p, 4), p, rtol=0, atol=1e-15)
    torch.testing.assert_close(centroids(p, 9, "client"), p, rtol=0, atol=1e-15)  # more cannot be


def test_as_many_clusters_as_clients_leave_nothing_to_learn_from_public_samples() -> None:
    """The target is the own prediction, so the gradient is 0 from the start: gradient descent moves nothing."""
    recipe = Recipe(lr=1.0, batch=8, epochs=2, momentum=0.0)
    moves = {}
    for clusters in (3, 1):
        tiny = Tiny(COMET(clusters=clusters), LABELS, factories=(Mlp(norm=False),), recipe=recipe)
        asked = record(tiny)
        tiny.run(2)
        synced = asked.fitted("sync")
        assert len(synced) == 3
        moves[clusters] = max(
            float((fitted.model.state[name] - value).abs().max())
            for fit, fitted in synced
            for name, value in fit.model.state.items()
        )
    assert moves[3] < 1e-12
    assert moves[1] > 1e-3


def test_clusters_by_hand() -> None:
    """Two clients near one corner, two near another: each learns the mean of its pair, in every sample anew."""
    a, b, c = torch.eye(3, dtype=torch.float64).unbind()
    near = 0.9 * a + 0.1 * c
    p = torch.stack([torch.stack([a, b]), torch.stack([near, b]), torch.stack([b, a]), torch.stack([b, near])])
    own = centroids(p, 2)
    torch.testing.assert_close(own[:, 0], torch.stack([(a + near) / 2] * 2 + [b] * 2))
    torch.testing.assert_close(own[:, 1], torch.stack([b] * 2 + [(a + near) / 2] * 2))


def test_by_client_the_pairs_are_the_same_in_every_sample() -> None:
    p = draw(0, 4, 30, 5)
    p[1], p[3] = 0.98 * p[0] + 0.02 * p[1], 0.98 * p[2] + 0.02 * p[3]
    own = centroids(p, 2, "client")
    torch.testing.assert_close(own, torch.stack([p[:2].mean(0)] * 2 + [p[2:].mean(0)] * 2))


def test_a_centroid_is_a_mean_that_counts_its_client_and_the_nearest_one() -> None:
    points = draw(1, 6, 40, 4).movedim(0, 1)  # [40, 6, 4]
    member = members(points, 3)
    assert member.sum(-1).eq(1).all()
    own = centroids(points.movedim(1, 0), 3).movedim(1, 0)
    for sample in range(40):
        for k in range(6):
            alike = member[sample].argmax(-1) == member[sample, k].argmax()
            torch.testing.assert_close(own[sample, k], points[sample, alike].mean(0))
            nearest = torch.cdist(points[sample, k][None], own[sample]).argmin()  # as a client would choose
            torch.testing.assert_close(own[sample, nearest], own[sample, k])


def test_it_starts_from_the_farthest_and_then_the_farthest_from_those() -> None:
    """From the mean at 3.4 the point at 10 is farthest, then that at 0; the rest joins the nearer one."""
    points = torch.tensor([[[0.0], [1.0], [2.0], [4.0], [10.0]]], dtype=torch.float64)
    assert members(points, 2)[0].argmax(-1).tolist() == [1, 1, 1, 1, 0]
    assert members(points, 3)[0].argmax(-1).tolist() == [1, 1, 1, 2, 0]


def test_order_and_equality_of_clients() -> None:
    p = draw(2, 5, 20, 3)
    order = torch.tensor([3, 1, 4, 0, 2])
    torch.testing.assert_close(centroids(p[order], 2), centroids(p, 2)[order])
    same = p[:1].expand(4, -1, -1)
    torch.testing.assert_close(centroids(same, 3), same)


def test_who_did_not_answer_gets_the_mean_of_all() -> None:
    tiny = Tiny(COMET(), labels=LABELS, options={"participation": 0.67}).run(1)
    (done,) = tiny.rounds
    (absent,) = set(done.downs) - set(done.ups)
    torch.testing.assert_close(done.downs[absent].values, torch.stack([u.values for u in done.ups.values()]).mean(0))
    p = torch.stack([done.ups[k].values for k in sorted(done.ups)])
    distance = (centroids(p, 2) - p.mean(0)).abs().sum(-1).mean()
    assert tiny.server.log["distance to the mean"] == pytest.approx(float(distance))


def test_joint_training_and_its_weight() -> None:
    first = [ran(COMET(joint=joint), 1) for joint in (True, False)]
    assert equal(first[0].clients[0].model.state, first[1].clients[0].model.state)  # nothing to learn from yet
    alone = [ran(COMET(lam=0.0, joint=joint)).scores() for joint in (True, False)]
    assert torch.equal(*alone)
    some = [ran(COMET(lam=lam, joint=True)).scores() for lam in (0.1, 1.0)]
    assert not torch.allclose(*some)
    assert not torch.allclose(some[1], ran(COMET()).scores())


def test_both_ways_to_train_draw_the_private_batches_of_fit() -> None:
    for joint, phases in ((True, ["fit", "fit"]), (False, ["fit", "sync", "fit"])):
        asked = record(tiny := Tiny(COMET(joint=joint), LABELS))
        tiny.run(2)
        assert [fit.key.phase for fit in asked.fits(client=0)] == phases


def test_it_says_where_it_comes_from() -> None:
    assert COMET().label == "COMET (personalised, reconstruction from a port)"
