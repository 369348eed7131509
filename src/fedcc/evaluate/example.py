"""One public sample as the clients see it (the paper's Fig. 1): with and without "unknown", and the two aggregates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedcc.methods.abstention import targets, trust


def example(logits: Tensor, hidden: Tensor | None, row: int | None = None) -> dict[str, Any]:
    """What each of K clients says of one sample, from their logits [K, N, C + 1] on all of them, and what comes of it.

    ``unknown`` are a client's C + 1 probabilities, ``plain`` those that it gives if it may not abstain, ``weight`` is
    the server's trust. The aggregates are FedCC's and the plain mean, ``accuracy`` (percent) says how often each names
    the hidden label, over all samples. ``row`` is the sample; by default the most telling one.
    """
    votes, plain = logits.softmax(-1), logits[..., :-1].softmax(-1)
    ours, mean = targets(votes), plain.mean(0)
    row = telling(ours, mean, hidden) if row is None else row
    weights = trust(votes)[:, row]
    return {
        "row": row,
        "label": None if hidden is None else int(hidden[row]),
        "clients": [
            {"unknown": rounded(votes[k, row]), "plain": rounded(plain[k, row]), "weight": round(float(weights[k]), 6)}
            for k in range(len(votes))
        ],
        "aggregates": {"unknown": rounded(ours[row]), "plain": rounded(mean[row])},
        "accuracy": None
        if hidden is None
        else {
            name: round(100 * float((p.argmax(-1) == hidden).double().mean()), 4)
            for name, p in (("unknown", ours), ("plain", mean))
        },
    }


def telling(ours: Tensor, mean: Tensor, hidden: Tensor | None) -> int:
    """The sample on which two predictions [N, C] differ most (total variation).

    Of those where they name different classes and the first one is right, if there are any; without labels, of those
    where they name different classes.
    """
    answer = ours.argmax(-1)
    differ = answer != mean.argmax(-1)
    if hidden is not None:
        differ &= answer == hidden
    distance = (ours - mean).abs().sum(-1) / 2
    return int(torch.where(differ, distance, distance - 2).argmax())


def rounded(values: Tensor) -> list[float]:
    return [round(v, 6) for v in values.tolist()]
