"""FedET: consensus, dissent and shared heads (Cho et al., IJCAI 2022), against loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedcc.core.model import Arch
from fedcc.core.requests import Predict
from fedcc.core.step import Sum
from fedcc.losses import CrossEntropy
from fedcc.methods import FedET
from fedcc.methods.fedet import Diversity, confidence, consensus, dissent
from steps import assert_same_under_vmap, close, draw, equal, gradient, labels, one, servers, watch
from tiny import DIMENSIONS, Mlp, Tiny

K, N, C = 4, 9, 5
Z = draw(0, K, N, C, scale=2.0)
SAME_WIDTH = (Mlp(8), Mlp(8, norm=False))
UNEQUAL = ((0,) * 20, (1, 2) * 4, (2, 0, 1) * 10, (1,) * 9)


def by_hand(z: Tensor, temperature: float) -> tuple[list[list[float]], list[int], list[list[float] | None]]:
    """Weights [N][K], labels [N] and dissenters' distributions [N], one sample at a time."""
    weights, ys, divs = [], [], []
    for n in range(z.shape[1]):
        rows = [z[k, n].tolist() for k in range(len(z))]
        variance = [sum((v - sum(r) / len(r)) ** 2 for v in r) / len(r) for r in rows]
        alpha = [v / sum(variance) for v in variance]
        mixed = [sum(a * r[c] for a, r in zip(alpha, rows, strict=True)) for c in range(len(rows[0]))]
        y = mixed.index(max(mixed))
        q = [k for k, r in enumerate(rows) if r.index(max(r)) != y]
        mass = sum(alpha[k] for k in q)
        z_div = [sum(alpha[k] / mass * rows[k][c] for k in q) / temperature for c in range(len(mixed))] if q else None
        weights.append(alpha)
        ys.append(y)
        divs.append(None if z_div is None else [math.exp(v) / sum(map(math.exp, z_div)) for v in z_div])
    return weights, ys, divs


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_weights_labels_and_dissent_against_a_loop(temperature: float) -> None:
    z = torch.cat([Z, Z[:, :1] * 0 + Z[:1, :1]], 1)  # in the last sample all agree
    weights, ys, divs = by_hand(z, temperature)
    torch.testing.assert_close(confidence(z).T, torch.tensor(weights, dtype=torch.float64))
    assert consensus(z).tolist() == ys
    found = dissent(z, consensus(z), temperature)
    assert divs[-1] is None
    assert sum(d is not None for d in divs) >= 5
    for row, expected in zip(found.tolist(), divs, strict=True):
        assert row == pytest.approx(expected if expected is not None else [0.0] * C)


def test_weights_are_shares_that_a_shift_of_logits_does_not_change() -> None:
    torch.testing.assert_close(confidence(Z).sum(0), torch.ones(N).double())
    shifted = Z + draw(1, K, N, 1, scale=5.0)
    torch.testing.assert_close(confidence(shifted), confidence(Z))


def test_equal_variances_give_the_plain_mean() -> None:
    z = torch.stack([Z[0].flip(-1), Z[0], Z[0].roll(1, -1)])
    torch.testing.assert_close(confidence(z), torch.full((3, N), 1 / 3).double())
    assert torch.equal(consensus(z), z.mean(0).argmax(-1))


def test_a_constant_client_weighs_nothing_and_all_constant_ones_weigh_the_same() -> None:
    z = torch.cat([Z, torch.full((1, N, C), 3.0).double()])
    assert (confidence(z)[-1] == 0).all()
    torch.testing.assert_close(confidence(z)[:-1], confidence(Z))
    flat = torch.full((K, N, C), 2.0).double()
    torch.testing.assert_close(confidence(flat), torch.full((K, N), 1 / K).double())
    assert (dissent(flat, consensus(flat), 1.0) == 0).all()


def test_dissenters_without_weight_have_no_say() -> None:
    sure = torch.tensor([0.0, 0.0, 9.0])
    z = torch.stack([sure, torch.zeros(3)])[:, None].double()  # the flat client's argmax is class 0, not 2
    assert consensus(z).tolist() == [2]
    assert (dissent(z, consensus(z), 1.0) == 0).all()


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_diversity_term_against_a_loop(temperature: float) -> None:
    q = draw(2, N, C).softmax(-1)
    q[3] = 0
    g = draw(3, N, C)
    total = 0.0
    for n in range(N):
        p = (g[n] / temperature).softmax(-1).tolist()
        total += sum(v * math.log(v / p[c]) for c, v in enumerate(q[n].tolist()) if v > 0) * temperature**2 / N
    assert float(one(Diversity("public", temperature), "public", g, target=q)) == pytest.approx(total, rel=1e-12)
    assert (gradient(Diversity("public", temperature), "public", g, target=q)[3] == 0).all()


def test_unanimous_clients_leave_no_diversity() -> None:
    z = Z[:1].expand(K, -1, -1) * torch.tensor([1.0, 2.0, 0.5, 3.0]).view(-1, 1, 1)
    target = dissent(z, consensus(z), 1.0)
    g = draw(4, N, C)
    assert one(Diversity("public"), "public", g, target=target) == 0
    assert (gradient(Diversity("public"), "public", g, target=target) == 0).all()


