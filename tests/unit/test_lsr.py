"""LSR: the regularisers (Yuan et al., CVPR 2020) and the reduction to FedMD."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedcc.methods import LSR, FedMD
from steps import assert_same_under_vmap, draw, equal, gradient, labels, one
from tiny import Mlp, Tiny

N, C = 6, 5
Z, Y = draw(0, N, C, scale=2.0), labels(1, C, N)
VARIANTS = ["ls", "ls_code", "tfkd_reg"]


def target(method: LSR) -> torch.Tensor:
    """What a loss pulls to: its gradient by the logits is (softmax - target) / N."""
    return Z.softmax(-1) - N * gradient(method.objective(C), "private", Z, y=Y)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_smoothing_is_fedmd_with_kl_on_probabilities_to_the_bit(variant: str) -> None:
    plain = Tiny(FedMD(loss="kl", average="probs"), factories=(Mlp(8), Mlp(12))).run(3)
    smoothed = Tiny(LSR(a=0.0, variant=variant), factories=(Mlp(8), Mlp(12))).run(3)  # type: ignore[arg-type]
    for mine, theirs in zip(smoothed.clients, plain.clients, strict=True):
        assert equal(mine.model.state, theirs.model.state)
    for a, b in zip(smoothed.rounds, plain.rounds, strict=True):
        assert torch.equal(a.downs[0].values, b.downs[0].values)
    assert torch.equal(smoothed.scores(), plain.scores())
    default = Tiny(LSR(variant=variant), factories=(Mlp(8), Mlp(12))).run(3)  # type: ignore[arg-type]
    assert not torch.allclose(default.scores(), plain.scores())


def test_uniform_smoothing_is_what_torch_calls_label_smoothing() -> None:
    loss = LSR(a=0.3).objective(C)
    torch.testing.assert_close(one(loss, "private", Z, y=Y), F.cross_entropy(Z, Y, label_smoothing=0.3))


@pytest.mark.parametrize(
    ("variant", "right", "wrong"), [("ls", 0.9 + 0.1 / C, 0.1 / C), ("ls_code", 0.9, 0.1 / (C - 1))]
)
def test_targets(variant: str, right: float, wrong: float) -> None:
    hot = F.one_hot(Y, C).double()
    found = target(LSR(a=0.1, variant=variant))  # type: ignore[arg-type]
    torch.testing.assert_close(found, right * hot + wrong * (1 - hot))
    torch.testing.assert_close(found.sum(-1), torch.ones(N).double())


def test_the_codes_smoothing_is_the_papers_with_more_of_it() -> None:
    torch.testing.assert_close(target(LSR(a=0.2, variant="ls_code")), target(LSR(a=0.2 * C / (C - 1))))


@pytest.mark.parametrize("variant", ["ls", "ls_code"])
def test_the_least_loss_is_the_targets_entropy(variant: str) -> None:
    method = LSR(a=0.1, variant=variant)  # type: ignore[arg-type]
    q = target(method)
    least = one(method.objective(C), "private", q.log(), y=Y)
    torch.testing.assert_close(least, -(q * q.log()).sum(-1).mean())
    assert least > 0
    assert gradient(method.objective(C), "private", q.log(), y=Y).abs().max() < 1e-12


def test_the_virtual_teacher_against_a_loop() -> None:
    total = 0.0
    for n in range(N):
        y = int(Y[n])
        r = [math.exp((0.99 if c == y else 0.01 / (C - 1)) / 20) for c in range(C)]
        p = Z[n].softmax(-1).tolist()
        kl = sum(v / sum(r) * math.log(v / sum(r) / p[c]) for c, v in enumerate(r))
        total += (0.9 * -math.log(p[y]) + 0.1 * kl) / N
    assert float(one(LSR(variant="tfkd_reg").objective(C), "private", Z, y=Y)) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_are_the_same_under_vmap(variant: str) -> None:
    loss = LSR(variant=variant).objective(C)  # type: ignore[arg-type]
    assert_same_under_vmap(loss, {"private": draw(2, 3, N, C)}, {"private": {"y": labels(3, C, 3, N)}})


def test_probabilities_are_shared_and_their_mean_comes_back() -> None:
    tiny = Tiny(LSR()).run(1)
    ups, downs = tiny.rounds[0].ups, tiny.rounds[0].downs
    for up in ups.values():
        torch.testing.assert_close(up.values.sum(-1), torch.ones(tiny.publics).double())
    torch.testing.assert_close(downs[1].values, (ups[0].values + ups[1].values + ups[2].values) / 3)
    alike = tiny.ask(tiny.method.server(tiny.server, dict.fromkeys(range(2), ups[0])))
    assert torch.equal(alike[0].values, ups[0].values)
    z = torch.stack([tiny.executor.predict(c.predict(tiny.test)).logits for c in tiny.clients])
    torch.testing.assert_close(tiny.scores(), z.softmax(-1).mean(0))


def test_limits() -> None:
    with pytest.raises(ValueError, match=r"a must be from 0 to 1, got -0\.1"):
        LSR(a=-0.1)
    with pytest.raises(ValueError, match="variant must be one of ls, ls_code, tfkd_reg"):
        LSR(variant="tf")  # type: ignore[arg-type]
