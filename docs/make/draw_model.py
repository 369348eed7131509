"""Train the federation of the page docs/draw.md and write its networks for the browser: `make draw`."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedcc
from fedcc.core.files import write_whole
from fedcc.core.rng import Key
from fedcc.methods import abstention as eq
from fedcc.nets.network import build

PLACE = Path(__file__).parents[1] / "draw" / "model.js"
EXAMPLES = 3  # test digits of each class


def narrow(outputs: int) -> nn.Module:
    """A network of 15,000 numbers, so that ten of them make a small page."""
    widths = (1, 12, 24, 48)
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(before, after, 3, 2 if i else 1, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * widths[-1], outputs))


def trained(rounds: int = 3, epochs: int = 20, seed: int = 1) -> tuple[fedcc.Federation, fedcc.Result]:
    """Ten clients with one digit each, and what FedCC makes of them."""
    federation = fedcc.Federation.named("digits", models=narrow, augment="pad=1", seed=seed)
    return federation, fedcc.run("fedcc", federation, rounds=rounds, epochs=epochs, seed=seed, device="cpu")


def folded(network: nn.Module) -> Iterator[tuple[dict[str, int], Tensor, Tensor]]:
    """Shape, weight and bias of each layer of a ``narrow`` network, with BatchNorm folded into the convolution."""
    parts = [part for part in network.modules() if isinstance(part, nn.Conv2d | nn.BatchNorm2d | nn.Linear)]
    for part, norm in zip(parts, [*parts[1:], None], strict=True):
        if isinstance(part, nn.Conv2d):
            assert isinstance(norm, nn.BatchNorm2d)
            assert norm.running_mean is not None
            assert norm.running_var is not None
            scale = norm.weight / (norm.running_var + norm.eps).sqrt()
            shape = {"kernel": part.kernel_size[0], "stride": part.stride[0]}
            shape |= {"inputs": part.in_channels, "outputs": part.out_channels}
            yield shape, part.weight * scale[:, None, None, None], norm.bias - norm.running_mean * scale
        elif isinstance(part, nn.Linear):
            yield {"kernel": 1, "inputs": part.in_features, "outputs": part.out_features}, part.weight, part.bias


@torch.no_grad()
def exported(federation: fedcc.Federation, result: fedcc.Result) -> dict[str, Any]:
    """All that the page needs: the networks as 16-bit numbers, what the clients usually say, and examples."""
    numbers: list[Tensor] = []
    layers: list[dict[str, int]] = []
    for model in result.trained.clients.values():
        network = build(model.arch, Key(0))
        network.load_state_dict(dict(model.state))
        parts = list(folded(network))
        layers = [shape for shape, _, _ in parts]
        numbers += [tensor.flatten() for _, *pair in parts for tensor in pair]
    halves = torch.cat(numbers).numpy().astype("<f2")
    if not np.isfinite(halves).all():
        raise ValueError("a weight is too large for a 16-bit number")
    labels, images = federation.test["y"], federation.test.x
    votes, public = (result.explain(x).votes for x in (images, federation.public.x))
    forced = (votes / votes.sum(-1, keepdim=True)).mean(0)  # nobody may say "unknown", everybody counts the same
    return {
        "clients": [
            [name for name, count in zip(result.classes, counts, strict=True) if count]
            for counts in federation.counts().tolist()
        ],
        "classes": result.classes,
        "layers": layers,
        "weights": base64.b64encode(halves.tobytes()).decode(),
        "habits": eq.baseline(torch.cat([public, 1 - public.sum(-1, keepdim=True)], -1)).tolist(),
        "examples": [images[labels == c][:EXAMPLES].flatten(1).tolist() for c in range(len(result.classes))],
        "accuracy": round(result.accuracy, 1),
        "forced": round(100 * float((forced.argmax(-1) == labels).float().mean()), 1),
        "test": len(labels),
    }


def script(model: dict[str, Any]) -> bytes:
    """The model as a script, since a page on a disk may load no other file."""
    return f'"use strict";\nvar fedcc = window.fedcc || {{}};\nfedcc.model = {json.dumps(model)};\n'.encode()


def main() -> None:
    model = exported(*trained())
    write_whole(PLACE, script(model))
    print(f"{PLACE}: accuracy {model['accuracy']} %, {PLACE.stat().st_size / 1000:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main()
