"""The device of a run, by name."""

from __future__ import annotations

import torch

from fedcc.core.naming import unknown


def choose_device(name: str) -> torch.device:
    """The device ``cpu``, ``cuda`` or ``cuda:N``; ``auto`` is the GPU where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise unknown("device", name, ("auto", "cpu", "cuda")) from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not there: {torch.cuda.device_count()} CUDA devices were found")
    return device
