"""Samples: named columns of equal length on one device, and how their inputs are shown to a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, sent there once: a captured step may not copy from the host."""
    return torch.tensor(values, dtype=dtype, device=device)


@dataclass(frozen=True)
class View:
    """How stored inputs become what a network sees: scaled, normalised and, while training, cropped and flipped.

    Stored images stay uint8 (four times smaller, and what a GPU keeps resident); the view turns a batch of them
    into floats. ``mean`` and ``std`` hold one number per channel, for inputs scaled by ``scale``.

    >>> view = View(scale=1 / 255, mean=(0.5,), std=(0.25,))
    >>> view.clean(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8))[0, 0, 0, 0].item()
    2.0
    """

    scale: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    pad: int = 0  # random crop of the original size after this much zero padding; 0 is no crop
    flip: bool = False  # random horizontal flip

    @property
    def augments(self) -> bool:
        return self.pad > 0 or self.flip

    def normalised(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Inputs that are already scaled (white is 1, black is 0), normalised."""
        x = x.to(dtype)
        if not self.mean:
            return x
        shape = (1, -1) + (1,) * (x.ndim - 2)
        mean, std = _constant(self.mean, dtype, x.device), _constant(self.std, dtype, x.device)
        return (x - mean.view(shape)) / std.view(shape)

    def numbers(self, channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel, in fp32."""
        mean, std = self.mean or (0.0,) * channels, self.std or (1.0,) * channels
        return _constant(mean, torch.float32, device), _constant(std, torch.float32, device)

    def clean(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the network sees when it predicts; never augmented. Integer inputs of an identity view stay integers."""
        if self.scale == 1.0 and not self.mean:
            return x.to(dtype) if x.is_floating_point() else x
        return self.normalised(x.to(dtype) * self.scale, dtype)

    def augmented(self, x: Tensor, draws: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the network sees while training: ``draws`` [B, 3] holds the crop's row and column and the flip."""
        if not self.augments:
            return self.clean(x, dtype)
        height, width = x.shape[-2:]
        padded = F.pad(x, (self.pad,) * 4)
        rows = draws[:, 0:1] + torch.arange(height, device=x.device)  # [B, H]
        columns = torch.arange(width, device=x.device).expand(len(x), -1)
        columns = torch.where(draws[:, 2:3] > 0, width - 1 - columns, columns) + draws[:, 1:2]  # [B, W]
        batch = torch.arange(len(x), device=x.device)[:, None, None]
        cropped = padded[batch, :, rows[:, :, None], columns[:, None, :]]  # [B, H, W, channels]
        return self.clean(cropped.permute(0, 3, 1, 2), dtype)


IDENTITY = View()


@dataclass(frozen=True, eq=False)
class Samples:
    """Immutable named columns of equal length: ``x`` and, where there is one, ``y`` or ``target``.

    >>> s = Samples({"x": torch.zeros(3, 2), "y": torch.tensor([0, 1, 1])})
    >>> len(s), sorted(s.with_(target=torch.ones(3, 4)).columns)
    (3, ['target', 'x', 'y'])
    """

    IMAGES: ClassVar[str] = "images [channels, height, width] of two or more columns"
    columns: Mapping[str, Tensor]
    view: View = field(default=IDENTITY)

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of one set of samples must be equally long, got {lengths}")
        object.__setattr__(self, "columns", MappingProxyType(dict(self.columns)))

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    @property
    def x(self) -> Tensor:
        return self.columns["x"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x.shape[1:])

    @property
    def are_images(self) -> bool:
        """Whether the inputs are ``IMAGES``, which a mirror may change."""
        return self.x.ndim == 4 and self.x.shape[-1] > 1

    @cached_property
    def mirrored(self) -> Samples:
        """The same samples, their images mirrored left to right; one object, however often it is asked for."""
        if not self.are_images:
            raise ValueError(f"mirror images are for {self.IMAGES}, got inputs of shape {list(self.shape)}")
        return self.with_(x=self.x.flip(-1))

    def with_(self, **columns: Tensor) -> Samples:
        """The same samples with these columns added or replaced."""
        return Samples({**self.columns, **columns}, self.view)

    def only(self, *names: str) -> Samples:
        """The same samples with these columns alone."""
        return Samples({name: self.columns[name] for name in names}, self.view)

    def at(self, rows: Tensor) -> Samples:
        """These samples alone: indices, or a mask with one entry per sample."""
        return Samples({name: column[rows.to(column.device)] for name, column in self.columns.items()}, self.view)

    def to(self, device: torch.device | str) -> Samples:
        return Samples({name: column.to(device) for name, column in self.columns.items()}, self.view)
