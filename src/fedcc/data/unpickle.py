"""Read a pickle of plain values and uint8 arrays, without Python's unpickler.

Opcodes are walked one by one, and nothing that a file names is imported or called; numpy's functions and types are
recognised by name. So a hostile file can neither run code nor build an object that crashes or stalls the interpreter:
values form a tree of limited depth, keys are texts, and time and memory are linear in the size of the file.
"""

from __future__ import annotations

import math
import pickletools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_BYTES = 1 << 29  # of a file; CIFAR-100's training set has 155 million
MAX_OPCODES = 1 << 21  # CIFAR-100's training set has 400,000
MAX_DEPTH = 16  # of containers within containers; CIFAR has 2
MAX_DIMENSIONS = 8  # of an array
MAX_BITS = 64  # of a whole number

# numpy.core is numpy 1's name for numpy._core; _codecs.encode is how Python 3 writes bytes in an old protocol.
NAMES = {
    "numpy.core.multiarray._reconstruct": "reconstruct",
    "numpy._core.multiarray._reconstruct": "reconstruct",
    "numpy.core.numeric._frombuffer": "frombuffer",
    "numpy._core.numeric._frombuffer": "frombuffer",
    "numpy.ndarray": "ndarray",
    "numpy.dtype": "dtype",
    "_codecs.encode": "encode",
}

TEXTS = frozenset(["UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"])
BYTES = frozenset(["BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"])
AS_READ = TEXTS | BYTES | {"FLOAT", "BINFLOAT"}
PYTHON_2 = frozenset(("STRING", "BINSTRING", "SHORT_BINSTRING"))  # pickletools gives these as text in latin-1
WHOLE = frozenset(["INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"])
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Refused(ValueError):
    """A file that holds something else, or is incomplete."""


@dataclass(slots=True, eq=False)
class Container:
    """A list, dict or tuple, its depth, and whether it is part of another: then it is complete."""

    value: Any
    depth: int = 1
    placed: bool = False


@dataclass(slots=True, eq=False)
class Array:
    """An array, first without its content."""

    value: Any = None


@dataclass(frozen=True, slots=True)
class Name:
    """One of ``NAMES``."""

    role: str


UINT8 = Name("uint8")


def unpickle(content: bytes) -> Any:
    """The value that a pickle holds: None, numbers, texts, bytes, lists, tuples, dicts and uint8 arrays.

    >>> unpickle(b"(lp0\\nI1\\naI2\\na.")
    [1, 2]
    """
    if len(content) > MAX_BYTES:
        raise Refused(f"{len(content):,} bytes, more than {MAX_BYTES:,}")
    return _Reader(len(content)).read(content)


