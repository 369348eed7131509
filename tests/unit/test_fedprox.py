from __future__ import annotations

import torch

from fedcc.core.requests import Recipe
from fedcc.losses import CrossEntropy, Proximal
from fedcc.methods import FedAvg, FedProx
from private_steps import agrees_over_clients, asked, draw, labels, same, step
from tiny import Tiny

NOTHING = torch.zeros(2, 2), torch.zeros(2, dtype=torch.long)


def test_the_term_is_the_sum_of_squares_of_what_is_trained() -> None:
    params = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]])}
    w = {"a": torch.zeros(2), "b": torch.ones(1, 1), "running_mean": torch.full((4,), 99.0)}
    assert Proximal()(step(*NOTHING, params=params, constants={"w": w})) == 9.0  # 1 + 4 + 4


def test_its_gradient_is_mu_times_the_distance() -> None:
    tiny = Tiny(FedProx(mu=0.3))
    c = tiny.clients[0]
    request = asked(tiny.method, c)
    names = [name for name in c.model.floating if "running" not in name]
    params = {name: (c.model.state[name] + 0.5 * draw(1)).requires_grad_() for name in names}
    logits, y = draw(4, 3), labels(4, 3)
    at = step(logits, y, params=params, constants=request.constants)
    for name, grad in zip(names, torch.autograd.grad(request.loss(at), list(params.values())), strict=True):
        torch.testing.assert_close(grad, 0.3 * (params[name].detach() - c.model.state[name]))
    assert set(request.constants["w"]) == set(c.model.floating)


def test_the_first_step_is_fedavgs_for_any_mu() -> None:
    one = Recipe(lr=1e-2, batch=8, steps=1)
    far = Tiny(FedProx(mu=100.0), recipe=one).run()
    plain = Tiny(FedAvg(), recipe=one).run()
    assert same(far.server.models["global"].state, plain.server.models["global"].state)  # running statistics included
    two = Recipe(lr=1e-2, batch=8, steps=2)
    again = Tiny(FedProx(mu=100.0), recipe=two).run().server.models["global"].state
    assert not same(again, Tiny(FedAvg(), recipe=two).run().server.models["global"].state)


def test_plain_descent_ends_at_the_fixed_point_and_nearer_for_larger_mu() -> None:
    root = 0.4 * draw(4, 4)
    a, best, w = root @ root.T + torch.eye(4), draw(4, seed=1), draw(4, seed=2)
    distances = []
    for mu in (0.0, 0.5, 2.0):
        loss = CrossEntropy("private") + mu / 2 * Proximal()
        theta = w.clone()
        for _ in range(300):
            leaf = theta.requires_grad_()
            quadratic = 0.5 * (leaf - best) @ a @ (leaf - best)
            pull = loss(step(torch.zeros(1, 2), torch.zeros(1).long(), params={"t": leaf}, constants={"w": {"t": w}}))
            (grad,) = torch.autograd.grad(quadratic + pull, leaf)
            theta = (theta - 0.2 * grad).detach()
        torch.testing.assert_close(theta, torch.linalg.solve(a + mu * torch.eye(4), a @ best + mu * w))
        distances.append(float((theta - w).norm()))
    assert distances[0] > distances[1] > distances[2]


def test_it_runs_over_clients() -> None:
    cases = [
        {
            "logits": draw(2, 2, seed=k),
            "y": labels(2, 2, k),
            "params": {"a": draw(3, seed=k), "b": draw(2, 2, seed=k + 9)},
            "constants": {"w": {"a": draw(3, seed=5), "b": draw(2, 2, seed=6)}},
        }
        for k in range(3)
    ]
    agrees_over_clients(CrossEntropy("private") + 0.5 * Proximal(), cases)
