"""What ``fedcc bench --all`` measures: networks that people train, from layers that each engine treats in its own way,
and runs that are large or uneven."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcc.core.model import Arch
from fedcc.core.samples import Samples, View
from fedcc.federation import Federation
from fedcc.nets import network
from fedcc.nets.resnet import ResNet
from fedcc.nets.small import Mlp

CLASSES = 10
IMAGE, LARGE_IMAGE = (3, 32, 32), (3, 64, 64)
VOCABULARY, LENGTH = 2000, 32  # of the tokens


@dataclass(frozen=True)
class BenchNetwork:
    """A network to measure, and its inputs: images [channels, height, width], tokens, or any other numbers."""

    name: str
    factory: Callable[[int], nn.Module]
    shape: tuple[int, ...] = IMAGE  # of one input
    tokens: int = 0  # how many different ones there are; 0: inputs are no tokens

    @property
    def arch(self) -> Arch:
        return Arch((self.factory,), CLASSES + 1, self.shape, bool(self.tokens))

    @property
    def images(self) -> bool:
        return len(self.shape) == 3 and not self.tokens

    def samples(self, number: int, augment: str, generator: torch.Generator) -> Samples:
        """Made-up inputs; images are augmented."""
        size = (number, *self.shape)
        if not self.images:
            x = (
                torch.randint(0, self.tokens, size, generator=generator)
                if self.tokens
                else torch.randn(size, generator=generator)
            )
            return Samples({"x": x})
        view = View(1 / 255, (0.5,) * self.shape[0], (0.25,) * self.shape[0], pad=4, flip=True)
        x = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        return Samples({"x": x}, view.with_augment(augment))


def resnet20_groups(outputs: int) -> nn.Module:
    """ResNet20 with GroupNorm, eight channels in a group, in place of BatchNorm."""
    module = ResNet(20)(outputs)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.GroupNorm(child.num_features // 8, child.num_features))
    return module


def lenet(outputs: int) -> nn.Module:
    """Two convolutions of 5x5 with pooling, two hidden layers with dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1600, 384), nn.ReLU(), nn.Dropout(0.5), nn.Linear(384, 192), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(192, outputs),
    )  # fmt: skip


class Encoder(nn.Module):
    """A layer of a transformer: attention and two linear layers, each after LayerNorm and around a shortcut."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class SmallViT(nn.Module):
    """A vision transformer for 32x32 images: patches of 4x4, six layers, width 192, three heads; mean over patches."""

    def __init__(self, outputs: int, width: int = 192, layers: int = 6):
        super().__init__()
        self.patches, self.position = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.zeros(1, 64, width))
        self.layers = nn.Sequential(*(Encoder(width, 3) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)
        nn.init.trunc_normal_(self.position, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.patches(x).flatten(2).transpose(1, 2) + self.position)
        out: Tensor = self.head(self.norm(x).mean(1))
        return out


class TokenLSTM(nn.Module):
    """Embeddings of width 64 and an LSTM of 128 units; its last output is classified."""

    def __init__(self, outputs: int):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(VOCABULARY, 64), nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embedding(x))[0][:, -1])
        return out


class WideBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


def resnet18(outputs: int) -> nn.Module:
    """ResNet18 with a first convolution of 3x3 and no pooling after it, as is usual for small images."""
    widths = (64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [WideBlock(i, o, 1 if i == o else 2) for i, o in zip((64, *widths), widths, strict=False)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, outputs),
    )  # fmt: skip


def frozen_resnet20(outputs: int) -> nn.Module:
    """A frozen ResNet20, in evaluation mode, and a linear layer that is trained."""
    backbone = ResNet(20)(64).requires_grad_(False).eval()
    return nn.Sequential(backbone, nn.ReLU(), nn.Linear(64, outputs))


BENCH_NETWORKS = (
    BenchNetwork("resnet20", ResNet(20)),
    BenchNetwork("resnet20, GroupNorm", resnet20_groups),
    BenchNetwork("CNN with dropout", lenet),
    BenchNetwork("MLP", Mlp(3 * 32 * 32)),
    BenchNetwork("ViT, 6 layers of 192", SmallViT),
    BenchNetwork("LSTM on tokens", TokenLSTM, (LENGTH,), VOCABULARY),
    BenchNetwork("resnet18", resnet18),
    BenchNetwork("resnet18, 64x64", resnet18, LARGE_IMAGE),
    BenchNetwork("frozen resnet20, head", frozen_resnet20),
)


@dataclass(frozen=True)
class BenchRun:
    """A run on made-up images that are split by label skew."""

    method: str
    skew: str
    clients: int = 10
    participation: float = 1.0
    rounds: int = 2
    epochs: int = 4
    model: str = "resnet20"
    images: int = 50_000  # of which a tenth is public

    def __str__(self) -> str:
        taking = "" if self.participation == 1 else f" ({self.participation:.0%} in each round)"
        return f"{self.method}, {self.skew}, {self.clients:,} clients{taking}, T={self.rounds}, E={self.epochs}"

    def steps(self, batch: int) -> float:
        """The client-steps of all rounds, or fewer: methods may train more than once per round."""
        each = max(1.0, 0.9 * self.images / self.clients / batch)
        return self.rounds * self.epochs * self.participation * self.clients * each

    def federation(self, augment: str) -> Federation:
        """The data; nothing is evaluated."""
        generator = torch.Generator().manual_seed(0)
        own = BenchNetwork(self.model, network(self.model, IMAGE))
        samples = own.samples(self.images, augment, generator)
        labels = torch.arange(self.images) % CLASSES
        data = (samples.x.numpy(), labels.numpy())
        return Federation.split(data, self.skew, self.clients, self.model, test=0, view=samples.view)


BENCH_RUNS = (
    BenchRun("fedavg", "classes:2"),  # of equal sizes
    BenchRun("fedavg", "dirichlet:0.05"),
    BenchRun("fedavg", "classes:2", clients=1_000),
    BenchRun("fedavg", "classes:2", clients=10_000, participation=0.01),
    BenchRun("fedcc", "classes:1", rounds=15, epochs=20),  # the paper's
)
