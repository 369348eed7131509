"""A folder of images to try things with: the digits 0 to 5 as PNG, JPEG and GIF in three sizes, a sub-folder per class.

Run ``python examples/make_images.py imgs``.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

FORMS = (("png", (8, 8)), ("jpg", (16, 16)), ("gif", (20, 24)))


def make_images(folder: Path) -> None:
    digits = load_digits()
    for i, (image, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        if digit < 6:
            suffix, size = FORMS[i % 3]
            path = folder / f"digit {digit}" / f"{i}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * 15.9).astype(np.uint8)).resize(size).save(path)


if __name__ == "__main__":
    make_images(Path(sys.argv[1]))
