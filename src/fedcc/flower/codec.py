"""Messages as bytes, and the checks of an upload at the server (docs/protocol.md, "Codecs").

The tensors of a message lie end to end in the order of its fields, so there are no offsets that could point anywhere.
An upload is compared with what a dry run of its client makes of the same downlink (:mod:`fedcc.flower.dry_run`).
Whatever is wrong, :class:`InvalidMessage` is raised, naming the value and the rule, and no other error.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcc.core.messages import LABELS, ROWS, Rows, leaves
from fedcc.core.naming import shortened
from fedcc.core.rng import Key
from fedcc.core.tree import MessageClasses, Pack, Unpack
from fedcc.core.wire import TOLERANCE, WIRE, Part, draws_for, dtype_name, is_probabilities, packed, parts_of, restored
from fedcc.engine.finite import limit

FORMAT = 1
DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8")
CODINGS = {"raw": (0, 8), "half": (0, 8), "rows": (2, 8), "simplex": (2, 2)}  # and how many dimensions each may have
NOTHING = "None"  # the kind of an empty message
SPARE = 4096  # characters that a header may be longer than the expected one: its numbers have more digits
LARGEST = 2**53  # the largest number: whole ones up to here are exact in floating point too


class InvalidMessage(ValueError):
    """A message is refused; the text says which value breaks which rule."""


@contextmanager
def malformed_refused() -> Iterator[None]:
    """Whatever else goes wrong is the message's fault too."""
    try:
        yield
    except InvalidMessage:
        raise
    except Exception as error:
        raise InvalidMessage(f"malformed: {type(error).__name__}: {str(error)[:120]}") from error


@dataclass(frozen=True, eq=False)
class EncodedMessage:
    """A message ready to send: the name of its type, a JSON header, and flat arrays by number format."""

    kind: str
    header: dict[str, Any]
    arrays: dict[str, Part]

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def text(self) -> str:
        """The header as sent."""
        return json.dumps(self.header, separators=(",", ":"))

    @property
    def buffers(self) -> dict[str, bytes]:
        """The arrays as sent: little-endian numbers and nothing else."""
        return {name: array.astype(array.dtype.newbyteorder("<")).tobytes() for name, array in self.arrays.items()}

    @staticmethod
    @malformed_refused()
    def parse(kind: str, text: str, buffers: Mapping[str, bytes]) -> EncodedMessage:
        """A received message; only its form is checked, and its arrays are views of the buffers."""
        header = json.loads(text)
        if not isinstance(header, dict):
            raise InvalidMessage(f"the header must be a JSON object, got {shortened(header)}")
        arrays: dict[str, Part] = {}
        for name, buffer in buffers.items():
            if name not in DTYPES:
                raise InvalidMessage(f"unknown array {shortened(name)}; known: {', '.join(DTYPES)}")
            dtype = np.dtype(name).newbyteorder("<")
            if len(buffer) % dtype.itemsize:
                raise InvalidMessage(f"array {name} must have a multiple of {dtype.itemsize} bytes, got {len(buffer)}")
            arrays[name] = np.frombuffer(buffer, dtype)
        return EncodedMessage(kind, header, arrays)


def encode(message: Any, wire: str, *, run: str = "", round: int = 0, key: Key | None = None) -> EncodedMessage:
    """Encode a message or None; ``key`` names the draws of ``int8-stochastic``."""
    if wire not in WIRE:
        raise ValueError(f"wire must be one of {', '.join(WIRE)}, got {wire!r}")
    pack = _Pack(wire, draws_for(wire, key))
    tree = pack(message)
    arrays = {name: np.concatenate(parts) for name, parts in pack.parts.items()}
    header = {"format": FORMAT, "run": run, "round": round, "wire": wire, "message": tree}
    return EncodedMessage(NOTHING if message is None else type(message).__name__, header, arrays)


