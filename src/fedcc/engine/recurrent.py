"""LSTM and GRU step by step, from linear layers: torch's own layers have no batching rule for ``torch.vmap``."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def unroll_recurrent(module: nn.Module) -> None:
    """Let every LSTM and GRU in a module, at any depth, compute step by step.

    Those that drop units between layers, or project their state, stay as they are.
    """
    for part in module.modules():
        if isinstance(part, nn.LSTM | nn.GRU) and not part.dropout and not part.proj_size:
            part.forward = partial(_unrolled, part)  # type: ignore[method-assign, assignment]


def _unrolled(layer: nn.LSTM | nn.GRU, x: Tensor, state: Tensor | tuple[Tensor, Tensor] | None = None) -> object:
    """What ``layer(x, state)`` returns, for inputs with a batch axis."""
    if not isinstance(x, Tensor) or x.ndim != 3:
        raise ValueError(f"{type(layer).__name__} step by step takes a tensor with a batch axis")
    is_lstm, ways = isinstance(layer, nn.LSTM), 2 if layer.bidirectional else 1
    x = x.transpose(0, 1) if layer.batch_first else x  # [time, batch, inputs]
    zeros = x.new_zeros(x.shape[1], layer.hidden_size)
    first = [state] if isinstance(state, Tensor) else list(state or [])
    states = [list(part) for part in first] or [[zeros] * layer.num_layers * ways] * (2 if is_lstm else 1)
    last: list[tuple[Tensor, Tensor]] = []
    for level in range(layer.num_layers):
        outputs = []
        for way in range(ways):
            k = level * ways + way
            suffix = f"l{level}{'_reverse' if way else ''}"
            out, end = _pass(layer, suffix, x.flip(0) if way else x, states[0][k], states[-1][k])
            outputs.append(out.flip(0) if way else out)
            last.append(end)
        x = outputs[0] if ways == 1 else torch.cat(outputs, -1)
    h, c = (torch.stack(part) for part in zip(*last, strict=True))
    return (x.transpose(0, 1) if layer.batch_first else x), ((h, c) if is_lstm else h)


def _pass(
    layer: nn.LSTM | nn.GRU, suffix: str, x: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One layer in one direction: all outputs, and the last state."""
    weight, recurrent = (getattr(layer, f"{kind}_{suffix}") for kind in ("weight_ih", "weight_hh"))
    bias, recurrent_bias = (getattr(layer, f"{kind}_{suffix}", None) for kind in ("bias_ih", "bias_hh"))
    cell, inputs, outputs = _lstm if isinstance(layer, nn.LSTM) else _gru, F.linear(x, weight, bias), []
    for t in range(len(x)):
        h, c = cell(inputs[t], F.linear(h, recurrent, recurrent_bias), h, c)
        outputs.append(h)
    return torch.stack(outputs), (h, c)


def _lstm(inputs: Tensor, recurrent: Tensor, _: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (inputs + recurrent).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(inputs: Tensor, recurrent: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    (r, z, n), (hr, hz, hn) = inputs.chunk(3, -1), recurrent.chunk(3, -1)
    reset, keep = (r + hr).sigmoid(), (z + hz).sigmoid()
    return keep * h + (1 - keep) * (n + reset * hn).tanh(), c