class _Reader:
    def __init__(self, size: int) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.copies = 2 * size  # bytes that may still be copied: once into bytes, once into an array

    def read(self, content: bytes) -> Any:
        for number, (opcode, argument, position) in enumerate(pickletools.genops(content), start=1):
            if number > MAX_OPCODES:
                raise Refused(f"more than {MAX_OPCODES:,} opcodes")
            if opcode.name == "STOP":
                if len(self.stack) != 1 or self.marks:
                    raise Refused("an end in the middle of a value")
                return self.plain(self.pop())[0]
            try:
                self.step(opcode.name, argument)
            except Refused as error:
                raise Refused(f"{error} (at byte {position})") from None
        raise Refused("no end")  # genops raises before

    def step(self, opcode: str, argument: Any) -> None:
        """Do what one opcode says."""
        push = self.stack.append
        if opcode in WHOLE:
            if isinstance(argument, int) and argument.bit_length() > MAX_BITS:
                raise Refused(f"a whole number of {argument.bit_length()} bits, more than {MAX_BITS}")
            push(argument)
        elif opcode in AS_READ:
            push(argument)
        elif opcode in PYTHON_2:
            push(argument.encode("latin-1"))
        elif opcode in CONSTANTS:
            push(CONSTANTS[opcode])
        elif opcode in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[argument] = self.top()
        elif opcode == "MEMOIZE":
            self.memo[len(self.memo)] = self.top()
        elif opcode in ("BINGET", "LONG_BINGET", "GET"):
            if argument not in self.memo:
                raise Refused(f"a reference to {argument}, which is not there")
            push(self.memo[argument])
        elif opcode == "MARK":
            self.marks.append(len(self.stack))
        elif opcode in ("EMPTY_LIST", "EMPTY_DICT"):
            push(Container([] if opcode == "EMPTY_LIST" else {}))
        elif opcode in TUPLES:
            push(self.tuple_of([self.pop() for _ in range(TUPLES[opcode])][::-1]))
        elif opcode == "TUPLE":
            push(self.tuple_of(self.since_mark()))
        elif opcode in ("LIST", "DICT"):
            items = self.since_mark()
            push(Container([] if opcode == "LIST" else {}))
            self.fill(items)
        elif opcode in ("APPENDS", "SETITEMS"):
            self.fill(self.since_mark(), list if opcode == "APPENDS" else dict)
        elif opcode == "APPEND":
            self.fill([self.pop()], list)
        elif opcode == "SETITEM":
            value, key = self.pop(), self.pop()
            self.fill([key, value], dict)
        elif opcode == "GLOBAL":
            push(self.named(argument.replace(" ", ".", 1)))
        elif opcode == "STACK_GLOBAL":
            name, module = self.pop(), self.pop()
            push(self.named(f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "?"))
        elif opcode == "REDUCE":
            arguments, function = self.pop(), self.pop()
            push(self.call(function, arguments))
        elif opcode == "BUILD":
            state = self.pop()
            self.build(self.top(), state)
        elif opcode not in ("PROTO", "FRAME"):
            raise Refused(f"the opcode {opcode}, which is refused: only plain values and uint8 arrays are admitted")

    # --------------------------------------------------------------------------------------------------- the stack

    def top(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise Refused("an opcode without its value")
        return self.stack[-1]

    def pop(self) -> Any:
        self.top()
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        if not self.marks:
            raise Refused("an opcode without its mark")
        start = self.marks.pop()
        items, self.stack[start:] = self.stack[start:], []
        return items

    # -------------------------------------------------------------------------------------------------- containers

    def plain(self, item: Any) -> tuple[Any, int]:
        """A value that may be part of a container, and its depth."""
        if isinstance(item, Container):
            item.placed = True
            return item.value, item.depth
        if isinstance(item, Name | tuple) or (isinstance(item, Array) and item.value is None):
            raise Refused("a part of an array by itself")
        return (item.value if isinstance(item, Array) else item), 0

    def tuple_of(self, items: list[Any]) -> Any:
        """A tuple. One with a part of an array in it stays as it is: it can only be an argument."""
        if any(isinstance(item, Name) for item in items) and not any(isinstance(item, tuple) for item in items):
            return tuple(items)
        pairs = [self.plain(item) for item in items]
        return Container(tuple(value for value, _ in pairs), self.deeper(0, pairs))

    def deeper(self, depth: int, pairs: list[tuple[Any, int]]) -> int:
        """The depth of a container that gets these values."""
        found = max(depth, 1 + max((d for _, d in pairs), default=0))
        if found > MAX_DEPTH:
            raise Refused(f"containers within containers, more than {MAX_DEPTH} deep")
        return found

    def fill(self, items: list[Any], kind: type | None = None) -> None:
        """Add items to the list or dict on top of the stack."""
        container = self.top()
        if not isinstance(container, Container) or not isinstance(container.value, kind or (list, dict)):
            raise Refused("items for something that takes none")
        if container.placed or any(item is container for item in items):
            raise Refused("a container that holds itself or grows after it was stored")
        held: Any = container.value
        pairs = [self.plain(item) for item in (items if isinstance(held, list) else items[1::2])]
        values = [value for value, _ in pairs]
        if isinstance(held, list):
            held.extend(values)
        else:
            keys = items[::2]
            if len(keys) != len(values) or not all(isinstance(key, str | bytes) for key in keys):
                raise Refused("a key that is no text, or that has no value")
            held.update(zip(keys, values, strict=True))
        container.depth = self.deeper(container.depth, pairs)

    # ------------------------------------------------------------------------------------------------------ arrays

    def named(self, name: str) -> Name:
        if name not in NAMES:
            shown = ascii(name[:80])[1:-1]
            raise Refused(f"the global {shown}, which is refused: only uint8 arrays are admitted")
        return Name(NAMES[name])

    def copied(self, size: int) -> None:
        """Count bytes that are copied, so that references cannot multiply them."""
        self.copies -= size
        if self.copies < 0:
            raise Refused("the same bytes many times over")

    def call(self, function: Any, arguments: Any) -> Any:
        values = arguments.value if isinstance(arguments, Container) else arguments
        if isinstance(function, Name) and isinstance(values, tuple):
            match function.role, values:
                case "encode", (str() as text, "latin1"):
                    self.copied(len(text))
                    try:
                        return text.encode("latin-1")
                    except UnicodeEncodeError:
                        raise Refused("bytes beyond 255") from None
                case "dtype", (str() | bytes() as code, *_):
                    return self.dtype(code)
                case "reconstruct", (Name("ndarray"), *_):
                    return Array()
                case "frombuffer", (
                    bytes() | bytearray() as data,
                    dtype,
                    Container(tuple() as shape),
                    "C" | "F" as order,
                ):
                    return Array(self.array(shape, dtype, data, order))
        raise Refused("a call that makes no uint8 array")

    def dtype(self, code: str | bytes) -> Name:
        text = code.decode("latin-1") if isinstance(code, bytes) else code
        if text not in ("u1", "uint8", "|u1"):
            known = np.dtype(text).name if re.fullmatch(r"[<>|=]?[biufc](1|2|4|8|16)|O8", text) else repr(text[:40])
            raise Refused(f"an array of {known}; only uint8 is admitted")
        return UINT8

    def build(self, target: Any, state: Any) -> None:
        """Complete an array, or a dtype: its state may have no fields and no sub-array."""
        values = state.value if isinstance(state, Container) else state
        match target, values if isinstance(values, tuple) else None:
            case Name("uint8"), (int(), "|" | b"|" | "=" | b"=", None, None, None, *_):
                return
            case Array(None), (int(), Container(tuple() as shape), dtype, int() as fortran, bytes() as data):
                target.value = self.array(shape, dtype, data, "F" if fortran else "C")
                return
        raise Refused("a state that is none of a uint8 array")

    def array(self, shape: tuple[Any, ...], dtype: Any, data: bytes | bytearray, order: Any) -> Any:
        if dtype != UINT8:
            raise Refused("an array that is not of uint8")
        if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
            raise Refused(f"an array whose shape is not up to {MAX_DIMENSIONS} whole numbers")
        if math.prod(shape) != len(data):
            raise Refused(f"an array of shape {shape} with {len(data)} bytes")
        self.copied(len(data))
        return np.frombuffer(bytearray(data), np.uint8).reshape(shape, order=order)
