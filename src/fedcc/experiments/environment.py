"""The machine and the software that a run's numbers come from."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcc import __version__


def environment(device: str, threads: int) -> dict[str, Any]:
    """Both as plain values, with the program's arguments."""
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return {
        "fedcc": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "gpu": gpu,
        "cuda": torch.version.cuda if gpu else None,
        "arguments": sys.argv[1:],
    }


def commit() -> str | None:
    """``FEDCC_COMMIT``, else the commit of this code's checkout, with ``+`` if files were changed, or None."""
    package_folder = Path(__file__).resolve().parent
    git, override = shutil.which("git"), os.environ.get("FEDCC_COMMIT")
    if git is None or override:
        return override or None

    def ask(*words: str) -> str | None:
        process = subprocess.run([git, "-C", str(package_folder), *words], capture_output=True, text=True, check=False)
        return process.stdout.strip() if process.returncode == 0 else None

    head = ask("rev-parse", "HEAD")
    if head is None or ask("ls-files", "--error-unmatch", str(Path(__file__).resolve())) is None:
        return None
    return head + ("+" if ask("status", "--porcelain", "--untracked-files=no", "--", str(package_folder)) else "")


def processor() -> str:
    """The CPU's name."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name.*?:(.*)", info.read_text(), re.M) if info.exists() else None
    return model[1].strip() if model else platform.processor() or platform.machine()
