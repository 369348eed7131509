"""Properties that follow from FedCC's Eqs. (7) to (10); docs/properties.md lists them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedcc.core.messages import Predictions
from fedcc.core.model import Outputs
from fedcc.core.roles import Client
from fedcc.core.step import Batch, Step
from fedcc.losses import CrossEntropy, Distill, SoftCrossEntropy
from fedcc.methods import FedCC
from fedcc.methods.abstention import aggregate, alpha, entropy, pseudo_labels, targets, trust
from recording import record, same
from tiny import Mlp, Tiny

quickly = settings(max_examples=40)
seeds = st.integers(0, 2**31)
sizes = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(2, 6))  # K, N, C


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def votes(draw: Any) -> Tensor:
    """Clients' probabilities [K, N, C + 1], from flat to certain."""
    k, n, c = draw(sizes)
    return normal(draw(seeds), k, n, c + 1, scale=draw(st.sampled_from([0.0, 0.5, 3.0, 12.0]))).softmax(-1)


# -- 1


@quickly
@given(votes())
def test_targets_are_distributions_over_the_known_classes_in_closed_form(v: Tensor) -> None:
    found = targets(v)
    assert found.shape == (v.shape[1], v.shape[2] - 1)
    assert (found >= 0).all()
    assert torch.allclose(found.sum(-1), torch.ones(len(found), dtype=found.dtype))
    a = v[..., :-1].sum(-1)  # [K, N]
    closed = (a[..., None] * v[..., :-1]).sum(0) / (a * a).sum(0)[:, None]
    assert torch.allclose(found, closed, atol=1e-6)


@quickly
@given(votes())
def test_trust_is_the_known_mass_over_all_known_mass(v: Tensor) -> None:
    mu = trust(v)
    a = 1 - v[..., -1]
    assert torch.allclose(mu.sum(0), torch.ones(v.shape[1], dtype=v.dtype))
    assert torch.allclose(mu * a.sum(0), a, atol=1e-9)


@pytest.mark.parametrize("known", [1e-6, 1e-13, 1e-30, 1e-39, 1e-42])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_targets_sum_to_one_however_small_the_known_mass(known: float, dtype: torch.dtype) -> None:
    v = torch.tensor([[[3 * known, known, 1.0]], [[known, 3 * known, 1.0]]], dtype=dtype)
    assert targets(v).sum(-1).tolist() == pytest.approx([1.0], abs=1e-3)
    assert targets(v)[0].tolist() == pytest.approx([0.5, 0.5], abs=2e-3)


# -- 2


@quickly
@given(votes(), st.data())
def test_a_client_that_abstains_from_everything_may_as_well_be_absent(v: Tensor, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(v)))
    nothing = torch.zeros_like(v[:1])
    nothing[..., -1] = 1
    assert torch.allclose(targets(torch.cat([v[:place], nothing, v[place:]])), targets(v), atol=1e-12)


@quickly
@given(sizes, seeds, st.floats(0.0, 0.99))
def test_equal_abstention_is_the_plain_mean_of_the_renormalised_vectors(
    size: tuple[int, int, int], seed: int, u: float
) -> None:
    k, n, c = size
    q = normal(seed, k, n, c, scale=2.0).softmax(-1)
    v = torch.cat([(1 - u) * q, torch.full((k, n, 1), u, dtype=q.dtype)], -1)
    assert torch.allclose(targets(v), q.mean(0), atol=1e-9)


# -- 3

weights = st.floats(1e-6, 10)


@quickly
@given(weights, st.floats(0, 6), st.lists(st.floats(0, 12), min_size=1, max_size=6))
def test_alpha_is_in_its_range_and_zero_above_w_l(w_l: float, w_u: float, h: list[float]) -> None:
    entropies = torch.tensor(h, dtype=torch.float64)
    found = alpha(w_l, w_u, entropies)
    assert (found >= 0).all()
    assert (found <= w_l / (w_l + w_u) + 1e-12).all()
    assert (found[entropies >= w_l] == 0).all()
    assert (found[entropies < w_l * (1 - 1e-9)] > 0).all()


