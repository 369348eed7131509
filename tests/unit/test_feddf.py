"""FedDF: the teacher, the students and the reductions (Lin et al., NeurIPS 2020)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.func import functional_call

from fedcc.core.messages import Weights
from fedcc.core.model import Model
from fedcc.core.requests import Predict, Recipe
from fedcc.core.rng import Key
from fedcc.gradients import Clip
from fedcc.losses import Distill
from fedcc.methods import FedAvg, FedDF
from fedcc.methods.feddf import divergence, ensemble, holdout
from fedcc.nets.network import build
from steps import close, draw, equal, servers, watch
from tiny import Mlp, Tiny

TWO = (Mlp(8), Mlp(12))
UNEQUAL = ((0,) * 20, (1, 2) * 4, (2, 0, 1) * 10, (1,) * 9)


def softmax(row: list[float]) -> list[float]:
    powers = [math.exp(v) for v in row]
    return [p / sum(powers) for p in powers]


@pytest.mark.parametrize("average", ["logits", "probs"])
def test_the_teacher_is_the_mean_of_all_clients(average: str) -> None:
    z = draw(0, 3, 5, 4, scale=2.0)
    for n, row in enumerate(ensemble(z, average).tolist()):
        votes = [z[k, n].tolist() for k in range(3)]
        votes = votes if average == "logits" else [softmax(v) for v in votes]
        mean = [sum(v[c] for v in votes) / 3 for c in range(4)]
        assert row == pytest.approx(softmax(mean) if average == "logits" else mean)


@pytest.mark.parametrize("average", ["logits", "probs"])
def test_a_constant_added_to_one_teachers_logits_changes_nothing(average: str) -> None:
    z = draw(1, 3, 5, 4)
    shifted = z.clone()
    shifted[1] += 7.5
    torch.testing.assert_close(ensemble(shifted, average), ensemble(z, average))


def test_no_steps_and_one_architecture_is_fedavg() -> None:
    fused, averaged = (Tiny(method, labels=UNEQUAL).run(3) for method in (FedDF(steps=0), FedAvg()))
    assert close(fused.server.models["global"].state, averaged.server.models["global"].state)
    torch.testing.assert_close(fused.scores(), averaged.scores())
    distilled = Tiny(FedDF(), labels=UNEQUAL).run(3)
    assert not close(distilled.server.models["global"].state, averaged.server.models["global"].state, 1e-3)


def test_identical_clients_leave_nothing_to_distil() -> None:
    tiny = Tiny(FedDF(), factories=(Mlp(8, norm=False),))
    fits = watch(tiny)
    down = tiny.ask(tiny.method.start(tiny.server))[0]
    tiny.ask(tiny.method.server(tiny.server, {k: Weights(down.state, 10) for k in range(3)}))
    (fit,) = servers(fits)
    network = build(fit.model.arch, Key(0)).double()
    params = {name: v.clone().requires_grad_() for name, v in fit.model.state.items()}
    z = functional_call(network, params, (tiny.public.x.double(),)).logits
    target = fit.streams["public"]["target"]
    kl = (target * (target.log() - z.log_softmax(-1))).sum(-1).mean()
    kl.backward()
    assert abs(float(kl.detach())) < 1e-12
    assert max(float(p.grad.abs().max()) for p in params.values() if p.grad is not None) < 1e-7


def test_teachers_are_not_touched_and_all_of_them_teach() -> None:
    tiny = Tiny(FedDF(), factories=TWO, labels=UNEQUAL).run(1)
    fits = watch(tiny)
    before = {k: {n: v.clone() for n, v in up.state.items()} for k, up in tiny.rounds[0].ups.items()}
    tiny.ask(tiny.method.server(tiny.server, tiny.rounds[0].ups))
    assert all(equal(before[k], up.state) for k, up in tiny.rounds[0].ups.items())
    z = torch.stack([tiny.executor.predict(c.predict(tiny.public)).logits for c in tiny.clients])
    for fit in servers(fits):
        torch.testing.assert_close(fit.streams["public"]["target"], z.mean(0).softmax(-1))


def test_each_student_starts_from_its_groups_average_and_goes_to_its_clients() -> None:
    tiny = Tiny(FedDF(), factories=TWO, labels=UNEQUAL)
    fits = watch(tiny)
    tiny.run(1)
    ups, downs = tiny.rounds[0].ups, tiny.rounds[0].downs
    for i, fit in enumerate(servers(fits)):
        members = [ups[k] for k in (i, i + 2)]
        total = sum(up.samples for up in members)
        expected = {n: sum(up.samples / total * up.state[n] for up in members) for n in members[0].state}
        assert close(fit.model.floating, expected)
        assert isinstance(fit.loss, Distill)
        assert fit.recipe.schedule == "cosine"
        assert fit.gradient == Clip(5.0)
        for k in (i, i + 2):
            assert equal(downs[k].state, tiny.server.models[f"group {i}"].floating)
        assert not close(downs[i].state, expected, 1e-3)
    assert tiny.server.models["global"].arch.trunks == (TWO[1],)
    student = tiny.executor.predict(Predict(tiny.server.models["group 1"], tiny.test))
    torch.testing.assert_close(tiny.scores(), student.logits)


def test_distillation_brings_the_student_nearer_to_the_teacher() -> None:
    tiny = Tiny(FedDF(epochs=30), labels=UNEQUAL)
    fits = watch(tiny)
    tiny.run(1)
    (fit,) = servers(fits)
    public = fit.streams["public"]
    before, after = (tiny.ask(divergence(m, public)) for m in (fit.model, tiny.server.models["global"]))
    assert after < 0.5 * before


def test_an_architecture_of_which_nobody_answers_goes_on_from_its_last_student() -> None:
    tiny = Tiny(FedDF(), factories=TWO, labels=UNEQUAL).run(1)
    last = tiny.server.models["group 1"]
    fits = watch(tiny)
    downs = tiny.ask(tiny.method.server(tiny.server, {k: tiny.rounds[0].ups[k] for k in (0, 2)}))
    assert sorted(downs) == [0, 1, 2, 3]
    assert equal(servers(fits)[1].model.state, last.state)
    z = torch.stack([tiny.executor.predict(tiny.clients[k].predict(tiny.public)).logits for k in (0, 2)])
    torch.testing.assert_close(servers(fits)[1].streams["public"]["target"], z.mean(0).softmax(-1))


def test_limits_of_the_distillation() -> None:
    tiny = Tiny(FedDF(steps=7, clip=0.0))
    fits = watch(tiny)
    tiny.run(1)
    (fit,) = servers(fits)
    assert fit.steps == 7
    assert fit.gradient is None


def test_early_stopping_holds_out_a_tenth_and_keeps_the_best() -> None:
    long = Recipe(lr=0.05, batch=8, epochs=20)
    tiny = Tiny(FedDF(early_stop="kl", epochs=6), publics=40, labels=UNEQUAL, recipe=long)
    tiny.server.recipe = Recipe(lr=0.4, batch=8)  # so fast that the last student is not the best
    fits = watch(tiny)
    tiny.run(1)
    distilled = servers(fits)
    assert len(distilled) == 6
    assert [len(f.streams["public"]) for f in distilled] == [36] * 6
    assert [f.recipe.lr for f in distilled] == pytest.approx([0.2 * (1 + math.cos(math.pi * e / 6)) for e in range(6)])
    assert len({f.key.phase for f in distilled}) == 6  # new batches every epoch
    assert all(f.optimizer for f in distilled[1:])  # and Adam goes on
    kept = held_out(tiny, tiny.server.models["global"])
    assert kept == pytest.approx(tiny.server.log["kl, group 0"])
    assert kept <= min(held_out(tiny, f.model) for f in distilled) + 1e-12
    assert kept < held_out(tiny, distilled[0].model)
    last = tiny.executor.fit(distilled[-1]).model
    assert kept < held_out(tiny, last)
    held, rest = holdout(tiny.server, distilled[0].streams["public"].with_(i=torch.arange(36)))
    assert len(held) == 3
    assert sorted([*held["i"].tolist(), *rest["i"].tolist()]) == list(range(36))
    tiny.server.begin(5)
    again, _ = holdout(tiny.server, distilled[0].streams["public"].with_(i=torch.arange(36)))
    assert torch.equal(again["i"], held["i"])


def held_out(tiny: Tiny, model: Model) -> float:
    """A model's divergence from the teacher on the held-out samples."""
    target = ensemble(
        torch.stack([tiny.executor.predict(c.predict(tiny.public)).logits for c in tiny.clients]), "logits"
    )
    held, _ = holdout(tiny.server, tiny.public.with_(target=target))
    return float(tiny.ask(divergence(model, held)))


