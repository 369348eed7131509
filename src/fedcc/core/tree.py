"""Messages as JSON: numbers, strings and None stay as they are; everything else is a list that begins with a tag.

Subclasses decide what represents a tensor. Nothing is unpickled: JSON can name only dataclasses that the method's own
modules know.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from fedcc.core import messages
from fedcc.core.method import AnyMethod

MessageClasses = Mapping[str, type[Any]]


def message_classes(method: AnyMethod) -> dict[str, type[Any]]:
    """The messages by name: dataclasses of ``fedcc.core.messages`` and of the modules that define the method."""
    modules = [messages, *(sys.modules[kind.__module__] for kind in reversed(type(method).__mro__))]
    members = [member for module in modules for member in vars(module).items()]
    return {name: kind for name, kind in members if isinstance(kind, type) and is_dataclass(kind)}


class Pack(ABC):
    """From values to JSON."""

    def __init__(self, classes: MessageClasses):
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
        """What represents a tensor."""

    def other(self, value: Any) -> list[Any]:
        name = type(value).__name__
        if self.classes.get(name) is type(value):
            return ["message", name, {f.name: self(getattr(value, f.name)) for f in fields(value)}]
        raise TypeError(
            "values kept between rounds are tensors, numbers, strings, lists, mappings, models, and messages whose "
            f"class the method's module knows; got {type(value).__module__}.{name}"
        )


class Unpack(ABC):
    """From JSON to values."""

    def __init__(self, classes: MessageClasses):
        self.builders: dict[str, Callable[..., Any]] = {
            "tensor": self.tensor,
            "list": lambda *values: [*map(self, values)],
            "tuple": lambda *values: (*map(self, values),),
            "map": lambda *pairs: {self(k): self(v) for k, v in pairs},
            "message": lambda name, fields: classes[name](**{n: self(v) for n, v in fields.items()}),
        }

    def __call__(self, value: Any) -> Any:
        return self.builders[value[0]](*value[1:]) if isinstance(value, list) else value

    @abstractmethod
    def tensor(self, *about: Any) -> Tensor:
        """The tensor, from what represents it."""
