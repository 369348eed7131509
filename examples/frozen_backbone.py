"""Heads on frozen backbones: ten clients with one digit each, three architectures, no weights exchanged.

Each client has a backbone that was made once and stays frozen, and trains only a linear head on it. The backbones here
are self-made: random convolutions, patches and projections, drawn from a fixed seed, so nothing is downloaded. Any
network works the same way; set ``requires_grad_(False)`` on what is not to be trained, and ``eval()`` on layers with
running statistics. Run ``python examples/frozen_backbone.py`` (a minute); ``--out FOLDER`` keeps the runs,
``--record FILE.json`` the numbers.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import fedcc


def frozen(backbone: nn.Module, seed: int) -> nn.Module:
    """A backbone with fixed random weights, the same wherever it is built, that no training changes."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in backbone.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
        parameter.data = torch.randn(parameter.shape, generator=generator) * (2 / fan_in) ** 0.5
    return backbone.requires_grad_(False)


def headed(backbone: nn.Module, width: int, outputs: int) -> nn.Module:
    """A head on normalised features; the normalisation learns nothing and has no running statistics."""
    return nn.Sequential(backbone, nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, outputs))


def convolutions(outputs: int) -> nn.Module:
    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 64, 3, padding=1)
    layers = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return headed(frozen(layers, seed=1), 64 * 16, outputs)


def patches(outputs: int) -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(1, 64, 4, stride=2, padding=1), nn.GELU(), nn.Flatten())
    return headed(frozen(layers, seed=2), 64 * 16, outputs)


class Projection(nn.Module):
    """Random Fourier features."""

    def __init__(self, width: int):
        super().__init__()
        self.layer = nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(self.layer(x.flatten(1)))


def projection(outputs: int) -> nn.Module:
    return headed(frozen(Projection(1024), seed=3), 1024, outputs)


# Clients with one class are certain of it, so the mean of their probabilities is the same for all classes: a tie, and
# FedMD answers class 0. It does better if it averages logits, so both forms are here.
METHODS = {"FedCC": fedcc.FedCC(), "FedMD": fedcc.FedMD(), "FedMD, logits": fedcc.FedMD(average="logits")}
BACKBONES: list[Callable[[int], nn.Module]] = [convolutions, patches, projection]


def compare(seed: int, rounds: int = 3, epochs: int = 20, out: Path | None = None) -> dict[str, float]:
    """The final accuracies of the methods in percent, one class per client."""
    federation = fedcc.Federation.named("digits", skew="classes:1", clients=10, models=BACKBONES, seed=seed)
    accuracy = {}
    for name, method in METHODS.items():
        folder = out / name.replace(", ", "-") / f"seed{seed}" if out else None
        options = {"rounds": rounds, "epochs": epochs, "lr": 1e-2, "seed": seed, "device": "cpu"}
        accuracy[name] = fedcc.run(method, federation, **options, out=folder, resume=folder is not None).accuracy
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the runs")
    parser.add_argument("--record", type=Path, help="JSON file of the numbers")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    by_seed = {seed: compare(seed, out=arguments.out) for seed in range(arguments.seeds)}
    for seed, accuracy in by_seed.items():
        print(f"seed {seed}: " + ", ".join(f"{name} {value:.2f} %" for name, value in accuracy.items()))
    means = {name: statistics.fmean(a[name] for a in by_seed.values()) for name in by_seed[0]}
    print("mean: " + ", ".join(f"{name} {value:.2f} %" for name, value in means.items()))
    gaps = [a["FedCC"] - max(value for name, value in a.items() if name != "FedCC") for a in by_seed.values()]
    print(f"FedCC is ahead of the better form of FedMD by {min(gaps):.2f} to {max(gaps):.2f} points")
    if arguments.record:
        record = {
            "experiment": "digits, classes:1, ten clients, three frozen backbones",
            "seeds": by_seed,
            "mean": means,
        }
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
