"""FedHKT (reconstruction): clusters, confidence, selection and distillation (docs/deviations.md)."""

from __future__ import annotations

import math

import pytest
import torch

from fedcc.core.requests import Predict
from fedcc.losses import Distill
from fedcc.methods import FedHKT
from fedcc.methods.clusters import cluster_of
from fedcc.methods.fedhkt import confidence, fused, selected
from steps import close, draw, equal, servers, watch
from tiny import Mlp, Tiny

M, N, C = 3, 8, 4
TWO = (Mlp(8), Mlp(12))
EVEN, ODD = (0, 0, 0, 1) * 5, (2, 2, 1, 2) * 3
EIGHT = (EVEN, EVEN, ODD, ODD, EVEN * 2, EVEN, ODD, ODD * 2)  # with two networks in turn, both kinds in each of them


def clusters(tiny: Tiny) -> list[int]:
    return [cluster_of(tiny.server, k) for k in range(len(tiny.clients))]


def test_confidence_and_knowledge_against_a_loop() -> None:
    q = draw(0, M, N, C, scale=2.0).softmax(-1)
    for n in range(N):
        c = [1 + sum(p * math.log(p) for p in q[m, n].tolist()) / math.log(C) for m in range(M)]
        omega = [v / sum(c) for v in c]
        assert confidence(q)[:, n].tolist() == pytest.approx(omega)
        assert fused(q)[n].tolist() == pytest.approx(
            [sum(omega[m] * float(q[m, n, i]) for m in range(M)) for i in range(C)]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_uniform_cluster_weighs_nothing_and_uniform_ones_alike(dtype: torch.dtype) -> None:
    for classes in (2, 3, 10, 200):
        uniform = torch.full((N, classes), 1 / classes, dtype=dtype)
        sure = draw(1, N, classes, scale=3.0).softmax(-1).to(dtype)
        found = confidence(torch.stack([sure, uniform]))
        assert (found[1] == 0).all()
        torch.testing.assert_close(found[0], torch.ones_like(found[0]))
        torch.testing.assert_close(confidence(torch.stack([uniform] * 3)), torch.full((3, N), 1 / 3, dtype=dtype))


def test_selection_against_a_loop() -> None:
    q, g = draw(2, 40, C, scale=2.0).softmax(-1), draw(3, 40, C)
    for kappa in (0.5, 0.7, 1.0):
        found = selected(q, g, kappa).tolist()
        for n in range(40):
            agree = int(q[n].argmax()) == int(g[n].argmax())
            assert found[n] == (agree or float(q[n].max()) >= kappa)
        assert 0 < sum(found) < 40
    assert selected(q, g, 0.0).all()
    assert selected(torch.tensor([[0.75, 0.25]]), torch.tensor([[0.0, 1.0]]), 0.75).tolist() == [True]


def test_clusters_gather_similar_clients_and_never_mix_networks() -> None:
    tiny = Tiny(FedHKT(epochs=1), labels=EIGHT, factories=TWO).run(1)
    found = clusters(tiny)
    assert found[0] == found[4]
    assert found[2] == found[6]
    assert found[1] == found[5]
    assert found[3] == found[7]
    assert sorted(set(found)) == [0, 1, 2, 3]
    for k, m in enumerate(found):
        assert tiny.server.models[f"cluster {m}"].arch == tiny.clients[k].arch


def test_clusters_are_the_nearest_of_several_and_sizes_do_not_matter() -> None:
    kinds = ((0,) * 40, (0,) * 4, (1,) * 4, (1,) * 40, (2,) * 40, (2,) * 4)
    tiny = Tiny(FedHKT(clusters=3, epochs=0), labels=kinds).run(1)
    found = clusters(tiny)
    assert sorted(set(found)) == [0, 1, 2]
    for k, own in enumerate(kinds):
        assert found[k] == found[k ^ 1]
        assert tiny.server.memory["centres"][found[k]].tolist() == pytest.approx([float(c == own[0]) for c in range(3)])


def test_the_architectures_share_the_number_of_clusters() -> None:
    kinds = [(c,) * 6 for c in (0, 0, 1, 1, 2, 2, 0, 0)]  # three kinds in each of the two
    tiny = Tiny(FedHKT(clusters=4, epochs=0), labels=kinds, factories=TWO).run(1)
    assert len(set(clusters(tiny))) == 4


def test_more_clusters_than_clients_are_clients_alone_with_their_own_weights() -> None:
    tiny = Tiny(FedHKT(clusters=20, epochs=0), labels=(EVEN, EVEN[:8], ODD, (1, 1)), factories=TWO).run(1)
    assert len(set(clusters(tiny))) == 4
    for k, up in tiny.rounds[0].ups.items():
        assert equal(tiny.rounds[0].downs[k].state, up.state)
        assert tiny.rounds[0].downs[k].cluster == clusters(tiny)[k]


def test_a_clusters_model_is_the_average_of_its_clients_by_size() -> None:
    tiny = Tiny(FedHKT(epochs=0), labels=EIGHT, factories=TWO).run(1)
    ups, downs = tiny.rounds[0].ups, tiny.rounds[0].downs
    for a, b in ((0, 4), (3, 7)):
        total = ups[a].samples + ups[b].samples
        expected = {n: (ups[a].samples * v + ups[b].samples * ups[b].state[n]) / total for n, v in ups[a].state.items()}
        assert close(downs[a].state, expected)
        assert equal(downs[a].state, downs[b].state)


def test_label_counts_are_sent_until_a_cluster_comes_back() -> None:
    tiny = Tiny(FedHKT(), labels=EIGHT, factories=TWO).run(2)
    first, second = tiny.rounds
    assert first.ups[0].counts.tolist() == [15, 5, 0]
    assert all(up.counts is None for up in second.ups.values())
    assert first.bytes_up - second.bytes_up == 8 * 3 * 4  # eight clients, three classes, four bytes


def test_who_sends_counts_again_stays_where_it_is() -> None:
    """A client that missed the downlink does not know that it has a cluster."""
    tiny = Tiny(FedHKT(), labels=EIGHT, factories=TWO).run(1)
    before = [list(group) for group in tiny.server.memory["clusters"]]
    tiny.server.begin(2)
    tiny.ask(tiny.method.server(tiny.server, tiny.rounds[0].ups))
    assert tiny.server.memory["clusters"] == before


def test_who_was_away_gets_a_cluster_when_it_first_appears() -> None:
    tiny = Tiny(FedHKT(), labels=EIGHT, factories=TWO)
    away = [tiny.clients[6], tiny.clients[7]]
    tiny.cohort.clients = tiny.clients[:6]
    tiny.run(1)
    before = tiny.rounds[0].downs
    assert (before[6].cluster, before[7].cluster) == (-1, -1)
    met = [tiny.rounds[0].ups[k] for k in (0, 2, 4)]
    total = sum(up.samples for up in met)
    average = {n: sum(up.samples / total * up.state[n] for up in met) for n in met[0].state}
    assert close(before[6].state, average)  # until then, the average of its architecture
    old = clusters(tiny)[:6]
    tiny.cohort.clients = away
    tiny.server.begin(2)
    ups = tiny.cohort.round(2, before)
    assert all(up.counts is not None for up in ups.values())
    after = tiny.ask(tiny.method.server(tiny.server, ups))
    assert clusters(tiny)[:6] == old
    assert len(tiny.server.memory["centres"]) == 4  # no cluster was added
    assert sorted(after) == list(range(8))
    for k in (6, 7):
        assert after[k].cluster >= 0
        assert tiny.server.models[f"cluster {after[k].cluster}"].arch == tiny.clients[k].arch
    assert (after[6].cluster, after[7].cluster) == (old[2], old[3])


def test_clusters_of_an_older_checkpoint_are_taken_over() -> None:
    a, b = (Tiny(FedHKT(), labels=EIGHT, factories=TWO) for _ in range(2))
    for tiny in (a, b):
        tiny.cohort.clients = tiny.clients[:6]
        tiny.run(1)
    memory = b.server.memory
    memory["clusters"] = {str(k): m for m, group in enumerate(memory["clusters"]) for k in group}
    memory["centres"] = memory["centres"].tolist()
    for tiny in (a, b):
        tiny.cohort.clients = tiny.clients
        tiny.server.begin(2)
        tiny.ask(tiny.method.server(tiny.server, tiny.cohort.round(2, tiny.rounds[0].downs)))
    assert a.server.memory["clusters"] == b.server.memory["clusters"]
    assert torch.equal(a.server.memory["centres"], b.server.memory["centres"])
    assert all(equal(model.state, b.server.models[name].state) for name, model in a.server.models.items())


def test_knowledge_goes_up_to_the_server_and_what_it_made_of_it_comes_down() -> None:
    tiny = Tiny(FedHKT(kappa=1.0), labels=EIGHT, factories=TWO, publics=30).run(1)
    previous = tiny.server.models["global"]
    fits = watch(tiny)
    ups = tiny.cohort.round(2, tiny.rounds[0].downs)
    tiny.server.begin(2)
    before = len(fits)
    sent = tiny.ask(tiny.method.server(tiny.server, ups))
    up, *downs = servers(fits[before:])
    assert equal(up.model.state, previous.state)
    z = [tiny.executor.predict(Predict(down.model, tiny.public)).logits for down in downs]  # θ_m before it is taught
    q = fused(torch.stack(z).softmax(-1))
    mask = selected(q, tiny.executor.predict(Predict(previous, tiny.public)).logits, 1.0)
    assert 0 < int(mask.sum()) < 30
    assert tiny.server.log["selected"] == pytest.approx(float(mask.double().mean()))
    torch.testing.assert_close(up.streams["public"]["target"], q[mask])
    g = tiny.executor.predict(Predict(tiny.server.models["global"], tiny.public)).logits.softmax(-1)
    assert len(downs) == 4
    for down in downs:
        assert down.loss == up.loss == Distill("public")
        torch.testing.assert_close(down.streams["public"]["target"], g[mask])
        torch.testing.assert_close(down.streams["public"].x, tiny.public.x[mask])
    for k, m in enumerate(clusters(tiny)):
        taught = tiny.executor.fit(downs[m]).model
        assert equal(sent[k].state, taught.floating)
        assert not equal(sent[k].state, downs[m].model.floating)
    torch.testing.assert_close(
        tiny.scores(), tiny.executor.predict(Predict(tiny.server.models["global"], tiny.test)).logits
    )


def test_round_1_selects_everything_whatever_kappa() -> None:
    tiny = Tiny(FedHKT(kappa=1.0), labels=EIGHT, factories=TWO)
    fits = watch(tiny)
    tiny.run(1)
    assert tiny.server.log["selected"] == 1
    assert len(servers(fits, "up")[0].streams["public"]) == tiny.publics


def test_it_says_that_it_is_a_reconstruction() -> None:
    assert FedHKT.note == "reconstruction"
    assert "reconstruction" in str(__import__("fedcc.methods.fedhkt", fromlist=["x"]).__doc__)
