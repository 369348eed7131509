"""Every option of FedCC changes what it should, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcc.core.messages import Predictions
from fedcc.core.model import Arch, Outputs
from fedcc.core.requests import Fit, Predict, Recalibrate, Recipe
from fedcc.core.rng import Key
from fedcc.core.roles import Client
from fedcc.core.samples import Samples, View
from fedcc.core.step import Batch, Step
from fedcc.losses import CrossEntropy, Distill
from fedcc.methods import FedCC, FedMD
from fedcc.methods.abstention import aggregate, entropy, featureless, sync_target, targets, trust
from recording import Recording, changed, record, same
from tiny import DIMENSIONS, Mlp, Tiny

MIXED = [[0, 1] * 10, [1, 2] * 6]


def ran(method: FedCC, rounds: int = 2, **settings: Any) -> tuple[Tiny, Recording]:
    tiny = Tiny(method, **{"labels": MIXED} | settings)
    recording = record(tiny)
    tiny.run(rounds)
    return tiny, recording


def shared(method: FedCC) -> Tensor:
    """What the second client shares after the second round."""
    found: Tensor = Tiny(method, labels=MIXED).run(2).rounds[-1].ups[1].values
    return found


def test_every_option_moves_a_run() -> None:
    """No option is decoration: another value of any of them changes what the clients share after two rounds."""
    others: dict[str, Any] = {
        "lam": 0.7,
        "delta": 0.4,
        "majority_threshold": 0.4,
        "majority_source": "labels",
        "majority_empty": "alpha_zero",
        "alpha_design": "client",
        "probe_kind": "noise",
        "entropy_space": "full",
        "sync_head": "restricted",
        "fit_head": "known",
        "refine_joint_batch": False,
        "bn_recalibrate": "public",
        "trust": 0.0,
        "guard_votes": True,
    }
    assert set(others) == {f.name for f in fields(FedCC)} - {"mirror"}  # that one is for inference alone
    # settings under which the option has something to decide
    where: dict[str, dict[str, Any]] = {"majority_empty": {"majority_threshold": 0.99}}
    silent = []
    plain = shared(FedCC())
    for name, value in others.items():
        base = FedCC(**where.get(name, {}))
        before = shared(base) if name in where else plain
        if torch.equal(before, shared(replace(base, **{name: value}))):
            silent.append(name)
    assert silent == []


# -- sync


def test_sync_head_padded_puts_zero_at_unknown() -> None:
    q = torch.tensor([[0.2, 0.8], [0.6, 0.4]])
    assert torch.equal(sync_target(q, "padded"), torch.tensor([[0.2, 0.8, 0.0], [0.6, 0.4, 0.0]]))
    assert torch.equal(sync_target(q, "restricted"), q)


@pytest.mark.parametrize(("head", "loss"), [("padded", Distill("public")), ("restricted", Distill("public", 3))])
def test_sync_head_chooses_the_softmax(head: Any, loss: Distill) -> None:
    _, asked = ran(FedCC(sync_head=head))
    for fit in asked.fits("sync"):
        assert fit.loss == loss
        assert fit.streams["public"]["target"].shape == (24, 4 if head == "padded" else 3)


def test_sync_head_restricted_leaves_the_unknown_row_alone() -> None:
    rows = {}
    for head in ("padded", "restricted"):
        _, asked = ran(FedCC(sync_head=head))
        fit, answer = asked.fitted("sync", client=0)[0]
        rows[head] = torch.equal(fit.model.state["head.weight"][-1], answer.model.state["head.weight"][-1])
    assert rows == {"padded": False, "restricted": True}


@pytest.mark.parametrize("classes", [2, 3, 7, 10])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_sync_zeroes_what_nobody_knew(classes: int, dtype: torch.dtype) -> None:
    """Also after the targets crossed the wire in half precision."""
    votes = torch.randn(3, 4, classes + 1, generator=torch.Generator().manual_seed(0)).softmax(-1)
    votes[:, 1] = F.one_hot(torch.tensor(classes), classes + 1)
    sent = targets(votes).to(dtype).float()
    masked = sync_target(sent, "restricted")
    assert torch.equal(masked[1], torch.zeros(classes))
    assert torch.equal(masked[[0, 2, 3]], sent[[0, 2, 3]])


def test_the_mask_of_what_nobody_knew_reaches_the_fit() -> None:
    tiny = Tiny(FedCC(), labels=MIXED)
    asked = record(tiny)
    sent = torch.full((24, 3), 1 / 3, dtype=torch.float64)
    tiny.ask(tiny.method.client(tiny.clients[0], Predictions(sent)))
    assert torch.equal(asked.fits("sync")[0].streams["public"]["target"][:, :3], torch.zeros_like(sent))


def test_what_nobody_knew_adds_neither_loss_nor_gradient() -> None:
    uniform, known = (
        torch.full((1, 3), 1 / 3, dtype=torch.float64),
        torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64),
    )
    target = sync_target(torch.cat([uniform, known]), "padded")
    z = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    loss = Distill("public")(Step({"public": Batch(Outputs(z, z), {"target": target})}))
    alone = Distill("public")(Step({"public": Batch(Outputs(z[1:], z[1:]), {"target": target[1:]})}))
    (grad,) = torch.autograd.grad(loss, z)
    assert torch.equal(grad[0], torch.zeros(4, dtype=torch.float64))
    assert grad[1].abs().sum() > 0
    assert torch.allclose(loss, alone / 2)


# -- fit


def test_fit_head_known_gives_the_unknown_row_no_gradient() -> None:
    z = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    step = Step({"private": Batch(Outputs(z, z), {"y": torch.tensor([0, 1, 2, 1, 0])})})
    (known,) = torch.autograd.grad(CrossEntropy("private", 3)(step), z)
    (full,) = torch.autograd.grad(CrossEntropy("private")(step), z)
    assert torch.equal(known[:, -1], torch.zeros(5, dtype=torch.float64))
    assert (full[:, -1] > 0).all()


@pytest.mark.parametrize(("head", "moves"), [("full", True), ("known", False)])
def test_fit_head_known_leaves_the_unknown_row_alone(head: Any, moves: bool) -> None:
    _, asked = ran(FedCC(fit_head=head), rounds=1)
    for fit, answer in asked.fitted("fit"):
        for name in ("head.weight", "head.bias"):
            before, after = fit.model.state[name], answer.model.state[name]
            assert torch.equal(before[-1], after[-1]) is not moves
            assert not torch.equal(before[:-1], after[:-1])
    assert all(f.loss.terms[0][1] == CrossEntropy("private") for f in asked.fits("refine"))  # refine always sees it


# -- lengths


def test_no_epochs_at_all_leaves_the_model_as_it_is() -> None:
    tiny = Tiny(FedCC(), labels=MIXED, recipe=Recipe(epochs=0))
    before = [c.model for c in tiny.clients]
    tiny.run(2)
    assert all(same(a.state, c.model.state) for a, c in zip(before, tiny.clients, strict=True))


@pytest.mark.parametrize(
    ("private", "steps"),
    [(40, 10), (9, 6)],
)
def test_an_epoch_of_refine_is_that_of_the_longer_stream(private: int, steps: int) -> None:
    """Batches of 8 for two epochs: 24 public samples are 6 steps, 40 private ones 10, 9 private ones 4."""
    _, asked = ran(FedCC(), rounds=1, labels=[[0] * private])
    assert asked.fitted("refine")[0][1].steps == steps


@pytest.mark.parametrize("joint", [True, False])
def test_refine_joint_batch(joint: bool) -> None:
    _, asked = ran(FedCC(refine_joint_batch=joint), rounds=1)
    assert {f.joint for f in asked.fits("refine")} == {joint}
    assert {f.joint for f in asked.fits("fit")} == {True}


@pytest.mark.parametrize("lam", [0.0, 0.2, 3.0])
def test_lam_weighs_the_public_loss_alone(lam: float) -> None:
    _, asked = ran(FedCC(lam=lam), rounds=1)
    loss = asked.fits("refine")[0].loss
    z = torch.randn(4, 4, dtype=torch.float64)
    step = Step(
        {
            "private": Batch(Outputs(z, z), {"y": torch.tensor([0, 1, 2, 0])}),
            "public": Batch(Outputs(z, z), {"target": z.softmax(-1)}),
        }
    )
    own = F.cross_entropy(z, torch.tensor([0, 1, 2, 0]))
    public = -(z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean()
    assert torch.allclose(loss(step), own + lam * public)


# -- majority


def client_of(labels: list[int], classes: int = 3) -> Client:
    return Tiny(FedCC(), labels=[labels], classes=classes).clients[0]


def test_majority_source_labels_counts_instead_of_probing() -> None:
    client = client_of([0] * 97 + [1] * 3 + [2] * 0)
    p = torch.tensor([0.001, 0.001, 0.998])
    assert FedCC().majority(client, p).tolist() == [False, False, True]
    assert FedCC(majority_source="labels").majority(client, p).tolist() == [True, True, False]
    rare = client_of([0] * 98 + [1] * 2)  # a share of exactly 2 % is not above it
    assert FedCC(majority_source="labels").majority(rare, p).tolist() == [True, False, False]


def test_majority_source_labels_leaves_the_entropy_of_the_probe() -> None:
    bias, logits = torch.tensor([[3.0, 1.0, 0.0, 0.0]]), torch.zeros(2, 4)
    a, b = client_of([0, 1] * 5), client_of([0, 1] * 5)
    FedCC().pseudo_labels(a, bias, logits)
    FedCC(majority_source="labels").pseudo_labels(b, bias, logits)
    assert a.log["w_l"] == b.log["w_l"]
    assert (a.log["majority"], b.log["majority"]) == (3, 2)


@pytest.mark.parametrize(("space", "w_l"), [("known", 0.6959182), ("full", 0.6974475)])
def test_probe_kind_labels_takes_p_from_the_label_shares(space: Any, w_l: float) -> None:
    """Shares 1/2, 1/2, 0, by hand: w_l = H of 0.999 p + 0.001 / 3 (or / 4, with 0 at "unknown"), w_u = ln 2."""
    client = client_of([0, 1] * 5)
    logits = torch.tensor([[0.0, 60.0, 90.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    found = FedCC(probe_kind="labels", entropy_space=space).pseudo_labels(client, None, logits)
    assert client.log["majority"] == 2
    assert (client.log["w_l"], client.log["w_u"]) == pytest.approx((w_l, 0.6931472), abs=1e-6)
    a = w_l / (w_l + 0.6931472)  # the first sample has entropy 0; the second has more than w_l
    assert found.tolist() == [pytest.approx([0, a, 0, 1 - a], abs=1e-6), [0, 0, 0, 1]]


def test_probe_kind_labels_asks_for_no_probe() -> None:
    tiny, asked = ran(FedCC(probe_kind="labels"), rounds=1)
    predicted = [r for g in asked.groups for r in g if isinstance(r, Predict)]
    assert all(r.samples is tiny.public for r in predicted)
    assert [c.log["w_l"] for c in tiny.clients] == pytest.approx([0.6959182] * 2, abs=1e-6)  # two of three classes each


def test_majority_empty_argmax_trusts_one_class() -> None:
    client = client_of([0], classes=60)
    logits = torch.zeros(4, 61)
    logits[:, 5] = 30.0
    found = FedCC().pseudo_labels(client, torch.zeros(1, 61), logits)
    assert client.log["majority"] == 1
    assert client.log["majority_empty"] == 1
    assert torch.allclose(found[:, 0], torch.full((4,), 0.5), atol=0.01)  # the first class is the probe's argmax


def test_majority_empty_alpha_zero_abstains_from_everything() -> None:
    client = client_of([0], classes=60)
    logits = torch.zeros(4, 61)
    logits[:, 5] = 30.0
    found = FedCC(majority_empty="alpha_zero").pseudo_labels(client, torch.zeros(1, 61), logits)
    assert torch.equal(found, F.one_hot(torch.full((4,), 60), 61).float())
    assert client.log["majority"] == 0
    assert "majority_empty" not in client.log


def test_majority_classes_are_found_anew_every_round() -> None:
    first, second = torch.tensor([0.98, 0.01, 0.01]), torch.tensor([0.01, 0.01, 0.98])
    client, method = client_of([0]), FedCC()
    assert method.majority(client, first).tolist() == [True, False, False]
    client.begin(2)
    assert method.majority(client, second).tolist() == [False, False, True]


def test_majority_threshold() -> None:
    p = torch.tensor([0.5, 0.3, 0.2])
    assert [int(FedCC(majority_threshold=t).majority(client_of([0]), p).sum()) for t in (0.0, 0.2, 0.4)] == [3, 2, 1]


def test_delta_smooths_the_probe() -> None:
    client = client_of([0])
    bias = torch.tensor([[40.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    found = []
    for delta in (0.0, 1e-3, 1.0):
        FedCC(delta=delta).pseudo_labels(client, bias, torch.zeros(1, 4, dtype=torch.float64))
        found.append(client.log["w_l"])
    assert found == pytest.approx([0.0, 0.0060040, 1.0986123], abs=1e-6)


# -- entropies


def test_entropy_space() -> None:
    bias = torch.tensor([[2.0, 1.0, 0.0, 3.0]], dtype=torch.float64)
    logits = torch.tensor([[5.0, 0.0, 0.0, 4.0]], dtype=torch.float64)
    for space, size in (("known", 3), ("full", 4)):
        client = client_of([0])
        found = FedCC(entropy_space=space).pseudo_labels(client, bias, logits)
        p = bias[0, :size].softmax(-1)
        w_l = float(entropy((1 - 1e-3) * p + 1e-3 / size))
        h = float(entropy(logits[0, :size].softmax(-1)))
        assert client.log["w_l"] == pytest.approx(w_l)
        assert client.log["majority"] == 3  # unknown is never one of them, however probable
        assert float(found[0, 0]) == pytest.approx((w_l - min(w_l, h)) / w_l)
        assert found.shape == (1, 4)


# -- alpha and trust


@pytest.mark.parametrize(
    ("design", "expected"),
    [("sample", [0.24181, 0.0]), ("client", [0.24181, 0.24181]), ("one", [1.0, 1.0])],
)
def test_alpha_design(design: Any, expected: list[float]) -> None:
    """A probe that is even on two of ten classes; a sample of which the model is sure, and one of which it is not."""
    bias = torch.full((1, 11), -80.0, dtype=torch.float64)
    bias[0, :2] = 0.0
    logits = torch.zeros(2, 11, dtype=torch.float64)
    logits[0, 1] = 80.0
    client = client_of([0, 1], classes=10)
    found = FedCC(alpha_design=design).pseudo_labels(client, bias, logits)
    assert found[:, :2].sum(-1).tolist() == pytest.approx(expected, abs=1e-5)
    assert found[:, -1].tolist() == pytest.approx([1 - a for a in expected], abs=1e-5)
    assert found[0, 0] == 0
    assert client.log["alpha"] == pytest.approx(sum(expected) / 2, abs=1e-5)


def test_alpha_design_one_still_abstains_from_everything_without_a_majority() -> None:
    method = FedCC(alpha_design="one", majority_empty="alpha_zero", majority_threshold=1.0)
    found = method.pseudo_labels(client_of([0]), torch.zeros(1, 4), torch.zeros(2, 4))
    assert found.tolist() == [[0, 0, 0, 1]] * 2


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 4.0])
def test_trust_is_the_exponent_of_the_known_mass(exponent: float) -> None:
    votes = torch.tensor([[[0.5, 0.3, 0.2]], [[0.1, 0.1, 0.8]], [[0.0, 0.0, 1.0]]], dtype=torch.float64)
    a = [0.8, 0.2, 0.0]
    weights = [x**exponent for x in a]
    total = sum(weights)
    assert trust(votes, exponent)[:, 0].tolist() == pytest.approx([w / total for w in weights])
    mixed = [sum(w * float(v[0, c]) for w, v in zip(weights, votes, strict=True)) / total for c in range(3)]
    assert aggregate(votes, exponent)[0].tolist() == pytest.approx(mixed)
    assert targets(votes, exponent)[0].tolist() == pytest.approx([m / sum(mixed[:2]) for m in mixed[:2]])


def test_trust_is_finite_where_nearly_all_abstain() -> None:
    votes = torch.tensor([[[2e-5, 0.0, 1.0]], [[0.0, 1e-5, 1.0]]])
    assert trust(votes, 4.0)[:, 0].tolist() == pytest.approx([16 / 17, 1 / 17])
    assert trust(torch.tensor([[[0.0, 0.0, 1.0]]] * 2), 4.0)[:, 0].tolist() == [0.5, 0.5]
    least = torch.tensor([[[1e-12, 0.0, 1.0]], [[0.0, 5e-13, 1.0]]], dtype=torch.float64)
    assert trust(least)[:, 0].tolist() == pytest.approx([2 / 3, 1 / 3])
    assert trust(least / 2)[:, 0].tolist() == [0.5, 0.5]


def test_a_whole_number_becomes_the_number_that_the_option_holds() -> None:
    assert [type(value) for value in (FedCC(lam=1).lam, FedMD(digest_epochs=1).digest_epochs)] == [float, int]


def test_trust_reaches_the_targets_and_the_prediction() -> None:
    rounds = {e: Tiny(FedCC(trust=e), labels=MIXED).run(1) for e in (0.0, 1.0)}
    for exponent, tiny in rounds.items():
        votes = torch.stack([up.values for up in tiny.rounds[-1].ups.values()])
        assert torch.equal(tiny.rounds[-1].downs[0].values, targets(votes, exponent))
    scores = [tiny.scores() for tiny in rounds.values()]
    assert not torch.equal(*scores)


# -- probe


def image_client(view: View, dtype: torch.dtype = torch.uint8) -> Client:
    public = Samples({"x": torch.zeros(3, 2, 4, 4, dtype=dtype)}, view)
    arch = Arch((Mlp(),), 4, (2, 4, 4))
    return Client(public=public, classes=3, recipe=Recipe(), key=Key(0, 1, 5), id=5, arch=arch, private=public)


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [("cdmad_ones", 1.0, 1.0), ("white", 2.0, 3.75), ("black", -2.0, -1.25), ("mean", 0.0, 0.0)],
)
def test_probe_kind_is_a_colour_in_the_space_the_network_sees(kind: Any, first: float, second: float) -> None:
    probe = featureless(image_client(View(1 / 255, (0.5, 0.25), (0.25, 0.2), pad=2, flip=True)), kind)
    seen = probe.view.clean(probe.x)
    assert seen.shape == (1, 2, 4, 4)
    assert torch.allclose(seen[0, 0], torch.full((4, 4), first))
    assert torch.allclose(seen[0, 1], torch.full((4, 4), second))


def test_probe_kind_noise_is_uniform_between_black_and_white() -> None:
    client = image_client(View(1 / 255, (0.5, 0.25), (0.25, 0.2)))
    seen = featureless(client, "noise").x
    assert seen.shape == (100, 2, 4, 4)
    for channel, low, high in ((0, -2.0, 2.0), (1, -1.25, 3.75)):
        values = seen[:, channel]
        assert low <= values.min() < low + 0.1
        assert high - 0.1 < values.max() <= high
        assert float(values.mean()) == pytest.approx((low + high) / 2, abs=0.15)
    draws = client.key.of(phase="probe").generator().random((100, 2, 4, 4))
    assert torch.equal(seen, client.public.view.normalised(torch.from_numpy(draws)))
    client.begin(2)
    assert not torch.equal(seen, featureless(client, "noise").x)


def test_probe_kind_white_without_a_normalisation() -> None:
    client = image_client(View(1 / 16))
    assert featureless(client, "white").x.unique().tolist() == [1.0]
    assert featureless(client, "black").x.unique().tolist() == [0.0]


@pytest.mark.parametrize("kind", ["cdmad_ones", "white", "black", "mean", "noise"])
def test_probe_kind_reaches_the_network(kind: Any) -> None:
    tiny, asked = ran(FedCC(probe_kind=kind), rounds=1)
    probes = [r for g in asked.groups for r in g if isinstance(r, Predict) and r.samples is not tiny.public]
    assert len(probes) == 2
    assert {len(p.samples) for p in probes} == {100 if kind == "noise" else 1}
    expected = featureless(tiny.clients[0], kind)
    assert any(torch.equal(p.samples.x, expected.x) for p in probes)


@dataclass(frozen=True)
class Words:
    """A factory: the mean of word vectors, and a linear layer."""

    def __call__(self, outputs: int) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(9, 5), nn.Linear(5, outputs))


@pytest.mark.parametrize("kind", ["cdmad_ones", "white", "black", "mean", "noise"])
def test_probe_kind_for_inputs_that_are_indices(kind: Any) -> None:
    """A network that takes integers gets an integer probe."""
    method = FedCC(probe_kind=kind)
    tiny = Tiny(method, labels=[[0, 1] * 4])
    words = torch.arange(24 * 4).view(24, 4) % 9
    client = Client(
        public=Samples({"x": words}),
        classes=3,
        recipe=tiny.recipe,
        key=Key(0, 1, 0),
        id=0,
        arch=Arch((Words(),), 4, (4,), tokens=True),
        private=Samples({"x": words[:8], "y": torch.arange(8) % 3}),
    )
    tiny.cohort = type(tiny.cohort)(method, [client], tiny.executor)
    assert tiny.ask(method.client(client, None)).values.isfinite().all()
    probe = featureless(client, kind).x
    if kind == "noise":
        draws = client.key.of(phase="probe").generator().integers(0, 9, (100, 4))
        assert torch.equal(probe, torch.from_numpy(draws))
    else:
        assert probe.tolist() == [[int(kind in ("cdmad_ones", "white"))] * 4]


# -- BatchNorm at the end


def test_bn_recalibrate_moves_running_statistics_alone() -> None:
    tiny, asked = ran(FedCC(bn_recalibrate="public"), rounds=1)
    pairs = [
        (request, answer)
        for group, answers in zip(asked.groups, asked.answers, strict=True)
        for request, answer in zip(group, answers, strict=True)
        if isinstance(request, Recalibrate)
    ]
    assert len(pairs) == 2
    for request, answer in pairs:
        moved = changed(request.model.state, answer.state)
        assert {n.rpartition(".")[2] for n in moved} == {"running_mean", "running_var"}
    plain, _ = ran(FedCC(), rounds=1)
    for a, b in zip(tiny.clients, plain.clients, strict=True):
        assert all(torch.equal(p, b.model.state[n]) for n, p in a.model.state.items() if "running" not in n)


def test_bn_recalibrate_ends_at_the_statistics_of_the_public_samples() -> None:
    tiny, _ = ran(FedCC(bn_recalibrate="public"), rounds=1)
    for client in tiny.clients:
        state = client.model.state
        entering = tiny.public.x.double() @ state["trunks.0.0.weight"].T
        assert torch.allclose(state["trunks.0.1.running_mean"], entering.mean(0), atol=1e-6)
        assert torch.allclose(state["trunks.0.1.running_var"], entering.var(0), atol=1e-6)
        assert not torch.allclose(
            state["trunks.0.1.running_mean"], client.private.x.double().mean(0) @ state["trunks.0.0.weight"].T, atol=0.3
        )


def test_bn_recalibrate_none_asks_for_nothing() -> None:
    _, asked = ran(FedCC(), rounds=1)
    assert not any(isinstance(r, Recalibrate) for group in asked.groups for r in group)


# -- what is shared


def test_what_a_client_shares_and_logs() -> None:
    tiny, asked = ran(FedCC(), rounds=1)
    shared: Predictions = tiny.rounds[0].ups[0]
    assert shared.values.shape == (24, 4)
    assert torch.allclose(shared.values.sum(-1), torch.ones(24, dtype=torch.float64))
    assert tiny.clients[0].log["unknown"] == pytest.approx(float(shared.values[:, -1].mean()))
    assert {"majority", "w_l", "w_u", "alpha", "unknown"} <= tiny.clients[0].log.keys()
    last = asked.fitted("refine", client=0)[-1][1].model
    assert torch.equal(tiny.ask(_probabilities(last, tiny.public)), shared.values)


def test_what_the_server_sends_are_the_targets_of_its_votes() -> None:
    tiny, _ = ran(FedCC())
    for done in tiny.rounds:
        expected = targets(torch.stack([done.ups[k].values for k in (0, 1)]))
        assert expected.shape == (24, 3)
        assert all(torch.equal(down.values, expected) for down in done.downs.values())
        assert set(done.downs) == {0, 1}
    lone = tiny.ask(FedCC().server(tiny.server, {1: tiny.rounds[-1].ups[1]}))
    assert torch.equal(lone[0].values, targets(tiny.rounds[-1].ups[1].values[None]))


async def _probabilities(model: Any, samples: Samples) -> Tensor:
    return (await Predict(model, samples)).logits.softmax(-1)


def test_refine_starts_from_the_fit_and_keeps_its_labels() -> None:
    """Phase three starts at theta_0, and the labels are those of theta_0, fixed for the phase (F-6)."""
    tiny, asked = ran(FedCC(), rounds=1)
    fitted, refine = asked.fitted("fit", client=0)[0][1], asked.fits("refine", client=0)[0]
    assert refine.model is fitted.model
    assert isinstance(refine, Fit)
    client = Tiny(FedCC(), labels=MIXED).clients[0]
    bias = tiny.ask(_logits(fitted.model, featureless(client, "cdmad_ones")))
    clean = tiny.ask(_logits(fitted.model, tiny.public))
    assert torch.equal(refine.streams["public"]["target"], FedCC().pseudo_labels(client, bias, clean))
    assert refine.streams["public"].shape == (DIMENSIONS,)


async def _logits(model: Any, samples: Samples) -> Tensor:
    return (await Predict(model, samples)).logits
