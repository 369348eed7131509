"""Engines serve the requests of methods: ``plain`` is the reference, ``fused`` trains clients together on a GPU."""

import os
import warnings

import torch

from fedcc.core.naming import unknown
from fedcc.core.options import Precision as Precision
from fedcc.engine.cuda import OLDEST
from fedcc.engine.drive import drive as drive
from fedcc.engine.fused import Fused as Fused
from fedcc.engine.plain import Monitor
from fedcc.engine.plain import Plain as Plain

ENGINES: dict[str, type[Plain] | type[Fused]] = {"plain": Plain, "fused": Fused}


def choose_device(name: str) -> torch.device:
    """The device ``cpu``, ``cuda`` or ``cuda:N``; ``auto`` is the GPU where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise unknown("device", name, ("auto", "cpu", "cuda")) from None
    if device.type == "mps":
        raise ValueError("device must be auto, cpu or cuda, got 'mps': no engine has been checked on it; use cpu")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} does not exist: {torch.cuda.device_count()} CUDA devices were found")
    return device


def default_engine(device: torch.device) -> str:
    """``fused`` on a GPU; ``plain`` on a CPU, where stacking gains nothing."""
    return "fused" if device.type == "cuda" else "plain"


class PrecisionWarning(UserWarning):
    """Numbers are computed in another format than usual on such a device."""


def default_precision(device: torch.device) -> Precision:
    """``bf16`` on a GPU that has it, ``fp32`` on others, with a warning, and on a CPU."""
    if device.type != "cuda":
        return "fp32"
    if torch.cuda.get_device_capability(device) >= OLDEST:
        return "bf16"
    text = f"{torch.cuda.get_device_name(device)} has no bf16; fp32 is used, which is slower than on newer GPUs"
    warnings.warn(text, PrecisionWarning, stacklevel=2)
    return "fp32"


def engine(name: str, device: torch.device, precision: Precision, monitor: Monitor | None = None) -> Plain | Fused:
    """An engine by name."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    return ENGINES[name](device, precision, monitor)


def set_deterministic(on: bool) -> None:
    """Make a GPU give the same bits every time, or use the fastest algorithms; a CPU gives the same bits anyway."""
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
    if on or torch.are_deterministic_algorithms_enabled():  # the call imports the compiler: 3 s and 150 MB a process
        torch.use_deterministic_algorithms(on, warn_only=True)
    torch.backends.cudnn.benchmark = not on
