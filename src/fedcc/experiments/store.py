"""The run folder, written as the run goes: whole files, and one line a round that is there or not, never half."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fedcc.core.files import written_whole
from fedcc.data.skew import Partition
from fedcc.experiments.experiment import Experiment
from fedcc.run import Record

FILES = ("experiment.toml", "environment.json", "partition.npz", "metrics.jsonl", "summary.json")


class RunFolderError(ValueError):
    """A folder that cannot take this run."""


class RunFolder:
    """One run's files; docs/design.md says what each holds."""

    def __init__(self, path: Path):
        self.path = path

    @staticmethod
    def begin(path: Path, experiment: Experiment, partition: Partition | None, overwrite: bool = False) -> RunFolder:
        """A new run's folder; refused where there is something else."""
        folder = RunFolder(path)
        folder.claim(experiment, overwrite)
        path.mkdir(parents=True, exist_ok=True)
        if partition is not None:
            partition.save(path / "partition.npz")
        folder.write("environment.json", environment(experiment))
        (path / "metrics.jsonl").write_bytes(b"")
        with written_whole(path / "experiment.toml") as file:  # last: its presence says that the run has begun
            file.write(experiment.toml().encode())
        return folder

    def claim(self, experiment: Experiment, overwrite: bool) -> None:
        """Make sure the folder is free, or free it."""
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file; --out must name a folder")
        held = [p.name for p in self.path.iterdir()] if self.path.is_dir() else []
        if not held:
            return
        if "experiment.toml" not in held:
            if not set(held) <= {*FILES, *(h for h in held if h.endswith(".tmp"))}:
                raise RunFolderError(f"{self.path} holds other files ({sorted(held)[0]}); choose another --out")
        elif not overwrite:
            try:
                same = Experiment.read(self.path / "experiment.toml") == experiment
            except ValueError:
                same = False
            what = "this run already" if same else "another run"
            state = "finished" if "summary.json" in held else "unfinished"
            raise RunFolderError(f"{self.path} holds {what} ({state}); choose another --out, or --overwrite it")
        for name in held:
            if name in FILES or name.startswith("models.") or name.endswith(".tmp"):
                (self.path / name).unlink()

    def write(self, name: str, content: Any) -> None:
        with written_whole(self.path / name) as file:
            file.write((json.dumps(content, indent=1) + "\n").encode())

    def add(self, record: Record) -> None:
        """Append a round; if the line does not fit on the disk, none of it stays."""
        path = self.path / "metrics.jsonl"
        with path.open("ab") as file:
            before = file.tell()
            try:
                file.write((json.dumps(record) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                file.close()
                os.truncate(path, before)
                raise

    def metrics(self) -> list[Record]:
        """The rounds so far; a line that is still being written is left out."""
        path = self.path / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def summary(self) -> dict[str, Any] | None:
        """The record of the finished run, or None."""
        path = self.path / "summary.json"
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return found


def environment(experiment: Experiment) -> dict[str, Any]:
    """The machine and the software that a run's numbers come from."""
    gpu = torch.cuda.get_device_name(experiment.device) if experiment.device.startswith("cuda") else None
    return {
        "fedcc": version("fedcc"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": experiment.threads,
        "gpu": gpu,
        "cuda": torch.version.cuda if gpu else None,
        "arguments": sys.argv[1:],
    }


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        import fedcc

        return fedcc.__version__ if package == "fedcc" else "unknown"


def commit() -> str | None:
    """The commit of the checkout this code runs from, ``+`` behind it if files were changed; None if there is none."""
    here = Path(__file__).resolve().parent
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*words: str) -> str | None:
        done = subprocess.run([git, "-C", str(here), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    head = ask("rev-parse", "HEAD")
    if head is None or ask("ls-files", "--error-unmatch", str(Path(__file__).resolve())) is None:
        return None
    return head + ("+" if ask("status", "--porcelain", "--untracked-files=no", "--", str(here)) else "")


def processor() -> str:
    """The CPU's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
