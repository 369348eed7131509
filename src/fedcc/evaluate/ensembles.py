"""Ensembles of models that were trained separately: the gain of combining predictions and nothing else.

They are readings of the evaluator for methods whose ``predict`` combines nothing (``local``, ``ssl``); one of them
weighs by label counts, which no server sees. All take the clients' logits [K, N, C].
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedcc.methods.fedhkt import fused


def ensembles(logits: Tensor, counts: Tensor | None = None) -> dict[str, Tensor]:
    """Scores [N, C] by name; ``counts`` [K, C] are the clients' private samples per class, if they are known."""
    q = logits.softmax(-1)
    scores = {"mean-logits": logits.mean(0), "mean-probs": q.mean(0), "by-entropy": fused(q)}
    return scores if counts is None else scores | {"by-counts": by_counts(q, counts)}


def by_counts(q: Tensor, counts: Tensor) -> Tensor:
    """sum_k q_k,c n_k,c / n_c: a client's vote for a class weighs as much as its share of that class's samples."""
    n = counts.to(q.device, q.dtype)
    share = n / n.sum(0).clamp(min=1)
    return torch.einsum("knc,kc->nc", q, share)
