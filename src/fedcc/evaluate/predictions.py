"""Predictions that are made once, however often they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fedcc.core.disclosure import Disclosure
from fedcc.core.messages import Predictions
from fedcc.core.method import Trained
from fedcc.core.model import Model, Outputs
from fedcc.core.requests import Executor, Predict, Recalibrate, Request
from fedcc.core.samples import Samples, View
from fedcc.engine.finite import NotFiniteError


class PredictionCache:
    """An engine that predicts once with each model on each input tensor, and recalibrates each model once.

    An error about predictions that are not finite names the client or the server's model.
    """

    def __init__(self, executor: Executor, trained: Trained | None = None):
        self.executor, self.trained = executor, trained or Trained(0, {}, {})
        self.outputs: dict[tuple[int, int, View], Outputs] = {}
        self.recalibrated: dict[tuple[int, int, View], tuple[Model, Recalibrate]] = {}
        self.alive: list[Any] = []  # models and inputs of the keys: while they live, nothing else gets their ids

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        missing = [r for r in requests if self.known(r) is None]
        answers = dict(zip(map(id, missing), self.answers(missing) if missing else [], strict=True))
        for request in missing:
            if isinstance(request, Predict):
                self.add(request, answers[id(request)])
            elif isinstance(request, Recalibrate):
                self.recalibrated[self.key(request)] = answers[id(request)], request
        return [answers[id(r)] if id(r) in answers else self.known(r) for r in requests]

    def known(self, request: Request[Any]) -> Any:
        """An answer that was given before; None if there is none."""
        if isinstance(request, Predict):
            return self.outputs.get(self.key(request))
        answer = self.recalibrated.get(self.key(request)) if isinstance(request, Recalibrate) else None
        return answer and answer[0]

    def forget_predictions(self) -> None:
        """Before other inputs are asked about; recalibrated models stay."""
        self.outputs.clear()
        self.alive.clear()

    def key(self, request: Any) -> tuple[int, int, View]:
        return id(request.model), id(request.samples.x), request.samples.view

    def add(self, request: Predict, outputs: Outputs) -> None:
        self.outputs[self.key(request)] = outputs
        self.alive += [request.model, request.samples.x]

    def answers(self, requests: Sequence[Request[Any]]) -> list[Any]:
        try:
            return self.executor.serve(requests)
        except NotFiniteError as error:
            owners = {id(model): f"client {k}" for k, model in self.trained.clients.items()}
            owners |= {id(model): f"the server's model {name!r}" for name, model in self.trained.server.items()}
            error.add_note(f"{owners.get(id(error.model), 'a model')}, 'evaluate'")
            raise


class DisclosedPredictions(PredictionCache):
    """An engine through which clients answer in the form in which they share answers, once for each sample."""

    def __init__(self, executor: Executor, trained: Trained, disclosure: Disclosure):
        super().__init__(executor, trained)
        self.disclosure = disclosure

    def answers(self, requests: Sequence[Request[Any]]) -> list[Any]:
        clients = {id(model) for model in self.trained.clients.values()}
        return [
            self._answer(outputs) if isinstance(request, Predict) and id(request.model) in clients else outputs
            for request, outputs in zip(requests, super().answers(requests), strict=True)
        ]

    def _answer(self, outputs: Outputs) -> Outputs:
        sent = self.disclosure.sent(Predictions(outputs.logits.softmax(-1)))
        return Outputs(self.disclosure.logits(sent), outputs.features[:, :0])


class RemotePredictions(PredictionCache):
    """An engine for models that stay at their sites: ``ask`` gives the logits of all of them for some inputs."""

    def __init__(
        self, executor: Executor, models: Mapping[int, Model], ask: Callable[[Tensor], Mapping[int, Predictions]]
    ):
        super().__init__(executor)
        self.models, self.ask = models, ask

    def answers(self, requests: Sequence[Request[Any]]) -> list[Any]:
        remote = {id(model) for model in self.models.values()}
        return [self._ask(r) if isinstance(r, Predict) and id(r.model) in remote else self.executor.serve([r])[0]
                for r in requests]  # fmt: skip

    def _ask(self, request: Predict) -> Outputs:
        if self.key(request) not in self.outputs:
            self.learn(request.samples, self.ask(request.samples.x))
        return self.outputs[self.key(request)]

    def learn(self, samples: Samples, answers: Mapping[int, Predictions]) -> None:
        """Add the answers of the sites, by client."""
        for k, message in answers.items():
            self.add(Predict(self.models[k], samples), Outputs(message.values, message.values[:, :0]))
