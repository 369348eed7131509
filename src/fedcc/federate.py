"""The round loop. Start reading here: downlinks -> clients -> uplinks -> server -> downlinks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from fedcc.core.disclosure import OPEN, Disclosure
from fedcc.core.messages import carried, nbytes
from fedcc.core.method import AnyMethod, Trained
from fedcc.core.model import Arch, Model
from fedcc.core.options import Wire, check_value
from fedcc.core.requests import Executor, Init, Recipe
from fedcc.core.rng import Key
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.engine.drive import drive
from fedcc.engine.finite import check_models
from fedcc.federation import Federation
from fedcc.nets import network


class Cohort(Protocol):
    """The clients, wherever they are: in this process or across machines."""

    wire: str  # the number format of what crosses the wire
    disclosure: Disclosure  # the form in which clients share their answers

    def round(self, t: int, downs: Mapping[int, Any]) -> Mapping[int, Any]:
        """What was sent by the clients that took part, by id; a client that did not answer is missing."""
        ...


@dataclass(frozen=True, eq=False)
class RoundMessages:
    """The messages of one round and their sizes in bytes."""

    t: int
    ups: Mapping[int, Any]  # as the method receives them
    downs: Mapping[int, Any]  # what the server sends after this round
    bytes_up: int
    bytes_down: int  # of what this round's clients received before it
    received: Mapping[int, Any] = field(default_factory=dict)  # by the clients, before this round
    sent: Mapping[int, Any] = field(default_factory=dict)  # by the clients; what ``ups`` were on the wire


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All that the next round depends on. The memories are no copies: it is valid until the next round begins."""

    t: int  # the last finished round
    downs: Mapping[int, Any]
    models: Mapping[str, Model]  # the server's
    memory: dict[str, Any]  # the server's
    clients: Mapping[int, tuple[Model, dict[str, Any]]]  # model and memory of each client that has taken part


def federate(
    method: AnyMethod,
    server: Server,
    cohort: Cohort,
    rounds: int,
    executor: Executor,
    start: Snapshot | None = None,
) -> Iterator[RoundMessages]:
    """The one loop, for every method: no branch on the kind of method. With ``start`` it continues after that round."""
    server.rounds = rounds if method.depends_on_rounds else None
    if start is None:
        downs = drive([method.start(server)], executor)[0]
    else:
        server.models, server.memory, downs = dict(start.models), start.memory, start.downs
    for t in range(start.t + 1 if start else 1, method.rounds(rounds) + 1):
        received = downs
        server.begin(t)
        sent = cohort.round(t, received)
        ups = {k: cohort.disclosure.received(up) for k, up in sent.items()}
        if ups:
            before = dict(server.models)
            try:
                downs = drive([method.server(server, dict(sorted(ups.items())))], executor)[0]
                check_models(before, server.models)
            except FloatingPointError as error:
                if not getattr(error, "__notes__", ()):
                    error.add_note(str(server.key))
                raise
        bytes_up = sum(nbytes(up, cohort.wire) for up in sent.values())
        sizes = {id(m): nbytes(m, cohort.wire) for m in {id(received[k]): received[k] for k in ups}.values()}
        bytes_down = sum(sizes[id(received[k])] for k in ups)  # often one message for all
        yield RoundMessages(t, ups, downs, bytes_up, bytes_down, received, sent)


