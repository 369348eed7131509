"""A site's own samples: an NPZ file, or a folder of arrays or images; checked before anything is trained on them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedcc.core.samples import Samples

if TYPE_CHECKING:
    from fedcc.flower.folder import Task

IMAGES = (".png", ".jpg", ".jpeg", ".bmp")


def site_samples(path: Path, task: Task) -> Samples:
    """The samples of ``path``: ``x`` (uint8 images) and ``y`` (whole-number labels) in an NPZ file; a folder with
    ``x.npy`` and ``y.npy``; or a folder with one sub-folder of images per class, named by its number or its name."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; --data names an NPZ file with x and y, or a folder")
    if not path.is_dir():
        arrays = read_arrays(path, "x", "y")
        x, y = arrays["x"], arrays["y"]
    elif (path / "x.npy").exists():
        x, y = _read_array(path / "x.npy"), _read_array(path / "y.npy")
    else:
        x, y = _read_images(path, task)
    check_images(path, x, task)
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise ValueError(f"{path}: y must be whole-number labels of shape [samples], got {y.dtype} {y.shape}")
    if len(y) != len(x):
        raise ValueError(f"{path}: x has {len(x)} images and y {len(y)} labels")
    if int(y.min()) < 0 or int(y.max()) >= task.classes:
        raise ValueError(f"{path}: labels must lie in 0 .. {task.classes - 1}, got {y.min()} .. {y.max()}")
    columns = {"x": torch.from_numpy(np.ascontiguousarray(x)), "y": torch.from_numpy(y.astype(np.int64))}
    return Samples(columns, task.view)


def check_images(path: Path, x: Any, task: Task) -> None:
    """Refuse anything but uint8 images of the federation's shape."""
    if x.dtype != np.uint8 or x.ndim != 1 + len(task.shape) or x.shape[1:] != task.shape:
        shape = "x".join(map(str, task.shape))
        raise ValueError(f"{path}: x must be uint8 images of shape [samples, {shape}], got {x.dtype} {list(x.shape)}")
    if not len(x):
        raise ValueError(f"{path} holds no samples")


def _read_array(path: Path) -> Any:
    with errors_named(f"{path} is not a readable array"):
        return np.load(path, allow_pickle=False)


def _read_images(folder: Path, task: Task) -> tuple[Any, Any]:
    from PIL import Image

    numbers = {str(c): c for c in range(task.classes)} | {name: c for c, name in enumerate(task.names)}
    class_folders = sorted(p for p in folder.iterdir() if p.is_dir())
    if not class_folders:
        raise ValueError(f"{folder} holds neither x.npy and y.npy nor sub-folders of images named by class")
    x, y = [], []
    for class_folder in class_folders:
        if class_folder.name not in numbers:
            raise ValueError(
                f"{class_folder}: no class has this name; known are 0 .. {task.classes - 1}, {', '.join(task.names)}"
            )
        for path in sorted(p for p in class_folder.iterdir() if p.suffix.lower() in IMAGES):
            with errors_named(f"{path} is not a readable image"), Image.open(path) as image:
                pixels = np.asarray(image.convert("L" if task.shape[0] == 1 else "RGB"))
            pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
            if pixels.shape != task.shape:
                raise ValueError(f"{path}: images must be {task.shape}, got {pixels.shape} (channels, height, width)")
            x.append(pixels)
            y.append(numbers[class_folder.name])
    if not x:
        raise ValueError(f"{folder} holds no images ({', '.join(IMAGES)})")
    return np.stack(x), np.asarray(y)


def read_arrays(path: Path, *names: str) -> dict[str, Any]:
    """The arrays of an NPZ file, with at least these names; objects are refused, since reading would unpickle them."""
    with errors_named(f"{path} is not a readable NPZ file"), np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
        if odd := [name for name, value in arrays.items() if not isinstance(value, np.ndarray)]:
            raise ValueError(f"{odd[0]} is not an array")
    for name in names:
        if name not in arrays:
            raise ValueError(f"{path} must hold the arrays {', '.join(names)}, got {', '.join(arrays) or 'none'}")
    return arrays


def images_sha256(x: np.ndarray) -> str:
    digest = hashlib.sha256(repr((x.shape, x.dtype.str)).encode())
    digest.update(np.ascontiguousarray(x).data)
    return digest.hexdigest()


@contextmanager
def errors_named(problem: str) -> Iterator[None]:
    """Errors in the block become a ValueError that begins so: reading damaged files raises nearly anything."""
    try:
        yield
    except Exception as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = f"{text} is missing" if type(error) is KeyError else " ".join(text.split()) or type(error).__name__
        raise ValueError(f"{problem}: {reason[:500]}") from None
