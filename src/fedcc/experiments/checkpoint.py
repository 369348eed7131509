"""Checkpoints: a federation between two rounds as one safetensors file, from which a run goes on bit for bit.

What a method remembers is a tree of models, messages, tensors and JSON values. The tensors of one type and device are
laid end to end as one tensor of the file, each of them once however often it is met (a file of thousands of small
ones would take several times as long); the rest becomes JSON in the file's metadata. Nothing is unpickled. A file's
name holds the checksum of its content.
"""

from __future__ import annotations

import base64
import contextlib
import json
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcc.core.digests import DamagedFile
from fedcc.core.method import AnyMethod
from fedcc.core.model import Arch, Model
from fedcc.core.options import check_value
from fedcc.core.tree import Classes, Pack, Unpack, message_classes
from fedcc.engine import choose_device
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.options import DEFAULTS, current_values
from fedcc.experiments.record import Record
from fedcc.experiments.result import Result, described, rebuilt
from fedcc.experiments.round_files import RoundFiles
from fedcc.experiments.rounds import FinishedRound, Observer, Pause
from fedcc.experiments.store import RunFolder, RunFolderError, lines
from fedcc.federate import Snapshot
from fedcc.federation import Federation, Models
from fedcc.methods import completed, outdated

FORMAT = 1
KEPT = 2
SHARE = 0.05  # of a run's time, where it is not said how often


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Where an unfinished run resumes, and what it has recorded so far."""

    snapshot: Snapshot
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0  # that the run has taken
    size: int = 0  # bytes of the file


class Checkpoints(Observer):
    """The checkpoints of one run, in its folder: read to resume it, written as an observer.

    One is written after every so many rounds, or where ``every`` is None, whenever it is cheap enough.
    """

    def __init__(
        self,
        folder: Path,
        experiment: Experiment,
        federation: Federation,
        *,
        every: int | None = None,
        keep: bool = False,
    ):
        self.folder, self.method = folder, experiment.build_method()
        self.device = choose_device(experiment.machine.device)
        self.every, self.keep, self.files = every, keep, RoundFiles(folder, "checkpoint")
        partition = federation.partition
        self.identity = json.loads(
            json.dumps(
                {
                    "experiment": experiment.values(),
                    "data_sha256": federation.fingerprint,
                    "partition_sha256": partition.sha256 if partition else None,
                }
            )
        )
        self.size = 0  # bytes of the latest
        self.cost = self.ended = 0.0  # seconds that the latest took, and when it was written
        self.begin(None)

    def begin(self, start: Checkpoint | None) -> None:
        """Begin to observe a run, at a checkpoint if it is resumed; later ones are removed."""
        self.recorded = list(start.records) if start else []
        self.begun = time.perf_counter() - (start.seconds if start else 0.0)
        if start:
            self.remove(after=start.snapshot.t)
            self.size = start.size

    @property
    def seconds(self) -> float:
        """That the run has taken so far."""
        return time.perf_counter() - self.begun

    def round(self, done: FinishedRound) -> None:
        self.recorded.append(done.record)
        due = self.affordable() if self.every is None else self.every > 0 and done.t % self.every == 0
        if due or (isinstance(done.request, Pause) and not done.is_last):
            self.write(done.snapshot(), self.recorded, self.seconds)

    def end(self, result: Result | None) -> None:
        """A finished run needs its checkpoints no longer."""
        if result is not None and not self.keep:
            self.remove()

    def affordable(self) -> bool:
        """Whether another one as costly as the latest takes at most its share of the time since then."""
        return self.cost <= SHARE * (time.perf_counter() - self.ended)

    def write(self, snapshot: Snapshot, records: Sequence[Record], seconds: float) -> None:
        """Write one, whole even if a signal asks the program to end, and remove those before the last two."""
        begun = time.perf_counter()
        about = {"format": FORMAT, "seconds": seconds, "records": compressed(records), **self.identity}
        content = packed(snapshot, self.method, about)
        self.files.write(snapshot.t, content, obsolete=lambda rounds: rounds[:-KEPT])
        self.size, self.ended = len(content), time.perf_counter()
        self.cost = self.ended - begun

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The latest that can be used, and what is wrong with newer ones and with ``metrics.jsonl``."""
        problems: list[str] = []
        for path in reversed(self.paths()):
            try:
                found = self.read(path, problems)
            except DamagedFile as error:
                problems.append(f"{path} is not used: {error}")
                continue
            self.size = found.size
            return found, problems
        return None, problems

    def read(self, path: Path, problems: list[str]) -> Checkpoint:
        content = self.files.read(path)
        with understood(path):
            about, tree = header(content)
            if about.get("format") != FORMAT:
                raise RunFolderError(f"{path} has format {about.get('format')}, this fedcc reads format {FORMAT}")
            options = about["experiment"] = {**DEFAULTS, **current_values(about["experiment"])}
            if not outdated(options["method"], options["settings"]):
                options["settings"] = json.loads(json.dumps(completed(options["method"], options["settings"])))
            for part, mine in self.identity.items():
                if (found := about[part]) != mine:
                    difference = _difference(part, found, mine)
                    raise RunFolderError(f"{path} is a checkpoint of another experiment ({difference})")
            check_value("seconds", about["seconds"], float, 0)
            snapshot: Snapshot = unpacked(content, tree, self.method, device=self.device)
            check_value("t", snapshot.t, int, 1)
            records = self.records(path, about, snapshot.t, problems)
        return Checkpoint(snapshot, records, about["seconds"], len(content))

    def records(self, path: Path, about: Mapping[str, Any], rounds: int, problems: list[str]) -> list[Record]:
        """The rounds up to a checkpoint, from itself; those of older versions left them to ``metrics.jsonl``."""
        metrics = self.folder / "metrics.jsonl"
        if "records" in about:
            records = expanded(about["records"])
            if [r["round"] for r in records] != list(range(1, rounds + 1)):
                raise ValueError(f"it lacks some of its {rounds} rounds")
            expected = lines(records)
            if not metrics.exists() or metrics.read_bytes()[: len(expected)] != expected:
                problems.append(f"{metrics} is not what the run wrote, and is written anew from {path.name}")
            return records
        records = RunFolder(self.folder).metrics(about["offset"])
        if [r.get("round") for r in records] != list(range(1, rounds + 1)):
            raise DamagedFile(f"metrics.jsonl lacks some of its {rounds} rounds")
        problems.append(f"{path} was written by an older version, without its records: those of {metrics} are believed")
        return records

    def paths(self) -> list[Path]:
        """Those there are, the oldest first."""
        return list(self.files.paths().values())

    def remove(self, after: int = 0) -> None:
        """Remove those of the rounds behind ``after``."""
        self.files.remove(t for t in self.files.paths() if t > after)


