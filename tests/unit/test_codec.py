"""Messages as bytes, and every reason for which an upload is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcc.core.messages import LABELS, Labels, Predictions, Rows, Weights, carried, nbytes
from fedcc.core.rng import Key
from fedcc.core.wire import packed
from fedcc.flower.codec import EncodedMessage, ExpectedMessage, InvalidMessage, accept, decode, encode

CLASSES = 4


@dataclass(frozen=True, eq=False)
class Everything:
    """A message with one of each."""

    weights: Weights
    shares: Tensor
    votes: Tensor = field(metadata=LABELS)
    counts: Tensor
    spare: Tensor | None = None
    steps: int = 3
    rate: float = 0.5


KNOWN = {kind.__name__: kind for kind in (Weights, Predictions, Labels, Everything)}


def everything(**changes: Any) -> Everything:
    draws = torch.Generator().manual_seed(1)
    state = {"conv": torch.randn(3, 2, 2, 2, generator=draws), "bias": torch.randn(3, generator=draws)}
    shares = torch.randn(5, CLASSES, generator=draws).softmax(-1)
    votes = torch.tensor([0, 3, 1, 2, 2], dtype=torch.uint8)
    made = Everything(Weights(state, 7), shares, votes, torch.tensor([1, 0, 4, 2], dtype=torch.int32))
    return replace(made, **changes)


def expected(message: Any, wire: str = "fp32") -> ExpectedMessage:
    return ExpectedMessage(message, KNOWN, CLASSES, wire, "run", 2)


def sent(message: Any, wire: str = "fp32", **about: Any) -> EncodedMessage:
    key = Key(5) if wire == "int8-stochastic" else None
    return encode(message, wire, **{"run": "run", "round": 2, "key": key} | about)


def taken(encoded: EncodedMessage, want: ExpectedMessage) -> Any:
    return accept(encoded.kind, encoded.text, encoded.buffers, want)


def tensors(message: Everything) -> list[Tensor]:
    return [*message.weights.state.values(), message.shares, message.votes, message.counts]


# -- there and back


def test_fp32_is_exact_for_every_bit_pattern() -> None:
    bits = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 0x7FC00001, 0x00000001], dtype=torch.int32)
    message = Predictions(bits.view(torch.float32))
    came = decode(sent(message), KNOWN, "fp32", run="run", round=2)
    assert torch.equal(came.values.view(torch.int32), bits)


@pytest.mark.parametrize("wire", ["fp32", "fp16", "int8", "int8-stochastic"])
def test_what_arrives_is_what_the_simulator_says(wire: str) -> None:
    message, encoded = everything(), sent(everything(), wire)
    came, simulated = taken(encoded, expected(message, wire)), carried(message, wire, Key(5))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors(came), tensors(simulated), strict=True))
    assert encoded.nbytes == sum(map(len, encoded.buffers.values())) == nbytes(message, wire)
    assert (came.weights.samples, came.steps, came.rate, came.spare) == (7, 3, 0.5, None)
    assert torch.equal(came.votes, message.votes)
    assert torch.equal(came.counts, message.counts)


def test_bytes_of_each_wire() -> None:
    floats, others = 3 * 8 + 3 + 5 * 4, 5 + 4 * 4
    assert nbytes(everything(), "fp32") == 4 * floats + others
    assert nbytes(everything(), "fp16") == 2 * floats + others
    assert nbytes(everything(), "int8") == 3 * 8 + 3 * 4 + 3 * 4 + 5 * 4 + others  # codes, scales, the bias as it is


def test_a_network_is_few_arrays() -> None:
    state = {f"layer{n}": torch.randn(4, 4) for n in range(100)}
    assert [len(sent(Weights(state), wire).arrays) for wire in ("fp32", "fp16", "int8")] == [1, 1, 2]


def test_no_message() -> None:
    encoded = sent(None)
    assert (encoded.kind, encoded.nbytes) == ("None", 0)
    assert taken(encoded, expected(None)) is None
    assert decode(encoded, KNOWN, "fp32", run="run", round=2) is None


def test_what_arrives_can_be_written_to() -> None:
    came = taken(sent(everything()), expected(everything()))
    came.shares.mul_(2)


# -- int8


def test_int8_by_hand() -> None:
    rows = torch.tensor([[127.0, -63.4, 0.4], [0.0, 0.0, 0.0]])
    coding, (codes, scales) = packed(rows, "int8")
    assert (coding, codes.tolist(), scales.tolist()) == ("rows", [127, -63, 0, 0, 0, 0], [1, 0])
    coding, (codes,) = packed(torch.tensor([[0.64, 0.32, 0.04, 0.0]]), "int8")
    assert (coding, codes.tolist()) == ("simplex", [255, 180, 64, 0])
    came = carried(Predictions(torch.tensor([[0.64, 0.32, 0.04, 0.0]])), "int8").values
    squares = np.array([255, 180, 64, 0]) ** 2
    assert np.allclose(came[0], squares / squares.sum(), rtol=1e-7)


def test_equal_probabilities_stay_equal() -> None:
    """FedCC's clients know by it that nobody knew (F-3)."""
    came = carried(Predictions(torch.full((3, 7), 1 / 7)), "int8").values
    assert bool((came == came[:, :1]).all())