@quickly
@given(weights, st.floats(0, 6), st.lists(st.floats(0, 12), min_size=2, max_size=6))
def test_alpha_never_grows_with_the_samples_entropy(w_l: float, w_u: float, h: list[float]) -> None:
    found = alpha(w_l, w_u, torch.tensor(sorted(h), dtype=torch.float64))
    assert (found.diff() <= 1e-12).all()


@quickly
@given(st.integers(2, 60), seeds)
def test_alpha_never_grows_with_the_number_of_missing_classes(classes: int, seed: int) -> None:
    """Through the method itself, so that w_u = ln(C - |C_J| + 1) is the code's own."""
    client = Tiny(FedCC(), labels=[[0]], classes=classes).clients[0]
    p = normal(seed, 1, classes + 1, scale=2.0)
    x = normal(seed + 1, 1, classes + 1, scale=20.0)
    found = []
    for threshold in sorted({0.0, *p[0, :classes].softmax(-1).tolist()[:-1]}):  # fewer and fewer majority classes
        FedCC(majority_threshold=threshold).pseudo_labels(client, p, x)
        found.append((client.log["majority"], client.log["alpha"]))
    for (more, first), (fewer, second) in itertools.pairwise(found):
        assert more >= fewer
        assert second <= first + 1e-12


@quickly
@given(weights, st.floats(0, 6), st.lists(st.floats(0, 12), min_size=1, max_size=6), st.floats(0.1, 10))
def test_the_base_of_the_logarithm_cancels(w_l: float, w_u: float, h: list[float], base: float) -> None:
    entropies = torch.tensor(h, dtype=torch.float64)
    scaled = alpha(w_l * base, w_u * base, entropies * base)
    assert torch.allclose(alpha(w_l, w_u, entropies), scaled, atol=1e-9)


@quickly
@given(st.integers(1, 200))
def test_entropy_is_between_zero_and_the_logarithm_of_the_classes(classes: int) -> None:
    p = normal(classes, 1, classes, scale=4.0).softmax(-1)
    assert -1e-12 <= float(entropy(p)) <= math.log(classes) + 1e-12
    assert float(entropy(torch.full((classes,), 1 / classes, dtype=torch.float64))) == pytest.approx(math.log(classes))
    assert float(entropy(F.one_hot(torch.tensor(0), classes).double())) == 0


# -- 4


@quickly
@given(
    st.integers(2, 8),
    seeds,
    st.sampled_from([0.0, 0.02, 0.3, 0.9]),
    st.sampled_from(["argmax", "alpha_zero"]),
    st.sampled_from(["known", "full"]),
)
def test_a_pseudo_label_is_one_majority_class_and_unknown(
    classes: int, seed: int, threshold: float, empty: Any, space: Any
) -> None:
    client = Tiny(FedCC(), labels=[[0]], classes=classes).clients[0]
    method = FedCC(majority_threshold=threshold, majority_empty=empty, entropy_space=space)
    bias, logits = normal(seed, 1, classes + 1, scale=3.0), normal(seed + 1, 9, classes + 1, scale=6.0)
    found = method.pseudo_labels(client, bias, logits)
    assert found.shape == (9, classes + 1)
    assert (found >= 0).all()
    assert torch.allclose(found.sum(-1), torch.ones(9, dtype=found.dtype))
    assert ((found > 0).sum(-1) <= 2).all()
    majority = client.majority
    assert majority is not None
    for row, scores in zip(found[:, :-1], logits[:, :-1], strict=True):
        if row.any():
            label = int(row.argmax())
            assert majority[label]
            assert scores[label] == scores[majority].max()


# -- 5


def on(logits: Tensor, target: Tensor) -> Step:
    return Step({"public": Batch(Outputs(logits, logits), {"target": target})})


@quickly
@given(sizes, seeds)
def test_padded_is_restricted_minus_the_logarithm_of_the_known_mass(size: tuple[int, int, int], seed: int) -> None:
    _, n, c = size
    z, q = normal(seed, n, c + 1, scale=3.0), normal(seed + 1, n, c).softmax(-1)
    for i in range(n):  # the mean over a batch of one is the sample's own value
        padded = Distill("public")(on(z[i : i + 1], F.pad(q[i : i + 1], (0, 1))))
        restricted = Distill("public", c)(on(z[i : i + 1], q[i : i + 1]))
        known = z[i].softmax(-1)[:-1].sum()
        assert torch.allclose(padded - restricted, -known.log(), atol=1e-9)