def test_early_stopping_returns_the_start_if_nothing_is_better_and_gives_up() -> None:
    clients = Recipe(lr=1e-2, batch=8, epochs=2)
    tiny = Tiny(FedDF(early_stop="kl", epochs=50, patience=10), labels=UNEQUAL, publics=40, recipe=clients)
    fits = watch(tiny)
    tiny.server.recipe = Recipe(lr=1e3, batch=8)
    tiny.run(1)
    distilled = servers(fits)
    assert equal(tiny.server.models["global"].state, distilled[0].model.state)
    assert len(distilled) == 2  # 5 steps an epoch: 10 without gain are the patience


def test_patience_counts_from_the_last_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    kl = iter([5.0, 4.0, 3.0] + [6.0] * 9)

    async def told(*_: Any) -> float:
        return next(kl)

    monkeypatch.setattr("fedcc.methods.feddf.divergence", told)
    tiny = Tiny(FedDF(early_stop="kl", epochs=9, patience=10), publics=40)
    fits = watch(tiny)
    tiny.run(1)
    assert [f.steps for f in servers(fits)] == [5] * 4  # two with gain, then 10 steps without
    assert equal(tiny.server.models["global"].state, servers(fits)[2].model.state)
    assert tiny.server.log["kl, group 0"] == 3.0


@pytest.mark.parametrize(("publics", "held"), [(2, 1), (12, 1), (25, 2), (40, 4)])
def test_how_many_are_held_out(publics: int, held: int) -> None:
    tiny = Tiny(FedDF(), publics=publics)
    assert [len(part) for part in holdout(tiny.server, tiny.public)] == [held, publics - held]


def test_the_norm_is_kept_from_zero() -> None:
    """As torch's clip_grad_norm_: 1e-6 is added to the norm."""
    grads = {"a": torch.tensor([3e-6, 0.0], dtype=torch.float64), "b": torch.tensor([4e-6], dtype=torch.float64)}
    found = Clip(3e-6).transform(grads)
    assert found["a"].tolist() == pytest.approx([1.5e-6, 0.0])
    assert found["b"].tolist() == pytest.approx([2e-6])
    assert torch.equal(Clip(1.0).transform(grads)["b"], grads["b"])


def test_early_stopping_continues_adams_state_so_sgd_is_refused() -> None:
    sgd = Recipe(lr=1e-2, batch=8, epochs=1, momentum=0.9)
    with pytest.raises(ValueError, match="needs optimizer=adam"):
        Tiny(FedDF(early_stop="kl"), recipe=sgd).run(1)
    Tiny(FedDF(), recipe=sgd).run(1)
