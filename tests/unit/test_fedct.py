"""FedCT: votes, ties and what crosses the wire, Abourayya et al., "Little is enough", AAAI 2025."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from fedcc.core.messages import Labels, nbytes
from fedcc.core.requests import Recipe
from fedcc.losses import CrossEntropy
from fedcc.methods import FedCT
from fedcc.methods.fedct import ballot, majority, tied
from steps import assert_same_under_vmap, draw, equal, labels, servers, value, watch
from tiny import Mlp, Tiny

K, N, C = 5, 60, 4
VOTES = labels(0, C, K, N)


def winners(n: int) -> list[int]:
    count = Counter(VOTES[:, n].tolist())
    return sorted(c for c, v in count.items() if v == max(count.values()))


def test_the_consensus_against_a_loop() -> None:
    votes = ballot(VOTES, C)
    best = [winners(n) for n in range(N)]
    assert 5 < sum(len(b) > 1 for b in best) < 55
    assert tied(votes).tolist() == [len(b) > 1 for b in best]
    tiny = Tiny(FedCT(), classes=C)
    downs = tiny.ask(tiny.method.server(tiny.server, {k: Labels.of(own, C) for k, own in enumerate(VOTES)}))
    assert downs[0].values.tolist() == [b[0] for b in best]  # the lowest class wins
    assert tiny.server.log["ties"] == sum(len(b) > 1 for b in best) / N


def test_labels_take_the_smallest_integers_that_hold_them() -> None:
    sizes = {10: torch.uint8, 256: torch.uint8, 257: torch.int16, 2**15: torch.int16, 2**15 + 1: torch.int32}
    for different, kind in sizes.items():
        last = Labels.of(torch.tensor([0, different - 1]), different)
        assert last.values.dtype == kind
        assert last.values.long().tolist() == [0, different - 1]
    assert nbytes(Labels.of(torch.zeros(5000, dtype=torch.long), 200)) == 5000


def test_a_bare_majority_beats_one_that_is_sure() -> None:
    z = torch.tensor([[0.1, 0.0, 0.0], [0.1, 0.0, 0.0], [0.0, 0.0, 50.0]])[:, None].double()
    assert z.softmax(-1).mean(0).argmax(-1).tolist() == [2]
    assert majority(z).argmax(-1).tolist() == [0]
    assert majority(z[1:]).argmax(-1).tolist() == [2]  # one vote each: the mean probability decides
    loud = torch.tensor([[5.0, 0.0, 0.0], [0.0, 100.0, 99.5]])[:, None].double()
    assert loud.mean(0).argmax(-1).tolist() == [1]
    assert majority(loud).argmax(-1).tolist() == [0]  # not the mean logit


def test_one_class_per_client_makes_class_0_the_consensus_everywhere() -> None:
    tiny = Tiny(FedCT(), factories=(Mlp(8), Mlp(12)), recipe=Recipe(lr=0.05, batch=8, epochs=20)).run(3)
    for k, up in tiny.rounds[0].ups.items():
        assert (up.values == k).all()  # each votes for the only class it has seen
    for round in tiny.rounds:
        assert all((down.values == 0).all() for down in round.downs.values())
        assert all(up.values.dtype == torch.uint8 for up in round.ups.values())
        assert round.bytes_up == 3 * tiny.publics
    assert [r.bytes_down for r in tiny.rounds] == [0, 3 * tiny.publics, 3 * tiny.publics]


def test_round_1_is_supervised_and_later_ones_take_the_union() -> None:
    tiny = Tiny(FedCT(public_batch=3))
    fits = watch(tiny)
    tiny.run(2)
    assert not servers(fits)
    first, later = fits[0], fits[-1]
    assert (list(first.streams), first.loss) == (["private"], CrossEntropy("private"))
    assert list(later.streams) == ["private", "public"]
    assert {fit.key.phase for fit in fits} == {"fit"}
    assert later.joint
    assert torch.equal(later.streams["public"]["y"], tiny.rounds[0].downs[0].values.long())
    assert [later.recipe.batch_size(name) for name in later.streams] == [8, 3]
    assert later.steps == 2 * 8  # 24 public samples by 3 are longer than 20 private ones by 8
    z, y = draw(1, 11, 3), labels(2, 3, 11)
    found = value(later.loss, {"private": z[:8], "public": z[8:]}, {"private": {"y": y[:8]}, "public": {"y": y[8:]}})
    torch.testing.assert_close(found, F.cross_entropy(z, y))  # every sample of the union weighs the same


def test_by_default_a_step_has_as_many_public_samples_as_private_ones() -> None:
    default, stated = Tiny(FedCT()).run(2), Tiny(FedCT(public_batch=8)).run(2)
    assert all(equal(a.model.state, b.model.state) for a, b in zip(default.clients, stated.clients, strict=True))
    other = Tiny(FedCT(public_batch=4)).run(2)
    assert not equal(other.clients[0].model.state, default.clients[0].model.state)


def test_the_loss_is_the_same_under_vmap() -> None:
    loss = 0.5 * CrossEntropy("private") + 0.5 * CrossEntropy("public")
    logits = {"private": draw(3, 2, 6, C), "public": draw(4, 2, 5, C)}
    columns = {"private": {"y": labels(5, C, 2, 6)}, "public": {"y": labels(6, C, 2, 5)}}
    assert_same_under_vmap(loss, logits, columns)


def test_one_client_teaches_itself() -> None:
    tiny = Tiny(FedCT(), labels=((0, 1, 2) * 8,)).run(2)
    assert torch.equal(tiny.rounds[0].downs[0].values, tiny.rounds[0].ups[0].values)


def test_missing_clients_have_no_vote_and_hear_the_result() -> None:
    tiny = Tiny(FedCT()).run(1)
    downs = tiny.ask(tiny.method.server(tiny.server, {1: tiny.rounds[0].ups[1]}))
    assert sorted(downs) == [0, 1, 2]
    assert torch.equal(downs[0].values, tiny.rounds[0].ups[1].values)


@pytest.mark.parametrize("clients", [2, 3, 4])
def test_prediction_is_the_majority_with_ties_by_mean_probability(clients: int) -> None:
    tiny = Tiny(FedCT(), labels=((0, 1), (2, 1), (0, 2), (1, 0))[:clients], publics=60).run(1)
    z = torch.stack([tiny.executor.predict(c.predict(tiny.test)).logits for c in tiny.clients])
    found, ties = tiny.scores().argmax(-1).tolist(), 0
    for n in range(tiny.publics):
        count = Counter(z[:, n].argmax(-1).tolist())
        best = [c for c, v in count.items() if v == max(count.values())]
        ties += len(best) > 1
        mean = z[:, n].softmax(-1).mean(0)
        assert found[n] == max(best, key=lambda c: float(mean[c]))
    assert ties > 0