@quickly
@given(sizes, seeds)
def test_kl_and_soft_cross_entropy_have_the_same_gradient(size: tuple[int, int, int], seed: int) -> None:
    _, n, c = size
    z = normal(seed, n, c + 1, scale=3.0).requires_grad_()
    q = F.pad(normal(seed + 1, n, c).softmax(-1), (0, 1))
    step = on(z, q)
    (kl,) = torch.autograd.grad(Distill("public")(step), z)
    (ce,) = torch.autograd.grad(SoftCrossEntropy("public")(step), z)
    assert torch.allclose(kl, ce, atol=1e-12)
    assert torch.allclose(kl, (z.detach().softmax(-1) - q) / n, atol=1e-12)


# -- 6


@dataclass(frozen=True)
class Supervised(FedCC):
    """FedCC whose third phase is E more epochs of the second."""

    async def client(self, c: Client, down: Predictions | None) -> Predictions:
        await c.fit("fit", CrossEntropy("private"), private=c.private)
        await c.fit("refine", CrossEntropy("private"), private=c.private)
        return Predictions((await c.predict(c.public)).logits.softmax(-1))


ALONE = FedCC(lam=0.0, refine_joint_batch=False)


@pytest.mark.parametrize("labels", [[[0] * 20, [1, 2] * 6], [[0, 1, 2] * 20, [1]]])
def test_without_the_public_loss_refine_is_supervised_training(labels: list[list[int]]) -> None:
    """Weights, running statistics and their counters, to the bit."""
    few = {"publics": 1}  # so that an epoch is that of the private samples
    a, b = Tiny(ALONE, labels=labels, **few).run(1), Tiny(Supervised(), labels=labels, **few).run(1)
    for one, other in zip(a.clients, b.clients, strict=True):
        assert any("running" in name for name in one.model.state)
        assert same(one.model.state, other.model.state)
    assert torch.equal(a.rounds[0].ups[0].values, b.rounds[0].ups[0].values)


def test_a_public_forward_would_move_the_running_statistics() -> None:
    """The reason why the property asks for separate forwards: the same weights are not even reached."""
    a, b = Tiny(replace(ALONE, refine_joint_batch=True), publics=8).run(1), Tiny(Supervised(), publics=8).run(1)
    name = next(n for n in a.clients[0].model.state if "running_mean" in n)
    assert not torch.allclose(a.clients[0].model.state[name], b.clients[0].model.state[name])


# -- 7


def test_the_first_round_has_no_sync_and_the_second_has() -> None:
    tiny = Tiny(FedCC())
    asked = record(tiny)
    tiny.run(2)
    assert [f.key.phase for f in asked.fits(client=0, round=1)] == ["fit", "refine"]
    assert [f.key.phase for f in asked.fits(client=0, round=2)] == ["sync", "fit", "refine"]


def test_the_first_round_depends_on_no_message() -> None:
    """The server's word for round one is None for every client, and the uplinks are those of a client on its own."""
    tiny = Tiny(FedCC())
    assert tiny.ask(FedCC().start(tiny.server)) == {0: None, 1: None, 2: None}
    ups = tiny.run(1).rounds[0].ups
    for k, own in enumerate(Tiny(FedCC()).clients):
        alone = Tiny(FedCC())
        client = alone.clients[k]
        client.begin(1)
        assert client.id == own.id
        assert torch.equal(alone.ask(FedCC().client(client, None)).values, ups[k].values)


# -- 8


@quickly
@given(sizes)
def test_when_all_say_unknown_the_target_is_uniform(size: tuple[int, int, int]) -> None:
    k, n, c = size
    v = torch.zeros(k, n, c + 1)
    v[..., -1] = 1
    assert torch.equal(targets(v), torch.full((n, c), 1 / c))
    assert aggregate(v).isfinite().all()
    assert torch.allclose(trust(v), torch.full((k, n), 1 / k))