def test_small_probabilities_keep_their_order_and_size() -> None:
    row = torch.tensor([[0.7, *[0.3 / 199] * 199]])
    came = carried(Predictions(row), "int8").values
    assert torch.allclose(came, row, rtol=0.05)  # one scale for the row: 85 % off


def test_logits_are_no_probabilities() -> None:
    assert packed(torch.tensor([[0.5, 0.5], [0.5, 0.6]]), "int8")[0] == "rows"
    assert packed(torch.tensor([[1.5, -0.5]]), "int8")[0] == "rows"


def test_stochastic_rounding_is_right_on_average_and_keyed() -> None:
    rows = torch.tensor([[1.0, 0.3, -0.7777]]).expand(4000, 3)
    came = carried(Weights({"w": rows}), "int8-stochastic", Key(1)).state["w"]
    assert came.unique(dim=0).shape[0] > 2
    assert torch.allclose(came.mean(0), rows[0], atol=5e-4)
    assert (carried(Weights({"w": rows}), "int8").state["w"].mean(0) - rows[0]).abs().max() > 5e-4  # it is not
    same = carried(Weights({"w": rows}), "int8-stochastic", Key(1)).state["w"]
    other = carried(Weights({"w": rows}), "int8-stochastic", Key(2)).state["w"]
    assert torch.equal(came, same)
    assert not torch.equal(came, other)
    shares = torch.tensor([[0.7, 0.2993, 0.0007]]).expand(4000, 3)
    assert torch.allclose(carried(Predictions(shares), "int8-stochastic", Key(1)).values.mean(0), shares[0], atol=3e-4)
    tiny = 0.25 / 255**2  # half a step of the root: rounded up by chance as often as its square asks for
    row = torch.tensor([1 - 500 * tiny, *[tiny] * 500]).expand(200, 501)
    came = carried(Predictions(row), "int8-stochastic", Key(1)).values
    assert came[:, 1:].mean().item() == pytest.approx(tiny, rel=0.03)


def test_stochastic_rounding_needs_a_key() -> None:
    with pytest.raises(ValueError, match="needs a key"):
        encode(everything(), "int8-stochastic")


@pytest.mark.parametrize(("wire", "value", "rule"), [("fp16", 70000.0, "up to 65504"), ("fp16", float("inf"), "finite"),
                                                     ("int8", float("nan"), "finite")])  # fmt: skip
def test_what_a_wire_cannot_carry(wire: str, value: float, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        encode(Weights({"w": torch.tensor([[value, 1.0]])}), wire)


def test_a_message_that_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="got bfloat16"):
        encode(Predictions(torch.zeros(2, dtype=torch.bfloat16)), "fp32")
    with pytest.raises(TypeError, match="got set"):
        encode(Predictions({1}), "fp32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wire must be one of"):
        encode(None, "fp8")


# -- refused


def refused(encoded: EncodedMessage, reason: str, want: ExpectedMessage | None = None) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        taken(encoded, want or expected(everything()))


