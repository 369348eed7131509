"""What of a client's answers leaves it: its predictions, hard labels, or labels that were randomised.

A filter between method and wire. The client's half turns predictions [n, columns] into one label per sample; columns
are the classes and, where the method has it, "unknown". The server's half turns labels into the predictions that the
method expects. docs/privacy.md, "Sharing less than predictions", says what this promises and what it does not.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcc.core.messages import Labels, Predictions
from fedcc.core.method import AnyMethod
from fedcc.core.options import Share
from fedcc.core.wire import is_probabilities

STRICTNESS: tuple[Share, ...] = get_args(Share)  # the later, the less leaves a client
SMALLEST = 1e-12  # probability whose logarithm is taken


def share_reason(method: AnyMethod, share: Share) -> str:
    """Why a method's clients cannot share their answers in this form; empty if they can."""
    if share == "predictions" or method.answers in ("probabilities", "labels"):
        return ""
    if method.answers == "logits":
        return f"share={share} turns probabilities into labels, but {method.name} shares logits: set average=probs"
    return (
        f"share={share} is for methods that share predictions for the public samples and nothing else, such as fedcc "
        f"and fedmd; {method.name} shares weights or other values, which it would not protect"
    )


@dataclass(frozen=True)
class Disclosure:
    """The form in which a method's clients share their answers; without arguments as the method makes them."""

    share: Share = "predictions"
    epsilon: float = math.inf  # of each answer, if it is noisy; not of a private record
    columns: int = 0  # different labels: the classes and perhaps "unknown"
    labels: bool = False  # the method itself takes labels

    @staticmethod
    def of(method: AnyMethod, classes: int, share: Share, epsilon: float) -> Disclosure:
        if reason := share_reason(method, share):
            raise ValueError(reason)
        noise = epsilon if share == "noisy" else math.inf
        return Disclosure(share, noise, method.outputs(classes), method.answers == "labels")

    @property
    def filters(self) -> bool:
        """Whether anything else than the method's own message leaves a client."""
        return self.share != "predictions"

    # -- at the client

    def sent(self, up: Any) -> Any:
        """What a client sends instead of its upload."""
        return self.answered(self.hard(up)) if self.filters else up

    def hard(self, up: Any) -> Tensor:
        """The label of each sample, [n]; of predictions the most likely one."""
        if isinstance(up, Labels):
            return up.values.long()
        if not isinstance(up, Predictions) or not (is_probabilities(up.values) or not len(up.values)):
            raise ValueError(f"share={self.share} needs probabilities or labels, got {type(up).__name__}")
        return up.values.argmax(-1)

    def answered(self, labels: Tensor) -> Labels:
        """The message with these labels, randomised if they are to be."""
        return Labels.of(self.randomised(labels) if self.share == "noisy" else labels, self.columns)

    def randomised(self, labels: Tensor) -> Tensor:
        """Each label, kept with probability ``keep``, else any of them, all with the same probability.

        A label is reported as itself e^epsilon times as often as in place of another one. The draws are the operating
        system's: whoever knows the run's seed could undo draws that follow from it.
        """
        system = secrets.SystemRandom()
        reported = [y if system.random() < self.keep else system.randrange(self.columns) for y in labels.tolist()]
        return torch.tensor(reported, dtype=torch.long, device=labels.device)

    def blank(self, number: int) -> Labels:
        """A message of this many answers, for its form."""
        return Labels.of(torch.zeros(number, dtype=torch.long), self.columns)

    @property
    def keep(self) -> float:
        """The probability that no draw replaces a label: (e^epsilon - 1) / (e^epsilon + columns - 1)."""
        if math.isinf(self.epsilon):
            return 1.0
        small = math.exp(-self.epsilon)
        return (1 - small) / (1 + (self.columns - 1) * small)

    # -- at the server

    def received(self, up: Any) -> Any:
        """A client's upload as the method expects it."""
        return up if not self.filters or self.labels else Predictions(self.probabilities(up.values))

    def logits(self, answer: Labels) -> Tensor:
        """A client's answer as a network's outputs [n, columns], whose softmax are the probabilities."""
        return self.probabilities(answer.values).clamp(min=SMALLEST).log()

    def probabilities(self, labels: Tensor) -> Tensor:
        """What the labels [n] of a client say, as probabilities [n, columns].

        Of noisy labels: the chance of each true label, given the one that was reported and how often this client
        reports each. Nothing but what was sent is used, so it costs no privacy. A method that takes labels counts
        them as they are reported.
        """
        ones = F.one_hot(labels.long(), self.columns).to(torch.float32)
        if self.share != "noisy":
            return ones
        other = (1 - self.keep) / self.columns
        likelihood = other + self.keep * ones
        if self.labels:
            return likelihood
        prior = ((ones.mean(0) - other) / max(self.keep, SMALLEST)).clamp(min=0)  # of the true labels
        counts = 1 + len(ones) * prior / prior.sum().clamp(min=SMALLEST)  # one more of each, so that none is excluded
        posterior = likelihood * counts
        return posterior / posterior.sum(-1, keepdim=True)


OPEN = Disclosure()
"""Messages as the method makes them."""
