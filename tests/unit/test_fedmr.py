from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedcc.core.messages import Weights, nbytes
from fedcc.core.requests import Fit
from fedcc.losses import CrossEntropy
from fedcc.methods import FedMR
from fedcc.methods.fedmr import Decorrelation, PrototypeMargin, Prototypes, class_means, inter, intra, prototypes
from private_steps import agrees_over_clients, draw, labels
from tiny import Tiny


def naive_intra(features: Tensor, y: Tensor) -> float:
    """Class by class, entry by entry, as the released code does it."""
    total, samples, d = 0.0, 0, features.shape[1]
    for c in set(y.tolist()):
        x = features[y == c]
        if len(x) < 2:
            continue
        x = (x - x.mean(0)) / (1e-8 + x.var(0, unbiased=True)).sqrt()
        squares = [float(x[:, i] @ x[:, j]) ** 2 for i in range(d) for j in range(d) if i != j]
        total += sum(squares) / len(squares)
        samples += len(x)
    return total / samples if samples else 0.0


@pytest.mark.parametrize("seed", range(5))
def test_decorrelation_against_a_loop(seed: int) -> None:
    features, y = draw(14, 5, seed=seed), labels(14, 6, seed)
    assert float(intra(features, y)) == pytest.approx(naive_intra(features, y), rel=1e-9)


def test_it_ignores_shift_scale_and_order_of_dimensions() -> None:
    features, y = draw(20, 5), labels(20, 3)
    value = intra(features, y)
    torch.testing.assert_close(intra(features + 7 * draw(5, seed=1), y), value)
    torch.testing.assert_close(intra(features * (0.5 + draw(5, seed=2).abs()), y), value, rtol=1e-5, atol=0)
    torch.testing.assert_close(intra(features[:, [3, 0, 4, 1, 2]], y), value)


def test_orthogonal_columns_cost_nothing_and_equal_ones_the_most() -> None:
    hadamard = torch.tensor([[1, 1, 1], [-1, 1, -1], [1, -1, -1], [-1, -1, 1]], dtype=torch.float64)
    y = torch.zeros(4).long()
    assert float(intra(hadamard, y)) == pytest.approx(0, abs=1e-12)
    worst = intra(draw(4, 1).expand(4, 3), y)
    assert float(worst) == pytest.approx(3**2 / 4, rel=1e-6)  # entries n - 1, squared, over n samples
    assert all(float(intra(draw(4, 3, seed=k), y)) < float(worst) for k in range(10))


def test_classes_of_one_sample_count_for_nothing() -> None:
    features, y = draw(6, 4), torch.tensor([0, 0, 0, 1, 2, 3])
    torch.testing.assert_close(intra(features, y), intra(features[:3], y[:3]))
    alone = features.clone().requires_grad_()
    value = intra(alone, torch.arange(6))
    (grad,) = torch.autograd.grad(value, alone)
    assert float(value.detach()) == 0
    assert torch.equal(grad, torch.zeros_like(grad))


def naive_inter(z: Tensor, y: Tensor, means: Tensor, known: Tensor) -> float:
    terms = [
        max(0.0, float((z[i] - means[y[i]]).norm() - (z[i] - means[j]).norm()))
        for i in range(len(z))
        for j in range(len(means))
        if j != y[i] and known[j] and known[y[i]]
    ]
    return sum(terms) / len(terms) if terms else 0.0


def test_the_margin_against_a_loop() -> None:
    z, y, means = draw(9, 4), labels(9, 5), draw(5, 4, seed=1)
    for known in ([1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]):
        mask = torch.tensor(known).bool()
        assert float(inter(z, y, means, mask)) == pytest.approx(naive_inter(z, y, means, mask))


def test_the_margin_is_zero_where_each_sample_is_nearest_to_its_own() -> None:
    means = 10 * torch.eye(3, 4, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 2])
    z = (means[y] + 0.1 * draw(4, 4)).requires_grad_()
    value = inter(z, y, means, torch.ones(3).bool())
    (grad,) = torch.autograd.grad(value, z)
    assert float(value.detach()) == 0
    assert torch.equal(grad, torch.zeros_like(grad))
    assert float(inter(z, torch.tensor([1, 1, 2, 2]), means, torch.ones(3).bool()).detach()) > 0
    at = means[y].requires_grad_()  # exactly on its prototype: no NaN from the norm
    assert torch.isfinite(torch.autograd.grad(inter(at, y, means, torch.ones(3).bool()), at)[0]).all()


