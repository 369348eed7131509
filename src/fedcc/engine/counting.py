"""How many images a method's networks process: counted from the requests, the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedcc.core.requests import Executor, Fit, Fitted, Predict, Recalibrate, Request
from fedcc.core.step import Gradient


class Counting:
    """Serves by another engine and counts images until they are taken.

    ``trained`` counts images that went forward and backward, by phase: steps times the batches of all streams, twice
    where a step takes the gradient twice. ``predicted`` counts images that went forward only, a frozen teacher's too.
    """

    def __init__(self, executor: Executor):
        self.executor = executor
        self.trained: dict[str, int] = {}
        self.predicted = 0

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        answers = self.executor.serve(requests)
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(request, Fit):
                self._count(request, answer)
            elif isinstance(request, Predict | Recalibrate):
                self.predicted += len(request.samples)
        return answers

    def take(self) -> dict[str, Any]:
        """What was counted since the last call, as plain values."""
        taken = {"trained": self.trained, "predicted": self.predicted}
        self.trained, self.predicted = {}, 0
        return taken

    def _count(self, fit: Fit, fitted: Fitted) -> None:
        phase, size = fit.key.phase, fit.recipe.batch_of
        twice = fit.gradient is not None and type(fit.gradient).ascent is not Gradient.ascent
        images = fitted.steps * sum(map(size, fit.streams)) * (2 if twice else 1)
        self.trained[phase] = self.trained.get(phase, 0) + images
        self.predicted += fitted.steps * sum(size(teacher.stream) for teacher in fit.frozen.values())
