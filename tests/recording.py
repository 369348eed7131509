"""An executor that remembers what was asked of it, and how a test compares states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedcc.core.requests import Executor, Fit, Fitted, Request
from tiny import Tiny


class Recording:
    """Serves by another executor; keeps every group of requests and its answers."""

    def __init__(self, executor: Executor):
        self.executor = executor
        self.groups: list[list[Request[Any]]] = []
        self.answers: list[list[Any]] = []

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        answers = self.executor.serve(requests)
        self.groups.append(list(requests))
        self.answers.append(answers)
        return answers

    def fits(self, phase: str | None = None, client: int | None = None, round: int | None = None) -> list[Fit]:
        return [fit for fit, _ in self.fitted(phase, client, round)]

    def fitted(
        self, phase: str | None = None, client: int | None = None, round: int | None = None
    ) -> list[tuple[Fit, Fitted]]:
        """The fits that were asked for with their answers, in order; None is any."""
        return [
            (request, answer)
            for group, answers in zip(self.groups, self.answers, strict=True)
            for request, answer in zip(group, answers, strict=True)
            if isinstance(request, Fit)
            and phase in (None, request.key.phase)
            and client in (None, request.key.client)
            and round in (None, request.key.round)
        ]


def record(tiny: Tiny) -> Recording:
    """From now on this federation's requests are recorded."""
    recording = Recording(tiny.executor)
    tiny.executor = tiny.cohort.executor = recording
    return recording


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Equal to the bit, names included."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def changed(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> set[str]:
    """The names of the entries that differ."""
    assert a.keys() == b.keys()
    return {name for name in a if not torch.equal(a[name], b[name])}
