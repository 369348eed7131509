"""Every method's messages cross the wire, and what its clients upload is what their stand-ins rehearse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcc.core.disclosure import OPEN
from fedcc.core.messages import Predictions, Weights, nbytes
from fedcc.core.rng import Key
from fedcc.core.tree import message_classes
from fedcc.core.wire import WIRE
from fedcc.federate import federate
from fedcc.flower.codec import EncodedMessage, ExpectedMessage, InvalidMessage, accept, decode, encode
from fedcc.flower.dry_run import DryRun
from fedcc.methods import METHODS, make
from tiny import Tiny

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "fedaux": [{"pretrain": "none"}],
    "fedconcat": [{"clusters": 2, "classifier_rounds": 3}],
    "fedmd": [{}, {"average": "logits", "loss": "l1"}],
    "fedmr": [{}, {"mode": "paper"}],
    "fens": [{"aggregator_rounds": 3}, {"aggregator_rounds": 3, "aggregator": "weights"}],
}
CASES = [(name, given) for name in METHODS for given in SETTINGS.get(name, [{}])]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(equal(a[n], b[n]) for n in a)
    if is_dataclass(a):
        return type(a) is type(b) and all(equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return bool(a == b)


class Remote:
    """The clients of a tiny federation, with all that they send and receive made bytes and read again."""

    disclosure = OPEN

    def __init__(self, tiny: Tiny, wire: str, everyone: bool = True):
        self.wire, self.tiny, self.everyone = wire, tiny, everyone
        self.known = message_classes(tiny.method)
        self.dry_run = DryRun(tiny.method, tiny.server, wire, "run")

    def round(self, t: int, downs: Mapping[int, Any]) -> dict[int, Any]:
        ups = {}
        for client in self.tiny.clients:
            if not self.everyone and (client.id + t) % 3 == 0:  # in turn, one is away
                continue
            client.begin(t)
            key = Key(self.tiny.seed, t, client.id, "wire")
            down = self.crossed(encode(downs[client.id], self.wire, run="run", round=t, key=key.of(stream="down")), t)
            up = self.tiny.ask(self.tiny.method.client(client, down))
            sent = encode(up, self.wire, run="run", round=t, key=key.of(stream="up"))
            assert sent.nbytes == nbytes(up, self.wire)
            if self.tiny.method.name == "Centralized":
                ups[client.id] = self.crossed(sent, t)
                continue
            expected = self.dry_run.expected_upload(client.id, t, downs[client.id])
            ups[client.id] = accept(sent.kind, sent.text, sent.buffers, expected)
        return ups

    def crossed(self, sent: EncodedMessage, t: int) -> Any:
        there = EncodedMessage.parse(sent.kind, sent.text, sent.buffers)
        return decode(there, self.known, self.wire, run="run", round=t)


@pytest.mark.parametrize("wire", WIRE)
@pytest.mark.parametrize(("name", "given"), CASES)
def test_a_federation_by_bytes_is_the_simulation(name: str, given: dict[str, Any], wire: str) -> None:
    simulated = Tiny(make(name, given), precision="fp32", options={"wire": wire}).run(2)
    tiny = Tiny(make(name, given), precision="fp32")
    rounds = list(federate(tiny.method, tiny.server, Remote(tiny, wire), 2, tiny.executor))
    for a, b in zip(rounds, simulated.rounds, strict=True):
        assert equal(a.ups, b.ups)
        assert equal(a.downs, b.downs)
        assert (a.bytes_up, a.bytes_down) == (b.bytes_up, b.bytes_down)
    assert equal({k: c.model.state for k, c in enumerate(tiny.clients)},
                 {k: c.model.state for k, c in enumerate(simulated.clients)})  # fmt: skip


@pytest.mark.parametrize(("name", "given"), CASES)
def test_clients_that_come_and_go_are_expected_as_they_are(name: str, given: dict[str, Any]) -> None:
    tiny = Tiny(make(name, given), precision="fp32")
    rounds = list(federate(tiny.method, tiny.server, Remote(tiny, "fp32", everyone=False), 3, tiny.executor))
    assert {len(r.ups) for r in rounds} == {2}


def test_stand_ins_carry_on_after_a_restart() -> None:
    """What FedConcat's clients upload depends on what they were sent in an earlier round."""
    method = make("fedconcat", {"clusters": 2, "classifier_rounds": 3})
    tiny = Tiny(method, precision="fp32")
    remote = Remote(tiny, "fp32")
    seen = []
    for done in federate(method, tiny.server, remote, 1, tiny.executor):
        seen.append(done.t)
        remote.dry_run = DryRun(method, tiny.server, "fp32", "run", start=remote.dry_run.clients)
    assert seen == [1, 2, 3, 4]


def test_models_at_the_end() -> None:
    tiny = Tiny(make("fedcc"), precision="fp32").run(1)
    dry_run = DryRun(tiny.method, tiny.server, "fp16", "run")
    sent = encode(Weights.of(tiny.clients[0].model, 20), "fp16", run="run", round=1)
    model, _ = dry_run.clients[0]
    expected = ExpectedMessage(Weights.of(model, 1), dry_run.message_classes, tiny.server.classes, "fp16", "run", 1)
    came = accept(sent.kind, sent.text, sent.buffers, expected)
    assert equal(came.state, {n: v.half().float() for n, v in tiny.clients[0].model.floating.items()})


def test_uploads_of_private_samples_are_not_expected() -> None:
    tiny = Tiny(make("centralized"), precision="fp32")
    with pytest.raises(ValueError, match="Centralized uploads private samples"):
        DryRun(tiny.method, tiny.server, "fp32", "run").expected_upload(0, 1, None)


def test_logits_where_probabilities_are_expected() -> None:
    tiny = Tiny(make("fedcc"), precision="fp32").run(1)
    up, expected = tiny.rounds[0].ups[0], DryRun(tiny.method, tiny.server, "fp32", "run").expected_upload(0, 1, None)
    sent = encode(replace(up, values=up.values.log()), "fp32", run="run", round=1)
    with pytest.raises(InvalidMessage, match="probabilities must not be negative"):
        accept(sent.kind, sent.text, sent.buffers, expected)
    logits = DryRun(make("fedmd", {"average": "logits"}), tiny.server, "fp32", "run").expected_upload(0, 1, None)
    free = encode(Predictions(up.values.log()), "fp32", run="run", round=1)
    accept(free.kind, free.text, free.buffers, logits)
