"""A message's fingerprint: equal for messages that are equal to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def fingerprint(message: Any) -> str:
    """The sha256 of a message's type, names, shapes and bits.

    >>> from fedcc.core.messages import Labels
    >>> one, other = (fingerprint(Labels(torch.tensor(v))) for v in ([1, 2], [2, 1]))
    >>> one == other, one == fingerprint(Labels(torch.tensor([1, 2])))
    (False, True)
    """
    digest = hashlib.sha256()
    _add(digest, message)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for name in sorted(value):
            digest.update(f"{name}:".encode())
            _add(digest, value[name])
    elif is_dataclass(value) and not isinstance(value, type):
        digest.update(type(value).__name__.encode())
        _add(digest, {f.name: getattr(value, f.name) for f in fields(value)})
    else:
        digest.update(repr(value).encode())
