"""One public sample as the clients see it (the paper's Fig. 1): with and without "unknown", and the two aggregates."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedcc.evaluate.accuracy import percent
from fedcc.methods.abstention import guarded_uploads, targets, trust


def example(
    logits: Tensor, hidden: Tensor | None, row: int | None = None, exponent: float = 1.0, guard: bool = False
) -> dict[str, Any]:
    """What each of K clients says of one sample, from their logits [K, N, C + 1] on all samples, and the aggregates.

    ``unknown`` are a client's C + 1 probabilities, ``plain`` those without "unknown", ``weight`` is the server's trust.
    The aggregates are FedCC's and the plain mean; ``accuracy`` (percent, over all samples) is how often each is the
    hidden label. ``row`` is the sample, by default the most telling one. ``exponent`` is the method's ``trust``,
    ``guard`` its ``guard_votes``.
    """
    votes, plain = logits.softmax(-1), logits[..., :-1].softmax(-1)
    counted = guarded_uploads(votes) if guard else votes
    aggregates = {"unknown": targets(counted, exponent), "plain": plain.mean(0)}
    row = telling(aggregates["unknown"], aggregates["plain"], hidden) if row is None else row
    weights = trust(counted, exponent)[:, row]
    known = {} if hidden is None else {name: percent(p.argmax(-1) == hidden) for name, p in aggregates.items()}
    return {
        "row": row,
        "label": None if hidden is None else int(hidden[row]),
        "clients": [
            {"unknown": rounded(votes[k, row]), "plain": rounded(plain[k, row]), "weight": round(float(weights[k]), 6)}
            for k in range(len(votes))
        ],
        "aggregates": {name: rounded(p[row]) for name, p in aggregates.items()},
        "accuracy": known or None,
    }


def telling(ours: Tensor, mean: Tensor, hidden: Tensor | None) -> int:
    """The sample on which two predictions [N, C] contradict each other most.

    If they predict the classes a and b: the lead of a over b in the first plus that of b over a in the second. Samples
    on which the first is wrong come last; if all predicted classes agree, the total variation decides.
    """
    a, b = ours.argmax(-1, keepdim=True), mean.argmax(-1, keepdim=True)
    against = ours.gather(1, a) - ours.gather(1, b) + mean.gather(1, b) - mean.gather(1, a)
    score = against.squeeze(1)  # at most 2
    if hidden is not None and bool(((a.squeeze(1) == hidden) & (score > 0)).any()):
        score = score.where(a.squeeze(1) == hidden, -1)
    elif not bool((score > 0).any()):
        score = (ours - mean).abs().sum(-1)
    return int(score.argmax())


def rounded(values: Tensor) -> list[float]:
    return [round(v, 6) for v in values.tolist()]