@malformed_refused()
def decode(
    encoded: EncodedMessage,
    message_classes: MessageClasses,
    wire: str,
    *,
    run: str = "",
    round: int = 0,
    device: str = "cpu",
) -> Any:
    """Decode a message of one of the classes that ``core.tree.message_classes`` lists.

    For a client, which cannot know what to expect; a server uses :func:`accept`.
    """
    _check_head(encoded, wire, run, round)
    unpack = _Unpack(message_classes, encoded.arrays, device)
    message = unpack(encoded.header["message"])
    kind = NOTHING if message is None else type(message).__name__
    if kind != encoded.kind:
        raise InvalidMessage(f"wrong type: it is called {shortened(encoded.kind)} and holds {kind}")
    for name, taken in unpack.taken.items():
        if taken != (size := len(encoded.arrays[name])):
            raise InvalidMessage(f"array {name} has {size:,} numbers, the header describes {taken:,}")
    return message


@dataclass(frozen=True, eq=False)
class ExpectedMessage:
    """What an upload must be: like this message of the client's dry run, for this run and round."""

    message: Any
    message_classes: MessageClasses
    classes: int  # number of labels
    wire: str
    run: str
    round: int

    @property
    def form(self) -> EncodedMessage:
        """The message, encoded."""
        return encode(self.message, self.wire, run=self.run, round=self.round, key=Key(0))


def upload_limits(form: EncodedMessage) -> tuple[int, int]:
    """How many bytes the arrays of an upload of this form may have, and how many characters its header."""
    return 2 * form.nbytes + SPARE, len(form.text) + SPARE  # below this, later checks give a better reason


@malformed_refused()
def accept(kind: str, text: str, buffers: Mapping[str, bytes], expected: ExpectedMessage, device: str = "cpu") -> Any:
    """Decode and check an upload. Its size is checked first, before anything is read."""
    wire, run, t = expected.wire, expected.run, expected.round
    form = expected.form
    limit, longest = upload_limits(form)
    size = sum(map(len, buffers.values()))
    if size > limit:
        raise InvalidMessage(f"too large: the arrays have {size:,} bytes, those of {form.kind} have {form.nbytes:,}")
    if len(text) > longest:
        raise InvalidMessage(f"too large: the header has {len(text):,} characters, at most {longest:,} are allowed")
    encoded = EncodedMessage.parse(kind, text, buffers)
    if kind != form.kind:
        raise InvalidMessage(f"wrong type: expected {form.kind}, got {shortened(kind)}")
    _check_head(encoded, wire, run, t)
    _check_tree(form.kind, form.header["message"], encoded.header["message"])
    message = decode(encoded, expected.message_classes, wire, run=run, round=t, device=device)
    for (path, form_leaf, mark), (_, leaf, _) in zip(leaves(expected.message, kind), leaves(message), strict=True):
        if isinstance(leaf, Tensor):
            _check_tensor(path, form_leaf, leaf, expected, mark)
        elif isinstance(leaf, int | float) and not isinstance(leaf, bool):
            _check_number(path, form_leaf, leaf)
    return message


def _check_head(encoded: EncodedMessage, wire: str, run: str, round: int) -> None:
    required = {"format": FORMAT, "run": run, "round": round, "wire": wire}
    if (names := set(encoded.header)) != {*required, "message"}:
        raise InvalidMessage(
            f"the header must have {', '.join([*required, 'message'])}, got {shortened(sorted(names))}"
        )
    for name, value in required.items():
        got = encoded.header[name]
        if type(got) is not type(value) or got != value:
            raise InvalidMessage(f"wrong {name}: expected {value!r}, got {shortened(got)}")


def _check_tree(path: str, form: Any, got: Any, some: bool = False) -> None:
    """Check that a header describes the same fields, types and shapes as the expected one; numbers may differ.

    ``some``: the arrays may have fewer rows.
    """
    kind = 2 if isinstance(form, list) and form[0] == "message" else 1  # entries that say what it is
    if type(form) is not type(got) or (isinstance(form, list) and got[:kind] != form[:kind]):
        raise InvalidMessage(f"{path}: expected {_describe(form)}, got {_describe(got)}")
    if not isinstance(form, list):
        return
    if form[0] == "tensor":
        length = got[-1][0] if some and isinstance(got[-1], list) and got[-1] else None
        if type(length) is int and 0 <= length <= form[-1][0]:
            coding = form[1] if length else got[1]  # of nothing, it is not known to be probabilities
            form = ["tensor", coding, form[2], [length, *form[-1][1:]]]  # rows may be left out
        for name, expected, actual in zip_longest(("coding", "dtype", "shape", "end"), form[1:], got[1:]):
            if json.dumps(actual) != json.dumps(expected):  # so that 1, 1.0 and true differ
                raise InvalidMessage(f"{path}: wrong {name}: expected {expected}, got {shortened(actual)}")
        return
    parts, got_parts = _parts(path, form), _parts(path, got)
    if missing := [n for n in parts if n not in got_parts]:
        raise InvalidMessage(f"{path}: {shortened(missing[0])} is missing")
    if extra := [n for n in got_parts if n not in parts]:
        raise InvalidMessage(f"{path}: {shortened(extra[0])} is not a part of it")
    if [*parts] != [*got_parts]:
        raise InvalidMessage(f"{path}: its parts are not in the expected order, {shortened([*parts])}")
    for name in parts:
        _check_tree(f"{path}.{name}", parts[name], got_parts[name], some=kind == 2 and form[1] == Rows.__name__)


