"""Losses that several methods share, one by one and under vmap."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcc.losses import cross_entropy

LANES, BATCH, CLASSES, KNOWN = 3, 5, 7, 4
G = torch.Generator().manual_seed(0)
Z = torch.randn(LANES, BATCH, CLASSES, generator=G, dtype=torch.float64)
Y = torch.randint(0, KNOWN, (LANES, BATCH), generator=G)


def test_alone_it_is_torchs_to_the_bit() -> None:
    z = Z[0].float().requires_grad_()
    found, expected = cross_entropy(z, Y[0]), F.cross_entropy(z, Y[0])
    assert torch.equal(found, expected)
    assert type(found.grad_fn) is type(expected.grad_fn)


@pytest.mark.parametrize(("zs", "ys"), [(0, 0), (1, 0), (0, 1), (2, 0), (None, 0), (0, None)])
def test_under_vmap_it_is_that_of_every_lane(zs: int | None, ys: int | None) -> None:
    """Its value, and its gradient twice: as a part of a sum, of some outputs only, with a weight per lane."""
    weight = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    gone = torch.zeros(CLASSES, dtype=torch.float64)
    gone[-1] = -torch.inf  # as methods remove a class

    def losses(z: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(z, y), w * cross_entropy(z[:, :KNOWN], y) + cross_entropy(z + gone, y) + z.square().mean()

    def plain(z: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(z, y), w * F.cross_entropy(z[:, :KNOWN], y) + F.cross_entropy(z + gone, y) + (
            z.square().mean()
        )

    z = (Z[0] if zs is None else Z).clone().requires_grad_()
    y = Y[0] if ys is None else Y
    given = z if zs is None else z.movedim(0, zs), y if ys is None else y.movedim(0, ys), weight
    found = torch.vmap(losses, (zs, ys, 0))(*given)
    lanes = [(z if zs is None else z[k], y if ys is None else y[k], weight[k]) for k in range(LANES)]
    expected = [torch.stack(part) for part in zip(*(plain(*lane) for lane in lanes), strict=True)]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        grads = [torch.autograd.grad(part.square().sum(), z, create_graph=True)[0] for part in (mine, theirs)]
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
        again = [torch.autograd.grad(grad.square().sum(), z, retain_graph=True)[0] for grad in grads]
        torch.testing.assert_close(*again, rtol=1e-12, atol=1e-12)


def test_transforms_may_be_nested() -> None:
    expected = torch.stack([torch.func.grad(F.cross_entropy)(Z[k], Y[k]) for k in range(LANES)])
    inside = torch.vmap(torch.func.grad(cross_entropy))(Z, Y)
    outside = torch.func.grad(lambda z: torch.vmap(cross_entropy)(z, Y).sum())(Z)
    pair = torch.vmap(torch.vmap(cross_entropy))(torch.stack([Z, -Z]), torch.stack([Y, Y]))
    torch.testing.assert_close(inside, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outside, expected, rtol=1e-12, atol=1e-12)
    for z, found in zip((Z, -Z), pair, strict=True):
        torch.testing.assert_close(found, torch.stack([F.cross_entropy(z[k], Y[k]) for k in range(LANES)]))
