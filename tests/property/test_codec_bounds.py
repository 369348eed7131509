"""What holds for all messages: they come back, within the codec's bounds; garbage is refused and nothing else."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedcc.core.messages import Labels, Predictions, Weights, carried, nbytes
from fedcc.core.rng import Key
from fedcc.core.wire import is_probabilities
from fedcc.flower.codec import DTYPES, EncodedMessage, ExpectedMessage, InvalidMessage, accept, decode, encode

KNOWN = {kind.__name__: kind for kind in (Weights, Predictions, Labels)}
WIRES = ("fp32", "fp16", "int8", "int8-stochastic")
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
ordinary = st.floats(-6e4, 6e4, width=32)


def floats(elements: st.SearchStrategy[float] = ordinary) -> st.SearchStrategy[Any]:
    return shapes.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=elements))


integers = st.sampled_from(["uint8", "int16", "int32", "int64"]).flatmap(lambda dtype: hnp.arrays(dtype, shapes))
states = st.dictionaries(st.text(max_size=8), floats() | integers, max_size=4)
logits = hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(2, 30)), elements=st.floats(-30, 30, width=32))


@given(st.dictionaries(st.text(max_size=8), floats(st.floats(width=32)) | integers, max_size=4), st.integers(0, 2**53))
def test_fp32_gives_back_every_bit(state: dict[str, Any], samples: int) -> None:
    message = Weights({n: torch.from_numpy(v.copy()) for n, v in state.items()}, samples)
    encoded = encode(message, "fp32")
    came = decode(EncodedMessage.parse(encoded.kind, encoded.text, encoded.buffers), KNOWN, "fp32")
    assert came.samples == samples
    assert list(came.state) == list(message.state)
    for name, value in came.state.items():
        assert (value.dtype, value.shape) == (message.state[name].dtype, message.state[name].shape)
        assert value.numpy().tobytes() == message.state[name].numpy().tobytes()


@given(states, st.sampled_from(WIRES), st.integers(0, 99))
def test_what_is_decoded_is_what_the_simulator_carries_and_counts(state: dict[str, Any], wire: str, seed: int) -> None:
    message = Weights({n: torch.from_numpy(v.copy()) for n, v in state.items()})
    encoded = encode(message, wire, key=Key(seed))
    came = decode(EncodedMessage.parse(encoded.kind, encoded.text, encoded.buffers), KNOWN, wire)
    simulated = carried(message, wire, Key(seed))
    assert all(torch.equal(came.state[n], simulated.state[n]) for n in state)
    assert encoded.nbytes == nbytes(message, wire)


@given(floats())
def test_bounds_of_fp16(values: Any) -> None:
    value = torch.from_numpy(values.copy())
    came = carried(Weights({"w": value}), "fp16").state["w"]
    assert bool(((came - value).abs() <= value.abs() * 2.0**-11 + 2.0**-25).all())


@given(floats(), st.sampled_from(WIRES[2:]))
def test_bounds_of_int8(values: Any, wire: str) -> None:
    """Half a step of 127 to the row's largest; a whole one where chance rounds."""
    value = torch.from_numpy(values.copy())
    came = carried(Weights({"w": value}), wire, Key(0)).state["w"]
    if value.ndim < 2 or not value.numel() or value[0].numel() < 2:
        assert torch.equal(came, value)
        return
    if value.ndim == 2 and is_probabilities(value):
        return
    rows, back = value.double().flatten(1), came.double().flatten(1)
    step = rows.abs().amax(1, keepdim=True) / 127
    bound = (0.5 if wire == "int8" else 1) * step * (1 + 1e-5) + 1e-40
    assert bool(((back - rows).abs() <= bound).all())


@given(logits, st.sampled_from(WIRES[1:]))
def test_bounds_of_probabilities(values: Any, wire: str) -> None:
    """They are probabilities again; with eight bits the roots, as vectors, move by sqrt(max C) / 255 at the most."""
    p = torch.from_numpy(values.copy()).softmax(-1)
    came = carried(Predictions(p), wire, Key(0)).values
    assert is_probabilities(came, 1e-3 if wire == "fp16" else 1e-6)
    moved = (came.double().sqrt() - p.double().sqrt()).norm(dim=-1)
    times = 1 if wire == "int8" else 2
    if wire != "fp16":
        assert bool((moved <= times * (p.amax(-1) * p.shape[-1]).sqrt() / 255 + 1e-6).all())


