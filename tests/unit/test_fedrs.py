from __future__ import annotations

import torch

from fedcc.core.model import Model
from fedcc.losses import CrossEntropy
from fedcc.methods import FedAvg, FedRS
from fedcc.methods.fedrs import RestrictedSoftmax, scales
from private_steps import agrees_over_clients, asked, draw, initial, labels, same, slopes
from tiny import Tiny


def test_scales_by_both_rules() -> None:
    assert scales(torch.tensor([9, 0, 1]), 0.5, "binary").tolist() == [1.0, 0.5, 1.0]  # one sample is enough
    counts = torch.tensor([10, 0, 5])
    assert scales(counts, 0.5, "binary").tolist() == [1.0, 0.5, 1.0]
    assert scales(counts, 0.5, "continuous").tolist() == [1.0, 0.5, 0.75]  # alpha + (1 - alpha) n_c / max n
    for alpha in (0.0, 0.1, 0.7):
        balanced = torch.tensor([4, 0, 4, 4])
        assert torch.equal(scales(balanced, alpha, "binary"), scales(balanced, alpha, "continuous"))


def test_the_gradient_of_a_missing_class_is_alpha_times_its_restricted_probability() -> None:
    logits, y, alpha = draw(6, 4), torch.tensor([0, 0, 2, 2, 0, 2]), 0.3
    scale = torch.tensor([1.0, alpha, 1.0, alpha], dtype=torch.float64)
    value, grad = slopes(RestrictedSoftmax(), logits, y, constants={"scale": scale})
    p = (logits * scale).softmax(-1)
    torch.testing.assert_close(value, -p[torch.arange(6), y].log().mean())
    torch.testing.assert_close(grad[:, 1], alpha * p[:, 1] / 6)
    torch.testing.assert_close(grad[:, 3], alpha * p[:, 3] / 6)
    torch.testing.assert_close(grad[:, 0], (p[:, 0] - (y == 0).double()) / 6)


def missing_logits(alpha: float, optimizer: type[torch.optim.Optimizer], **settings: float) -> float:
    """Their mean after 350 steps of a linear head on features of two classes out of ten."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(400) % 2
    x = (torch.rand(2, 64, generator=generator)[y] + 0.3 * torch.randn(400, 64, generator=generator)).relu()
    weight = (0.1 * torch.randn(10, 64, generator=generator)).requires_grad_()
    scale = scales(torch.tensor([200, 200] + 8 * [0]), alpha, "binary").float()
    descent = optimizer([weight], **settings)
    for _ in range(350):
        descent.zero_grad()
        torch.nn.functional.cross_entropy(x @ weight.T * scale, y).backward()
        descent.step()
    return float((x @ weight.detach().T)[:, 2:].mean())


def test_it_restricts_missing_classes_with_sgd_and_not_with_adam() -> None:
    sgd = {alpha: missing_logits(alpha, torch.optim.SGD, lr=0.01, momentum=0.9) for alpha in (0.5, 1.0)}
    adam = {alpha: missing_logits(alpha, torch.optim.Adam, lr=1e-3) for alpha in (0.5, 1.0)}
    assert 0.75 * sgd[1.0] < sgd[0.5] < 0
    assert adam[0.5] < 1.15 * adam[1.0] < 0  # Adam divides alpha out, and the shrunk logit has further to go


def test_with_alpha_zero_a_missing_class_gets_no_gradient_at_all() -> None:
    tiny = Tiny(FedRS(alpha=0.0), labels=((0,) * 20, (0,) * 10 + (1,) * 10)).run()
    received = initial(tiny)
    for k, missing in ((0, [1, 2]), (1, [2])):
        up = tiny.rounds[0].ups[k].state
        for name in ("head.weight", "head.bias"):
            assert torch.equal(up[name][missing], received[name][missing])
            assert not torch.equal(up[name], received[name])


def test_who_has_all_classes_trains_as_in_fedavg() -> None:
    labels = ((0,) * 12 + (1,) * 5 + (2,) * 3, (1,) * 20)
    restricted, plain = Tiny(FedRS(), labels=labels).run(), Tiny(FedAvg(), labels=labels).run()
    assert same(restricted.rounds[0].ups[0].state, plain.rounds[0].ups[0].state)
    assert not same(restricted.rounds[0].ups[1].state, plain.rounds[0].ups[1].state)


def test_the_clients_own_counts_are_used() -> None:
    tiny = Tiny(FedRS(alpha=0.25), labels=((0,) * 10 + (2,) * 10,))
    request = asked(tiny.method, tiny.clients[0])
    assert request.constants["scale"].tolist() == [1.0, 0.25, 1.0]
    assert request.loss == RestrictedSoftmax()
    assert asked(FedRS(alpha=1.0), tiny.clients[0]).loss == CrossEntropy("private")


def test_predictions_are_plain_logits() -> None:
    restricted = Tiny(FedRS()).run()
    plain = Tiny(FedAvg())
    plain.server.models["global"] = Model(plain.clients[0].arch, restricted.server.models["global"].state)
    assert torch.equal(restricted.scores(), plain.scores())


def test_it_runs_over_clients() -> None:
    cases = [
        {"logits": draw(5, 4, seed=k), "y": labels(5, 4, k), "constants": {"scale": draw(4, seed=k + 9).abs()}}
        for k in range(3)
    ]
    agrees_over_clients(RestrictedSoftmax(), cases)
