"""Small networks for inputs that are no images: ``mlp`` for tables, ``bag`` for tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

WIDTH = 128


@dataclass(frozen=True)
class Mlp:
    """A factory: two hidden layers of ``width`` units on any inputs of ``inputs`` numbers.

    >>> Mlp(8)(3)(torch.zeros(2, 8)).shape
    torch.Size([2, 3])
    """

    inputs: int
    width: int = WIDTH

    def __call__(self, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(self.inputs, self.width),
            nn.ReLU(),
            nn.Linear(self.width, self.width),
            nn.ReLU(),
            nn.Linear(self.width, outputs),
        )

    def __str__(self) -> str:
        return "mlp" if self.width == WIDTH else f"mlp{self.width}"


class _Bag(nn.Module):
    def __init__(self, vocabulary: int, outputs: int):
        super().__init__()
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary + 1, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.embedding(x.clamp(max=self.vocabulary)).mean(1)
        out: Tensor = self.head(torch.relu(self.hidden(mean)))
        return out


@dataclass(frozen=True)
class Bag:
    """A factory: the mean of the tokens' embeddings, and one hidden layer.

    Tokens from ``vocabulary`` on, which training did not have, share one embedding.

    >>> Bag(100)(3)(torch.tensor([[5, 7, 120]])).shape
    torch.Size([1, 3])
    """

    vocabulary: int

    def __call__(self, outputs: int) -> nn.Module:
        return _Bag(self.vocabulary, outputs)

    def __str__(self) -> str:
        return f"bag{self.vocabulary}"
