"""Dropout whose masks follow from a seed: the same whether a network trains alone or together with others."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KINDS = {nn.Dropout: False, nn.Dropout1d: True, nn.Dropout2d: True, nn.Dropout3d: True}  # True: drops whole channels
BITS = 24  # of the number that decides about one entry
# SplitMix64: the increment and the two factors, as signed 64-bit integers.
INCREMENT, FACTORS = 0x9E3779B97F4A7C15 - 2**64, (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


class SeededDropout(nn.Module):
    """Like ``nn.Dropout``, but the mask is a function of the seed, the layer, and its calls since the seed was set."""

    seed: Tensor

    def __init__(self, p: float, whole_channels: bool, layer: int):
        super().__init__()
        self.p, self.whole_channels, self.layer, self.calls = p, whole_channels, layer, 0
        self.register_buffer("seed", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropped(x, self.seed) if self.training else x

    def dropped(self, x: Tensor, seed: Tensor) -> Tensor:
        """The input after the next mask of a seed."""
        if self.p == 0:
            return x
        shape = x.shape[:2] + (1,) * (x.ndim - 2) if self.whole_channels else x.shape
        own = mixed(seed + (1024 * self.layer + self.calls + 1))
        self.calls += 1
        draws = mixed(own + torch.arange(math.prod(shape), device=x.device) * INCREMENT)
        kept = (draws >> (64 - BITS) & 2**BITS - 1) >= round(self.p * 2**BITS)
        scale: Tensor = kept.to(x.dtype) / max(1 - self.p, 2.0**-BITS)
        return x * scale.view(shape)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class SeededAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with dropout: torch draws the masks inside one function, out of reach of a seed."""

    drop: SeededDropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        masks = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        if not self.training:
            return super().forward(query, key, value, *masks)
        batched, inputs = query.ndim == 3, [query, key, value]
        if not (batched and self.batch_first):
            inputs = [x.transpose(0, 1) if batched else x[None] for x in inputs]  # [batch, length, width]
        weights: list[Tensor] = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        if self.in_proj_weight is not None:  # one tensor holds all three
            weights = list(self.in_proj_weight.chunk(3))
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = (F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
        q, k, v = (x.reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2) for x in projected)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.head_dim)  # [batch, heads, queries, keys]
        if attn_mask is not None:
            own = attn_mask if attn_mask.ndim == 2 else attn_mask.view(len(q), self.num_heads, *attn_mask.shape[1:])
            scores = _masked(scores, own)
        if key_padding_mask is not None:
            scores = _masked(scores, key_padding_mask.view(len(k), 1, 1, -1))
        shares = self.drop(scores.softmax(-1))
        out = torch.matmul(shares, v).transpose(1, 2).flatten(2)
        out = F.linear(out, self.out_proj.weight, self.out_proj.bias)
        shares = shares.mean(1) if average_attn_weights else shares
        if not batched:
            out, shares = out[0], shares[0]
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out, shares if need_weights else None


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _extended(layer: nn.MultiheadAttention) -> bool:
    """Whether keys and values are more than the inputs': such layers stay as they are."""
    return layer.bias_k is not None or layer.add_zero_attn


def use_seeded_dropout(module: nn.Module) -> None:
    """Replace torch's dropout layers in a module, at any depth, and the dropout of its attention."""
    layer = 0
    for parent in list(module.modules()):
        if type(parent) is nn.MultiheadAttention and parent.dropout and not _extended(parent):
            parent.__class__ = SeededAttention  # its tensors keep their names
            parent.drop = SeededDropout(parent.dropout, False, layer).train(parent.training)
            layer += 1
        for name, child in list(parent._modules.items()):  # one layer may have two names, and so two masks
            if type(child) in KINDS:
                assert isinstance(child, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d)
                seeded = SeededDropout(child.p, KINDS[type(child)], layer)
                setattr(parent, name, seeded.train(child.training))
                layer += 1


def dropout_layers(module: nn.Module) -> dict[str, SeededDropout]:
    return {name: part for name, part in module.named_modules() if isinstance(part, SeededDropout)}


def step_seed(seed: Tensor, step: Tensor | int) -> Tensor:
    """The seed of one training step of a fit."""
    return mixed(seed + torch.as_tensor(step, device=seed.device) * INCREMENT)


def mixed(numbers: Tensor) -> Tensor:
    """Integers whose bits look random, of integers that differ (the last part of SplitMix64).

    >>> mixed(torch.tensor([0, 1, 2])).tolist()
    [0, 6238072747940578789, -2606959012126976886]
    """
    h = (numbers ^ (numbers >> 30 & 2**34 - 1)) * FACTORS[0]  # >> repeats the sign; the mask removes it
    h = (h ^ (h >> 27 & 2**37 - 1)) * FACTORS[1]
    return h ^ (h >> 31 & 2**33 - 1)