@given(logits)
def test_a_row_of_eight_bits_is_as_good_a_second_time(values: Any) -> None:
    once = carried(Predictions(torch.from_numpy(values.copy()).softmax(-1)), "int8")
    assert torch.allclose(carried(once, "int8").values, once.values, atol=1e-6)


# -- garbage

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["tensor", "message", "map", "list", "raw", "half", "rows", "simplex", "float32", "Predictions"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
TARGETS = [
    Predictions(torch.full((3, 4), 0.25)),
    Labels(torch.zeros(3, dtype=torch.uint8)),
    Weights({"a": torch.ones(2, 3), "b": torch.ones(3)}, 5),
    None,
]


def attempt(kind: Any, text: Any, buffers: Any, expected: ExpectedMessage) -> Any:
    try:
        return accept(kind, text, buffers, expected)
    except InvalidMessage:
        return InvalidMessage


@settings(max_examples=300)
@given(
    st.sampled_from(TARGETS),
    st.sampled_from(WIRES),
    st.text(max_size=20) | st.sampled_from(["Predictions", "Labels", "Weights", "None"]),
    st.text(max_size=30) | json_values.map(json.dumps),
    st.dictionaries(st.sampled_from(DTYPES) | st.text(max_size=5), st.binary(max_size=80), max_size=3),
)
def test_garbage_is_refused(target: Any, wire: str, kind: str, text: str, buffers: dict[str, bytes]) -> None:
    assert attempt(kind, text, buffers, ExpectedMessage(target, KNOWN, 4, wire, "run", 1)) is InvalidMessage


@settings(max_examples=300)
@given(st.sampled_from(TARGETS[:3]), st.sampled_from(WIRES), st.data())
def test_a_damaged_upload_is_refused_or_still_keeps_the_rules(target: Any, wire: str, data: st.DataObject) -> None:
    """One node of the header is replaced, or one byte of the arrays."""
    expected = ExpectedMessage(target, KNOWN, 4, wire, "run", 1)
    encoded = encode(target, wire, run="run", round=1, key=Key(0))
    header, buffers = json.loads(encoded.text), encoded.buffers
    if data.draw(st.booleans()):
        places = list(nodes(header))
        holder, at = data.draw(st.sampled_from(places))
        holder[at] = data.draw(json_values)
    else:
        name = data.draw(st.sampled_from(sorted(buffers)))
        damaged = bytearray(buffers[name])
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        buffers[name] = bytes(damaged)
    came = attempt(encoded.kind, json.dumps(header), buffers, expected)
    if came is InvalidMessage:
        return
    assert type(came) is type(target)
    if isinstance(came, Predictions):
        assert came.values.shape == (3, 4)
        assert is_probabilities(came.values, 1e-3)
    elif isinstance(came, Labels):
        assert bool((came.values < 4).all())
    else:
        assert all(v.isfinite().all() and v.shape == target.state[n].shape for n, v in came.state.items())
        assert came.samples > 0


def nodes(tree: Any) -> Any:
    for at in range(len(tree)) if isinstance(tree, list) else list(tree):
        yield tree, at
        if isinstance(tree[at], list | dict):
            yield from nodes(tree[at])


@settings(max_examples=50)
@given(st.lists(st.integers(0, 10**12), max_size=4), st.sampled_from(["raw", "half", "rows", "simplex"]))
def test_what_a_header_claims_allocates_nothing(shape: list[int], coding: str) -> None:
    header = encode(None, "fp32").header | {
        "message": ["message", "Predictions", {"values": ["tensor", coding, "float32", shape]}]
    }
    tracemalloc.start()
    with suppress(InvalidMessage):
        decode(EncodedMessage("Predictions", header, {"float32": np.zeros(4, np.float32)}), KNOWN, "fp32")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
