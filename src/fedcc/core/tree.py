"""Messages as trees: numbers, texts and None stand for themselves, all else is a list that begins with a tag.

Such a tree is JSON. What becomes of a tensor is up to the subclass. Nothing is unpickled: the classes that a tree may
name are the dataclasses that the method's own modules know.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from fedcc.core import messages
from fedcc.core.method import AnyMethod

Classes = Mapping[str, type[Any]]


def message_classes(method: AnyMethod) -> dict[str, type[Any]]:
    """The messages by name: dataclasses of ``fedcc.core.messages`` and of the modules that define the method."""
    modules: list[ModuleType] = [sys.modules[kind.__module__] for kind in reversed(type(method).__mro__)]
    known = [vars(module) for module in (messages, *modules)]
    return {n: kind for names in known for n, kind in names.items() if isinstance(kind, type) and is_dataclass(kind)}


class Pack(ABC):
    """From values to a tree."""

    def __init__(self, classes: Classes):
        self.classes = classes

    def __call__(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return ["tensor", *self.tensor(value)]
        if isinstance(value, list | tuple):
            return ["list" if isinstance(value, list) else "tuple", *map(self, value)]
        if isinstance(value, Mapping):
            return ["map", *([self(k), self(v)] for k, v in value.items())]
        return self.other(value)

    @abstractmethod
    def tensor(self, value: Tensor) -> tuple[Any, ...]:
        """What stands for a tensor in the tree."""

    def other(self, value: Any) -> list[Any]:
        name = type(value).__name__
        if self.classes.get(name) is type(value):
            return ["message", name, {f.name: self(getattr(value, f.name)) for f in fields(value)}]
        raise TypeError(
            "between rounds there are tensors, numbers, texts, lists, mappings, models, and messages whose class the "
            f"method's module knows; got {type(value).__module__}.{name}"
        )


class Unpack(ABC):
    """And back."""

    def __init__(self, classes: Classes):
        self.made: dict[str, Callable[..., Any]] = {
            "tensor": self.tensor,
            "list": lambda *values: [*map(self, values)],
            "tuple": lambda *values: (*map(self, values),),
            "map": lambda *pairs: {self(k): self(v) for k, v in pairs},
            "message": lambda name, given: classes[name](**{n: self(v) for n, v in given.items()}),
        }

    def __call__(self, value: Any) -> Any:
        return self.made[value[0]](*value[1:]) if isinstance(value, list) else value

    @abstractmethod
    def tensor(self, *about: Any) -> Tensor:
        """The tensor again, from what stood for it."""
