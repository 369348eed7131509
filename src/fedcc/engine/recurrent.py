"""Recurrent layers step by step, from linear layers: torch's own have no batching rule for ``torch.vmap``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The next states h and c, of what inputs and h contribute, h, and c; layers without c pass it on."""


def unroll_recurrent(module: nn.Module) -> None:
    """Let every recurrent layer and cell in a module, at any depth, compute step by step.

    Those that drop units between layers, or project their state, stay as they are.
    """
    for part in module.modules():
        if isinstance(part, nn.LSTM | nn.GRU | nn.RNN) and not part.dropout and not part.proj_size:
            part.forward = partial(_unrolled, part)  # type: ignore[method-assign, assignment]
        elif isinstance(part, nn.LSTMCell | nn.GRUCell | nn.RNNCell):
            part.forward = partial(_cell, part)  # type: ignore[method-assign, assignment]


def _unrolled(
    layer: nn.LSTM | nn.GRU | nn.RNN, input: Tensor, hx: Tensor | tuple[Tensor, Tensor] | None = None
) -> object:
    """What ``layer(input, hx)`` returns, for inputs with a batch axis."""
    if not isinstance(input, Tensor) or input.ndim != 3:
        raise ValueError(f"{type(layer).__name__} step by step takes a tensor with a batch axis")
    is_lstm, ways = isinstance(layer, nn.LSTM), 2 if layer.bidirectional else 1
    x = input.transpose(0, 1) if layer.batch_first else input  # [time, batch, inputs]
    zeros = x.new_zeros(x.shape[1], layer.hidden_size)
    first = [hx] if isinstance(hx, Tensor) else list(hx or [])
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
    layer: nn.LSTM | nn.GRU | nn.RNN, suffix: str, x: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One layer in one direction: all outputs, and the last state."""
    weight, recurrent = (getattr(layer, f"{kind}_{suffix}") for kind in ("weight_ih", "weight_hh"))
    bias, recurrent_bias = (getattr(layer, f"{kind}_{suffix}", None) for kind in ("bias_ih", "bias_hh"))
    step, inputs, outputs = _step_of(layer), F.linear(x, weight, bias), []
    for t in range(len(x)):
        h, c = step(inputs[t], F.linear(h, recurrent, recurrent_bias), h, c)
        outputs.append(h)
    return torch.stack(outputs), (h, c)


def _cell(
    cell: nn.LSTMCell | nn.GRUCell | nn.RNNCell, input: Tensor, hx: Tensor | tuple[Tensor, Tensor] | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """What ``cell(input, hx)`` returns."""
    zeros = input.new_zeros(*input.shape[:-1], cell.hidden_size)
    h, c = (zeros, zeros) if hx is None else (hx, hx) if isinstance(hx, Tensor) else hx
    inputs, recurrent = F.linear(input, cell.weight_ih, cell.bias_ih), F.linear(h, cell.weight_hh, cell.bias_hh)
    h, c = _step_of(cell)(inputs, recurrent, h, c)
    return (h, c) if isinstance(cell, nn.LSTMCell) else h


def _step_of(layer: nn.Module) -> Step:
    if isinstance(layer, nn.LSTM | nn.LSTMCell):
        return _lstm
    if isinstance(layer, nn.GRU | nn.GRUCell):
        return _gru
    return _tanh if layer.nonlinearity == "tanh" else _relu


def _lstm(inputs: Tensor, recurrent: Tensor, _: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (inputs + recurrent).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(inputs: Tensor, recurrent: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    (r, z, n), (hr, hz, hn) = inputs.chunk(3, -1), recurrent.chunk(3, -1)
    reset, keep = (r + hr).sigmoid(), (z + hz).sigmoid()
    return keep * h + (1 - keep) * (n + reset * hn).tanh(), c


def _tanh(inputs: Tensor, recurrent: Tensor, _: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return (inputs + recurrent).tanh(), c


def _relu(inputs: Tensor, recurrent: Tensor, _: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return (inputs + recurrent).relu(), c
