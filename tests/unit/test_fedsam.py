from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedcc.core.requests import Recipe
from fedcc.core.step import norm
from fedcc.engine.plain import Training, _frozen_statistics
from fedcc.gradients import Ascent
from fedcc.losses import CrossEntropy
from fedcc.methods import FedAvg, FedSAM
from fedcc.nets import build
from private_steps import asked, draw, initial, same
from steps import batches
from tiny import Tiny

STEPS = Recipe(lr=1e-2, batch=8, steps=3)


def test_on_a_quadratic_the_gradient_is_taken_at_the_worst_point() -> None:
    root, theta = draw(5, 5), draw(5, seed=1)
    a = root @ root.T
    offsets = Ascent(0.7).ascent({"t": a @ theta})
    assert offsets is not None
    at = (theta + offsets["t"]).requires_grad_()
    (grad,) = torch.autograd.grad(0.5 * at @ a @ at, at)
    torch.testing.assert_close(grad, a @ (theta + 0.7 * a @ theta / (a @ theta).norm()))


def test_the_offset_has_norm_rho_over_all_tensors_together() -> None:
    for rho in (0.5, 1.0, 2.0):
        assert float(norm(Ascent(rho).ascent({"a": draw(3, 4)}) or {})) == pytest.approx(rho, rel=1e-9)
    offsets = Ascent(0.1).ascent({"a": draw(3, 4), "b": 10 * draw(7, seed=1)})
    assert offsets is not None
    assert float(norm(offsets)) == pytest.approx(0.1, rel=1e-9)
    together = torch.cat([draw(3, 4).flatten(), 10 * draw(7, seed=1)])
    torch.testing.assert_close(offsets["b"], 0.1 * 10 * draw(7, seed=1) / together.norm())


def test_a_vanishing_gradient_gives_no_offset() -> None:
    offsets = Ascent(0.1).ascent({"a": torch.zeros(3)})
    assert offsets is not None
    assert torch.equal(offsets["a"], torch.zeros(3))


def test_three_steps_by_hand() -> None:
    """Two passes, weights restored, Adam on the second gradient, BatchNorm moved by the first pass alone."""
    tiny = Tiny(FedSAM(rho=0.1), labels=((0,) * 12 + (1,) * 8,), recipe=STEPS).run()
    c, found = tiny.clients[0], tiny.rounds[0].ups[0].state
    module = build(c.arch, c.key).double()
    module.load_state_dict(initial(tiny), strict=False)
    params = list(module.parameters())
    means, squares = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for t, rows in enumerate(batches(c.key.of(round=1, phase="fit", stream="private"), 20, 8, 3), 1):
        x, y = c.private.x[rows].double(), c.private["y"][rows]
        first = torch.autograd.grad(F.cross_entropy(module(x).logits, y), params)
        length = torch.cat([g.flatten() for g in first]).norm()
        saved = {name: value.clone() for name, value in module.state_dict().items()}
        with torch.no_grad():
            for p, g in zip(params, first, strict=True):
                p += 0.1 * g / length
        second = torch.autograd.grad(F.cross_entropy(module(x).logits, y), params)
        module.load_state_dict(saved)  # weights and running statistics as before the second pass
        with torch.no_grad():
            for p, g, m, v in zip(params, second, means, squares, strict=True):
                m += 0.1 * (g - m)
                v += 0.001 * (g * g - v)
                p -= 1e-2 * m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    for name, value in found.items():
        torch.testing.assert_close(value, module.state_dict()[name], rtol=1e-9, atol=1e-11)


def test_the_ascent_is_undone_to_the_bit() -> None:
    still = Recipe(lr=0.0, batch=8, steps=3)
    tiny = Tiny(FedSAM(rho=1.0), recipe=still).run()
    received, up = initial(tiny), tiny.rounds[0].ups[0].state
    assert all(torch.equal(up[name], received[name]) for name in up if "running" not in name)
    assert not torch.equal(up["trunks.0.1.running_mean"], received["trunks.0.1.running_mean"])


def test_exactly_two_backward_passes_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    backward = Training.backward
    monkeypatch.setattr(Training, "backward", lambda *a: passes.append(1) or backward(*a))
    for method, each in ((FedSAM(), 2), (FedSAM(rho=0.0), 1), (FedAvg(), 1)):
        passes.clear()
        Tiny(method, recipe=STEPS).run()
        assert len(passes) == 3 * 3 * each


def test_batchnorm_that_keeps_no_statistics_still_keeps_none() -> None:
    norms = torch.nn.ModuleList([torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2, track_running_stats=False)])
    with _frozen_statistics(norms):
        assert [m.track_running_stats for m in norms] == [False, False]
    assert [m.track_running_stats for m in norms] == [True, False]
    assert not hasattr(norms, "track_running_stats")


def test_it_approaches_fedavg_linearly_in_rho() -> None:
    def weights(rho: float) -> torch.Tensor:
        return Tiny(FedSAM(rho=rho), recipe=STEPS).run().server.models["global"].state["head.weight"]

    plain = Tiny(FedAvg(), recipe=STEPS).run().server.models["global"].state["head.weight"]
    gaps = [float((weights(rho) - plain).norm()) for rho in (1e-3, 1e-4, 1e-5)]
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=0.05)
    assert gaps[1] / gaps[2] == pytest.approx(10, rel=0.05)


def test_it_asks_for_plain_cross_entropy() -> None:
    tiny = Tiny(FedSAM(rho=0.2))
    request = asked(tiny.method, tiny.clients[0])
    assert (request.loss, request.gradient) == (CrossEntropy("private"), Ascent(0.2))
    assert asked(FedSAM(rho=0.0), tiny.clients[0]).gradient is None


def test_running_statistics_move_once_a_step() -> None:
    one = Recipe(lr=1e-2, batch=8, steps=1)
    sam, plain = Tiny(FedSAM(rho=5.0), recipe=one).run(), Tiny(FedAvg(), recipe=one).run()
    a, b = ({n: v for n, v in t.server.models["global"].state.items() if "running" in n} for t in (sam, plain))
    assert same(a, b)
