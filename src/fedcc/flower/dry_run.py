"""What a client's next upload must look like: the server runs the client's round without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from fedcc.core.disclosure import OPEN, Disclosure
from fedcc.core.messages import Data, leaves
from fedcc.core.method import AnyMethod
from fedcc.core.model import HEAD, Arch, Model, Outputs, State
from fedcc.core.requests import Fit, Fitted, Init, Predict, Recalibrate, Request
from fedcc.core.rng import Key
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.core.tree import message_classes
from fedcc.engine.drive import drive
from fedcc.federate import build_client
from fedcc.flower.codec import ExpectedMessage
from fedcc.flower.own_network import NotKnown, UnknownState, is_at_site
from fedcc.nets import build


class ShapeEngine:
    """An engine that gets only shapes and steps right: a fit returns its model, all logits and features are zero.

    Of a network that only its site knows, it knows the outputs; ``unknown`` is its state.
    """

    def __init__(self, unknown: State | None = None):
        self.unknown: State = {} if unknown is None else unknown

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Request[Any]) -> Any:
        if isinstance(request, Init):
            known = not is_at_site(request.arch)
            return Model(request.arch, dict(network_state(request.arch)[0]) if known else self.unknown)
        if isinstance(request, Fit):
            model, trained = request.model, HEAD if request.only == "head" else network_state(request.model.arch)[1]
            return Fitted(model, request.steps, 0.0, {}, trained)
        if isinstance(request, Recalibrate):
            return request.model
        if isinstance(request, Predict):
            model, n = request.model, len(request.samples)
            width = 0 if is_at_site(model.arch) else model.state["head.weight"].shape[1]
            return Outputs(torch.zeros(n, model.arch.outputs), torch.zeros(n, width))
        raise TypeError(f"no shape is known for the answer to {type(request).__name__}")


@lru_cache(maxsize=32)
def network_state(arch: Arch) -> tuple[State, tuple[str, ...]]:
    """Some state of a network, and the names of its trained parameters; none of a site's own."""
    if is_at_site(arch):
        return {}, ()
    module = build(arch, Key(0))
    return dict(module.state_dict()), module.trainable


class DryRun:
    """A stand-in for each client at the server: it has the client's network and one blank sample of each class, goes
    through the client's rounds with the client's downlinks, and remembers what the client would.

    ``start`` are the models and memories that :attr:`clients` gave to a checkpoint. ``unknown`` is the state of a
    network that only its site knows. ``disclosure`` is the form in which clients share answers.
    """

    def __init__(
        self,
        method: AnyMethod,
        server: Server,
        wire: str,
        run: str,
        start: Mapping[int, tuple[Model, dict[str, Any]]] | None = None,
        unknown: State | None = None,
        disclosure: Disclosure = OPEN,
    ):
        self.disclosure = disclosure
        self.method, self.wire, self.run, self.engine = method, wire, run, ShapeEngine(unknown)
        self.server, self.classes, self.message_classes = server, server.classes, message_classes(method)
        self.public = public = Samples({"x": server.public.x.cpu()}, server.public.view)
        blank = torch.zeros((), dtype=public.x.dtype).expand(server.classes, *public.shape)
        self.private = Samples({"x": blank, "y": torch.arange(server.classes)}, public.view)
        self._clients: dict[int, Client] = {}
        for k in server.archs:
            self._stand_in(k)
        for k, state in (start or {}).items():  # a client that was added since has none
            self._clients[k].model, self._clients[k].memory = state

    def add(self, k: int, arch: Arch) -> None:
        """Let a new client into the federation: from now on the server addresses it, too."""
        self.server.archs = {**self.server.archs, k: arch}
        self._stand_in(k)

    def _stand_in(self, k: int) -> None:
        s = self.server
        client = build_client(self.public, s.classes, s.recipe, s.key.seed, k, s.archs, self.private)
        client.model = self.engine.answer(Init(client.arch, client.key))
        self._clients[k] = client

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
        if not self.disclosure.filters:
            return ExpectedMessage(up, self.message_classes, self.classes, self.wire, self.run, t)
        labels = self.disclosure.blank(len(client.public))
        return ExpectedMessage(labels, self.message_classes, self.disclosure.columns, self.wire, self.run, t)


def check_outputs_suffice(method: AnyMethod, server: Server) -> None:
    """Refuse a method that sends or uses weights, if some client's network is known to its site only."""
    own = [k for k, arch in server.archs.items() if is_at_site(arch)]
    try:
        if own and method.family == "parameters":
            raise NotKnown
        dry_run = DryRun(method, server, "fp32", "", unknown=UnknownState())
        downs = drive([method.start(server)], dry_run.engine)[0] if own else {}
        for k in own:
            list(leaves(dry_run.expected_upload(k, 1, downs[k]).message))
    except NotKnown:
        raise ValueError(
            f"{method.name} sends weights, and the server knows no weights of a network that its site brings; "
            "name the clients' networks, or choose a method that sends predictions, such as fedcc"
        ) from None
    if any(is_at_site(model.arch) for model in server.models.values()):
        raise ValueError(
            f"{method.name} trains a network on the server, by default one of the clients, which only its site knows; "
            "name it with --set server_arch=NAME"
        )
