"""Accuracies of one round, in percent. Only this package sees the public labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedcc.core.messages import Labels, Predictions
from fedcc.core.method import AnyMethod, Reading, Trained
from fedcc.core.requests import Executor, Predict
from fedcc.core.samples import Samples
from fedcc.engine.drive import drive
from fedcc.evaluate.ensembles import ensembles
from fedcc.evaluate.predictions import PredictionCache


@dataclass(frozen=True)
class Evaluation:
    """``accuracy`` of the method's own prediction on the global test set; the others are for the record.

    ``clients`` holds each client's own model on the global test set over the known classes, ``local`` the same on
    test data distributed like the client's private labels, ``targets`` the accuracy of what the server sent for the
    public samples. Networks that may answer "unknown" have three more, for which that answer is allowed: ``valid``
    (on the global test set, right for labels outside the client's majority classes), ``valid_labels`` (outside the
    classes that it holds) and ``local_full`` (as ``local``, never right). ``readings`` are the accuracies of
    the same models, read in other ways. ``Evaluation()`` is that of a round that is not evaluated.

    A detailed evaluation has two more. ``confusion`` counts the test samples by label (row) and predicted class
    (column); where each client predicts alone it is the sum over clients. ``known`` is, for each client whose network
    may answer "unknown", the mean probability that it does not, by label.
    """

    accuracy: float | None = None
    clients: dict[int, float] = field(default_factory=dict)
    local: dict[int, float] = field(default_factory=dict)
    targets: float | None = None
    valid: dict[int, float] = field(default_factory=dict)
    valid_labels: dict[int, float] = field(default_factory=dict)
    local_full: dict[int, float] = field(default_factory=dict)
    readings: dict[str, float] = field(default_factory=dict)
    confusion: list[list[int]] = field(default_factory=list)
    known: dict[int, list[float | None]] = field(default_factory=dict)


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
) -> Evaluation:
    """Evaluate what training has left so far.

    ``counts`` (private samples per class, by client) asks for the clients' own accuracies, ``majority`` (the classes
    that a client claims to know, as masks) for the valid ones; ``downs`` and ``hidden`` (the public labels) for that
    of the public targets; ``readings`` for those of other ways to predict; ``detailed`` for what is too large for
    every round.
    """
    engine, inputs, labels = PredictionCache(executor, trained), test.only("x"), test["y"]
    scores = drive([method.predict(trained, inputs)], engine)[0]
    found = Evaluation(percent(scores.argmax(-1) == labels), targets=targets_accuracy(downs or {}, hidden))
    if detailed:
        found.confusion.extend(confusion(scores.argmax(-1), labels, trained.classes))
    for k, held in (counts or {}).items():
        logits = engine.serve([Predict(trained.clients[k], inputs)])[0].logits
        right = logits[:, : trained.classes].argmax(-1) == labels
        found.clients[k], found.local[k] = percent(right), local_accuracy(right, labels, held)
        if logits.shape[-1] == trained.classes + 1:
            answers = logits.argmax(-1)
            found.local_full[k] = local_accuracy(answers == labels, labels, held)
            found.valid_labels[k] = percent(valid(answers, labels, held > 0))
            if majority and k in majority:
                found.valid[k] = percent(valid(answers, labels, majority[k]))
            if detailed:
                found.known[k] = class_means(1 - logits.softmax(-1)[:, -1], labels, trained.classes)
    for name, reading in (readings or {}).items():
        other = drive([reading(trained, inputs)], engine)[0]
        if other is not None:
            found.readings[name] = percent(other.argmax(-1) == labels)
    if readings is not None and scores.ndim == 3:  # each client predicts alone
        rows = [counts[k] for k in trained.clients if counts and k in counts]
        known = torch.stack(rows) if len(rows) == len(trained.clients) else None
        for name, others in ensembles(scores, known).items():
            found.readings[name] = percent(others.argmax(-1) == labels)
    return found


def readings_of(method: AnyMethod, public: Samples, last: bool) -> dict[str, Reading]:
    """A method's readings in a round; those that cost predictions of their own only in the last one."""
    return {**method.readings(public), **(method.last_readings(public) if last else {})}


def percent(right: Tensor) -> float:
    """The share of true entries, in percent."""
    return round(100 * float(right.double().mean()), 4)


def valid(answers: Tensor, labels: Tensor, majority: Tensor) -> Tensor:
    """Table II's rule, [N]: right is the label itself, or "unknown" (answer C) where the label is no majority class."""
    majority = majority.to(labels.device)
    return (answers == labels) | ((answers == len(majority)) & ~majority[labels])


def local_accuracy(right: Tensor, labels: Tensor, counts: Tensor) -> float:
    """Accuracy on test data distributed like the client's private labels: sum_c (n_c / n) acc_c."""
    counts = counts.to(labels.device)
    tested = torch.bincount(labels, minlength=len(counts)).double()
    by_class = torch.bincount(labels, weights=right.double(), minlength=len(counts)) / tested.clamp(min=1)
    share = counts.double() * (tested > 0)
    return round(100 * float((share * by_class).sum() / share.sum().clamp(min=1)), 4)


def confusion(answers: Tensor, labels: Tensor, classes: int) -> list[list[int]]:
    """How many samples of each label (row) were given each class (column); ``answers`` [N], or [clients, N]."""
    pairs = labels.expand_as(answers) * classes + answers
    rows: list[list[int]] = torch.bincount(pairs.flatten(), minlength=classes**2).view(classes, classes).tolist()
    return rows


def class_means(values: Tensor, labels: Tensor, classes: int) -> list[float | None]:
    """The mean of ``values`` [N] over the samples of each label, to 4 digits; None where there are none."""
    tested = torch.bincount(labels, minlength=classes).tolist()
    sums = torch.bincount(labels, weights=values.double(), minlength=classes).tolist()
    return [round(total / n, 4) if n else None for total, n in zip(sums, tested, strict=True)]


def targets_accuracy(downs: Mapping[int, Any], hidden: Tensor | None) -> float | None:
    """How often the public targets that the server sends name the hidden label."""
    message = next((m for m in downs.values() if isinstance(m, Predictions | Labels)), None)
    if message is None or hidden is None:
        return None
    named = message.values.argmax(-1) if isinstance(message, Predictions) else message.values
    return percent(named.long() == hidden.to(named.device))
