"""FedProto: prototypes, the pull to them, and the nearest one as a linear model (docs/deviations.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedcc
from fedcc.core.requests import Predict
from fedcc.core.samples import Samples
from fedcc.federation import Federation
from fedcc.losses import CrossEntropy
from fedcc.methods import FedProto, Local
from fedcc.methods.fedmr import class_means
from fedcc.methods.fedproto import PrototypeDistance, by_prototype, nearest
from private_steps import agrees_over_clients, draw, labels, same, step
from recording import record
from tiny import Mlp, Tiny

KNOWN = torch.tensor([True, False, True])


def distance(features: Tensor, y: Tensor, means: Tensor, known: Tensor = KNOWN) -> Tensor:
    constants = {"means": means, "known": known}
    return PrototypeDistance()(step(torch.zeros(len(y), 3), y, features, constants))


def test_the_pull_by_hand() -> None:
    h = draw(4, 5).requires_grad_()
    y, means = torch.tensor([0, 1, 2, 0]), draw(3, 5, seed=1)
    value = distance(h, y, means)
    gaps = torch.stack([h[i].detach() - means[c] if KNOWN[c] else torch.zeros(5).double() for i, c in enumerate(y)])
    torch.testing.assert_close(value.detach(), (gaps**2).sum() / 20)
    torch.testing.assert_close(torch.autograd.grad(value, h)[0], 2 * gaps / 20)


def test_on_its_prototype_a_sample_costs_nothing_and_elsewhere_it_does() -> None:
    means, y = draw(3, 5), torch.tensor([0, 2, 2])
    assert float(distance(means[y], y, means)) == 0
    assert float(distance(means[y] + 1e-3, y, means)) > 0
    assert float(distance(draw(3, 5, seed=1), y, means, torch.zeros(3).bool())) == 0


def test_it_ignores_the_head() -> None:
    logits = draw(4, 3).requires_grad_()
    constants = {"means": draw(3, 5), "known": KNOWN}
    value = PrototypeDistance()(step(logits, labels(4, 3), draw(4, 5).requires_grad_(), constants))
    assert torch.autograd.grad(value, logits, allow_unused=True)[0] is None


def test_many_clients_at_once() -> None:
    cases = [
        {"logits": draw(6, 3, seed=k), "y": labels(6, 3, seed=k), "features": draw(6, 5, seed=k),
         "constants": {"means": draw(3, 5, seed=9 + k), "known": KNOWN.roll(k)}}
        for k in range(3)
    ]  # fmt: skip
    agrees_over_clients(PrototypeDistance(), cases)


def test_without_the_pull_it_is_local() -> None:
    own, local = Tiny(FedProto(lam=0.0)).run(3), Tiny(Local()).run(3)
    assert all(same(a.model.state, b.model.state) for a, b in zip(own.clients, local.clients, strict=True))
    pulled = Tiny(FedProto()).run(3)
    assert not same(pulled.clients[0].model.state, local.clients[0].model.state)


def test_the_first_round_has_no_pull_and_the_next_ones_have() -> None:
    tiny = Tiny(FedProto(lam=0.3), classes=4)
    asked = record(tiny)
    tiny.run(2)
    assert {fit.loss for fit in asked.fits(round=1)} == {CrossEntropy("private")}
    (fit,) = asked.fits(client=1, round=2)
    assert fit.loss == CrossEntropy("private") + 0.3 * PrototypeDistance()
    assert torch.equal(fit.constants["means"], tiny.rounds[0].downs[1].means)
    assert fit.constants["known"].tolist() == [True, True, True, False]  # nobody has the last class


def test_a_client_sends_the_class_means_of_its_features_after_training() -> None:
    tiny = Tiny(FedProto(), labels=((0, 1) * 8, (1, 2) * 6)).run(1)
    for k, up in tiny.rounds[0].ups.items():
        client = tiny.clients[k]
        features = tiny.executor.serve([Predict(client.model, client.private)])[0].features
        for c in range(3):
            rows = features[client.private["y"] == c]
            torch.testing.assert_close(up.means[c], rows.mean(0) if len(rows) else torch.zeros(8).double())
            assert int(up.counts[c]) == len(rows)


def test_prototypes_are_means_over_the_clients_that_have_the_class() -> None:
    lists = ((0,) * 4 + (1,) * 12, (0,) * 8, (1,) * 4 + (2,))
    for weight, shares in (("equal", (0.5, 0.5)), ("counts", (1 / 3, 2 / 3))):
        tiny = Tiny(FedProto(weight=weight), labels=lists).run(1)  # type: ignore[arg-type]
        ups, down = tiny.rounds[0].ups, tiny.rounds[0].downs[0]
        torch.testing.assert_close(down.means[0], shares[0] * ups[0].means[0] + shares[1] * ups[1].means[0])
        assert down.counts.tolist() == [12, 16, 1]
        assert torch.equal(down.means[2], ups[2].means[2])  # of a single sample
        for c in (0, 1):  # inside the hull
            own = torch.stack([up.means[c] for up in ups.values() if up.counts[c]])
            assert bool(((own.amin(0) <= down.means[c] + 1e-12) & (down.means[c] <= own.amax(0) + 1e-12)).all())


def test_equal_counts_make_both_weights_the_same() -> None:
    one, other = (
        Tiny(FedProto(weight=weight), labels=((0, 1) * 4, (1, 2) * 4, (2, 0) * 4)).run(2)  # type: ignore[arg-type]
        for weight in ("equal", "counts")
    )
    torch.testing.assert_close(one.rounds[1].downs[0].means, other.rounds[1].downs[0].means)


def test_one_client_has_its_own_means_as_prototypes() -> None:
    tiny = Tiny(FedProto(), labels=((0, 1, 2) * 4,)).run(2)
    assert torch.equal(tiny.rounds[1].downs[0].means, tiny.rounds[1].ups[0].means)


def test_a_class_whose_clients_are_away_keeps_its_prototype() -> None:
    tiny = Tiny(FedProto(), options={"participation": 0.4}).run(4)  # one client of one class in each round
    before = None
    for done in tiny.rounds:
        (k,), down = done.ups, done.downs[0]
        assert torch.equal(down.means[k], done.ups[k].means[k])
        if before is not None:
            others = [c for c in range(3) if c != k]
            assert torch.equal(down.means[others], before.means[others])
            assert torch.equal(down.counts[others], before.counts[others])
        before = down
    assert before is not None
    assert int((before.counts > 0).sum()) > 1


# -- prediction


def test_the_linear_model_names_the_nearest_prototype() -> None:
    means, h = draw(6, 5), draw(200, 5, seed=1)
    known = torch.tensor([True, True, False, True, True, True])
    model = nearest(means, known)
    scores = Tiny(Local()).executor.serve([Predict(model, Samples({"x": h}))])[0].logits
    distances = torch.cdist(h, means).masked_fill(~known, torch.inf)
    assert torch.equal(scores.argmax(-1), distances.argmin(-1))
    torch.testing.assert_close((h.square().sum(-1, keepdim=True) - scores)[:, known], distances[:, known].square())


def test_it_predicts_by_mean_probabilities_and_reads_by_prototypes() -> None:
    tiny = Tiny(FedProto(), labels=((0, 1) * 10, (1, 2) * 10)).run(2)
    outputs = [tiny.executor.serve([Predict(c.model, tiny.test)])[0] for c in tiny.clients]
    torch.testing.assert_close(tiny.scores(), torch.stack([o.logits.softmax(-1) for o in outputs]).mean(0))
    trained, g = tiny.cohort.trained_models(tiny.server), tiny.rounds[-1].downs[0].means
    read = tiny.ask(by_prototype(trained, tiny.test.only("x")))
    total = sum(torch.cdist(o.features, g).square() for o in outputs)
    assert torch.equal(read.argmax(-1), total.argmin(-1))
    assert "prototype" in tiny.method.readings(tiny.public)
    votes = tiny.ask(tiny.method.votes(trained, tiny.test.only("x")))
    assert votes.known.shape == (2, 24, 3)


def test_models_that_stay_at_their_sites_have_no_features_to_read() -> None:
    tiny = Tiny(FedProto()).run(1)

    class Remote:
        def serve(self, requests: Any) -> Any:
            return [o._replace(features=o.features[:, :0]) for o in Tiny(Local()).executor.serve(requests)]

    tiny.executor = Remote()  # type: ignore[assignment]
    assert tiny.ask(by_prototype(tiny.cohort.trained_models(tiny.server), tiny.test.only("x"))) is None


def test_networks_with_other_numbers_of_features_are_refused() -> None:
    with pytest.raises(ValueError, match=r"same number of them, got Mlp\(width=8.* with 8, Mlp\(width=12.* with 12"):
        Tiny(FedProto(), factories=(Mlp(), Mlp(12))).run(1)
    Tiny(FedProto(), factories=(Mlp(), Mlp(norm=False))).run(1)


def test_a_saved_result_predicts_the_same(tmp_path: Path) -> None:
    digits = Federation.named("digits", skew="classes:3", fraction=0.3)
    result = fedcc.run(FedProto(), digits, rounds=1, epochs=1)
    assert result.rounds[-1]["readings"]["prototype"] > 0
    again = fedcc.load(result.save(tmp_path))
    assert torch.equal(again.predict(digits.test.x[:50]), result.predict(digits.test.x[:50]))
    assert torch.equal(again.trained.server["prototypes"].state["head.weight"],
                       result.trained.server["prototypes"].state["head.weight"])  # fmt: skip


def test_means_of_missing_classes_are_zero() -> None:
    assert not class_means(draw(4, 5), torch.tensor([0, 0, 2, 2]), 4)[[1, 3]].any()