def test_the_loss_is_the_same_under_vmap() -> None:
    loss = CrossEntropy("public") + 0.05 * Diversity("public", 2.0)
    q = draw(5, 3, N, C).softmax(-1)
    q[:, 0] = 0
    columns = {"public": {"y": labels(6, C, 3, N), "target": q}}
    assert_same_under_vmap(loss, {"public": draw(7, 3, N, C)}, columns)


def test_the_server_learns_consensus_and_dissent() -> None:
    tiny = Tiny(FedET(), factories=SAME_WIDTH, labels=UNEQUAL)
    fits = watch(tiny)
    tiny.run(1)
    (fit,) = servers(fits)
    z = torch.stack([tiny.executor.predict(c.predict(tiny.public)).logits for c in tiny.clients])
    assert torch.equal(fit.streams["public"]["y"], consensus(z))
    torch.testing.assert_close(fit.streams["public"]["target"], dissent(z, consensus(z), 1.0))
    assert fit.loss == Sum(((1.0, CrossEntropy("public")), (0.05, Diversity("public", 1.0))))
    server = tiny.executor.predict(Predict(tiny.server.models["global"], tiny.test))
    torch.testing.assert_close(tiny.scores(), server.logits)


def test_no_diversity_is_training_on_hard_labels_alone() -> None:
    tiny = Tiny(FedET(lam=0.0), labels=UNEQUAL)
    fits = watch(tiny)
    tiny.run(1)
    assert servers(fits)[0].loss == CrossEntropy("public")


def test_the_servers_head_starts_from_the_mean_of_all_heads_and_goes_to_all() -> None:
    tiny = Tiny(FedET(), factories=SAME_WIDTH, labels=UNEQUAL)
    fits = watch(tiny)
    start = tiny.ask(tiny.method.start(tiny.server))
    first = tiny.server.models["global"]
    assert not equal(first.floating, start[1].state)  # the server's own model, not the clients' first one
    tiny.run(1)
    ups, downs = tiny.rounds[0].ups, tiny.rounds[0].downs
    (fit,) = servers(fits)
    for name in ("head.weight", "head.bias"):
        torch.testing.assert_close(fit.model.state[name], sum(up.state[name] for up in ups.values()) / 4)
        for down in downs.values():
            assert torch.equal(down.state[name], tiny.server.models["global"].state[name])
    assert all(torch.equal(fit.model.state[n], v) for n, v in first.state.items() if not n.startswith("head."))
    total = ups[1].samples + ups[3].samples
    for name, v in downs[1].state.items():
        if not name.startswith("head."):
            expected = ups[1].samples / total * ups[1].state[name] + ups[3].samples / total * ups[3].state[name]
            torch.testing.assert_close(v, expected)
            assert not torch.allclose(v, tiny.server.models["global"].state[name])


def test_heads_of_another_width_stay_as_they_are() -> None:
    tiny = Tiny(FedET(), factories=(Mlp(12), Mlp(8)), labels=UNEQUAL)
    fits = watch(tiny)
    tiny.run(1)
    ups, downs = tiny.rounds[0].ups, tiny.rounds[0].downs
    (fit,) = servers(fits)
    torch.testing.assert_close(
        fit.model.state["head.bias"], (ups[1].state["head.bias"] + ups[3].state["head.bias"]) / 2
    )
    total = ups[0].samples + ups[2].samples
    own = sum(ups[k].samples / total * ups[k].state["head.weight"] for k in (0, 2))
    torch.testing.assert_close(downs[0].state["head.weight"], own)


def test_clients_of_the_servers_network_may_take_its_model() -> None:
    tiny = Tiny(FedET(reuse_server=True), factories=SAME_WIDTH).run(1)
    downs = tiny.rounds[0].downs
    assert equal(downs[1].state, tiny.server.models["global"].floating)
    assert downs[0].state.keys() != downs[1].state.keys()


def test_everybody_gets_a_model_of_its_own_network_whoever_answered() -> None:
    tiny = Tiny(FedET(), factories=SAME_WIDTH, labels=UNEQUAL).run(1)
    before = tiny.server.models["group 1"]
    downs = tiny.ask(tiny.method.server(tiny.server, {0: tiny.rounds[0].ups[0]}))
    assert sorted(downs) == [0, 1, 2, 3]
    trunk = {n: v for n, v in before.floating.items() if not n.startswith("head.")}
    assert close({n: downs[3].state[n] for n in trunk}, trunk)


def test_the_servers_network_by_name() -> None:
    big = Mlp(16)

    def networks(name: str) -> Arch:
        assert name == "big"
        return Arch((big,), 3, (DIMENSIONS,))

    tiny = Tiny(FedET(server_arch="big"))
    tiny.server.networks = networks
    assert tiny.run(1).server.models["global"].arch.trunks == (big,)
    own = Tiny(FedET(server_arch=str(Mlp(8))), factories=(Mlp(8), Mlp(12)))
    assert own.run(1).server.models["global"].arch.trunks == (Mlp(8),)
    assert Tiny(FedET(), factories=(Mlp(8), Mlp(12))).run(1).server.models["global"].arch.trunks == (Mlp(12),)
    with pytest.raises(ValueError, match="unknown server_arch 'resnet56'"):
        Tiny(FedET(server_arch="resnet56")).run(1)


def test_length_and_rate_of_the_servers_training() -> None:
    tiny = Tiny(FedET(steps=3, lr=0.5))
    fits = watch(tiny)
    tiny.run(1)
    (fit,) = servers(fits)
    assert (fit.steps, fit.recipe.lr) == (3, 0.5)