def changed(message: Any = None, wire: str = "fp32", **header: Any) -> EncodedMessage:
    encoded = sent(everything() if message is None else message, wire)
    return replace(encoded, header=encoded.header | header)


def test_good_ones_are_accepted() -> None:
    for wire in ("fp32", "fp16", "int8", "int8-stochastic"):
        taken(sent(everything(), wire), expected(everything(), wire))
    taken(sent(everything(steps=10**6, rate=0.001)), expected(everything()))


def test_another_type() -> None:
    refused(sent(Labels(torch.zeros(3, dtype=torch.uint8))), "wrong type: expected Everything, got 'Labels'")
    refused(sent(None), "wrong type: expected Everything, got 'None'")
    encoded = sent(everything())
    refused(replace(encoded, kind="Weights"), "wrong type")
    told = json.loads(encoded.text)
    told["message"][1] = "Weights"
    refused(replace(encoded, header=told), "expected a Everything, got a Weights")


def test_another_run_round_wire_or_format() -> None:
    refused(sent(everything(), run="other"), "wrong run: expected 'run', got 'other'")
    refused(sent(everything(), round=1), "wrong round: expected 2, got 1")
    refused(changed(round=2.0), "wrong round: expected 2, got 2.0")
    refused(changed(format=9), "wrong format: expected 1, got 9")
    refused(changed(wire="fp16"), "wrong wire: expected 'fp32', got 'fp16'")
    refused(changed(extra=1), "the header must have format, run, round, wire, message, got")


def test_missing_and_extra_parts() -> None:
    less = everything(weights=Weights({"conv": everything().weights.state["conv"]}, 7))
    refused(sent(less), r"Everything.weights.state: 'bias' is missing")
    more = everything(weights=Weights({**everything().weights.state, "z": torch.zeros(0)}, 7))
    refused(sent(more), r"Everything.weights.state: 'z' is not a part of it")
    turned = everything(weights=Weights(dict(reversed(everything().weights.state.items())), 7))
    refused(sent(turned), "not in the expected order")
    refused(sent(everything(spare=torch.zeros(0))), "Everything.spare: expected nothing, got a 'tensor'")
    encoded = sent(everything())
    del encoded.header["message"][2]["steps"]
    refused(encoded, "Everything: 'steps' is missing")


def test_another_shape_or_dtype() -> None:
    refused(
        sent(everything(shares=everything().shares.T.contiguous())), r"wrong shape: expected \[5, 4\], got \[4, 5\]"
    )
    refused(sent(everything(votes=everything().votes.to(torch.int8))), "votes: wrong dtype: expected uint8, got 'int8'")
    refused(sent(everything(steps=2.0)), r"Everything.steps: expected a int \(3\), got a float \(2.0\)")
    encoded = sent(everything())
    encoded.header["message"][2]["shares"][1] = "half"
    refused(encoded, "shares: wrong coding: expected raw, got 'half'")
    encoded.header["message"][2]["shares"] = ["tensor"]
    refused(encoded, "shares: wrong coding: expected raw, got None")


def test_what_is_not_finite() -> None:
    for value in (float("nan"), float("inf")):
        shares = everything().shares.clone()
        shares[3, 1] = value
        refused(
            sent(everything(shares=shares)),
            f"Everything.shares must be finite, 1 of its values are not, such as {value}",
        )
        refused(sent(everything(rate=value)), f"Everything.rate must be finite, got {value}")
    encoded = sent(everything(), "int8")
    encoded.arrays["float32"] = np.full_like(encoded.arrays["float32"], np.inf)
    refused(encoded, "must be finite", expected(everything(), "int8"))
    encoded.arrays["float32"] = np.full_like(encoded.arrays["float32"], 3e38)  # finite, but not what it scales
    refused(encoded, "must be finite", expected(everything(), "int8"))
    shares = everything().shares.clone()
    shares[3, 1] = -3e38  # no fit gives that, and an average with it would end the run
    refused(sent(everything(shares=shares)), r"Everything.shares must be at most 1.84e\+19 in size, got -3e\+38")


