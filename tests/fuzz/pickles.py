"""Pickles in CIFAR's layout: made opcode by opcode, with what is known to crash or hang an unpickler."""

from __future__ import annotations

import pickle
import pickletools
import random
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedcc.data import cifar
from fedcc.data.dataset import DataError
from fuzz.harness import Case, Target, Wrong
from fuzz.mutate import mutated_bytes

ROWS, CLASSES = 4, 10
LAYOUT = cifar.Layout(
    train=("data_batch_1",),
    test="test_batch",
    rows=(ROWS, ROWS),
    labels=b"labels",
    names_file="batches.meta",
    names=b"label_names",
    classes=CLASSES,
    md5={},
)
GLOBALS = (
    "numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct", "numpy ndarray", "numpy dtype",
    "_codecs encode", "os system", "builtins eval", "builtins bytearray", "numpy float64", "__builtin__ getattr",
    "numpy._core.multiarray scalar", "functools partial", "posix abort", "builtins dict", "numpy.ma mvoid",
    "copyreg _reconstructor", "__builtin__ set", "collections OrderedDict", "numpy.lib.format read_array",
)  # fmt: skip
OPCODES = [op for op in pickletools.opcodes if op.name not in ("STOP", "EXT1", "EXT2", "EXT4", "PERSID")]


def examples() -> tuple[list[bytes], list[bytes]]:
    """Batches and names as Python 2 and 3 write them, in all protocols."""
    x = (np.arange(ROWS * cifar.PIXELS) % 251).astype(np.uint8).reshape(ROWS, -1)
    batch: dict[Any, Any] = {b"batch_label": b"one", b"labels": [0, 3, 9, 1], b"data": x, b"filenames": [b"a"] * ROWS}
    text = {k.decode(): v for k, v in batch.items()}
    names = {b"label_names": [f"class {c}".encode() for c in range(CLASSES)], b"num_vis": 3072}
    batches = [pickle.dumps(tree, protocol) for tree in (batch, text) for protocol in range(5)]
    return batches, [pickle.dumps(names, protocol) for protocol in range(5)]


class Cifar(Target):
    """``read_batch`` and ``read_names`` on files whose md5 nobody knows."""

    name, refusals = "cifar", (DataError,)

    def prepare(self, folder: Path) -> None:
        self.batches, self.names = examples()
        self.opcodes = [[_sources(content), content] for content in self.batches + self.names]

    def make(self, rng: random.Random) -> Case:
        kind = rng.random()
        names = rng.random() < 0.2
        file = "batches.meta" if names else "data_batch_1"
        pool = self.names if names else self.batches
        if kind < 0.3:
            return {file: mutated_bytes(rng, rng.choice(pool), pool)}
        if kind < 0.65:
            return {file: self.changed_opcodes(rng, names)}
        if kind < 0.75:
            return {file: attack(rng)}
        return {file: b"\x80\x02" + b"".join(opcode(rng) for _ in range(rng.choice((3, 8, 20, 60)))) + b"."}

    def changed_opcodes(self, rng: random.Random, names: bool) -> bytes:
        """Opcodes of an example left out, doubled, swapped, taken from another, or new ones put in."""
        parts = list(rng.choice(self.opcodes[len(self.batches) :] if names else self.opcodes[: len(self.batches)])[0])
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(len(parts))
            match rng.randrange(6):
                case 0 if len(parts) > 1:
                    del parts[at]
                case 1:
                    parts.insert(at, parts[at])
                case 2:
                    other = rng.randrange(len(parts))
                    parts[at], parts[other] = parts[other], parts[at]
                case 3:
                    parts.insert(at, rng.choice(rng.choice(self.opcodes)[0]))
                case 4:
                    parts[at] = mutated_bytes(rng, parts[at])
                case _:
                    parts.insert(at, opcode(rng))
        return b"".join(parts)

    def check(self, case: Case, folder: Path) -> bool:
        [(name, content)] = case.items()
        assert content is not None
        path = folder / name
        path.write_bytes(content)
        if name == "batches.meta":
            names = cifar.read_names(path, LAYOUT)
            if len(names) != CLASSES or not all(type(n) is str for n in names):
                raise Wrong("class names that are no texts were accepted")
            return True
        x, y = cifar.read_batch(path, LAYOUT, ROWS)
        if type(x) is not np.ndarray or x.dtype != np.uint8 or x.shape != (ROWS, 3, 32, 32):
            raise Wrong("images of another form were accepted")
        if y.dtype != np.int64 or not (y.min() >= 0 and y.max() < CLASSES):
            raise Wrong("labels out of range were accepted")
        int(x.sum())  # memory that is not there would crash here
        return True


def _sources(content: bytes) -> list[bytes]:
    """Each opcode of a pickle with its argument, as bytes."""
    begins = [position or 0 for _, _, position in pickletools.genops(content)] + [len(content)]
    return [content[a:b] for a, b in pairwise(begins)]


