"""Read a pickled dictionary of numbers, texts, lists of these and uint8 arrays, without Python's unpickler.

Opcodes are walked one by one, and nothing that a file names is imported or called; numpy's functions and types are
recognised by name. So a hostile file can neither run code nor build an object that crashes or stalls the interpreter:
keys are texts, no list holds another, and time and memory are linear in the size of the file.
"""

import math
import pickletools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_BYTES = 1 << 29  # of a file; CIFAR-100's training set has 155 million
MAX_OPCODES = 1 << 21  # CIFAR-100's training set has 400,000
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
WHOLE = frozenset(["INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"])
AS_READ = TEXTS | BYTES | WHOLE | {"FLOAT", "BINFLOAT"}
PYTHON_2 = frozenset(("STRING", "BINSTRING", "SHORT_BINSTRING"))  # pickletools gives these as text in latin-1
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
Plain = None | bool | int | float | str | bytes | bytearray


class Refused(ValueError):
    """A file that holds something else, or is incomplete."""


@dataclass(slots=True, eq=False)
class Array:
    """An array, first without its content."""

    value: Any = ...


@dataclass(frozen=True, slots=True)
class Name:
    """One of ``NAMES``."""

    role: str


UINT8 = Name("uint8")


def unpickle(content: bytes) -> dict[str | bytes, Any]:
    """The dictionary that a pickle holds.

    >>> unpickle(b"}U\\x06labels](K\\x01K\\x02es.")
    {b'labels': [1, 2]}
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

    def read(self, content: bytes) -> dict[str | bytes, Any]:
        for number, (opcode, argument, position) in enumerate(pickletools.genops(content), start=1):
            if number > MAX_OPCODES:
                raise Refused(f"more than {MAX_OPCODES:,} opcodes")
            try:
                self.step(opcode.name, argument)
            except Refused as error:
                raise Refused(f"{error} (at byte {position})") from None
        if len(self.stack) != 1 or self.marks:
            raise Refused("an end in the middle of a value")
        if not isinstance(self.stack[0], dict):
            raise Refused(f"no dictionary but a value of the type {type(self.stack[0]).__name__}")
        return self.stack[0]

    def step(self, opcode: str, argument: Any) -> None:
        """Do what one opcode says."""
        push = self.stack.append
        if opcode in AS_READ:
            if isinstance(argument, int) and argument.bit_length() > MAX_BITS:
                raise Refused(f"a whole number of {argument.bit_length()} bits, more than {MAX_BITS}")
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
                raise Refused(f"a reference to {argument}, which does not exist")
            push(self.memo[argument])
        elif opcode == "MARK":
            self.marks.append(len(self.stack))
        elif opcode in TUPLES:
            push(tuple([self.pop() for _ in range(TUPLES[opcode])][::-1]))
        elif opcode == "TUPLE":
            push(tuple(self.since_mark()))
        elif opcode in ("EMPTY_LIST", "EMPTY_DICT", "LIST", "DICT"):
            items = self.since_mark() if opcode in ("LIST", "DICT") else []
            push([] if opcode in ("LIST", "EMPTY_LIST") else {})
            self.fill(items, type(self.top()))
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
        elif opcode not in ("PROTO", "FRAME", "STOP"):
            raise Refused(f"the opcode {opcode}, which is refused: only plain values and uint8 arrays are admitted")

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

    def fill(self, items: list[Any], kind: type[Any]) -> None:
        """Add items to the list or dict on top of the stack."""
        container = self.top()
        if not isinstance(container, kind):
            raise Refused("items for something that takes none")
        if kind is list:
            if not all(isinstance(item, Plain) for item in items):
                raise Refused("a list of something other than numbers and texts")
            container.extend(items)
            return
        keys, values = items[::2], [item.value if isinstance(item, Array) else item for item in items[1::2]]
        if len(keys) != len(values) or not all(isinstance(key, str | bytes) for key in keys):
            raise Refused("a key that is not a text, or has no value")
        if not all(isinstance(value, Plain | list | np.ndarray) for value in values):
            raise Refused("a value that is no number, text, list or whole array")
        container.update(zip(keys, values, strict=True))

    def named(self, name: str) -> Name:
        if name not in NAMES:
            printable_name = ascii(name[:80])[1:-1]
            raise Refused(f"the global {printable_name}, which is refused: only uint8 arrays are admitted")
        return Name(NAMES[name])

    def copied(self, size: int) -> None:
        """Count bytes that are copied, so that references cannot multiply them."""
        self.copies -= size
        if self.copies < 0:
            raise Refused("the same bytes many times over")

    def call(self, function: Any, arguments: Any) -> Any:
        match function, arguments:
            case Name("encode"), (str() as text, "latin1"):
                self.copied(len(text))
                try:
                    return text.encode("latin-1")
                except UnicodeEncodeError:
                    raise Refused("bytes beyond 255") from None
            case Name("dtype"), (str() | bytes() as code, *_):
                return self.dtype(code)
            case Name("reconstruct"), (Name("ndarray"), *_):
                return Array()
            case Name("frombuffer"), (bytes() | bytearray() as data, dtype, tuple() as shape, "C" | "F" as order):
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
        match target, state:
            case Name("uint8"), (int(), "|" | b"|" | "=" | b"=", None, None, None, *_):
                return
            case Array(value), (int(), tuple() as shape, dtype, int() as fortran, bytes() as data) if value is ...:
                target.value = self.array(shape, dtype, data, "F" if fortran else "C")
                return
        raise Refused("a state that does not belong to a uint8 array")

    def array(self, shape: tuple[Any, ...], dtype: Any, data: bytes | bytearray, order: Any) -> Any:
        if dtype != UINT8:
            raise Refused("an array that is not of uint8")
        if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
            raise Refused(f"an array whose shape is not up to {MAX_DIMENSIONS} whole numbers")
        if math.prod(shape) != len(data):
            raise Refused(f"an array of shape {shape} with {len(data)} bytes")
        self.copied(len(data))
        return np.frombuffer(bytearray(data), np.uint8).reshape(shape, order=order)
