"""What it means to answer "unknown": the equations of FedCC, one function each.

Votes are probabilities [K, N, C + 1] of K clients on N samples, the last entry "unknown".
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcc.core.roles import Client
from fedcc.core.samples import IDENTITY, Samples

Probe = Literal["cdmad_ones", "white", "black", "mean", "noise"]
Design = Literal["sample", "client", "one"]
HABIT, LOUD = 1.25, 2.0  # F-32


def smoothed(p: Tensor, delta: float) -> Tensor:
    """(1 - delta) p + delta / |C|, Eq. (9)."""
    return (1 - delta) * p + delta / p.shape[-1]


def entropy(p: Tensor) -> Tensor:
    """H(p) = -sum_c p_c ln p_c with 0 ln 0 = 0."""
    return -torch.xlogy(p, p).sum(-1)


def unknown_weight(classes: int, majority: int) -> float:
    """w_u = ln(|C| - |C_J| + 1), Sec. IV-B."""
    return math.log(classes - majority + 1)


def majority_classes(share: Tensor, threshold: float) -> Tensor:
    """C_J as a mask [C]: classes whose share is above the threshold (strictly), Sec. V-A."""
    return share > threshold


def label_shares(c: Client, outputs: int) -> Tensor:
    """The shares of a client's labels [outputs], 0 at "unknown" if that is one of them (F-21, F-31)."""
    return F.pad(c.counts() / len(c.private), (0, outputs - c.classes))


def alpha(w_l: float, w_u: float, h: Tensor, design: Design = "sample") -> Tensor:
    """(w_l - min(w_l, h)) / (w_l + w_u) for samples of entropy h, Eq. (10); 0 where nothing is known (w_l = 0).

    Other designs (F-28): ``client`` leaves h out, which is the paper's alpha_base; ``one`` is always 1.
    """
    if design == "one":
        return torch.ones_like(h)
    if design == "client":
        h = torch.zeros_like(h)
    if w_l <= 0:
        return torch.zeros_like(h)
    return (w_l - h.clamp(max=w_l)) / (w_l + w_u)


def pseudo_labels(alpha: Tensor, known_logits: Tensor, majority: Tensor) -> Tensor:
    """Alpha e_m + (1 - alpha) e_u with m the best majority class, Eq. (8): [N, C + 1]."""
    best = known_logits.masked_fill(~majority, -math.inf).argmax(-1)
    return torch.cat([alpha[:, None] * F.one_hot(best, known_logits.shape[-1]), (1 - alpha)[:, None]], -1)


def votes(logits: list[Tensor], views: int = 1) -> Tensor:
    """Votes from logits [N, C + 1], K for each of the ``views`` of the samples: a client's mean over these (F-30)."""
    return torch.stack(torch.stack([one.softmax(-1) for one in logits]).chunk(views)).mean(0)


def baseline(votes: Tensor) -> Tensor:
    """b_{k,c} = mean_x v_{k,c}(x) over the public samples (F-32): [K, C] from votes [K, N, C + 1]."""
    return votes[..., :-1].mean(1)


def loudest(baseline: Tensor) -> Tensor:
    """The most that a client may claim to know on average: 2 med_k sum_c b_{k,c}, the lower median (F-32)."""
    known = baseline.sum(-1).sort().values
    return LOUD * known[(len(known) - 1) // 2]


def guarded(votes: Tensor, baseline: Tensor, limit: Tensor) -> Tensor:
    """The votes [K, N, C + 1] that stand out from what a client always says, scaled to the limit (F-32).

    A vote for a known class counts s_k v_{k,c} if v_{k,c} > 1.25 b_{k,c}, else 0; s_k = min(1, limit / sum_c b_{k,c}).
    "unknown" gets the rest. A vote that is the same for all samples becomes "unknown".
    """
    known = votes[..., :-1] * (votes[..., :-1] > HABIT * baseline[:, None])
    known = known * (limit / baseline.sum(-1).clamp(min=1e-12)).clamp(max=1)[:, None, None]
    return torch.cat([known, 1 - known.sum(-1, keepdim=True)], -1)


def guarded_uploads(votes: Tensor) -> Tensor:
    """Uploaded votes [K, n_u, C + 1] as they count by their own means over the public samples (F-32)."""
    means = baseline(votes)
    return guarded(votes, means, loudest(means))


def trust(votes: Tensor, exponent: float = 1.0) -> Tensor:
    """mu_k = a_k / sum_j a_j with a_k = 1 - v_{k,u}, Alg. 1 line 7: [K, N] from votes [K, N, C + 1].

    Equal weights where all abstain (F-17). Another exponent takes a_k to that power (F-29).
    """
    a = votes[..., :-1].sum(-1)  # not 1 - v_u, which cancels
    total = a.sum(0)
    mu = torch.where(total < 1e-12, torch.full_like(a, 1 / len(a)), a / total.clamp(min=1e-12))
    if exponent == 1:
        return mu
    powers = mu**exponent  # of mu, not of a, which may be tiny
    return powers / powers.sum(0)


def aggregate(votes: Tensor, exponent: float = 1.0) -> Tensor:
    """The server's prediction [N, C + 1] from the clients' [K, N, C + 1], Eq. (11)."""
    return (trust(votes, exponent)[..., None] * votes).sum(0)


def targets(votes: Tensor, exponent: float = 1.0) -> Tensor:
    """Soft targets [N, C]: Eq. (11) without "unknown", renormalised, Alg. 1 line 9; uniform where nobody knows."""
    known = aggregate(votes, exponent)[:, :-1]
    mass = known.sum(-1, keepdim=True)
    nobody = mass == 0
    return torch.where(nobody, torch.full_like(known, 1 / known.shape[-1]), known / mass.masked_fill(nobody, 1))


def sync_target(targets: Tensor, head: str) -> Tensor:
    """Targets as the sync phase takes them: padded with 0 at "unknown" (F-1), all zero where nobody knew (F-3)."""
    uniform = (targets == targets[:, :1]).all(-1, keepdim=True)  # also where the wire rounded 1 / C
    targets = targets.masked_fill(uniform, 0)
    return F.pad(targets, (0, 1)) if head == "padded" else targets


def featureless(c: Client, kind: Probe) -> Samples:
    """x_0: a solid colour in the space the network sees; for ``noise`` a hundred inputs of uniform noise (F-7)."""
    shape, device = (1, *c.public.shape), c.public.x.device
    draws = c.key.of(phase="probe").generator()
    if c.arch.tokens:  # one and the same index in every place
        ids = torch.full(shape, int(kind in ("cdmad_ones", "white")))
        if kind == "noise":
            ids = torch.from_numpy(draws.integers(0, int(c.public.x.max()) + 1, (100, *c.public.shape)))
        return Samples({"x": ids.to(device)}, IDENTITY)
    if kind in ("cdmad_ones", "mean"):  # 1 or 0 after normalisation
        return Samples({"x": torch.full(shape, float(kind == "cdmad_ones"), device=device)}, IDENTITY)
    x = torch.full(shape, float(kind == "white"))
    if kind == "noise":
        x = torch.from_numpy(draws.random((100, *c.public.shape)))
    return Samples({"x": c.public.view.normalised(x.to(device))}, IDENTITY)
