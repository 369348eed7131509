"""A snapshot survives its file: every method goes on from it as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcc.core.files import uninterrupted
from fedcc.core.messages import Labels, Weights
from fedcc.core.model import Arch, Model
from fedcc.core.tree import message_classes
from fedcc.experiments.experiment import first_difference
from fedcc.experiments.packing import from_bytes, read_header, to_bytes
from fedcc.federate import RoundMessages, Snapshot, federate
from fedcc.methods import METHODS, make
from tiny import Mlp, Tiny

SMALL: dict[str, dict[str, Any]] = {
    "fedconcat": {"classifier_rounds": 3, "clusters": 2},
    "fedaux": {"pretrain": "none"},
}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, SMALL.get(name, {}), {}) for name in METHODS),
    *(
        (name, {}, {"participation": 0.5})
        for name in ("fedavg", "fedhkt", "fedcc", "feddf", "centralized", "fedmr", "scarlet")
    ),
    ("fedconcat", {"classifier_rounds": 3, "clusters": 2, "histogram": "labels"}, {"participation": 0.5}),
    ("fedconcat", {"classifier_rounds": 3}, {"wire": "fp16"}),
    ("fednova", {"server_momentum": 0.5}, {}),
    ("fedcc", {"majority_source": "labels"}, {"wire": "fp16"}),
]
CLIENTS = [[0, 1] * 6, [1, 2] * 6, [2, 0] * 6, [0] * 12]


def federation(name: str, settings: dict[str, Any], options: dict[str, Any]) -> Tiny:
    one = METHODS[name].family == "parameters" or name == "fedproto"
    return Tiny(make(name, settings), CLIENTS, factories=(Mlp(),) if one else (Mlp(), Mlp(6)), options=options)


def travelled(snapshot: Snapshot, tiny: Tiny) -> Snapshot:
    """The snapshot as it comes back from a file."""
    content = to_bytes(snapshot, tiny.method, {})
    return from_bytes(Snapshot, content, read_header(content)[1], tiny.method, models=tiny.factories)


def messages(rounds: list[RoundMessages]) -> list[Any]:
    return [(r.t, r.bytes_up, r.bytes_down) for r in rounds]


def tensors(tiny: Tiny) -> dict[str, Tensor]:
    trained = tiny.cohort.trained_models(tiny.server)
    return {f"{who}/{n}": v for who, m in {**trained.clients, **trained.server}.items() for n, v in m.state.items()}


@pytest.mark.parametrize(("name", "settings", "options"), CASES, ids=lambda v: str(v) if v else "")
@pytest.mark.parametrize("stop", [1, 4])
def test_every_method_goes_on_as_if_nothing_had_happened(
    name: str, settings: dict[str, Any], options: dict[str, Any], stop: int
) -> None:
    total = 3 if name == "fedconcat" else stop + 2
    whole = federation(name, settings, options).run(total)
    begun = federation(name, settings, options)
    first = list(islice(federate(begun.method, begun.server, begun.cohort, total, begun.executor), stop))
    start = travelled(begun.cohort.snapshot(begun.server, first[-1]), begun)
    rest = federation(name, settings, options | {"start": start})
    rest.rounds = list(federate(rest.method, rest.server, rest.cohort, total, rest.executor, start))
    assert messages(first + rest.rounds) == messages(whole.rounds)
    expected, found = tensors(whole), tensors(rest)
    assert list(expected) == list(found)  # in their order, too
    assert all(torch.equal(expected[n], found[n]) and expected[n].dtype == found[n].dtype for n in expected)
    assert torch.equal(whole.scores(), rest.scores())
    for one, other in zip((whole.server, *whole.clients), (rest.server, *rest.clients), strict=True):
        assert _plain(one.memory) == _plain(other.memory)


def test_values_survive_with_their_types_and_order() -> None:
    shared, part = torch.arange(6.0), torch.arange(8).view(2, 4)
    state = {"b": shared, "a": torch.tensor(3, dtype=torch.int64)}
    model = Model(Arch((Mlp(),), 3, (6,)), state)
    memory = {
        "none": None, "flags": [True, False], "n": 1, "f": 0.1, "nan": float("inf"), "text": "é\n", "pair": (1, [2.5]),
        "nested": {"x": [part[0], part[1], part.T], "empty": {}, "none": []}, 7: torch.zeros(0, 3),
        "half": torch.ones(2, dtype=torch.bfloat16), "mask": torch.tensor([True, False]),
    }  # fmt: skip
    downs = {3: Weights(state, 5), 1: None, 2: Labels(shared)}
    tiny = Tiny(make("fedavg"))
    content = to_bytes(Snapshot(2, downs, {"m": model}, memory, {0: (model, {})}), tiny.method, {"a": 1})
    about, tree = read_header(content)
    again = from_bytes(Snapshot, content, tree, tiny.method, models=tiny.factories)
    assert about == {"a": 1}
    assert again.t == 2
    assert list(again.downs) == [3, 1, 2]
    assert again.downs[1] is None
    assert isinstance(again.downs[3], Weights)
    assert again.downs[3].samples == 5
    assert again.models["m"].arch == model.arch
    assert list(again.models["m"].state) == ["b", "a"]
    assert again.downs[2].values is again.models["m"].state["b"] is again.clients[0][0].state["b"]  # stored once
    assert _plain(again.memory) == _plain(memory)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Stranger:
    x: int = 0


@pytest.mark.parametrize("value", [Stranger(), {1, 2}, object(), b"x"])
def test_what_cannot_be_stored_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"got .*{type(value).__name__}"):
        to_bytes(Snapshot(1, {}, {}, {"odd": value}, {}), make("fedcc"), {})


def test_a_file_names_no_class_that_the_method_does_not_know() -> None:
    assert message_classes(make("fedmr")).keys() >= {"Weights", "Prototypes"}
    content = to_bytes(Snapshot(1, {0: Labels(torch.zeros(2))}, {}, {}, {}), make("fedct"), {})
    tree = json.loads(json.dumps(read_header(content)[1]).replace("Labels", "Popen"))
    with pytest.raises(KeyError, match="Popen"):
        from_bytes(Snapshot, content, tree, make("fedct"))


def test_a_signal_waits_for_the_end_of_a_write() -> None:
    done: list[str] = []

    class Told(Exception):
        pass

    def handler(*_: object) -> None:
        raise Told

    def write() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("written")

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(Told):
            write()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done == ["written"]


@pytest.mark.parametrize(
    ("other", "own", "words"),
    [
        ({"lam": 1.0}, {"lam": 2.0}, "lam is 1.0, here 2.0"),
        ({"lam": 1.0, "mu": 3}, {"lam": 1.0}, "mu is 3, here missing"),
        ({"lam": 1.0}, {"lam": 1.0, "mu": None}, "mu is missing, here None"),
        ("text", {"lam": 1.0}, "settings is text, here {'lam': 1.0}"),
    ],
)
def test_what_differs_is_named(other: object, own: object, words: str) -> None:
    difference = first_difference({"settings": other}, {"settings": own})
    assert difference is not None
    assert "{} is {}, here {}".format(*difference) == words
