"""A density ratio by kernel least squares (KuLSIF): what looks like a client's own data, against uniform noise.

Kanamori, Suzuki and Sugiyama, "Statistical analysis of kernel-based least-squares density-ratio estimation", Machine
Learning 2012. With auxiliary points a_1..a_n, own points y_1..y_m and a Gaussian kernel k, the ratio minimises
1/2 mean_i r(a_i)^2 - mean_j r(y_j) + lambda/2 |r|^2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ratio:
    """r(z) = sum_i alpha_i k(z, a_i) + 1 / (m lambda) sum_j k(z, y_j)."""

    noise: Tensor  # a, [n, d]
    own: Tensor  # y, [m, d]
    alpha: Tensor  # [n]
    width: float
    lam: float

    def __call__(self, z: Tensor) -> Tensor:
        """The ratio [N] at points [N, d]."""
        near = kernel(z, self.own, self.width).mean(-1) / self.lam
        return kernel(z, self.noise, self.width) @ self.alpha + near


def kernel(z: Tensor, points: Tensor, width: float) -> Tensor:
    """exp(-|z - p|^2 / (2 width^2)): [N, n]."""
    return (-torch.cdist(z, points).square() / (2 * width**2)).exp()


def fitted(noise: Tensor, own: Tensor, width: float, lam: float) -> Ratio:
    """The ratio by its closed form: alpha = -1 / (n m lambda) (K_aa / n + lambda I)^-1 K_ay 1."""
    n = len(noise)
    matrix = kernel(noise, noise, width) / n + lam * torch.eye(n, dtype=noise.dtype, device=noise.device)
    towards = kernel(noise, own, width).mean(-1)
    return Ratio(noise, own, -torch.linalg.solve(matrix, towards) / (n * lam), width, lam)


def median_distance(points: Tensor) -> float:
    """The median distance of two points; the mean if most of them coincide, 1 if all do."""
    distances = torch.pdist(points)
    if not bool(distances.any()):
        return 1.0
    return float(distances.median()) or float(distances.mean())


def looks_own(public: Tensor, own: Tensor, number: int, quantile: float, draws: np.random.Generator) -> Tensor:
    """Which public points [N, d] look like a client's own [n_k, d]: a mask [N].

    Up to ``number`` own points, at most half of them, estimate the ratio. The threshold is its quantile at the others.
    All are standardised by the own points; if those do not differ, every public point looks like them.
    """
    public, own = public.flatten(1).double(), own.flatten(1).double()
    spread = own.std(0, correction=0)
    if not bool((spread > 0).any()):
        return torch.ones(len(public), dtype=torch.bool, device=public.device)
    varying = spread > 0
    public, own = ((z - own.mean(0))[:, varying] / spread[varying] for z in (public, own))
    order = torch.from_numpy(draws.permutation(len(own))).to(own.device)
    size = min(number, len(own) // 2)
    y, held_out = own[order[:size]], own[order[size:]]
    low, high = own.amin(0), own.amax(0)
    noise = low + (high - low) * torch.from_numpy(draws.random((number, len(low)))).to(own)
    ratio = fitted(noise, y, median_distance(y), number**-0.5)
    return ratio(public) > ratio(held_out).quantile(quantile)