def test_probabilities() -> None:
    negative = everything().shares.clone()
    negative[0, 0], negative[0, 1] = -0.25, negative[0, 1] + negative[0, 0] + 0.25
    refused(sent(everything(shares=negative)), "Everything.shares: probabilities must not be negative, got -0.25")
    heavy = everything().shares.clone()
    heavy[2] *= 1.5
    refused(sent(everything(shares=heavy)), "must sum to 1 within 0.0001, but row 2 sums to 1.5")
    heavy = everything().shares.clone()
    heavy[2] *= 1.002
    refused(sent(everything(shares=heavy), "fp16"), "but row 2 sums to 1.00", expected(everything(), "fp16"))
    refused(sent(everything(shares=heavy), "int8"), "wrong coding: expected simplex", expected(everything(), "int8"))


def test_probabilities_of_nothing() -> None:
    encoded = sent(everything(), "int8")
    encoded.arrays["uint8"] = np.zeros_like(encoded.arrays["uint8"])
    refused(encoded, "probabilities of a row are all zero", expected(everything(), "int8"))


def test_labels_and_counts() -> None:
    votes = torch.tensor([0, 3, 1, 4, 2], dtype=torch.uint8)
    refused(sent(everything(votes=votes)), "Everything.votes: labels must be from 0 to 3, got 4")
    signed = everything(votes=everything().votes.to(torch.int16))
    below = replace(signed, votes=torch.tensor([0, -1, 1, 2, 2], dtype=torch.int16))
    refused(sent(below), "labels must be from 0 to 3, got -1", expected(signed))
    refused(sent(everything(counts=-everything().counts)), "Everything.counts: counts must not be negative, got -4")
    refused(sent(everything(counts=0 * everything().counts)), "Everything.counts: counts must not all be zero")


def test_numbers_have_the_sign_of_the_rehearsed_ones() -> None:
    refused(sent(everything(steps=0)), "Everything.steps must be above 0")
    refused(sent(everything(steps=2**60)), "at most 9,007,199,254,740,992, got 1152921504606846976")
    for rehearsed, bad in ((0, -1), (-1, -2)):
        want = expected(everything(steps=rehearsed))
        taken(sent(everything(steps=5)), want)
        refused(sent(everything(steps=bad)), f"must be at least {rehearsed} and", want)


def test_too_large_is_seen_before_anything_is_read() -> None:
    want, encoded = expected(everything()), sent(everything())
    huge = {"float32": bytes(100 * encoded.nbytes)}
    with pytest.raises(
        InvalidMessage, match=r"too large: the arrays have 20,\d+ bytes, those of Everything have 2\d\d"
    ):
        accept("nonsense", "no JSON", huge, want)
    with pytest.raises(InvalidMessage, match="too large: the header has 100,000 characters"):
        accept(encoded.kind, " " * 100_000, encoded.buffers, want)


def test_arrays_that_do_not_fit_the_header() -> None:
    encoded, want = sent(everything()), expected(everything())
    short = encoded.buffers | {"uint8": b"\1\1"}
    with pytest.raises(InvalidMessage, match="array uint8 has 2 numbers left, the header asks for 5"):
        accept(encoded.kind, encoded.text, short, want)
    moved = encoded.buffers | {"float32": encoded.buffers["float32"][:-4], "int8": b"\0\0\0\0"}
    with pytest.raises(InvalidMessage, match="array"):
        accept(encoded.kind, encoded.text, moved, want)
    with pytest.raises(InvalidMessage, match="unknown array 'complex64'; known: float64"):
        accept(encoded.kind, encoded.text, {"complex64": b""}, want)
    with pytest.raises(InvalidMessage, match="array float32 must have a multiple of 4 bytes, got 3"):
        accept(encoded.kind, encoded.text, {"float32": b"abc"}, want)
    spare = sent(Labels(torch.zeros(3, dtype=torch.uint8)))
    less = ExpectedMessage(Labels(torch.zeros(4, dtype=torch.uint8)), KNOWN, CLASSES, "fp32", "run", 2)
    more = {"uint8": bytes(4)}
    with pytest.raises(InvalidMessage, match="wrong shape"):
        accept(spare.kind, spare.text, more, less)
    with pytest.raises(InvalidMessage, match="array uint8 has 4 numbers, the header describes 3"):
        decode(EncodedMessage.parse(spare.kind, spare.text, more), KNOWN, "fp32", run="run", round=2)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "NaN", "[" * 2000, '{"a":' * 2000, '{"format": 1}', "\0"])
