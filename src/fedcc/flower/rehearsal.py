"""What a client's next upload has to look like: its round, rehearsed at the server without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedcc.core.messages import Data, Weights
from fedcc.core.method import AnyMethod
from fedcc.core.model import HEAD, Arch, Model, Outputs, State
from fedcc.core.requests import Fit, Fitted, Init, Predict, Recalibrate, Request
from fedcc.core.rng import Key
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.core.tree import message_classes
from fedcc.engine.drive import drive
from fedcc.flower.codec import Expected
from fedcc.nets import build


class Shapes:
    """An executor that serves by shapes: a fit gives its model back, every logit and feature is zero."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.dtype = dtype

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Request[Any]) -> Any:
        if isinstance(request, Init):
            state, _ = _network(request.arch)
            return Model(request.arch, {n: v.to(self.dtype) if v.is_floating_point() else v for n, v in state.items()})
        if isinstance(request, Fit):
            model = request.model
            return Fitted(model, 1, 0.0, {}, HEAD if request.only == "head" else _network(model.arch)[1])
        if isinstance(request, Recalibrate):
            return request.model
        if isinstance(request, Predict):
            model, n = request.model, len(request.samples)
            width = model.state["head.weight"].shape[1]
            return Outputs(self.zeros(n, model.arch.outputs), self.zeros(n, width))
        raise TypeError(f"nothing is known of the shape of {type(request).__name__}")

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype)


@lru_cache(maxsize=32)
def _network(arch: Arch) -> tuple[State, tuple[str, ...]]:
    """Some state of a network, and the names of what is trained in it."""
    module = build(arch, Key(0))
    return dict(module.state_dict()), module.trainable


class Rehearsal:
    """The server's stand-ins, one per client: each has the client's network, one blank sample of each class, and goes
    through the client's rounds with the downlinks that the client is really sent.

    A method may make an upload depend on what the client remembers, so stand-ins remember as well. ``start`` are the
    models and memories of an earlier process, as :attr:`clients` gave them to its checkpoint.
    """

    def __init__(
        self,
        method: AnyMethod,
        server: Server,
        wire: str,
        run: str,
        start: Mapping[int, tuple[Model, dict[str, Any]]] | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        self.method, self.wire, self.run, self.executor = method, wire, run, Shapes(dtype)
        self.classes, self.messages = server.classes, message_classes(method)
        public = Samples({"x": server.public.x.cpu()}, server.public.view)
        blank = torch.zeros((), dtype=public.x.dtype).expand(server.classes, *public.shape)
        private = Samples({"x": blank, "y": torch.arange(server.classes)}, public.view)
        self._clients = {
            k: Client(
                public=public,
                classes=server.classes,
                recipe=server.recipe,
                key=server.key.of(client=k),
                id=k,
                arch=arch,
                private=private,
            )
            for k, arch in server.archs.items()
        }
        for k, client in self._clients.items():
            client.model = self.executor.answer(Init(client.arch, client.key))
            if start is not None:
                client.model, client.memory = start[k]

    @property
    def clients(self) -> dict[int, tuple[Model, dict[str, Any]]]:
        """The stand-ins' models and memories, for a :class:`~fedcc.federate.Snapshot`."""
        return {k: (c.model, c.memory) for k, c in self._clients.items()}

    def expect(self, k: int, t: int, down: Any) -> Expected:
        """What client ``k`` has to upload in round ``t`` where it is sent ``down``."""
        client = self._clients[k]
        client.begin(t)
        up = drive([self.method.client(client, down)], self.executor)[0]
        if isinstance(up, Data):
            raise ValueError(
                f"{self.method.name} uploads private samples; a federation across machines has no place for it"
            )
        return self._expected(up, t)

    def expect_model(self, k: int, t: int) -> Expected:
        """What client ``k`` has to upload where it hands over its model after round ``t``, as ``Weights.of(model)``."""
        return self._expected(Weights.of(self._clients[k].model, 1), t)

    def _expected(self, message: Any, t: int) -> Expected:
        return Expected(message, self.messages, self.classes, self.wire, self.run, t)
