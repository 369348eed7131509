"""Advice on public samples, the one thing that a user of distillation must find: docs/public-data.md."""

import warnings

import torch

from fedcc.core.messages import Predictions
from fedcc.core.method import AnyMethod
from fedcc.experiments.rounds import FinishedRound, Observer
from fedcc.federation import Federation

FEW = 2  # public samples per class; with less, accuracy falls (docs/public-data.md)
TRAINED = 3  # epochs before a client knows its own samples
KNOWN = 0.3  # mean largest vote; measured: 0.46 and more with useful public samples, below 0.2 with useless ones


class PublicDataWarning(UserWarning):
    """Public samples that are too few, or unlike the clients' own."""


def public_line(method: AnyMethod, federation: Federation) -> str:
    """One line on the public samples of a method that distils; empty for others."""
    if method.family != "distillation":
        return ""
    number, classes = len(federation.public), federation.classes
    samples = f"{number:,} public sample{'s' if number > 1 else ''}"
    if number < FEW * classes:
        return f"only {samples} for {classes} classes: at least {FEW} per class are advised"
    return f"{samples}, used without labels; they should look like the clients' own"


class PublicAdvice(Observer):
    """Warns after the first round if the clients recognise next to nothing of the public samples."""

    def __init__(self, method: AnyMethod, classes: int, epochs: int):
        self.applies = method.outputs(classes) == classes + 1 and epochs >= TRAINED

    def round(self, done: FinishedRound) -> None:
        votes = [up.values for up in done.messages.ups.values() if isinstance(up, Predictions)]
        if done.t > 1 or not self.applies or not votes:
            return
        known = float(torch.stack(votes)[..., :-1].amax((0, 2)).mean())
        if known < KNOWN:
            text = (
                f"the clients recognise next to nothing of the public samples: the largest vote for a class is "
                f"{known:.2f} on average, {KNOWN} or more is usual; do they look like the clients' own "
                "(same scaling, same kind of objects)?"
            )
            warnings.warn(text, PublicDataWarning, stacklevel=2)
