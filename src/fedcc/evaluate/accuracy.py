"""Accuracies of one round, in percent. Only this package sees the public labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedcc.core.disclosure import OPEN, Disclosure
from fedcc.core.messages import Labels, Predictions, Rows
from fedcc.core.method import AnyMethod, Reading, Trained
from fedcc.core.requests import Executor, Predict
from fedcc.core.samples import Samples
from fedcc.engine.drive import drive
from fedcc.evaluate.predictions import DisclosedPredictions, PredictionCache
from fedcc.methods.fedhkt import fused

Metric = Callable[[Tensor, Tensor], Any]
"""A number of the caller's own: from probabilities [N, classes] and labels [N] of the test samples."""


@dataclass(frozen=True)
class Evaluation:
    """The accuracies after a round; ``Evaluation()`` stands for a round that was not evaluated."""

    accuracy: float | None = None  # of the method's own prediction on the global test set
    clients: dict[int, float] = field(default_factory=dict)  # own model, global test set, known classes
    local: dict[int, float] = field(default_factory=dict)  # the same on test data distributed like the private labels
    targets: float | None = None  # of what the server sent for the public samples
    # on the global test set, where "unknown" is right outside the majority classes
    valid: dict[int, float] = field(default_factory=dict)
    # the same, where "unknown" is right outside the classes that the client holds
    valid_labels: dict[int, float] = field(default_factory=dict)
    local_full: dict[int, float] = field(default_factory=dict)  # as local; "unknown" is never right
    readings: dict[str, float] = field(default_factory=dict)  # of the same models, read in other ways
    confusion: list[list[int]] = field(default_factory=list)  # test samples by label (row) and predicted class
    metrics: dict[str, float] = field(default_factory=dict)  # of the caller's own, by name
    known: dict[int, list[float | None]] = field(default_factory=dict)  # mean probability of not "unknown", by label


def evaluate(
    method: AnyMethod,
    trained: Trained,
    test: Samples,
    executor: Executor,
    *,
    counts: Mapping[int, Tensor] | None = None,
    majority: Mapping[int, Tensor] | None = None,
    downs: Mapping[int, Any] | None = None,
    hidden: Tensor | None = None,
    readings: Mapping[str, Reading] | None = None,
    detailed: bool = False,
    metrics: Mapping[str, Metric] | None = None,
    disclosure: Disclosure = OPEN,
) -> Evaluation:
    """Evaluate trained models.

    Each further argument adds accuracies: ``counts`` (private samples per class, by client) those of the clients' own
    models, ``majority`` (masks of the classes that a client claims to know) the valid ones, ``downs`` with ``hidden``
    (the public labels) that of the public targets, ``readings`` those of other ways to predict. ``detailed`` adds
    ``confusion`` and ``known``, which are too large for every round. ``metrics`` are the caller's own. ``disclosure``
    is the form in which clients answer when the method predicts; their own accuracies do not depend on it.
    """
    labels, ways = test["y"], {"": method.predict, **(readings or {})}
    engine = PredictionCache(executor, trained)
    others, own_logits = _predictions(ways, trained, test.only("x"), engine, list(counts or {}), disclosure)
    scores = others.pop("")
    assert scores is not None
    e = Evaluation(percent(scores.argmax(-1) == labels), targets=targets_accuracy(downs or {}, hidden))
    for name, metric in (metrics or {}).items():
        e.metrics[name] = measured(name, metric, method.probabilities(scores).cpu(), labels.cpu())
    if detailed:
        e.confusion.extend(confusion(scores.argmax(-1), labels, trained.classes))
    for k, own in (counts or {}).items():
        logits = own_logits[k]
        right = logits[:, : trained.classes].argmax(-1) == labels
        e.clients[k], e.local[k] = percent(right), local_accuracy(right, labels, own)
        if logits.shape[-1] == trained.classes + 1:
            answers = logits.argmax(-1)
            e.local_full[k] = local_accuracy(answers == labels, labels, own)
            e.valid_labels[k] = percent(valid(answers, labels, own > 0))
            if majority and k in majority:
                e.valid[k] = percent(valid(answers, labels, majority[k]))
            if detailed:
                e.known[k] = class_means(1 - logits.softmax(-1)[:, -1], labels, trained.classes)
    if readings is None:
        return e
    if scores.ndim == 3:  # one set of scores per client
        rows = [counts[k] for k in trained.clients if counts and k in counts]
        others |= ensembles(scores, torch.stack(rows) if len(rows) == len(trained.clients) else None)
    e.readings.update((name, percent(s.argmax(-1) == labels)) for name, s in others.items() if s is not None)
    return e


def _predictions(
    ways: Mapping[str, Reading],
    trained: Trained,
    inputs: Samples,
    engine: PredictionCache,
    clients: Sequence[int],
    disclosure: Disclosure,
) -> tuple[dict[str, Tensor | None], dict[int, Tensor]]:
    """What each way to predict says of the inputs, and the logits of these clients' own models.

    A memory map is read a part at a time.
    """
    answers, at = DisclosedPredictions(engine, trained, disclosure) if disclosure.filters else engine, 0
    scores: dict[str, Tensor | None] = {}
    logits: dict[int, Tensor] = {}
    for part in inputs.chunks():
        for name, way in ways.items():
            scores[name] = _put(scores.get(name), drive([way(trained, part)], answers)[0], at, len(inputs))
            for k in clients if not name else ():
                own = engine.serve([Predict(trained.clients[k], part)])[0].logits
                logits[k] = _put(logits.get(k), own, at, len(inputs))
        at += len(part)
        engine.forget_predictions()
        answers.forget_predictions()
    return scores, logits