@contextlib.contextmanager
def understood(path: Path) -> Iterator[None]:
    """Refuse a file by its name if its checksum is right and its content is not what this version can read."""
    from safetensors import SafetensorError

    try:
        yield
    except (DamagedFile, RunFolderError):
        raise
    except (
        ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, SafetensorError, zlib.error
    ) as error:  # fmt: skip
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise RunFolderError(f"{path} is not a file that this fedcc can read ({reason})") from None


def _difference(part: str, found: Any, mine: Any) -> str:
    if not isinstance(mine, dict):
        return f"{part} is {found}, here {mine}"
    name = next(n for n in mine if found.get(n) != mine[n])
    return _difference(name, found.get(name), mine[name])


def compressed(records: Sequence[Record]) -> str:
    return base64.b64encode(zlib.compress(lines(records))).decode()


def expanded(text: str) -> list[Record]:
    return [json.loads(line) for line in zlib.decompress(base64.b64decode(text)).splitlines()]


# ------------------------------------------------------------------------------------------------ snapshots as bytes


def packed(snapshot: Any, method: AnyMethod, about: Mapping[str, Any]) -> bytes:
    """A snapshot, or another dataclass of what lasts between rounds, as a safetensors file with ``about`` beside it."""
    from safetensors.torch import save

    pack = _Pack(message_classes(method))
    tree = {f.name: pack(getattr(snapshot, f.name)) for f in fields(snapshot)}
    archs = described({str(n): arch for n, arch in enumerate(pack.archs)})
    metadata = {"about": json.dumps(dict(about)), "tree": json.dumps({"snapshot": tree, "archs": archs})}
    return save(pack.joined(), metadata)


def unpacked(
    content: bytes,
    tree: Mapping[str, Any],
    method: AnyMethod,
    models: Models | None = None,
    device: torch.device | str = "cpu",
    kind: type[Any] = Snapshot,
) -> Any:
    """The snapshot (or what else was packed) of a file; ``models`` are the caller's own networks, if there are any."""
    from safetensors.torch import load

    tensors = {n: value if n.endswith(".cpu") else value.to(device) for n, value in load(content).items()}
    archs = {int(n): arch for n, arch in rebuilt(tree["archs"], models).items()}
    unpack = _Unpack(message_classes(method), tensors, archs)
    return kind(**{name: unpack(value) for name, value in tree["snapshot"].items()})


def header(content: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    return json.loads(metadata["about"]), json.loads(metadata["tree"])


class _Pack(Pack):
    """Models too; tensors laid end to end, by type and device."""

    def __init__(self, classes: Classes):
        super().__init__(classes)
        self.archs: dict[Arch, int] = {}
        self.parts: dict[str, list[Tensor]] = {}  # by type and device
        self.lengths: dict[str, int] = {}
        self.places: dict[int, tuple[str, int]] = {}  # of each tensor, by identity, in its part

    def tensor(self, value: Tensor) -> tuple[Any, ...]:
        if id(value) not in self.places:
            name = f"{value.dtype}.{value.device.type}".removeprefix("torch.")
            begin = self.lengths.get(name, 0)
            self.places[id(value)], self.lengths[name] = (name, begin), begin + value.numel()
            self.parts.setdefault(name, []).append(value)
        return *self.places[id(value)], list(value.shape)

    def other(self, value: Any) -> list[Any]:
        if isinstance(value, Model):
            return ["model", self.archs.setdefault(value.arch, len(self.archs)), self(value.state)]
        return super().other(value)

    def joined(self) -> dict[str, Tensor]:
        return {n: torch.cat([part.detach().reshape(-1) for part in parts]).cpu() for n, parts in self.parts.items()}


class _Unpack(Unpack):
    """And back."""

    def __init__(self, classes: Classes, tensors: Mapping[str, Tensor], archs: Mapping[int, Arch]):
        super().__init__(classes)
        self.tensors = tensors
        self.cut: dict[tuple[str, int, tuple[int, ...]], Tensor] = {}
        self.builders["model"] = lambda arch, state: Model(archs[arch], self(state))

    def tensor(self, *about: Any) -> Tensor:
        name, begin, shape = about
        place = name, begin, tuple(shape)
        if place not in self.cut:
            part = self.tensors[name]
            if begin < 0 or min(shape, default=0) < 0 or begin + prod(shape) > len(part):
                raise ValueError(f"{name} has {len(part):,} values, none of shape {shape} from {begin}")
            self.cut[place] = part[begin : begin + prod(shape)].view(shape).clone()
        return self.cut[place]