def test_headers_that_are_none(text: str) -> None:
    encoded = sent(everything())
    with pytest.raises(InvalidMessage):
        accept(encoded.kind, text, encoded.buffers, expected(everything()))


@pytest.mark.parametrize("tree", [
    ["tensor", "raw", "float32", [10**18]], ["tensor", "rows", "float32", [10**18, 0]],
    ["tensor", "rows", "float32", [3]], ["tensor", "simplex", "float32", [2, 2, 2]], ["tensor", "raw", "float32", [-1]],
    ["tensor", "raw", "float32", [True]], ["tensor", "raw", "float32", [1.0]], ["tensor", "raw", "object", [1]],
    ["tensor", "pickle", "float32", [1]], ["tensor", "half", "int8", [1]], ["tensor"], ["tensor", 1, 2, 3], [], [[]],
    ["tensor", [], {}, {}], ["message", "Nobody", {}], ["message", "Weights", {}],
    ["message", "Weights", {"state": 1, "x": 2}],
    ["message"], ["message", [], 3], ["map", 1], ["map", [1]], ["map", [["list"], 1]], ["made", 1], {"a": 1},
    ["tensor", "raw", "float32", [1] * 100],
])  # fmt: skip
def test_a_client_is_safe_from_nonsense_too(tree: Any) -> None:
    header = sent(None).header | {"message": ["message", "Predictions", {"values": tree}]}
    encoded = EncodedMessage("Predictions", header, {"float32": np.zeros(4, np.float32), "int8": np.zeros(4, np.int8)})
    with pytest.raises(InvalidMessage):
        decode(encoded, KNOWN, "fp32", run="run", round=2)


# -- some rows


def test_rows_may_be_left_out_and_nothing_else() -> None:
    def rows(*numbers: int, values: Tensor | None = None) -> Rows:
        equal = torch.full((len(numbers), CLASSES), 1 / CLASSES) if values is None else values
        return Rows(torch.tensor(numbers, dtype=torch.int32), equal)

    want = replace(expected(rows(0, 1, 4, 7)), message_classes={"Rows": Rows})
    for good in (rows(0, 1, 4, 7), rows(1, 7), rows(0), rows()):
        for wire in ("fp32", "fp16", "int8"):
            came = taken(sent(good, wire), replace(want, wire=wire))
            assert torch.equal(came.rows, good.rows)
            assert came.values.shape == good.values.shape
    for bad, reason in (
        (rows(1, 0), "ascending"),
        (rows(1, 1), "ascending"),
        (rows(2), "among the 4 that may be answered"),
        (rows(-1), "among the 4"),
        (rows(0, 1, 4, 7, 8), "wrong shape"),
        (rows(1, values=torch.full((1, 3), 1 / 3)), "wrong shape"),
        (rows(1, values=torch.full((1, CLASSES), 0.5)), "sum to 1"),
    ):
        with pytest.raises(InvalidMessage, match=reason):
            taken(sent(bad), want)
    uneven = sent(rows(0, 1))
    parts = dict(uneven.header["message"][2])
    parts["values"] = [*parts["values"][:-1], [1, CLASSES]]
    tree = ["message", "Rows", parts]
    odd = EncodedMessage(
        "Rows", {**uneven.header, "message": tree}, {**uneven.arrays, "float32": uneven.arrays["float32"][:CLASSES]}
    )
    with pytest.raises(InvalidMessage):
        taken(odd, want)
    with pytest.raises(InvalidMessage, match="wrong shape"):  # predictions are complete
        taken(sent(Predictions(torch.full((3, CLASSES), 0.25))), expected(Predictions(torch.full((4, CLASSES), 0.25))))