def _put(whole: Any, part: Any, at: int, number: int) -> Any:
    """Rows of a tensor [..., number, C] from row ``at`` on; allocated once, since small parts would split the heap."""
    if part is None or part.shape[-2] == number:
        return part
    if whole is None:
        whole = part.new_empty((*part.shape[:-2], number, part.shape[-1]))
    whole[..., at : at + part.shape[-2], :] = part
    return whole


def readings_in_round(method: AnyMethod, public: Samples, last: bool) -> dict[str, Reading]:
    """A method's readings in a round; those that cost predictions of their own only in the last one."""
    return {**method.readings(public), **(method.last_readings(public) if last else {})}


def ensembles(logits: Tensor, counts: Tensor | None = None) -> dict[str, Tensor]:
    """Readings of models that were trained separately (``local``, ``ssl``): scores [N, C] from logits [K, N, C].

    They show the gain of combining predictions and nothing else. ``by-counts`` needs the clients' private samples per
    class, ``counts`` [K, C], which no server sees: a vote for a class weighs as much as the share of its samples.
    """
    q = logits.softmax(-1)
    scores = {"mean-logits": logits.mean(0), "mean-probs": q.mean(0), "by-entropy": fused(q)}
    if counts is not None:
        n = counts.to(q.device, q.dtype)
        scores["by-counts"] = torch.einsum("knc,kc->nc", q, n / n.sum(0).clamp(min=1))
    return scores


def measured(name: str, metric: Metric, probabilities: Tensor, labels: Tensor) -> float:
    """The value of a metric of the caller's own; the mean over the clients if each of them predicts by itself."""
    sets = probabilities if probabilities.ndim == 3 else probabilities[None]
    try:
        values = [float(metric(p, labels)) for p in sets]
    except Exception as error:
        raise ValueError(f"the metric {name} failed: {type(error).__name__}: {error}") from error
    if not all(map(math.isfinite, values)):
        raise ValueError(f"the metric {name} must be a finite number, got {values[0] if len(values) == 1 else values}")
    return sum(values) / len(values)


def percent(right: Tensor) -> float:
    """The share of true entries, in percent."""
    return round(100 * float(right.double().mean()), 4)


def valid(answers: Tensor, labels: Tensor, majority: Tensor) -> Tensor:
    """Table II's rule, [N]: the label is right, and so is "unknown" (C) where the label is not a majority class."""
    majority = majority.to(labels.device)
    return (answers == labels) | ((answers == len(majority)) & ~majority[labels])


def local_accuracy(right: Tensor, labels: Tensor, counts: Tensor) -> float:
    """Accuracy on test data distributed like the client's private labels: sum_c (n_c / n) acc_c."""
    counts = counts.to(labels.device)
    class_sizes = torch.bincount(labels, minlength=len(counts)).double()
    by_class = torch.bincount(labels, weights=right.double(), minlength=len(counts)) / class_sizes.clamp(min=1)
    share = counts.double() * (class_sizes > 0)
    return round(100 * float((share * by_class).sum() / share.sum().clamp(min=1)), 4)


def confusion(answers: Tensor, labels: Tensor, classes: int) -> list[list[int]]:
    """How many samples of each label (row) were given each class (column); ``answers`` [N], or [clients, N]."""
    pairs = labels.expand_as(answers) * classes + answers
    rows: list[list[int]] = torch.bincount(pairs.flatten(), minlength=classes**2).view(classes, classes).tolist()
    return rows


def class_means(values: Tensor, labels: Tensor, classes: int) -> list[float | None]:
    """The mean of ``values`` [N] over the samples of each label, to 4 digits; None where there are none."""
    class_sizes = torch.bincount(labels, minlength=classes).tolist()
    sums = torch.bincount(labels, weights=values.double(), minlength=classes).tolist()
    return [round(total / n, 4) if n else None for total, n in zip(sums, class_sizes, strict=True)]


def targets_accuracy(downs: Mapping[int, Any], hidden: Tensor | None) -> float | None:
    """How often the public targets that the server sends name the hidden label."""
    message = next((m for m in downs.values() if isinstance(m, Predictions | Labels | Rows)), None)
    if message is None or hidden is None:
        return None
    if isinstance(message, Rows):  # of those that it names
        hidden = hidden[message.rows.long().to(hidden.device)]
    if not len(hidden):
        return None
    predicted = message.values if isinstance(message, Labels) else message.values.argmax(-1)
    return percent(predicted.long() == hidden.to(predicted.device))


def choice_accuracy(up: Any, hidden: Tensor | None, labels: Tensor) -> float | None:
    """How often a public sample for which a client chose to answer has one of the labels of its own samples."""
    if not isinstance(up, Rows) or hidden is None or not len(up.rows):
        return None
    return percent(torch.isin(hidden[up.rows.long().to(hidden.device)], labels.to(hidden.device)))
