"""CIFAR-style residual networks of depth 6n + 2: widths 16/32/64, shortcuts without parameters.

He et al., "Deep residual learning for image recognition", CVPR 2016, Sec. 4.2.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


class Shortcut(nn.Module):
    """The identity, or every second pixel with zero channels around it where the width doubles (option A).

    A module, since channels may mix only inside modules when clients are stacked.
    """

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.stride = stride
        self.extra = (after - before) // 2

    def forward(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.extra, self.extra)) if self.extra else x


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.shortcut = Shortcut(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class _ResNet(nn.Module):
    def __init__(self, depth: int, channels: int, outputs: int):
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        widths = [16] * blocks + [32] * blocks + [64] * blocks
        before = [16, *widths[:-1]]
        self.blocks = nn.Sequential(*(Block(i, o, 1 if i == o else 2) for i, o in zip(before, widths, strict=True)))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.head = nn.Linear(64, outputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.conv(x))))
        out: Tensor = self.head(self.flatten(self.pool(x)))
        return out


DEEPEST = 1202  # the paper's deepest network


@dataclass(frozen=True)
class ResNet:
    """A factory: ``ResNet(20)(outputs)`` is a new ResNet20 for square images from 8x8 up.

    >>> sum(p.numel() for p in ResNet(20)(10).parameters())
    269722
    """

    depth: int
    channels: int = 3

    def __post_init__(self) -> None:
        if not 8 <= self.depth <= DEEPEST or (self.depth - 2) % 6:
            raise ValueError(f"a CIFAR ResNet's depth is 6n + 2 (8, 14, 20, ..., {DEEPEST}), got {self.depth}")

    def __call__(self, outputs: int) -> nn.Module:
        return _ResNet(self.depth, self.channels, outputs)

    def __str__(self) -> str:
        return f"resnet{self.depth}"
