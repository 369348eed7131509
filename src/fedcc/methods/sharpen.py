"""Ways to sharpen a mean of probabilities: what DS-FL and SCARLET differ in."""

from __future__ import annotations

import torch
from torch import Tensor


def era(p: Tensor, temperature: float) -> Tensor:
    """DS-FL's entropy reduction: softmax(p / T) of **probabilities** [..., C].

    Two entries differ by a factor of e^(1 / T) at most, so with many classes the tail keeps mass.

    >>> [round(v, 4) for v in era(torch.tensor([0.7, 0.2, 0.1]), 0.1).tolist()]
    [0.9909, 0.0067, 0.0025]
    """
    return (p / temperature).softmax(-1)


def enhanced_era(p: Tensor, beta: float) -> Tensor:
    """SCARLET's: p^beta / sum_c p_c^beta, computed as softmax(beta ln p); beta = 1 gives p itself, to the bit.

    A row of zeros, a sample that nobody answered, stays as it is.

    >>> [round(v, 4) for v in enhanced_era(torch.tensor([0.7, 0.2, 0.1]), 2.0).tolist()]
    [0.9074, 0.0741, 0.0185]
    """
    if beta == 1:
        return p
    some = (p > 0).any(-1, keepdim=True)
    return torch.where(some, (beta * torch.where(some, p, 1).log()).softmax(-1), 0)
