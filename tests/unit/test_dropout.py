"""Dropout whose masks follow from a seed: layers, and the dropout of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedcc.nets.dropout import SeededAttention, SeededDropout, dropout_layers, use_seeded_dropout

SHAPES = {
    "alone": ((5, 8), (5, 8), (5, 8)),
    "a batch": ((5, 3, 8), (5, 3, 8), (5, 3, 8)),
    "other keys": ((5, 3, 8), (7, 3, 8), (7, 3, 8)),
}
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
PADDED = torch.arange(5) > torch.tensor([2, 4, 3])[:, None]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # the inputs, arguments of the layer and of a call
    "alone": ("alone", {}, {}),
    "alone, padding": ("alone", {}, {"key_padding_mask": PADDED[0]}),
    "batch": ("a batch", {}, {}),
    "no biases": ("a batch", {"bias": False}, {"need_weights": False}),
    "batch first": ("a batch", {"batch_first": True}, {"average_attn_weights": False}),
    "other keys": ("other keys", {}, {}),
    "keys of another width": ("other keys", {"kdim": 4, "vdim": 6}, {}),
    "causal": ("a batch", {}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "a mask of numbers": ("a batch", {}, {"attn_mask": torch.arange(25.0).view(5, 5) / 9}),
    "a mask per head": ("a batch", {}, {"attn_mask": torch.arange(150.0).view(6, 5, 5) / 99}),
    "causal and padding": ("a batch", {}, {"attn_mask": CAUSAL, "key_padding_mask": PADDED}),
}


@pytest.mark.parametrize("case", CASES)
def test_attention_without_a_mask_is_torchs(case: str) -> None:
    inputs, made, called = CASES[case]
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, dropout=0.0, **made)
    ours = nn.MultiheadAttention(8, 2, dropout=0.5, **made)
    ours.load_state_dict(theirs.state_dict())
    use_seeded_dropout(ours)
    assert isinstance(ours, SeededAttention)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    widths = 8, made.get("kdim", 8), made.get("vdim", 8)
    x = [torch.randn(*shape[:-1], w) for shape, w in zip(SHAPES[inputs], widths, strict=True)]
    if made.get("batch_first"):
        x = [part.transpose(0, 1) for part in x]
    for drops in (False, True):
        ours.drop.p = 0.5 if drops else 0.0
        for expected, found in zip(theirs(*x, **called), ours(*x, **called), strict=True):
            assert (expected is None) == (found is None)
            if found is not None:
                assert found.shape == expected.shape
                assert torch.allclose(expected, found, atol=1e-6) != drops
    torch.testing.assert_close(ours.eval()(*x, **called)[0], theirs.eval()(*x, **called)[0])


def test_attention_drops_weights_as_its_seed_says() -> None:
    layer = nn.MultiheadAttention(8, 2, dropout=0.25)
    use_seeded_dropout(layer)
    x, shares = torch.randn(40, 3, 8), []
    for seed in (1, 1, 2):
        (drop,) = dropout_layers(layer).values()
        drop.seed, drop.calls = torch.tensor(seed), 0
        shares.append(layer(x, x, x, average_attn_weights=False)[1])
    assert torch.equal(shares[0], shares[1])
    assert not torch.equal(shares[0], shares[2])
    assert float((shares[0] == 0).float().mean()) == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("more", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"dropout": 0.0}])
def test_attention_of_another_kind_stays(more: dict[str, Any]) -> None:
    layer = nn.MultiheadAttention(8, 2, **({"dropout": 0.5} | more))
    use_seeded_dropout(layer)
    assert type(layer) is nn.MultiheadAttention


def test_a_layer_with_two_names_has_a_seed_under_each() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x))
            return out

    network = Twice()
    use_seeded_dropout(network)
    assert isinstance(network.second, SeededDropout)
    assert list(dropout_layers(network)) == ["first", "second"]
    assert float((network(torch.ones(10_000)) == 0).float().mean()) == pytest.approx(0.75, abs=0.02)
