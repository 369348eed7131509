"""Values that last between rounds as the bytes of one safetensors file.

They are dataclasses of models, messages, tensors and JSON values. The tensors of one type and device are joined into
one tensor of the file, each once however often it occurs (a file of thousands of small tensors would take several times
as long); the rest becomes JSON in the metadata. Nothing is unpickled.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedcc.core.digests import DamagedFile
from fedcc.core.method import AnyMethod
from fedcc.core.model import Arch, Model
from fedcc.core.tree import MessageClasses, Pack, Unpack, message_classes
from fedcc.experiments.saved import describe_archs, rebuild_archs
from fedcc.experiments.store import RunFolderError
from fedcc.federation import Models

T = TypeVar("T")


def to_bytes(value: Any, method: AnyMethod, about: Mapping[str, Any]) -> bytes:
    """A dataclass as the content of a file, with ``about``, which :func:`read_header` gives back."""
    pack = _Pack(message_classes(method))
    tree = {f.name: pack(getattr(value, f.name)) for f in fields(value)}
    archs = describe_archs({str(n): arch for n, arch in enumerate(pack.archs)})
    metadata = {"about": json.dumps(dict(about)), "tree": json.dumps({"snapshot": tree, "archs": archs})}
    return save(pack.joined(), metadata)


def from_bytes(
    kind: type[T],
    content: bytes,
    tree: Mapping[str, Any],
    method: AnyMethod,
    *,
    models: Models | None = None,
    device: torch.device | str = "cpu",
) -> T:
    """The dataclass of this kind in a file's content; ``models`` are the caller's own networks, if there are any."""
    tensors = {n: value if n.endswith(".cpu") else value.to(device) for n, value in load(content).items()}
    archs = {int(n): arch for n, arch in rebuild_archs(tree["archs"], models).items()}
    unpack = _Unpack(message_classes(method), tensors, archs)
    return kind(**{name: unpack(value) for name, value in tree["snapshot"].items()})


def read_header(content: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """What :func:`to_bytes` was given as ``about``, and the tree that :func:`from_bytes` needs."""
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    return json.loads(metadata["about"]), json.loads(metadata["tree"])


@contextmanager
def unreadable_refused(path: Path) -> Iterator[None]:
    """Refuse a file by its name if its checksum is right but this version cannot read its content."""
    try:
        yield
    except (DamagedFile, RunFolderError):
        raise
    except (
        ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, SafetensorError, zlib.error
    ) as error:  # fmt: skip
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise RunFolderError(f"{path} is not a file that this fedcc can read ({reason})") from None


class _Pack(Pack):
    """Models too; tensors laid end to end, by type and device."""

    def __init__(self, classes: MessageClasses):
        super().__init__(classes)
        self.archs: dict[Arch, int] = {}
        self.parts: dict[str, list[Tensor]] = {}  # by type and device
        self.lengths: dict[str, int] = {}
        self.positions: dict[int, tuple[str, int]] = {}  # part and begin of each tensor, by its id

    def tensor(self, value: Tensor) -> tuple[Any, ...]:
        if id(value) not in self.positions:
            name = f"{value.dtype}.{value.device.type}".removeprefix("torch.")
            begin = self.lengths.get(name, 0)
            self.positions[id(value)], self.lengths[name] = (name, begin), begin + value.numel()
            self.parts.setdefault(name, []).append(value)
        return *self.positions[id(value)], list(value.shape)

    def other(self, value: Any) -> list[Any]:
        if isinstance(value, Model):
            return ["model", self.archs.setdefault(value.arch, len(self.archs)), self(value.state)]
        return super().other(value)

    def joined(self) -> dict[str, Tensor]:
        return {n: torch.cat([part.detach().reshape(-1) for part in parts]).cpu() for n, parts in self.parts.items()}


class _Unpack(Unpack):
    """And back; a tensor that occurs several times is one tensor again."""

    def __init__(self, classes: MessageClasses, tensors: Mapping[str, Tensor], archs: Mapping[int, Arch]):
        super().__init__(classes)
        self.tensors = tensors
        self.slices: dict[tuple[str, int, tuple[int, ...]], Tensor] = {}
        self.builders["model"] = lambda arch, state: Model(archs[arch], self(state))

    def tensor(self, *about: Any) -> Tensor:
        name, begin, shape = about
        key = name, begin, tuple(shape)
        if key not in self.slices:
            part = self.tensors[name]
            if begin < 0 or min(shape, default=0) < 0 or begin + prod(shape) > len(part):
                raise ValueError(f"{name} has {len(part):,} values, none of shape {shape} from {begin}")
            self.slices[key] = part[begin : begin + prod(shape)].view(shape).clone()
        return self.slices[key]
