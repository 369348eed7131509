"""A folder with a sub-folder of images per class, optionally below ``train/``, ``test/`` and ``public/``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcc.errors import InputError, LeftOut

Images = NDArray[np.uint8]

SIDE = 32  # the largest side by default, unless all images are squares of one size up to KEPT
KEPT = 64
SMALLEST = 8
WHITE = 65_535  # the largest value of 16 bits
PIXELS = 64_000_000  # of one image, before anything is decoded
SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
PARTS = ("train", "test", "public")


class DarkImages(UserWarning):
    """Images of 16 bits use so little of their range that they are nearly black in 8 bits."""


class Encoded(BytesIO):
    """The content of an image file that is in memory, with a name for errors."""

    def __init__(self, content: bytes, name: str):
        super().__init__(content)
        self.source = name

    def __str__(self) -> str:
        return self.source


@dataclass(frozen=True)
class Listing:
    """The images of one part in the order they are read, and the name of each one's class ("" without classes)."""

    paths: list[Path]
    names: list[str]


def list_parts(folder: Path) -> dict[str, Listing]:
    """The images of a folder by part; without ``train/`` all are training images."""
    if not (folder / "train").is_dir():
        return {"train": list_classes(folder)}
    parts = {part: folder / part for part in PARTS if (folder / part).is_dir()}
    return {part: list_images(path) if part == "public" else list_classes(path) for part, path in parts.items()}


def list_classes(folder: Path) -> Listing:
    """The images in the sub-folders, each of which is a class."""
    classes = [path for path in _entries(folder) if path.is_dir()]
    if not classes:
        raise InputError(f"{folder}: expected a sub-folder of images per class, found none")
    if loose := [path for path in _entries(folder) if path.suffix.lower() in SUFFIXES and path.is_file()]:
        _leave_out(folder, len(loose), "images", loose[0], "they are in no class's folder")
    listing = Listing([], [])
    for path in classes:
        images = _images(path)
        if deeper := _folders(path):
            _leave_out(path, len(deeper), "folders", deeper[0], "a class's images lie in its own folder")
        if not images:
            raise InputError(
                f"{path}: a class needs images ({', '.join(SUFFIXES)}), found none; "
                "delete the folder if there are none of this class"
            )
        listing.paths.extend(images)
        listing.names.extend([path.name] * len(images))
    return listing


def list_images(folder: Path) -> Listing:
    """All images below a folder; public images need no classes."""
    paths = [image for path in _below(folder) for image in _images(path)]
    if not paths:
        raise InputError(f"{folder}: expected images ({', '.join(SUFFIXES)}), found none")
    return Listing(paths, [""] * len(paths))


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith((".", "__")))
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror or error})") from error


def _folders(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if path.is_dir()]


def _below(folder: Path) -> list[Path]:
    """A folder and all folders below it; links to folders are followed at the top only, since they may form a loop."""
    inner = [path for child in _folders(folder) for path in ([child] if child.is_symlink() else _below(child))]
    return [folder, *inner]


def _leave_out(folder: Path, number: int, what: str, first: Path, reason: str) -> None:
    warnings.warn(f"{folder}: {number} {what} are left out, as {first.name}: {reason}", LeftOut, stacklevel=3)


def _images(folder: Path) -> list[Path]:
    files = [path for path in _entries(folder) if path.is_file()]
    images = [path for path in files if path.suffix.lower() in SUFFIXES]
    if len(images) < len(files):
        first = next(path for path in files if path.suffix.lower() not in SUFFIXES)
        _leave_out(folder, len(files) - len(images), "files", first, "their names are not those of images")
    return images


@dataclass(frozen=True)
class Form:
    """What all images become: squares of this side, with one channel (all are grey) or three."""

    side: int
    channels: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.side, self.side


