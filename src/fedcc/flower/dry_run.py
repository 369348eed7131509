"""What a client's next upload must look like: the server runs the client's round without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from fedcc.core.messages import Data
from fedcc.core.method import AnyMethod
from fedcc.core.model import HEAD, Arch, Model, Outputs, State
from fedcc.core.requests import Fit, Fitted, Init, Predict, Recalibrate, Request
from fedcc.core.rng import Key
from fedcc.core.roles import Server
from fedcc.core.samples import Samples
from fedcc.core.tree import message_classes
from fedcc.engine.drive import drive
from fedcc.federate import build_client
from fedcc.flower.codec import ExpectedMessage
from fedcc.nets import build


class ShapeEngine:
    """An engine that gets only shapes right: a fit returns its model, all logits and features are zero."""

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Request[Any]) -> Any:
        if isinstance(request, Init):
            return Model(request.arch, dict(network_state(request.arch)[0]))
        if isinstance(request, Fit):
            model = request.model
            return Fitted(model, 1, 0.0, {}, HEAD if request.only == "head" else network_state(model.arch)[1])
        if isinstance(request, Recalibrate):
            return request.model
        if isinstance(request, Predict):
            model, n = request.model, len(request.samples)
            width = model.state["head.weight"].shape[1]
            return Outputs(torch.zeros(n, model.arch.outputs), torch.zeros(n, width))
        raise TypeError(f"no shape is known for the answer to {type(request).__name__}")


@lru_cache(maxsize=32)
def network_state(arch: Arch) -> tuple[State, tuple[str, ...]]:
    """Some state of a network, and the names of its trained parameters."""
    module = build(arch, Key(0))
    return dict(module.state_dict()), module.trainable


class DryRun:
    """A stand-in for each client at the server: it has the client's network and one blank sample of each class, goes
    through the client's rounds with the client's downlinks, and remembers what the client would.

    ``start`` are the models and memories that :attr:`clients` gave to a checkpoint.
    """

    def __init__(
        self,
        method: AnyMethod,
        server: Server,
        wire: str,
        run: str,
        start: Mapping[int, tuple[Model, dict[str, Any]]] | None = None,
    ):
        self.method, self.wire, self.run, self.engine = method, wire, run, ShapeEngine()
        self.classes, self.message_classes = server.classes, message_classes(method)
        public = Samples({"x": server.public.x.cpu()}, server.public.view)
        blank = torch.zeros((), dtype=public.x.dtype).expand(server.classes, *public.shape)
        private = Samples({"x": blank, "y": torch.arange(server.classes)}, public.view)
        self._clients = {
            k: build_client(public, server.classes, server.recipe, server.key.seed, k, arch, private)
            for k, arch in server.archs.items()
        }
        for k, client in self._clients.items():
            client.model = self.engine.answer(Init(client.arch, client.key))
            if start is not None:
                client.model, client.memory = start[k]

    @property
    def clients(self) -> dict[int, tuple[Model, dict[str, Any]]]:
        """The stand-ins' models and memories, for a :class:`~fedcc.federate.Snapshot`."""
        return {k: (c.model, c.memory) for k, c in self._clients.items()}

    def expected_upload(self, k: int, t: int, down: Any) -> ExpectedMessage:
        """What client ``k`` must upload in round ``t`` after it received ``down``."""
        client = self._clients[k]
        client.begin(t)
        up = drive([self.method.client(client, down)], self.engine)[0]
        if isinstance(up, Data):
            raise ValueError(f"{self.method.name} uploads private samples, which a federation across machines refuses")
        return ExpectedMessage(up, self.message_classes, self.classes, self.wire, self.run, t)
