"""Messages as bytes, and the checks that stand between an upload and the server.

A message becomes a small JSON header and a few flat arrays, one per number format: the tensors of a message lie end to
end in the order of its fields, so a network of a hundred tensors is two or three arrays, and there are no offsets that
could point anywhere. :mod:`fedcc.core.wire` says how one tensor is packed; the simulator rounds with the same code.

An upload is held against a rehearsal: the message that a stand-in of the client, which trains nothing, makes of the
same downlink (:mod:`fedcc.flower.rehearsal`). So types, fields, shapes and kinds of values are known without a word
about any method. Whatever is wrong, :class:`Refused` is raised, naming the value and the rule, and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcc.core.messages import LABELS, leaves
from fedcc.core.rng import Key
from fedcc.core.tree import Classes, Pack, Unpack
from fedcc.core.wire import TOLERANCE, WIRE, Part, draws_for, dtype_name, is_probabilities, packed, parts_of, restored

FORMAT = 1
DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8")
CODINGS = {"raw": 0, "half": 0, "rows": 2, "simplex": 2}  # and how many dimensions each asks for
NOTHING = "None"  # the kind of no message
SPARE = 4096  # characters that a header may be longer than the rehearsed one: its numbers have more digits
LARGEST = 2**53  # of a whole number: those up to here are exact in floating point as well


class Refused(ValueError):
    """A message that is not what it should be; the text says which value breaks which rule."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """A message ready to be sent: its type's name, what JSON holds of it, and flat arrays by number format."""

    kind: str
    header: dict[str, Any]
    arrays: dict[str, Part]

    @property
    def nbytes(self) -> int:
        """The bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def text(self) -> str:
        """The header as it is sent."""
        return json.dumps(self.header, separators=(",", ":"))

    @property
    def buffers(self) -> dict[str, bytes]:
        """The arrays as they are sent: little-endian numbers and nothing else."""
        return {name: array.astype(array.dtype.newbyteorder("<")).tobytes() for name, array in self.arrays.items()}

    @staticmethod
    def received(kind: str, text: str, buffers: Mapping[str, bytes]) -> Encoded:
        """What came, unchecked but for its form; the arrays are views of the buffers."""
        if not isinstance(kind, str) or not isinstance(text, str):
            raise Refused(f"kind and header must be texts, got {type(kind).__name__} and {type(text).__name__}")
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Refused(f"the header is not JSON: {str(error)[:80]}") from None
        if not isinstance(header, dict):
            raise Refused(f"the header must be a JSON object, got {_short(header)}")
        arrays: dict[str, Part] = {}
        for name, buffer in buffers.items():
            if name not in DTYPES:
                raise Refused(f"array {_short(name)}: there are {', '.join(DTYPES)}")
            dtype = np.dtype(name).newbyteorder("<")
            if not isinstance(buffer, bytes) or len(buffer) % dtype.itemsize:
                size = f"{len(buffer)} of them" if isinstance(buffer, bytes) else type(buffer).__name__
                raise Refused(f"array {name} must be bytes, a multiple of {dtype.itemsize}, got {size}")
            arrays[name] = np.frombuffer(buffer, dtype)
        return Encoded(kind, header, arrays)


def encode(message: Any, wire: str, *, run: str = "", round: int = 0, key: Key | None = None) -> Encoded:
    """A message (or None) for the wire; ``key`` names the draws of ``int8-stochastic``."""
    if wire not in WIRE:
        raise ValueError(f"wire must be one of {', '.join(WIRE)}, got {wire!r}")
    pack = _Pack(wire, draws_for(wire, key))
    tree = pack(message)
    arrays = {name: np.concatenate(parts) for name, parts in pack.parts.items()}
    header = {"format": FORMAT, "run": run, "round": round, "wire": wire, "message": tree}
    return Encoded(NOTHING if message is None else type(message).__name__, header, arrays)


def decode(
    encoded: Encoded, messages: Classes, wire: str, *, run: str = "", round: int = 0, device: str = "cpu"
) -> Any:
    """The message again; ``messages`` are the classes it may be of (``core.tree.message_classes``).

    This is for a party that cannot know what is coming (a client); a server uses :func:`accept`.
    """
    return _guarded(_decode, encoded, messages, wire, run, round, device)


@dataclass(frozen=True, eq=False)
class Expected:
    """What an upload has to be: like this rehearsed message of the same client, for this run and round."""

    message: Any
    messages: Classes
    classes: int  # of the labels
    wire: str
    run: str
    round: int

    @property
    def form(self) -> Encoded:
        """The rehearsed message on the wire."""
        key = Key(0) if self.wire.endswith("-stochastic") else None
        return encode(self.message, self.wire, run=self.run, round=self.round, key=key)


def accept(kind: str, text: str, buffers: Mapping[str, bytes], expected: Expected, device: str = "cpu") -> Any:
    """The uploaded message, checked; or :class:`Refused`. Sizes are looked at first, before anything is read."""
    return _guarded(_accept, kind, text, buffers, expected, device)


def _guarded(function: Callable[..., Any], *given: Any) -> Any:
    """Garbage takes ways that nobody thought of: whatever goes wrong is the message's fault, not the server's."""
    try:
        return function(*given)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"malformed: {type(error).__name__}: {str(error)[:120]}") from error


def _accept(kind: str, text: str, buffers: Mapping[str, bytes], expected: Expected, device: str) -> Any:
    form = expected.form
    limit, longest = 2 * form.nbytes + SPARE, len(form.text) + SPARE  # up to here a better reason can be given
    size = sum(len(buffer) for buffer in buffers.values())
    if size > limit:
        raise Refused(f"too large: the arrays have {size:,} bytes, those of {form.kind} have {form.nbytes:,}")
    if len(text) > longest:
        raise Refused(f"too large: the header has {len(text):,} characters, at most {longest:,} are allowed")
    encoded = Encoded.received(kind, text, buffers)
    if kind != form.kind:
        raise Refused(f"wrong type: expected {form.kind}, got {_short(kind)}")
    _check_head(encoded, expected.wire, expected.run, expected.round)
    _check_tree(form.kind, form.header["message"], encoded.header["message"])
    message = _decode(encoded, expected.messages, expected.wire, expected.run, expected.round, device)
    for (path, form_leaf, mark), (_, leaf, _) in zip(leaves(expected.message, kind), leaves(message), strict=True):
        _check_leaf(path, form_leaf, leaf, expected, labels=mark == LABELS["holds"])
    return message


def _check_head(encoded: Encoded, wire: str, run: str, round: int) -> None:
    wanted = {"format": FORMAT, "run": run, "round": round, "wire": wire}
    if (found := set(encoded.header)) != {*wanted, "message"}:
        raise Refused(f"the header must have {', '.join([*wanted, 'message'])}, got {_short(sorted(found))}")
    for name, value in wanted.items():
        given = encoded.header[name]
        if type(given) is not type(value) or given != value:
            raise Refused(f"wrong {name}: expected {value!r}, got {_short(given)}")


def _check_tree(path: str, form: Any, got: Any) -> None:
    """That a header describes the same fields, types and shapes as the rehearsed one; numbers may differ."""
    if type(form) is not type(got):
        raise Refused(f"{path}: expected {_described(form)}, got {_described(got)}")
    if not isinstance(form, list):
        return
    if not got or got[0] != form[0]:
        raise Refused(f"{path}: expected {_described(form)}, got {_described(got)}")
    if form[0] == "tensor":
        for name, wanted, given in zip(("coding", "dtype", "shape"), form[1:], [*got[1:], None, None], strict=False):
            if given != wanted or [*map(type, _listed(given))] != [*map(type, _listed(wanted))]:
                raise Refused(f"{path}: wrong {name}: expected {wanted}, got {_short(given)}")
        if len(got) != len(form):
            raise Refused(f"{path}: a tensor has {len(form) - 1} entries, got {len(got) - 1}")
        return
    if form[0] == "message" and (len(got) != 3 or got[1] != form[1] or not isinstance(got[2], dict)):
        raise Refused(f"{path}: expected {_described(form)}, got {_described(got)}")
    wanted, given = _entries(path, form), _entries(path, got)
    if missing := [n for n in wanted if n not in given]:
        raise Refused(f"{path}: {_short(missing[0])} is missing")
    if extra := [n for n in given if n not in wanted]:
        raise Refused(f"{path}: {_short(extra[0])} is not a part of it")
    if [*wanted] != [*given]:
        raise Refused(f"{path}: its parts are not in their order, {_short([*wanted])}")
    for name in wanted:
        _check_tree(f"{path}.{name}", wanted[name], given[name])


def _entries(path: str, tree: list[Any]) -> dict[Any, Any]:
    """The parts of a message, a mapping or a list, by name."""
    if tree[0] == "message":
        parts: dict[Any, Any] = tree[2]
        return parts
    if tree[0] == "map":
        pairs = tree[1:]
        if not all(isinstance(p, list) and len(p) == 2 and isinstance(p[0], str) for p in pairs):
            raise Refused(f"{path}: a mapping is pairs of a text and a value")
        if len(names := dict(pairs)) != len(pairs):
            raise Refused(f"{path}: a name appears twice")
        return names
    return dict(enumerate(tree[1:]))


def _check_leaf(path: str, form: Any, got: Any, expected: Expected, labels: bool) -> None:
    if isinstance(form, Tensor):
        _check_tensor(path, form, got, expected, labels)
    elif isinstance(form, list | tuple):
        raise Refused(f"{path}: a message holds arrays, numbers and mappings of arrays, got {_short(got)}")
    elif isinstance(form, int | float) and not isinstance(form, bool):
        if not math.isfinite(got):
            raise Refused(f"{path} must be finite, got {got}")
        low, rule = (0, "above 0") if form > 0 else (min(form, 0), f"at least {min(form, 0)}")
        if got < low or (got == low and form > 0) or abs(got) > LARGEST:
            raise Refused(f"{path} must be {rule} and at most {LARGEST:,}, got {got}")


def _check_tensor(path: str, form: Tensor, got: Tensor, expected: Expected, labels: bool) -> None:
    if got.is_floating_point() and not bool(got.isfinite().all()):
        first = got[~got.isfinite()][0].item()
        raise Refused(f"{path} must be finite, {int((~got.isfinite()).sum()):,} of its values are not, as {first}")
    if labels:
        if bool((outside := (got < 0) | (got >= expected.classes)).any()):
            raise Refused(f"{path}: labels are from 0 to {expected.classes - 1}, got {got[outside][0].item()}")
    elif is_probabilities(form):
        if bool((got < 0).any()):
            raise Refused(f"{path}: probabilities are not negative, got {got.min().item():g}")
        tolerance, sums = TOLERANCE[expected.wire], got.double().sum(-1).reshape(-1)
        if bool((off := (sums - 1).abs() > tolerance).any()):
            row, value = int(off.nonzero()[0]), sums[off][0].item()
            raise Refused(f"{path}: probabilities sum to 1 within {tolerance:g}, row {row} sums to {value:g}")
    elif not got.is_floating_point() and not bool((form < 0).any()):
        if bool((got < 0).any()):
            raise Refused(f"{path}: counts are not negative, got {got.min().item()}")
        if bool(form.any()) and not bool(got.any()):
            raise Refused(f"{path}: counts are not all zero")


# ------------------------------------------------------------------------------------------------ trees and arrays


class _Pack(Pack):
    """Tensors go to the end of the array of their number format."""

    def __init__(self, wire: str, draws: np.random.Generator | None):
        super().__init__({})
        self.wire, self.draws = wire, draws
        self.parts: dict[str, list[Part]] = {}

    def tensor(self, value: Tensor) -> tuple[Any, ...]:
        dtype, shape = dtype_name(value.dtype), list(value.shape)
        if dtype not in DTYPES:
            raise TypeError(f"a message's tensors are {', '.join(DTYPES)}, got {dtype}")
        coding, parts = packed(value, self.wire, self.draws)
        for part in parts:
            self.parts.setdefault(part.dtype.name, []).append(part)
        return coding, dtype, shape

    def other(self, value: Any) -> list[Any]:
        if is_dataclass(value):
            return ["message", type(value).__name__, {f.name: self(getattr(value, f.name)) for f in fields(value)}]
        raise TypeError(f"a message holds arrays, numbers and mappings of arrays, got {type(value).__name__}")


class _Unpack(Unpack):
    """And back, taking from the front what the header says; it trusts nothing that the header says."""

    def __init__(self, messages: Classes, arrays: Mapping[str, Part], device: str):
        super().__init__(messages)
        self.arrays, self.device = arrays, device
        self.taken = dict.fromkeys(arrays, 0)

    def tensor(self, *about: Any) -> Tensor:
        coding, dtype, shape = about
        if coding not in CODINGS or dtype not in DTYPES:
            raise Refused(f"a tensor has a coding ({', '.join(CODINGS)}) and a dtype, got {_short(about)}")
        whole = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        if not whole or len(shape) > 8 or len(shape) < CODINGS[coding] or (coding == "simplex" and len(shape) != 2):
            raise Refused(f"{_short(shape)} is not the shape of a tensor in {coding} coding")
        if coding != "raw" and not dtype.startswith("float"):
            raise Refused(f"{coding} coding is for floats, got {dtype}")
        parts = tuple(self.take(name, length) for name, length in parts_of(coding, tuple(shape), dtype))
        if coding == "simplex" and prod(shape) and not parts[0].reshape(shape).any(1).all():
            raise Refused("probabilities of a row are all zero")
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found afterwards
            value = restored(coding, parts, tuple(shape), dtype)
        return value.to(torch.device(self.device))

    def take(self, name: str, length: int) -> Part:
        begin, array = self.taken.get(name, 0), self.arrays.get(name)
        there = 0 if array is None else len(array) - begin
        if array is None or there < length:
            raise Refused(f"array {name} has {there:,} numbers left, the header asks for {length:,}")
        self.taken[name] = begin + length
        return array[begin : begin + length]


def _decode(encoded: Encoded, messages: Classes, wire: str, run: str, round: int, device: str) -> Any:
    _check_head(encoded, wire, run, round)
    unpack = _Unpack(messages, encoded.arrays, device)
    message = unpack(encoded.header["message"])
    kind = NOTHING if message is None else type(message).__name__
    if kind != encoded.kind:
        raise Refused(f"wrong type: it is called {_short(encoded.kind)} and holds {kind}")
    for name, taken in unpack.taken.items():
        if taken != (there := len(encoded.arrays[name])):
            raise Refused(f"array {name} has {there:,} numbers, the header describes {taken:,}")
    return message


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _described(tree: Any) -> str:
    if isinstance(tree, list) and tree:
        return f"a {tree[1]}" if tree[0] == "message" and len(tree) > 1 else f"a {_short(tree[0])}"
    return "nothing" if tree is None else f"a {type(tree).__name__} ({_short(tree)})"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
