"""One public sample as the clients see it (the paper's Fig. 1): with and without "unknown", and the two aggregates."""

from __future__ import annotations

from typing import Any

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
    """The sample on which two predictions [N, C] contradict each other most.

    With a and b the classes that they name: the first one's lead of a over b plus the second one's of b over a. Samples
    on which the first one is wrong come last; where no two classes differ, the total variation decides.
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
