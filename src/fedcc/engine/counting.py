"""The number of images that networks process: counted from the requests, so it is the same for every engine."""

from collections.abc import Sequence
from typing import Any

from fedcc.core.requests import Executor, Fit, Predict, Recalibrate, Request
from fedcc.core.step import Gradient


class Counting:
    """Serves requests by another engine and counts images.

    ``trained`` counts images of forward and backward passes by phase: steps times the batches of all streams, twice
    if a step takes the gradient twice. ``predicted`` counts images of forward passes, also those of frozen teachers.
    """

    def __init__(self, executor: Executor):
        self.executor = executor
        self.trained: dict[str, int] = {}
        self.predicted = 0

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        answers = self.executor.serve(requests)
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(request, Fit):
                phase, size = request.key.phase, request.recipe.batch_size
                twice = request.gradient is not None and type(request.gradient).ascent is not Gradient.ascent
                images = answer.steps * sum(map(size, request.streams)) * (2 if twice else 1)
                self.trained[phase] = self.trained.get(phase, 0) + images
                self.predicted += answer.steps * sum(size(teacher.stream) for teacher in request.frozen.values())
            elif isinstance(request, Predict | Recalibrate):
                self.predicted += len(request.samples)
        return answers

    def take(self) -> dict[str, Any]:
        """The counts since the last call, as plain values."""
        counts = {"trained": self.trained, "predicted": self.predicted}
        self.trained, self.predicted = {}, 0
        return counts