def opcode(rng: random.Random) -> bytes:
    """One opcode with an argument of its kind."""
    if rng.random() < 0.25:
        module, name = rng.choice(GLOBALS).split()
        return f"c{module}\n{name}\n".encode()
    op = rng.choice(OPCODES)
    code = op.code.encode("latin-1")
    size = rng.choice((0, 1, 2, 7, 255, 2**31 - 1, 2**32 - 1))
    data = rng.choice((b"", b"data", b"labels", b"u1", b"O8", b"|V8", b"\x00" * 8, b"latin1", b"b"))
    match op.arg.name if op.arg else "":
        case "":
            return code
        case "uint1":
            return code + bytes([rng.randrange(8)])
        case "uint2":
            return code + struct.pack("<H", rng.choice((0, 1, 3072, 65535)))
        case "int4":
            return code + struct.pack("<i", rng.choice((0, 1, -1, ROWS, 3072, 2**31 - 1, -(2**31))))
        case "uint4":
            return code + struct.pack("<I", rng.choice((0, 1, 5, 2**31 - 1, 2**32 - 1)))
        case "uint8":
            return code + struct.pack("<Q", rng.choice((0, 1, 100, 2**40, 2**64 - 1)))
        case "float8":
            return code + rng.randbytes(8)
        case "string1" | "bytes1" | "unicodestring1" | "long1":
            return code + bytes([len(data) if rng.random() < 0.8 else size % 256]) + data
        case "string4" | "bytes4" | "unicodestring4" | "long4":
            return code + struct.pack("<I", len(data) if rng.random() < 0.8 else size) + data
        case "bytes8" | "bytearray8" | "unicodestring8":
            return (
                code + struct.pack("<Q", len(data) if rng.random() < 0.8 else rng.choice((size, 2**63, 2**40))) + data
            )
        case "stringnl_noescape_pair":
            return code + rng.choice(GLOBALS).replace(" ", "\n").encode() + b"\n"
        case _:
            line = rng.choice(
                (b"0", b"1", b"-1", b"01", b"'a'", b"1L", b"9" * rng.choice((10, 400, 5000)), b"1e999", b"x")
            )
            return code + line + b"\n"


def attack(rng: random.Random) -> bytes:
    """Structures that are small in the file and large, deep or dangerous in memory."""
    n = rng.choice((10, 30, 41, 100, 1000, 20_000))
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tC\x01btR"
    dtype = rng.choice(
        (b"O8", b"|O", b"V8", b"u1", b"|u1", b"U4", b"S4", b"M8", b"f8", b"i8", b"V0", b"u1,O8", b"(2,)u1")
    )
    made = b"cnumpy\ndtype\n(" + b"U" + bytes([len(dtype)]) + dtype + b"K\x00K\x01tR"
    flags = struct.pack("<i", rng.choice((0, 1, 2, 63, -1)))
    fields = b"}U\x01aN(K\x03(U\x01aU\x01btUafieldsdsK\x08K\x08J" + flags + b"t"
    state = rng.choice((
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
        b"(K\x03U\x01<N(U\x01at}U\x01a(cnumpy\ndtype\n(U\x02O8K\x00K\x01tRK\x00tsK\x08K\x08J" + flags + b"tb",
        b"(K\x04U\x01|" + made + b"NNK\x08K\x08J" + flags + b"tb",
        fields + b"b",
        b"",
    ))  # fmt: skip
    shape = rng.choice(
        (b"(K\x04M\x00\x0ct", b"(K\x01t", b"(J\xff\xff\xff\x7ft", b"(J\xff\xff\xff\xfft", b")", b"(K\x00t")
    )
    raw = b"\x00" * rng.choice((0, 1, 8, 12288))
    content = b"B" + struct.pack("<I", len(raw)) + raw
    match rng.randrange(9):
        case 0:  # an array whose type and bytes disagree, written into
            return (
                b"\x80\x02}U\x04data"
                + array
                + b"(K\x01"
                + shape
                + made
                + state
                + rng.choice((b"\x88", b"\x89"))
                + content
                + (b"tb" + rng.choice((b"", b"K\x00K\x01s", b"U\x01aNs", b"K\x00]s")) + b"s.")
            )
        case 1:  # tuples doubled, as a key
            return b"\x80\x02}" + b"K\x01" + b"2\x86" * min(n, 200) + b"K\x01s."
        case 2:  # lists in lists
            return b"\x80\x02" + b"]" * n + b"a" * (n - 1) + b"."
        case 3:  # tuples in tuples
            return b"\x80\x02}" + b")" + b"\x85" * n + b"K\x01s."
        case 4:  # a list in itself
            return b"\x80\x02}U\x06labels]q\x00h\x00ah\x00as."
        case 5:  # a list appended to itself again and again by reference
            return b"\x80\x02]q\x00" + b"".join(b"](" + b"h" + bytes([k]) + b"h" + bytes([k]) + b"eq" + bytes([k + 1])
                                                 for k in range(min(n, 200))) + b"."  # fmt: skip
        case 6:  # huge memo indices and lengths
            return b"\x80\x02]r" + struct.pack("<I", rng.choice((2**20, 2**28, 2**31 - 1, 2**32 - 1))) + b"."
        case 7:  # frames and long strings that are not there
            return b"\x80\x04\x95" + struct.pack("<Q", rng.choice((0, 5, 2**40, 2**63))) + b"]." + rng.randbytes(4)
        case _:  # codecs
            codec = rng.choice((b"latin1", b"zip", b"bz2", b"hex", b"rot13", b"unicode_escape", b"idna", b"punycode"))
            payload = rng.choice((b"a" * 20_000, b"\x00" * 50, b"x\x9cK"))
            return (
                b"\x80\x02}U\x06labels"
                + rng.choice((b"c_codecs\nencode\n(", b"c_codecs\ndecode\n("))
                + b"X"
                + struct.pack("<I", len(payload))
                + payload
                + b"U"
                + bytes([len(codec)])
                + codec
                + b"tRs."
            )
