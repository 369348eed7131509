"""Outliers made from a client's own samples: FedOV's destructive changes, as data.

Each image is changed in one of five ways, as the authors' code does: a small crop enlarged, a strong blur, a large part
erased, a band overwritten by another, squares of a band rotated. Other inputs get half of their numbers from another
sample. Nothing here reads another client's sample.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcc.core.samples import Samples

CROP, ERASE = (0.10, 0.33), (0.33, 0.50)  # shares of the area that are kept, and that are erased
LONG, SHORT = (3, 5, 7, 9), (1, 3, 5)  # sides of the blur's box
WEIGHTS = (1, 1, 1, 2, 2)  # of crop, blur, erase, cut, rotate


def outliers(samples: Samples, draws: np.random.Generator) -> Tensor:
    """As many outliers as samples, of the same shape and type."""
    x = samples.x
    if not samples.are_images or min(x.shape[2:]) < 4:
        return mixed(x, draws)
    kinds = draws.choice(len(WEIGHTS), size=len(x), p=np.array(WEIGHTS) / sum(WEIGHTS))
    result = x.clone()
    fill = samples.view.numbers(x.shape[1], x.device)[0] / samples.view.scale  # 0 after normalisation
    for kind, change in enumerate((cropped, blurred, erased, cut, rotated)):
        rows = torch.from_numpy(np.flatnonzero(kinds == kind)).to(x.device)
        if len(rows):
            images = x[rows]
            changed = erased(images, draws, fill) if kind == 2 else change(images, draws)  # type: ignore[operator]
            result[rows] = in_type(changed, x)
    return result


def in_type(values: Tensor, like: Tensor) -> Tensor:
    """Values in the type of stored inputs, rounded to whole numbers where those are."""
    if values.dtype == like.dtype or like.is_floating_point():
        return values.to(like.dtype)
    return values.round().clamp(torch.iinfo(like.dtype).min, torch.iinfo(like.dtype).max).to(like.dtype)


def rectangles(n: int, area: tuple[float, float], draws: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Height, width, top and left of n rectangles as shares of an image; their area is uniform."""
    share, shape = draws.uniform(*area, n), draws.uniform(0.35, 0.65, n)
    height, width = share**shape, share ** (1 - shape)
    return height, width, draws.random(n) * (1 - height), draws.random(n) * (1 - width)


def cropped(x: Tensor, draws: np.random.Generator) -> Tensor:
    """A part of 10 to 33 % of the area, enlarged to the whole."""
    height, width, top, left = rectangles(len(x), CROP, draws)
    zero = np.zeros(len(x))
    theta = np.stack([width, zero, 2 * left + width - 1, zero, height, 2 * top + height - 1], 1).reshape(-1, 2, 3)
    grid = F.affine_grid(torch.from_numpy(theta).float().to(x.device), list(x.shape), align_corners=False)
    return F.grid_sample(x.float(), grid, padding_mode="border", align_corners=False)


def blurred(x: Tensor, draws: np.random.Generator) -> Tensor:
    """The mean over a box, 3 to 9 pixels by 1 to 5, either way round."""
    boxes = np.stack([draws.choice(LONG, len(x)), draws.choice(SHORT, len(x))], 1)
    boxes = np.where(draws.random(len(x))[:, None] < 0.5, boxes, boxes[:, ::-1])
    result = torch.empty(x.shape, device=x.device)
    for height, width in np.unique(boxes, axis=0).tolist():
        rows = torch.from_numpy(np.flatnonzero((boxes == (height, width)).all(1))).to(x.device)
        padded = F.pad(x[rows].float(), (width // 2, width // 2, height // 2, height // 2), mode="replicate")
        result[rows] = F.avg_pool2d(padded, (height, width), stride=1)
    return result


def erased(x: Tensor, draws: np.random.Generator, fill: Tensor) -> Tensor:
    """A rectangle of 33 to 50 % of the area shows the mean colour."""
    height, width, top, left = (torch.from_numpy(v).to(x.device)[:, None] for v in rectangles(len(x), ERASE, draws))
    rows, columns = ((torch.arange(side, device=x.device) + 0.5) / side for side in x.shape[2:])
    hidden = ((rows >= top) & (rows < top + height))[:, :, None] & ((columns >= left) & (columns < left + width))[
        :, None
    ]
    return torch.where(hidden[:, None], fill.view(1, -1, 1, 1), x.float())


def cut(x: Tensor, draws: np.random.Generator) -> Tensor:
    """A band of half the width is overwritten by another, a quarter away or more; or the halves swap places."""
    upright = torch.from_numpy(draws.random(len(x)) < 0.5).to(x.device)
    result = x.clone()
    for dim, chosen in ((3, upright), (2, ~upright)):
        side, n = x.shape[dim], int(chosen.sum())
        half = side // 2
        first = draws.integers(0, half - math.ceil(side / 4) + 1, n)
        second = first + math.ceil(side / 4) + np.floor(draws.random(n) * (half - math.ceil(side / 4) - first + 1))
        back = draws.random(n) < 0.5
        to, source = (torch.from_numpy(np.where(b, first, second)).to(x.device)[:, None].long() for b in (back, ~back))
        index = torch.arange(side, device=x.device).expand(n, -1)
        pasted = torch.where((index >= to) & (index < to + half), index - to + source, index)
        swapped = torch.from_numpy(draws.random(n) < 0.5).to(x.device)[:, None]
        taken = torch.where(swapped, (index + half) % side, pasted)
        shape = (n, 1, 1, side) if dim == 3 else (n, 1, side, 1)
        result[chosen] = x[chosen].take_along_dim(taken.view(shape), dim)
    return result


def rotated(x: Tensor, draws: np.random.Generator) -> Tensor:
    """Two squares of half the size, side by side in a band, each turned by 90, 180 or 270 degrees."""
    side = min(x.shape[2:]) // 2
    tops = draws.integers(0, x.shape[2] - side + 1, len(x))
    result = x.clone()
    for left in (0, side):
        turns = draws.integers(1, 4, len(x))
        for top, turn in np.unique(np.stack([tops, turns], 1), axis=0).tolist():
            rows = torch.from_numpy(np.flatnonzero((tops == top) & (turns == turn))).to(x.device)
            square = x[rows, :, top : top + side, left : left + side]
            result[rows, :, top : top + side, left : left + side] = square.rot90(turn, (2, 3))
    return result


def mixed(x: Tensor, draws: np.random.Generator) -> Tensor:
    """Half of a sample's numbers come from another sample, for inputs that are not images."""
    flat = x.flatten(1)
    others = torch.from_numpy((np.arange(len(x)) + draws.integers(1, max(len(x), 2), len(x))) % len(x)).to(x.device)
    swapped = torch.from_numpy(draws.random(tuple(flat.shape)).argsort(1) < flat.shape[1] / 2).to(x.device)
    return torch.where(swapped, flat[others], flat).view_as(x)