def common_form(paths: Sequence[Path | Encoded], resize: int = 0) -> Form:
    """The form for these images, by their headers: sides of ``resize`` pixels, else their own if all are small squares.

    Otherwise the side is the median of their shorter sides, at most 32.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        headers = list(pool.map(_header, paths, chunksize=64))
    channels = 1 if all(is_grey for _, is_grey in headers) else 3
    shorter = sorted(min(size) for size, _ in headers)
    alike = len({size for size, _ in headers}) == 1 and len(set(headers[0][0])) == 1
    side = min(shorter[len(shorter) // 2], KEPT if alike else SIDE)
    return Form(resize or max(side, SMALLEST), channels)


def _header(path: Path | Encoded) -> tuple[tuple[int, int], bool]:
    """An image's size, and whether it is grey."""
    with _opened(path) as image:
        if image.mode == "P":  # a palette, as of GIF files
            colours = np.array(image.getpalette("RGB")).reshape(-1, 3)
            return image.size, bool((colours == colours[:, :1]).all())
        return image.size, image.mode in ("1", "L", "LA", "I;16", "I;16B")


def _opened(path: Path | Encoded) -> Any:
    """An image whose header has been read."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is lower
            image = Image.open(path)
    except Image.DecompressionBombError as error:
        raise InputError(f"{path}: an image may have at most {PIXELS:,} pixels ({error})") from error
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for damaged files
        raise InputError(f"{path}: expected an image, found: {error}") from error
    if image.width * image.height > PIXELS:
        image.close()
        raise InputError(f"{path}: an image may have at most {PIXELS:,} pixels, found {image.width} x {image.height}")
    return image


def decode(path: Path | Encoded, form: Form, peaks: dict[Path | Encoded, int] | None = None) -> Images:
    """One image, upright, on white where it is transparent, its centre cropped to a square: [channels, side, side].

    Of 16 bits the upper 8 are kept; ``peaks`` receives the largest value of such an image.
    """
    from PIL import Image, ImageOps

    try:
        with _opened(path) as image:
            kind = image.format
            image = ImageOps.exif_transpose(image)
            if image.mode == "F" or (image.mode == "I" and kind != "PNG"):
                raise InputError(f"{path}: an image may have 8 or 16 bits per value, found 32")
            if image.mode.startswith("I"):  # 16 bits
                values = np.asarray(image).astype(np.int64)
                if peaks is not None:
                    peaks[path] = int(values.max())
                image = Image.fromarray((values >> 8).clip(0, 255).astype(np.uint8))
            if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
                image = image.convert("RGBA")
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image)
            image = image.convert("L" if form.channels == 1 else "RGB")
            image = ImageOps.fit(image, (form.side, form.side), Image.Resampling.BILINEAR)
            pixels = np.asarray(image)
    except InputError:
        raise
    except (OSError, SyntaxError, ValueError, MemoryError) as error:
        raise InputError(f"{path}: expected an image, found: {error}") from error
    return pixels[None] if form.channels == 1 else pixels.transpose(2, 0, 1)


def decode_all(paths: Sequence[Path | Encoded], form: Form) -> Images:
    """Images of one form, [N, channels, side, side]."""
    images, peaks = np.empty((len(paths), *form.shape), np.uint8), dict[Path | Encoded, int]()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes outside the interpreter's lock
        for i, image in enumerate(pool.map(partial(decode, form=form, peaks=peaks), paths, chunksize=64)):
            images[i] = image
    if peaks and 0 < max(peaks.values()) < WHITE / 8:
        _warn_of_dark(next(path for path in paths if path in peaks), len(peaks) - 1, max(peaks.values()))
    return images


def _warn_of_dark(first: Path | Encoded, others: int, peak: int) -> None:
    """12 bits in files of 16, for example, as programs write them that export DICOM."""
    which = f"{first} and {others:,} others" if others else str(first)
    text = (
        f"{which}: no value is above {peak:,} of {WHITE:,}, and of 16 bits the upper 8 are kept, so they become nearly "
        f"black, 0 to {peak >> 8} of 255; multiply the values by {WHITE // peak}"
    )
    warnings.warn(text, DarkImages, stacklevel=3)