def test_prototypes_are_means_over_all_clients_samples() -> None:
    z, y = draw(12, 3), labels(12, 4)
    parts = [slice(0, 5), slice(5, 12)]
    means = torch.stack([class_means(z[p], y[p], 5) for p in parts])
    counts = torch.stack([torch.bincount(y[p], minlength=5) for p in parts]).int()
    merged, total = prototypes(means, counts)
    torch.testing.assert_close(merged, class_means(z, y, 5))
    assert total.tolist() == torch.bincount(y, minlength=5).tolist()
    assert merged[4].tolist() == [0.0] * 3  # class 4 is nowhere


def test_the_papers_mode_sends_class_means_and_uses_them_from_round_two() -> None:
    tiny = Tiny(FedMR(mode="paper", mu=0.2, mu2=0.3), classes=4)  # class 3 is nowhere
    fits: list[Fit] = []
    serve = tiny.executor.fit
    tiny.executor.fit = lambda fit: fits.append(fit) or serve(fit)  # type: ignore[method-assign, func-returns-value]
    tiny.run(2)
    up, down = tiny.rounds[0].ups[1], tiny.rounds[0].downs[1]
    assert isinstance(up, Prototypes)
    assert isinstance(down, Prototypes)
    assert up.counts.tolist() == [0, 20, 0, 0]
    assert down.counts.tolist() == [20, 20, 20, 0]
    torch.testing.assert_close(down.means[1], up.means[1])
    extra = nbytes(up) - nbytes(Weights(up.state))
    assert extra == nbytes(down) - nbytes(Weights(down.state)) == 4 * 8 * 4 + 4 * 4  # C x d floats and C counts
    first, second = CrossEntropy("private") + 0.2 * Decorrelation(), 0.3 * PrototypeMargin()
    assert [fit.loss for fit in fits] == [first] * 3 + [first + second] * 3
    assert {fit.key.phase for fit in fits} == {"fit"}
    assert fits[3].constants["known"].tolist() == [True, True, True, False]
    assert torch.equal(fits[3].constants["means"], down.means)


def test_client_means_are_those_of_its_trained_model() -> None:
    tiny = Tiny(FedMR(mode="paper"), labels=((0,) * 12 + (1,) * 5, (2,) * 9)).run()
    c = tiny.clients[0]
    features = tiny.ask(_outputs(c)).features
    found = tiny.rounds[0].ups[0].means
    torch.testing.assert_close(found[0], features[:12].mean(0))
    torch.testing.assert_close(found[1], features[12:].mean(0))
    assert not found[2].any()


async def _outputs(c: object) -> object:
    return await c.predict(c.private)  # type: ignore[attr-defined]


def test_a_class_that_nobody_brings_keeps_its_prototype() -> None:
    tiny = Tiny(FedMR(mode="paper"))
    first = tiny.run().rounds[0]
    kept = first.downs[0].means[2]
    without = {k: up for k, up in first.ups.items() if k != 2}
    later = tiny.ask(tiny.method.server(tiny.server, without))[0]
    assert torch.equal(later.means[2], kept)
    assert later.counts.tolist() == [20, 20, 20]


def test_the_codes_mode_sends_weights_alone() -> None:
    tiny = Tiny(FedMR()).run()
    assert type(tiny.rounds[0].ups[0]) is type(tiny.rounds[0].downs[0]) is Weights


def test_both_run_over_clients() -> None:
    cases = [
        {
            "logits": draw(7, 4, seed=k),
            "y": labels(7, 4, k) if k else torch.arange(7) % 4,
            "features": draw(7, 5, seed=k + 20),
            "constants": {"means": draw(4, 5, seed=k + 40), "known": torch.tensor([1, k > 0, 1, k > 1]).bool()},
        }
        for k in range(3)
    ]
    agrees_over_clients(Decorrelation(), cases)
    agrees_over_clients(PrototypeMargin(), cases)