def _parts(path: str, tree: list[Any]) -> dict[str, Any]:
    """The parts of a message or mapping, by name."""
    if tree[0] == "message":
        _, _, parts = tree
        return dict(parts)
    pairs = tree[1:]
    if tree[0] != "map" or not all(isinstance(p, list) and len(p) == 2 and isinstance(p[0], str) for p in pairs):
        raise InvalidMessage(f"{path}: a message holds arrays, numbers and mappings of arrays, got {shortened(tree)}")
    if len(parts := dict(pairs)) != len(pairs):
        raise InvalidMessage(f"{path}: a name appears twice")
    return parts


def _describe(tree: Any) -> str:
    if isinstance(tree, list) and tree:
        return f"a {tree[1]}" if tree[0] == "message" and len(tree) > 1 else f"a {shortened(tree[0])}"
    return "nothing" if tree is None else f"a {type(tree).__name__} ({shortened(tree)})"


def _check_number(path: str, form: float, got: float) -> None:
    if not math.isfinite(got):
        raise InvalidMessage(f"{path} must be finite, got {got}")
    low, rule = (0, "above 0") if form > 0 else (min(form, 0), f"at least {min(form, 0)}")
    if got < low or (got == low and form > 0) or abs(got) > LARGEST:
        raise InvalidMessage(f"{path} must be {rule} and at most {LARGEST:,}, got {got}")


def _check_tensor(path: str, form: Tensor, got: Tensor, expected: ExpectedMessage, mark: str) -> None:
    if len(bad := got[~got.isfinite()]):
        raise InvalidMessage(f"{path} must be finite, {len(bad):,} of its values are not, such as {bad[0].item()}")
    if got.dtype in (torch.float32, torch.float64) and len(bad := got[got.abs() > limit(got.dtype)]):
        raise InvalidMessage(f"{path} must be at most {limit(got.dtype):.3g} in size, got {bad[0].item():.3g}")
    if mark == ROWS["holds"]:
        if bool((got.diff() <= 0).any()) or not bool(torch.isin(got, form).all()):
            raise InvalidMessage(f"{path}: rows must be ascending, and among the {len(form):,} that may be answered")
        return
    if mark == LABELS["holds"]:
        if len(bad := got[(got < 0) | (got >= expected.classes)]):
            raise InvalidMessage(f"{path}: labels must be from 0 to {expected.classes - 1}, got {bad[0].item()}")
        return
    probabilities, counts = is_probabilities(form), not form.is_floating_point() and not bool((form < 0).any())
    if (probabilities or counts) and bool((got < 0).any()):
        kind = "counts" if counts else "probabilities"
        raise InvalidMessage(f"{path}: {kind} must not be negative, got {got.min().item():g}")
    if counts and bool(form.any()) and not bool(got.any()):
        raise InvalidMessage(f"{path}: counts must not all be zero")
    if probabilities:
        tolerance, sums = TOLERANCE[expected.wire], got.double().sum(-1).reshape(-1)
        if len(bad := ((sums - 1).abs() > tolerance).nonzero()):
            row, total = int(bad[0]), sums[bad[0]].item()
            raise InvalidMessage(
                f"{path}: probabilities must sum to 1 within {tolerance:g}, but row {row} sums to {total:g}"
            )


# ------------------------------------------------------------------------------------------------- Flower's messages


