"""Samples: named columns of equal length on one device, and how a network sees their inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcc.core.maps import MappedTensor
from fedcc.core.naming import unknown


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, copied there once: a captured step cannot copy from the host."""
    return torch.tensor(values, dtype=dtype, device=device)


@dataclass(frozen=True)
class View:
    """How stored inputs become what a network sees: scaled, normalised and, while training, cropped and flipped.

    Images stay uint8 in memory and on a GPU; each batch is converted when it is used.

    >>> view = View(scale=1 / 255, mean=(0.5,), std=(0.25,))
    >>> view.clean(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8))[0, 0, 0, 0].item()
    2.0
    """

    scale: float = 1.0
    mean: tuple[float, ...] = ()  # of scaled inputs, one number per channel
    std: tuple[float, ...] = ()
    pad: int = 0  # random crop of the original size after this much zero padding; 0 is no crop
    flip: bool = False  # random horizontal flip
    hole: float = 0.0  # side of a square at a random place that shows the mean colour, as a share of the image's
    brightness: float = 0.0  # scaled inputs are multiplied by a random factor from 1 - brightness to 1 + brightness
    shift: float = 0.0  # then a random number from -shift to shift is added

    @property
    def augments(self) -> bool:
        return self.pad > 0 or self.flip or self.strong

    @property
    def strong(self) -> bool:
        """Whether training images get a hole or another brightness."""
        return self.hole > 0 or self.brightness > 0 or self.shift > 0

    @property
    def draws_per_image(self) -> int:
        """Random numbers per training image: see :meth:`augmented`."""
        return 7 if self.strong else 3 if self.augments else 0

    def with_augment(self, augment: str) -> View:
        """This view with another augmentation: ``none``, ``standard`` (unchanged), ``strong``, or values as below.

        >>> View(pad=4, flip=True).with_augment("hole=0.25,shift=0.1").hole
        0.25
        """
        if augment == "standard":
            return self
        if augment == "none":
            return replace(self, pad=0, flip=False, hole=0.0, brightness=0.0, shift=0.0)
        return replace(self, **parse_augment(augment))

    def normalised(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Scaled inputs (white is 1, black is 0), normalised."""
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
        """What a network sees when it predicts. Integer inputs of an identity view stay integers."""
        if self.scale == 1.0 and not self.mean:
            return x.to(dtype) if x.is_floating_point() else x
        return self.normalised(x.to(dtype) * self.scale, dtype)

    def augmented(self, x: Tensor, draws: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What a network sees while training.

        ``draws`` [B, 3] holds the crop's row and column and the flip; a strong view has [B, 7], with the hole's
        centre, the brightness and the shift, each from 0 to 255.
        """
        if not self.augments:
            return self.clean(x, dtype)
        height, width = x.shape[-2:]
        padded = F.pad(x, (self.pad,) * 4)
        rows = draws[:, 0:1] + torch.arange(height, device=x.device)  # [B, H]
        columns = torch.arange(width, device=x.device).expand(len(x), -1)
        columns = torch.where(draws[:, 2:3] > 0, width - 1 - columns, columns) + draws[:, 1:2]  # [B, W]
        batch = torch.arange(len(x), device=x.device)[:, None, None]
        cropped = padded[batch, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        if not self.strong:
            return self.clean(cropped, dtype)
        factors, shifts = (table[draws[:, i]].view(-1, 1, 1, 1) for i, table in self.levels(dtype, x.device).items())
        images = self.normalised(cropped.to(dtype) * self.scale * factors + shifts, dtype)
        tall, wide = self.hole_size(height, width)
        above = torch.arange(height, device=x.device) - (draws[:, 3:4] * height // LEVELS - tall // 2)  # [B, H]
        left = torch.arange(width, device=x.device) - (draws[:, 4:5] * width // LEVELS - wide // 2)  # [B, W]
        hidden = ((above >= 0) & (above < tall))[:, :, None] & ((left >= 0) & (left < wide))[:, None, :]
        return images.masked_fill(hidden[:, None], 0)

    def levels(self, dtype: torch.dtype, device: torch.device) -> dict[int, Tensor]:
        """Factor and shift of each of the 256 levels, by the column of ``draws`` that selects one."""
        steps = [2 * level / (LEVELS - 1) - 1 for level in range(LEVELS)]
        factors = tuple(1 + self.brightness * step for step in steps)
        return {5: _constant(factors, dtype, device), 6: _constant(tuple(self.shift * s for s in steps), dtype, device)}

    def hole_size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the hole in pixels."""
        return round(self.hole * height), round(self.hole * width)


IDENTITY = View()
CHUNK = 1 << 23  # bytes of a memory map, as float32, that are in memory at a time
LEVELS = 256  # of brightness, shift and the hole's position: a draw is one byte
AUGMENT = ("none", "standard", "strong")
STRONG = {"hole": 0.5, "brightness": 0.2, "shift": 0.15}
_AUGMENT_LIMITS = {"pad": 127, "hole": 1.0, "brightness": 1.0, "shift": 1.0}


def parse_augment(text: str) -> dict[str, Any]:
    """The fields of a view that ``strong``, or a list like ``hole=0.5,brightness=0.2``, changes."""
    if text == "strong":
        return dict(STRONG)
    if "=" not in text:
        raise unknown("augmentation", text, (*AUGMENT, "a list such as hole=0.5,brightness=0.2,shift=0.15"))
    values: dict[str, Any] = {}
    for pair in text.split(","):
        name, _, number = (part.strip() for part in pair.partition("="))
        if name not in _AUGMENT_LIMITS:
            raise unknown("part of an augmentation", name, _AUGMENT_LIMITS)
        try:
            value = int(number) if name == "pad" else float(number)
        except ValueError:
            raise ValueError(f"{name} of an augmentation must be a number, got {number!r}") from None
        if not 0 <= value <= _AUGMENT_LIMITS[name]:
            raise ValueError(f"{name} of an augmentation must be from 0 to {_AUGMENT_LIMITS[name]:g}, got {number}")
        values[name] = value
    return values


@dataclass(frozen=True, eq=False)
class Samples:
    """Immutable named columns of equal length: ``x`` and, where there is one, ``y`` or ``target``.

    >>> s = Samples({"x": torch.zeros(3, 2), "y": torch.tensor([0, 1, 1])})
    >>> s, sorted(s.with_(target=torch.ones(3, 4)).columns)
    (Samples(3 x float32 [2], y), ['target', 'x', 'y'])
    """

    IMAGES: ClassVar[str] = "images [channels, height, width] of two or more columns"
    columns: Mapping[str, Tensor]
    view: View = field(default=IDENTITY)

    def __post_init__(self) -> None:
        first, *others = self.columns.values()
        if any(
            len(column) != len(first) for column in others
        ):  # len() of a lone column would fix its length in an export
            lengths = {name: len(column) for name, column in self.columns.items()}
            raise ValueError(f"columns of one set of samples must be equally long, got {lengths}")
        object.__setattr__(self, "columns", MappingProxyType(dict(self.columns)))

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __repr__(self) -> str:
        x, others = self.x, ", ".join(name for name in self.columns if name != "x")
        dtype = str(x.dtype).removeprefix("torch.")
        return f"Samples({len(self):,} x {dtype} {list(self.shape)}{others and ', ' + others})"

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
        """Whether the inputs are ``IMAGES``, which can be mirrored."""
        return self.x.ndim == 4 and self.x.shape[-1] > 1

    @property
    def are_tokens(self) -> bool:
        """Whether a network sees integers."""
        return not self.x.is_floating_point() and self.view == IDENTITY

    @cached_property
    def mirrored(self) -> Samples:
        """The same samples, their images mirrored left to right; always the same object."""
        if not self.are_images:
            raise ValueError(f"mirror images are for {self.IMAGES}, got inputs of shape {list(self.shape)}")
        return self.with_(x=self.x.flip(-1))

    def with_(self, **columns: Tensor) -> Samples:
        """The same samples with these columns added or replaced."""
        return Samples({**self.columns, **columns}, self.view)

    def only(self, *names: str) -> Samples:
        """The same samples with only these columns."""
        return Samples({name: self.columns[name] for name in names}, self.view)

    def at(self, rows: Tensor) -> Samples:
        """Some of the samples: indices, or a mask with one entry per sample."""
        return Samples({name: column[rows.to(column.device)] for name, column in self.columns.items()}, self.view)

    def chunks(self) -> Iterator[Samples]:
        """The samples themselves or, if their inputs are in a memory map, a part at a time."""
        if not isinstance(self.x, MappedTensor):
            yield self
            return
        step = max(1, CHUNK // (4 * math.prod(self.shape)))
        for start in range(0, len(self), step):
            yield Samples({name: c[start : start + step] for name, c in self.columns.items()}, self.view)

    def to(self, device: torch.device | str) -> Samples:
        return Samples({name: column.to(device) for name, column in self.columns.items()}, self.view)
