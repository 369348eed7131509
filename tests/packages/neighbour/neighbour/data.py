"""Points on four noisy rings; the ring is the class."""

import numpy as np

from fedcc.core.samples import View
from fedcc.data import Dataset, Defaults


def rings() -> Dataset:
    rng = np.random.default_rng(0)

    def draw(number: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(number) % 4
        angle = rng.uniform(0, 2 * np.pi, number)
        radius = 1 + y + rng.normal(0, 0.15, number)
        x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
        return x.astype(np.float32), y.astype(np.int64)

    defaults = Defaults("classes:1", 4, rounds=3, epochs=5, shared_model="sine", models="sine,mlp")
    names = ("innermost", "inner", "outer", "outermost")
    return Dataset("rings", names, *draw(800), *draw(400), View(), defaults)