class Simulated:
    """All clients in this process, driven together by one engine."""

    def __init__(
        self,
        method: AnyMethod,
        clients: list[Client],
        executor: Executor,
        *,
        participation: float = 1.0,
        wire: str = "fp32",
        disclosure: Disclosure = OPEN,
        start: Snapshot | None = None,
    ):
        check_value("participation", participation, float, high=1, above=0)
        check_value("wire", wire, Wire)
        self.method, self.clients, self.executor = method, clients, executor
        self.participation, self.wire, self.disclosure = participation, wire, disclosure
        self.present: list[Client] = []  # those of the latest round
        for client in clients:  # most of many clients may never take part: their models are made if they are needed
            client.first_model = partial(_first, client, executor)
            if start is not None and client.id in start.clients:
                client.model, client.memory = start.clients[client.id]

    def round(self, t: int, downs: Mapping[int, Any]) -> dict[int, Any]:
        self.present = self.participants(t)
        for client in self.present:
            client.begin(t)
        downs = {c.id: carried(downs[c.id], self.wire, c.key.of(phase="wire", stream="down")) for c in self.present}
        ups = drive([self.method.client(c, downs[c.id]) for c in self.present], self.executor)
        return {
            c.id: carried(self.disclosure.sent(up), self.wire, c.key.of(phase="wire", stream="up"))
            for c, up in zip(self.present, ups, strict=True)
        }

    def participants(self, t: int) -> list[Client]:
        """The clients of round t: all, or a sample that depends only on the seed and the round."""
        number = max(1, round(self.participation * len(self.clients)))
        if number == len(self.clients):
            return self.clients
        key = Key(self.clients[0].key.seed, t, phase="participation")
        sample = key.generator().choice(len(self.clients), number, replace=False)
        return [self.clients[i] for i in sorted(sample)]

    def snapshot(self, server: Server, messages: RoundMessages) -> Snapshot:
        """All that the next round depends on."""
        clients = {c.id: (c.model, c.memory) for c in self.clients if c.has_model or c.memory}
        return Snapshot(messages.t, messages.downs, server.models, server.memory, clients)

    def trained_models(self, server: Server) -> Trained:
        """The models to predict with now."""
        return Trained.of(server, ClientModels(self.clients))


class ClientModels(Mapping[int, Model]):
    """The clients' models now, by id; first models of those without one are made when asked for, and kept only here."""

    def __init__(self, clients: list[Client]):
        self._clients = {c.id: c for c in clients}
        self._models = {c.id: c.model for c in clients if c.has_model}

    def __getitem__(self, client: int) -> Model:
        if client not in self._models:
            make = self._clients[client].first_model  # if it has trained since, this is still its model before that
            assert make is not None
            self._models[client] = make()
        return self._models[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


def _first(client: Client, executor: Executor) -> Model:
    model: Model = executor.serve([first_model(client)])[0]
    return model


def first_model(client: Client) -> Init:
    """A client's model before its first round, whenever it joins."""
    return Init(client.arch, client.key.of(round=0, phase="init"))


def build_roles(
    method: AnyMethod, federation: Federation, recipe: Recipe, seed: int, device: torch.device | str
) -> tuple[Server, list[Client]]:
    """The server and the clients of a run, each with what it may see and nothing else."""
    archs, public, classes = federation.archs(method), federation.public.to(device), federation.classes
    clients = [
        build_client(public, classes, recipe, seed, k, archs, private.to(device))
        for k, private in enumerate(federation.private)
    ]
    return build_server(method, public, classes, recipe, seed, archs), clients


def build_client(
    public: Samples, classes: int, recipe: Recipe, seed: int, number: int, archs: Mapping[int, Arch], private: Samples
) -> Client:
    """One client, in this process or at its site."""
    return Client(
        public=public, classes=classes, recipe=recipe, key=Key(seed, 0, number), archs=archs,
        id=number, arch=archs[number], private=private,
    )  # fmt: skip


def build_server(
    method: AnyMethod, public: Samples, classes: int, recipe: Recipe, seed: int, archs: Mapping[int, Arch]
) -> Server:
    """The server of clients with these networks, wherever the clients are."""
    if reason := method.unusable_reason(public):
        raise ValueError(reason)

    def build(name: str) -> Arch:
        return Arch((network(name, public.shape),), method.outputs(classes), public.shape, public.are_tokens)

    return Server(public=public, classes=classes, recipe=recipe, key=Key(seed), archs=archs, networks=build)
