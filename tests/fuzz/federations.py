"""Federations across machines: the folders of operator and sites, a site's data, and messages on the wire."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedcc.core.messages import Labels, Predictions, Weights
from fedcc.core.rng import Key
from fedcc.core.samples import View
from fedcc.core.tree import message_classes
from fedcc.core.wire import WIRE, is_probabilities
from fedcc.experiments.experiment import Experiment
from fedcc.flower.codec import DTYPES, EncodedMessage, ExpectedMessage, InvalidMessage, accept, decode, encode
from fedcc.flower.data import site_samples
from fedcc.flower.folder import FederationFolder, Site, Task, disagreement, parse_clients
from fedcc.flower.rules import Rules
from fedcc.methods import make
from fuzz.harness import Case, Target, Wrong
from fuzz.mutate import RAW_JSON, RAW_TOML, mutated_bytes, mutated_tree, to_json, to_toml
from fuzz.texts import WORDS, decoded, encoded, text

SHAPE, CLASSES = (1, 8, 8), 3


def the_task() -> Task:
    return Task(CLASSES, ("cat", "dog", "owl"), SHAPE, 5, "0" * 64, View(1 / 255, (0.5,), (0.2,)))


class Folders(Target):
    """``federation.toml`` and ``site.toml`` with their ``experiment.toml``."""

    name = "federation"

    def prepare(self, folder: Path) -> None:
        import tomllib

        e = Experiment.resolve("fedcc", data="digits", device="cpu", clients=2)
        clients = {"north": "resnet8", "east": "resnet14"}
        operator = FederationFolder(folder, e, the_task(), Rules(quorum=2), clients, ("localhost", "127.0.0.1"), 9092)
        site = Site(folder, e, the_task(), "north", 0, "resnet8", "localhost:9092", False)
        operator.write()
        site.write()
        names = ("federation.toml", "site.toml", "experiment.toml")
        self.texts = {name: (folder / name).read_bytes() for name in names}
        self.trees = {name: tomllib.loads(content.decode()) for name, content in self.texts.items()}
        self.good = operator.terms("north")

    def begin(self, folder: Path) -> None:
        for name, content in self.texts.items():
            (folder / name).write_bytes(content)

    def make(self, rng: random.Random) -> Case:
        name = rng.choice(("federation.toml", "federation.toml", "site.toml", "site.toml", "experiment.toml"))
        if rng.random() < 0.02:
            return {name: None}
        if rng.random() < 0.25:
            return {name: mutated_bytes(rng, self.texts[name], list(self.texts.values()))}
        return {name: to_toml(mutated_tree(rng, self.trees[name], RAW_TOML, list(self.trees.values()), WORDS))}

    def check(self, case: Case, folder: Path) -> bool:
        [(name, content)] = case.items()
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
        try:
            if name != "site.toml":
                self.used(FederationFolder.read(folder))
            if name != "federation.toml":
                self.served(Site.read(folder))
        finally:
            (folder / name).write_bytes(self.texts[name])
        return True

    def used(self, found: FederationFolder) -> None:
        """What a server does with what it has read: nothing of it may fail later."""
        method = found.experiment.build_method()
        found.archs(method)
        json.dumps([found.terms(n) for n in found.clients])
        if not isinstance(found.address, str) or found.task.view is None:
            raise Wrong("no address")
        [found.key(n) for n in found.clients]
        parse_clients([f"{n}={m}" for n, m in found.clients.items()])

    def served(self, site: Site) -> None:
        method = site.experiment.build_method()
        site.task.arch(method, site.model)
        disagreement(self.good, site.terms())
        if not isinstance(site.server, str) or not isinstance(site.name, str) or not isinstance(site.share_model, bool):
            raise Wrong("a value of another type was accepted")


class Names(Target):
    """``--client NAME[=MODEL]``."""

    name, names_files = "clients", False

    def make(self, rng: random.Random) -> Case:
        return {str(n): encoded(text(rng)) for n in range(rng.randrange(4))}

    def check(self, case: Case, folder: Path) -> bool:
        for name in parse_clients([decoded(v) for v in case.values()]):
            if "/" in name or "\n" in name or name.startswith("."):
                raise Wrong("a name that is no folder's name was accepted")
        return True


class SiteData(Target):
    """A site's own samples: an NPZ file, arrays, or folders of images."""

    name = "site-data"

    def prepare(self, folder: Path) -> None:
        self.task = the_task()
        rng = np.random.default_rng(0)
        self.x, self.y = rng.integers(0, 256, (6, *SHAPE), dtype=np.uint8), np.array([0, 1, 2, 0, 1, 2])
        self.images = []
        for kind in ("PNG", "JPEG", "BMP"):
            for mode in ("L", "RGB"):
                buffer = io.BytesIO()
                Image.fromarray(self.x[0, 0]).convert(mode).save(buffer, kind)
                self.images.append((f".{kind.lower()}", buffer.getvalue()))

    def make(self, rng: random.Random) -> Case:
        kind = rng.random()
        if kind < 0.2:
            suffix, content = rng.choice(self.images)
            return {f"folder/{rng.randrange(4)}/a{suffix}": mutated_bytes(rng, content)}
        if kind < 0.5:
            arrays = {"x.npy": self.npy(rng, self.x), "y.npy": self.npy(rng, self.y)}
            return {f"folder/{name}": content for name, content in arrays.items() if rng.random() < 0.98}
        buffer = io.BytesIO()
        squeezed = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
        with zipfile.ZipFile(buffer, "w", squeezed) as packed:
            for name, array in (("x", self.x), ("y", self.y)):
                if rng.random() < 0.97:
                    held = zipfile.ZipInfo(
                        f"{name}.npy" if rng.random() < 0.97 else rng.choice(("x", "../y.npy", "z.npy"))
                    )
                    packed.writestr(held, self.npy(rng, array), squeezed)
        content = buffer.getvalue()
        return {"data.npz": mutated_bytes(rng, content) if rng.random() < 0.4 else content}

    def npy(self, rng: random.Random, array: Any) -> bytes:
        """An array as a file; sometimes of another type or shape, or with a header that says something else."""
        if rng.random() < 0.3:
            dtype = rng.choice(
                ("uint8", "int64", "uint64", "float32", "complex64", "bool", "S3", "U2", "M8[s]", ">i4", "V4")
            )
            array = array.astype("uint8").astype(dtype) if dtype != "V4" else np.zeros(6, "V4")
        if rng.random() < 0.1:
            array = array[: rng.randrange(len(array))]
        if rng.random() < 0.1:
            array = array.reshape(rng.choice(((-1,), (1, -1), (2, -1) if array.size % 2 == 0 else (-1, 1))))
        if rng.random() < 0.1 and array.dtype.kind in "iuf":
            array = array.copy()
            array.reshape(-1)[:1] = rng.choice((0, 3, 100))
            if array.dtype.kind == "i":
                array.reshape(-1)[:1] = rng.choice((-1, 3, 2**31 - 1)) if array.dtype.itemsize > 2 else -1
        buffer = io.BytesIO()
        np.save(buffer, array)
        content = buffer.getvalue()
        if rng.random() < 0.3:
            header = rng.choice(HEADERS)
            version = rng.choice((b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"))
            size = struct.pack("<H" if version[0] == 1 else "<I", len(header) if rng.random() < 0.9 else 65535)
            content = b"\x93NUMPY" + version + size + header + rng.randbytes(rng.choice((0, 8, 400)))
        elif rng.random() < 0.2:
            content = mutated_bytes(rng, content)
        return content

    def check(self, case: Case, folder: Path) -> bool:
        top = folder / next(iter(case)).split("/")[0] if case else folder / "folder"
        made = []
        for name, content in case.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content or b"")
            made.append(path)
        if not case:
            top.mkdir(exist_ok=True)
        try:
            samples = site_samples(top, self.task)
        finally:
            for path in made:
                path.unlink()
                if path.parent not in (folder, top):
                    path.parent.rmdir()
        x, y = samples.x, samples["y"]
        if x.dtype != torch.uint8 or tuple(x.shape[1:]) != SHAPE or y.dtype != torch.int64 or len(x) != len(y):
            raise Wrong("samples of another form were accepted")
        if int(y.min()) < 0 or int(y.max()) >= CLASSES:
            raise Wrong("labels out of range were accepted")
        return True


HEADERS = tuple(
    f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    for descr in ("'|u1'", "'<i8'", "'|O'", "[('a', '<i8')]", "'<U1000000000'", "'V0'", "5", "'|u1', 'x': 1", "(" * 150)
    for order in ("False", "True", "2")
    for shape in ("(6, 1, 8, 8)", "(6,)", "(10000000000,)", "(-6,)", "(0,)", "(2**62, 4)", "()", "6", "(1.5,)",
                  "(" + "1, " * 40 + ")", "(1000000, 1000, 1000)", "(True,)")
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------------- messages


def messages() -> list[tuple[Any, Any]]:
    """Methods with messages that cross the wire in them."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(4, 5, generator=generator).softmax(-1)
    state = {"a.weight": torch.randn(2, 3, generator=generator), "a.bias": torch.zeros(3), "n": torch.tensor(3)}
    found: list[tuple[Any, Any]] = [
        ("fedavg", Weights(state, 5)),
        ("fedmd", Predictions(torch.randn(4, 5, generator=generator))),
        ("feddf", Weights(state, 7)),
        ("fedcc", Predictions(shares)),
        ("fedct", Labels(torch.tensor([0, 1, 2, 3], dtype=torch.uint8))),
        ("fedavg", None),
    ]
    return [(make(name), message) for name, message in found]


class Upload(Target):
    """What a client sends: kept to the rehearsed form, finite, within range, or refused."""

    name, names_files, refusals = "upload", False, (InvalidMessage,)

    def prepare(self, folder: Path) -> None:
        self.sent = []
        for method, message in messages():
            for wire in WIRE:
                expected = ExpectedMessage(message, message_classes(method), 5, wire, "run", 1)
                there = encode(message, wire, run="run", round=1, key=Key(0))
                self.sent.append((expected, there.kind, json.loads(there.text), there.buffers))
        self.headers = [header for _, _, header, _ in self.sent]

    def make(self, rng: random.Random) -> Case:
        n = rng.randrange(len(self.sent))
        _, kind, header, buffers = self.sent[n]
        body, arrays = to_json(header), dict(buffers)
        for _ in range(rng.choice((1, 1, 2))):
            match rng.randrange(6):
                case 0 | 1:
                    words = ("tensor", "message", "map", "list", "tuple", "raw", "half", "rows", "simplex", *DTYPES)
                    body = to_json(mutated_tree(rng, header, RAW_JSON, self.headers, words))
                case 2:
                    body = mutated_bytes(rng, body)
                case 3 | 4 if arrays:
                    name = rng.choice(sorted(arrays))
                    arrays[name] = self.spoiled(rng, name, arrays[name])
                case 5:
                    kind = rng.choice(
                        (kind, "None", "Weights", "Predictions", "Labels", "Data", "Snapshot", "", "x" * 100)
                    )
                    name = rng.choice((*DTYPES, "object", "complex64", "", "float128", "V8"))
                    arrays[name] = rng.randbytes(rng.choice((0, 1, 8, 400)))
        return {"which": str(n).encode(), "kind": kind.encode(), "header": body} | {
            f"array {k}": v for k, v in arrays.items()
        }

    def spoiled(self, rng: random.Random, name: str, content: bytes) -> bytes:
        kind = rng.random()
        if kind < 0.5 or not content or name not in DTYPES or len(content) % np.dtype(name).itemsize:
            return mutated_bytes(rng, content)
        array = np.frombuffer(content, name).copy()
        at = rng.randrange(len(array)) if len(array) else 0
        special: tuple[float, ...] = (0, 1, -1, float("nan"), float("inf"), -float("inf"), 1e30, 6e4, 1e-40)
        if array.dtype.kind != "f":
            low, high = np.iinfo(name).min, np.iinfo(name).max
            special = (0, low, high, 4, min(5, high))
        with np.errstate(over="ignore"):
            array[at : at + rng.choice((1, 2, 10**6))] = np.array(rng.choice(special)).astype(name)
        return array.tobytes()

    def check(self, case: Case, folder: Path) -> bool:
        expected, kind, header, arrays = self.parts(case)
        form = expected.message
        came = accept(kind, header, arrays, expected)
        if type(came) is not type(form):
            raise Wrong("a message of another type was accepted")
        self.alike(form, came, expected)
        return True

    def alike(self, form: Any, came: Any, expected: ExpectedMessage) -> None:
        if isinstance(form, Weights):
            if (
                list(came.state) != list(form.state)
                or type(came.samples) is not type(form.samples)
                or came.samples <= 0
            ):
                raise Wrong("other entries were accepted")
            for name, value in form.state.items():
                self.tensor(value, came.state[name])
        elif isinstance(form, Predictions):
            self.tensor(form.values, came.values)
            if is_probabilities(form.values) and not is_probabilities(came.values, 2e-3):
                raise Wrong("values that are no probabilities were accepted")
        elif isinstance(form, Labels):
            self.tensor(form.values, came.values)
            if int(came.values.max()) >= expected.classes:
                raise Wrong("labels out of range were accepted")

    def tensor(self, form: torch.Tensor, came: torch.Tensor) -> None:
        if came.shape != form.shape or came.dtype != form.dtype:
            raise Wrong("a tensor of another shape or type was accepted")
        if came.is_floating_point() and not bool(came.isfinite().all()):
            raise Wrong("values that are not finite were accepted")

    def parts(self, case: Case) -> tuple[ExpectedMessage, str, str, dict[str, bytes]]:
        expected = self.sent[int(case["which"] or b"0")][0]
        arrays = {name.removeprefix("array "): v or b"" for name, v in case.items() if name.startswith("array ")}
        header = (case["header"] or b"").decode("utf-8", "surrogateescape")
        return expected, decoded(case["kind"]), header, arrays


class Download(Upload):
    """What the server sends: a message of a class that the method knows, or refused."""

    name = "download"

    def check(self, case: Case, folder: Path) -> bool:
        expected, kind, header, arrays = self.parts(case)
        received = EncodedMessage.parse(kind, header, arrays)
        came = decode(received, expected.message_classes, expected.wire, run="run", round=1)
        if came is not None and type(came) not in expected.message_classes.values():
            raise Wrong("a message of no known class was accepted")
        total = sum(len(v) for v in arrays.values())
        held = sum(t.numel() for t in _tensors(came))
        if held > 8 * total + 8:
            raise Wrong("a message larger than what was sent")
        return True


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    below: list[Any] = []
    if isinstance(value, dict):
        below = list(value.values())
    elif isinstance(value, list | tuple):
        below = list(value)
    elif hasattr(value, "__dataclass_fields__"):
        below = [getattr(value, n) for n in value.__dataclass_fields__]
    return [t for v in below for t in _tensors(v)]