class Texts(dict[str, str]):
    """The texts of a received message; one that is missing makes the message invalid."""

    def __missing__(self, name: str) -> str:
        raise InvalidMessage(f"{name!r} is missing")


def write_content(texts: Mapping[str, str], message: EncodedMessage | None = None) -> Any:
    """Texts and perhaps a message as the content of one of Flower's, a RecordDict; it splits arrays into chunks."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    config, arrays = dict(texts), {}
    if message is not None:
        config |= {"kind": message.kind, "header": message.text}
        for name, buffer in message.buffers.items():
            arrays[name] = Array(dtype=name, shape=(len(message.arrays[name]),), stype="fedcc", data=buffer)
    return RecordDict({"fedcc": ConfigRecord(config), "arrays": ArrayRecord(arrays)})  # type: ignore[arg-type]


def read_content(content: Any) -> tuple[Texts, dict[str, bytes]]:
    """The texts and the bytes of the arrays; content of another form is refused."""
    try:
        texts = Texts({str(name): value for name, value in content["fedcc"].items()})
        buffers = {str(name): array.data for name, array in content["arrays"].items()}
    except (KeyError, AttributeError, TypeError):
        raise InvalidMessage("it is not a fedcc message") from None
    if odd := [name for name, value in texts.items() if not isinstance(value, str)]:
        raise InvalidMessage(f"{odd[0]!r} must be a text")
    return texts, buffers


# ------------------------------------------------------------------------------------------------------- fingerprints


def fingerprint(message: Any) -> str:
    """The sha256 of a message's type, names, shapes and bits.

    >>> from fedcc.core.messages import Labels
    >>> one, other = (fingerprint(Labels(torch.tensor(v))) for v in ([1, 2], [2, 1]))
    >>> one == other, one == fingerprint(Labels(torch.tensor([1, 2])))
    (False, True)
    """
    digest = hashlib.sha256()
    for part in _bytes_of(message):
        digest.update(part)
    return digest.hexdigest()


def _bytes_of(value: Any) -> Iterator[bytes]:
    if is_dataclass(value):
        yield type(value).__name__.encode()
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Tensor):
        plain = value.detach().cpu()
        yield f"{plain.dtype}{tuple(plain.shape)}".encode()
        # copied: a tensor of one element may have a stride of 0, which no view of bytes may have
        flat = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.flatten())
        yield flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for name in sorted(value):
            yield f"{name}:".encode()
            yield from _bytes_of(value[name])
    else:
        yield repr(value).encode()


# ------------------------------------------------------------------------------------------------ trees and arrays


class _Pack(Pack):
    """Appends each tensor to the array of its number format."""

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
    """Takes each tensor from the front of its array; trusts nothing in the header."""

    def __init__(self, message_classes: MessageClasses, arrays: Mapping[str, Part], device: str):
        super().__init__(message_classes)
        self.arrays, self.device = arrays, device
        self.taken = dict.fromkeys(arrays, 0)

    def tensor(self, *about: Any) -> Tensor:
        coding, dtype, shape = about
        if coding not in CODINGS or dtype not in DTYPES:
            raise InvalidMessage(f"a tensor has a coding ({', '.join(CODINGS)}) and a dtype, got {shortened(about)}")
        whole = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        if not whole or not CODINGS[coding][0] <= len(shape) <= CODINGS[coding][1]:
            raise InvalidMessage(f"{shortened(shape)} is not the shape of a tensor in {coding} coding")
        if coding != "raw" and not dtype.startswith("float"):
            raise InvalidMessage(f"{coding} coding is for floats, got {dtype}")
        parts = tuple(self.take(name, length) for name, length in parts_of(coding, tuple(shape), dtype))
        if coding == "simplex" and not (math.prod(shape) and parts[0].reshape(shape).any(1).all()):
            raise InvalidMessage("probabilities of a row are all zero")
        with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are found later
            value = restored(coding, parts, tuple(shape), dtype)
        return value.to(torch.device(self.device))

    def take(self, name: str, length: int) -> Part:
        begin, array = self.taken.get(name, 0), self.arrays.get(name)
        remaining = 0 if array is None else len(array) - begin
        if array is None or remaining < length:
            raise InvalidMessage(f"array {name} has {remaining:,} numbers left, the header asks for {length:,}")
        self.taken[name] = begin + length
        return array[begin : begin + length]
