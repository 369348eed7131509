"""A site's own samples: an NPZ file, or a folder of arrays or images; checked before anything is trained on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcc.core.samples import Samples
from fedcc.flower.folder import Task, arrays, readable

IMAGES = (".png", ".jpg", ".jpeg", ".bmp")


def site_samples(path: Path, task: Task) -> Samples:
    """The samples of ``path``: ``x`` (uint8 images) and ``y`` (whole-number labels) in an NPZ file; a folder with
    ``x.npy`` and ``y.npy``; or a folder with one sub-folder of images per class, named by its number or its name."""
    if not path.exists():
        raise ValueError(f"{path} is not there; --data names an NPZ file with x and y, or a folder")
    if not path.is_dir():
        found = arrays(path, "x", "y")
        x, y = found["x"], found["y"]
    elif (path / "x.npy").exists():
        x, y = _array(path / "x.npy"), _array(path / "y.npy")
    else:
        x, y = _images(path, task)
    checked_images(path, x, task)
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise ValueError(f"{path}: y must be whole-number labels of shape [samples], got {y.dtype} {y.shape}")
    if len(y) != len(x):
        raise ValueError(f"{path}: x has {len(x)} images and y {len(y)} labels")
    if int(y.min()) < 0 or int(y.max()) >= task.classes:
        raise ValueError(f"{path}: labels must lie in 0 .. {task.classes - 1}, got {y.min()} .. {y.max()}")
    columns = {"x": torch.from_numpy(np.ascontiguousarray(x)), "y": torch.from_numpy(y.astype(np.int64))}
    return Samples(columns, task.view)


def checked_images(path: Path, x: Any, task: Task) -> None:
    """Refuse what is not uint8 images of the federation's shape."""
    if x.dtype != np.uint8 or x.ndim != 1 + len(task.shape) or x.shape[1:] != task.shape:
        want = "x".join(map(str, task.shape))
        raise ValueError(f"{path}: x must be uint8 images of shape [samples, {want}], got {x.dtype} {list(x.shape)}")
    if not len(x):
        raise ValueError(f"{path} holds no samples")


def _array(path: Path) -> Any:
    with readable(path, "array"):
        return np.load(path, allow_pickle=False)


def _images(folder: Path, task: Task) -> tuple[Any, Any]:
    from PIL import Image

    numbers = {str(c): c for c in range(task.classes)} | {name: c for c, name in enumerate(task.names)}
    parts = sorted(p for p in folder.iterdir() if p.is_dir())
    if not parts:
        raise ValueError(f"{folder} holds neither x.npy and y.npy nor sub-folders of images named by class")
    x, y = [], []
    for part in parts:
        if part.name not in numbers:
            raise ValueError(
                f"{part}: no class has this name; known are 0 .. {task.classes - 1}, {', '.join(task.names)}"
            )
        for path in sorted(p for p in part.iterdir() if p.suffix.lower() in IMAGES):
            with readable(path, "image"), Image.open(path) as image:
                pixels = np.asarray(image.convert("L" if task.shape[0] == 1 else "RGB"))
            pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
            if pixels.shape != task.shape:
                raise ValueError(f"{path}: images must be {task.shape}, got {pixels.shape} (channels, height, width)")
            x.append(pixels)
            y.append(numbers[part.name])
    if not x:
        raise ValueError(f"{folder} holds no images ({', '.join(IMAGES)})")
    return np.stack(x), np.asarray(y)