def test_a_sample_nobody_knows_disturbs_no_other() -> None:
    v = normal(0, 3, 4, 5).softmax(-1)
    w = v.clone()
    w[:, 2] = torch.tensor([0, 0, 0, 0, 1.0])
    keep = [0, 1, 3]
    assert torch.equal(targets(w)[keep], targets(v)[keep])
    assert torch.equal(targets(w)[2], torch.full((4,), 0.25, dtype=torch.float64))


@quickly
@given(votes(), seeds)
def test_the_order_of_clients_does_not_matter(v: Tensor, seed: int) -> None:
    order = torch.randperm(len(v), generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(targets(v[order]), targets(v), atol=1e-12)


# -- 9


@quickly
@given(votes(), seeds)
def test_relabelled_classes_relabel_the_targets(v: Tensor, seed: int) -> None:
    order = torch.randperm(v.shape[-1] - 1, generator=torch.Generator().manual_seed(seed))
    last = torch.tensor([v.shape[-1] - 1])
    assert torch.allclose(targets(v[..., torch.cat([order, last])]), targets(v)[:, order], atol=1e-12)


@quickly
@given(st.integers(2, 8), seeds)
def test_relabelled_classes_relabel_the_pseudo_labels(classes: int, seed: int) -> None:
    client = Tiny(FedCC(), labels=[[0]], classes=classes).clients[0]
    order = torch.randperm(classes, generator=torch.Generator().manual_seed(seed))
    whole = torch.cat([order, torch.tensor([classes])])  # "unknown" stays last
    bias, logits = normal(seed, 1, classes + 1, scale=3.0), normal(seed + 1, 5, classes + 1, scale=6.0)
    before = FedCC().pseudo_labels(client, bias, logits)
    after = FedCC().pseudo_labels(client, bias[:, whole], logits[:, whole])
    assert torch.allclose(after, before[:, whole], atol=1e-12)


def test_a_whole_round_with_relabelled_classes() -> None:
    """Exchange two classes in the private labels and in the last layer: all that is shared is exchanged."""
    order = torch.tensor([1, 0, 2])
    rows = torch.tensor([1, 0, 2, 3])
    a = Tiny(FedCC(), labels=[[0, 1] * 10, [1, 2] * 10])
    b = Tiny(FedCC(), labels=[[0, 1] * 10, [1, 2] * 10])
    for client in b.clients:
        client.private = client.private.with_(y=order[client.private["y"]])
        head = {n: v[rows] for n, v in client.model.state.items() if n.startswith("head")}
        client.model = client.model.with_(head)
    one, other = a.run(2).rounds[-1], b.run(2).rounds[-1]
    assert torch.allclose(other.ups[0].values, one.ups[0].values[:, rows], atol=1e-9)
    assert torch.allclose(other.downs[0].values, one.downs[0].values[:, order], atol=1e-9)


# -- 10


@quickly
@given(votes())
def test_inference_and_targets_agree_on_the_best_class(v: Tensor) -> None:
    scores, renormalised = aggregate(v)[:, :-1], targets(v)
    top = scores.topk(2, -1).values
    clear = top[:, 0] > top[:, 1] * (1 + 1e-9)  # no ties
    assert torch.equal(scores.argmax(-1)[clear], renormalised.argmax(-1)[clear])


def test_prediction_is_the_aggregate_over_the_known_classes() -> None:
    tiny = Tiny(FedCC(), factories=(Mlp(), Mlp(12))).run(1)
    outputs = [tiny.ask(_logits(c, tiny)) for c in tiny.clients]
    expected = aggregate(torch.stack([o.softmax(-1) for o in outputs]))[:, :3]
    assert torch.equal(tiny.scores(), expected)
    assert tiny.scores().shape == (24, 3)


async def _logits(client: Client, tiny: Tiny) -> Tensor:
    return (await client.predict(tiny.test.only("x"))).logits


def test_pseudo_labels_never_hold_minus_infinity() -> None:
    found = pseudo_labels(torch.zeros(2), torch.zeros(2, 3), torch.tensor([True, False, False]))
    assert found.isfinite().all()
