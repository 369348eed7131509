"""Run folders: every file of a finished and of an unfinished run damaged, then read by everything that reads it."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
import typing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from functools import cache, lru_cache
from hashlib import blake2b
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fedcc
from fedcc.cli import run as command
from fedcc.core.method import Trained
from fedcc.core.model import Arch, Model
from fedcc.core.rng import Key
from fedcc.core.samples import View
from fedcc.experiments import analyse, saved, tracking
from fedcc.experiments import run as running
from fedcc.experiments.checkpoint import Checkpoints
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.packing import to_bytes
from fedcc.experiments.result import Result
from fedcc.experiments.round_files import CHECKSUM_BYTES
from fedcc.experiments.rounds import FinishedRound, Observer, Pause, Paused
from fedcc.experiments.run import execute
from fedcc.federation import Federation
from fedcc.methods import make
from fedcc.nets import build
from fedcc.report.records import find_records
from fuzz.harness import Case, Target, Wrong
from fuzz.mutate import RAW_JSON, changed_digit, mutated_bytes, mutated_tree, to_json
from tiny import DIMENSIONS, Mlp, finished

HALF, WHOLE = "half", "whole"


@contextmanager
def frozen_clock() -> Iterator[None]:
    """Times and the number of other runs are part of the files; with this they, and so inputs, are always the same."""
    before, shared = time.perf_counter, running.shared
    os.environ["FEDCC_COMMIT"] = "0" * 40
    time.perf_counter = lambda: 0.0
    running.shared = lambda _: nullcontext(lambda: 0)  # type: ignore[assignment]
    try:
        yield
    finally:
        time.perf_counter, running.shared = before, shared


def quicken() -> None:
    """Make once what is the same for every input; it would take more than half of the time."""
    hints = cache(typing.get_type_hints)
    for name, module in list(sys.modules.items()):
        if name.startswith("fedcc.") and getattr(module, "get_type_hints", None) is typing.get_type_hints:
            module.get_type_hints = hints  # type: ignore[attr-defined]
    Federation.named = staticmethod(cache(Federation.named))  # type: ignore[method-assign]
    saved.build = lru_cache(64)(saved.build)  # type: ignore[attr-defined]


def put_in_order(folder: Path) -> None:
    """Checkpoints with their metadata sorted: the library that writes them draws the order anew each time."""
    for path in folder.glob("checkpoint-*"):
        content = in_order(path.read_bytes())
        path.unlink()
        digest = blake2b(content, digest_size=CHECKSUM_BYTES).hexdigest()
        path.with_name(f"checkpoint-{path.name.split('-')[1]}-{digest}.safetensors").write_bytes(content)


def in_order(content: bytes) -> bytes:
    """A safetensors file with its metadata sorted."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    return joined(header, content[8 + length :])


def joined(header: Any, rest: bytes) -> bytes:
    """A safetensors file."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + rest


def content_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file() and p.name != ".lock"}


def damaged(rng: random.Random, name: str, content: bytes) -> bytes:
    """A file as damage, another program or a hand may leave it; ten ways in all."""
    kind = rng.random()
    if name.endswith(".json") and kind < 0.45:
        return to_json(mutated_tree(rng, json.loads(content), RAW_JSON))
    if name.endswith(".jsonl") and kind < 0.45:
        lines = content.splitlines(keepends=True)
        at = rng.randrange(len(lines))
        lines[at] = to_json(mutated_tree(rng, json.loads(lines[at]), RAW_JSON)) + b"\n"
        return b"".join(lines)
    if name.endswith((".json", ".jsonl", ".toml")) and kind < 0.7:
        return changed_digit(rng, content)
    if name.endswith(".safetensors") and kind < 0.4:
        return with_header(rng, content)
    return mutated_bytes(rng, content)


def with_header(rng: random.Random, content: bytes) -> bytes:
    """A safetensors file with a changed header that is still one."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, value in header.get("__metadata__", {}).items():
        if rng.random() < 0.7:
            header["__metadata__"][name] = to_json(mutated_tree(rng, json.loads(value), RAW_JSON)).decode(
                "utf-8", "replace"
            )
    if "__metadata__" not in header or rng.random() < 0.3:
        header = mutated_tree(rng, header, (), (), ("F32", "I32", "F16", "F64", "BOOL", "U8"))
    return joined(header, content[8 + length :])


class Noticed:
    """What a reader says while it reads."""

    def __init__(self) -> None:
        self.text = StringIO()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(StringIO()), redirect_stderr(self.text):
            warnings.simplefilter("always")
            yield
        for one in caught:
            self.text.write(f"{one.message}\n")

    def __bool__(self) -> bool:
        return bool(self.text.getvalue().strip())


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        v.dtype == b[n].dtype and v.shape == b[n].shape and v.numpy().tobytes() == b[n].numpy().tobytes()
        for n, v in a.items()
    )


def same_models(a: Trained, b: Trained) -> bool:
    return (a.classes, a.clients.keys(), a.server.keys()) == (b.classes, b.clients.keys(), b.server.keys()) and all(
        same_tensors(dict(x.state), dict(y.state))
        for x, y in zip(
            (*a.clients.values(), *a.server.values()), (*b.clients.values(), *b.server.values()), strict=True
        )
    )


def same_result(a: Result, b: Result) -> bool:
    return (a.method, a.view, a.dtype) == (b.method, b.view, b.dtype) and same_models(a.trained, b.trained)


class Telling:
    """A tracker that keeps nothing."""

    def __init__(self, *_: Any):
        pass

    def log(self, step: int, numbers: Any) -> None:
        pass

    def close(self, finished: bool) -> None:
        pass


class PauseAfterTwo(Observer):
    def round(self, done: FinishedRound) -> Pause | None:
        return Pause("enough") if done.t == 2 else None


class RunFolders(Target):
    """``resume``, ``report``, ``analyse`` and ``fedcc.load`` on damaged folders: refused, said, or the same numbers."""

    name, fast = "run-folder", False
    refusals = (ValueError, OSError)

    def prepare(self, folder: Path) -> None:
        common: dict[str, Any] = {"data": "digits", "skew": "classes:5", "clients": 2, "models": "resnet8", "rounds": 3}
        self.experiment = Experiment.resolve("fedcc", **common, epochs=0, fraction=0.1, device="cpu")
        with frozen_clock():
            execute(self.experiment, folder / WHOLE)
            with suppress(Paused):
                execute(self.experiment, folder / HALF, observers=[PauseAfterTwo()])
        (folder / HALF / "tracking.json").write_text(json.dumps({"telling": {"run": "x", "step": 1}}))
        put_in_order(folder / HALF)
        self.files = {state: content_of(folder / state) for state in (HALF, WHOLE)}
        self.good = Result.load(folder / WHOLE)
        [self.record] = find_records([folder / WHOLE]).runs
        self.start: Any = None
        with self.stubs(folder / HALF):
            self.resumed(folder / HALF, Noticed())
        self.start = self.seen
        if self.start is None:
            raise RuntimeError("the example itself is not resumed")
        checkpoints = Checkpoints(folder / HALF, self.experiment, self.experiment.federation())
        kept = [checkpoints.read(path, []) for path in checkpoints.paths()]
        self.good_bits = {one.snapshot.t: self.bits(one) for one in kept}

    @contextmanager
    def stubs(self, place: Path) -> Iterator[None]:
        """Nothing is trained and nothing computed: only what is read counts."""
        before = command.train, analyse.inspect_models

        def train(described: Any, place: Path, *_: Any, start: Any = None, **__: Any) -> None:
            self.seen = (described, start)
            trackers = tracking.Trackers(("telling",), described, place, lambda _: None)
            trackers.round(finished(round=3, accuracy=50.0))
            trackers.end(None)

        tracking.TRACKERS["telling"] = (Telling, ())  # type: ignore[assignment]
        command.train, analyse.inspect_models = train, lambda result, *_: self.note(result)
        try:
            yield
        finally:
            command.train, analyse.inspect_models = before
            del tracking.TRACKERS["telling"]

    def note(self, result: Result) -> dict[str, Any]:
        self.used = result
        return {}

    def begin(self, folder: Path) -> None:
        torch.set_num_threads(1)
        for state, files in self.files.items():
            (folder / state).mkdir()
            for name, content in files.items():
                (folder / state / name).write_bytes(content)

    def make(self, rng: random.Random) -> Case:
        state = rng.choice((HALF, HALF, WHOLE))
        names = [n for n in self.files[state] if n not in ("environment.json", "partition.npz") or rng.random() < 0.1]
        if state == WHOLE and rng.random() < 0.4:
            names = ["summary.json", "models.json"]
        case: dict[str, bytes | None] = {}
        for _ in range(rng.choice((1, 1, 1, 2))):
            name = rng.choice(names)
            kind = rng.random()
            if kind < 0.04:
                case[f"{state}/{name}"] = None
            elif kind < 0.06:
                case[f"{state}/{name}/"] = b""
            else:
                case[f"{state}/{name}"] = damaged(rng, name, self.files[state][name])
        return case

    def check(self, case: Case, folder: Path) -> bool:
        state = next(iter(case)).split("/")[0]
        place = folder / state
        for name, content in case.items():
            path = folder / name.rstrip("/")
            path.unlink(missing_ok=True)
            if name.endswith("/"):
                path.mkdir()
            elif content is not None:
                path.write_bytes(content)
        try:
            with self.stubs(place):
                return self.read_half(place) if state == HALF else self.read_whole(place)
        finally:
            self.restore(place, self.files[state])

    def restore(self, place: Path, files: dict[str, bytes]) -> None:
        for path in place.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in files:
                path.unlink()
        for name, content in files.items():
            if (
                not (path := place / name).exists()
                or path.stat().st_size != len(content)
                or path.read_bytes() != content
            ):
                path.write_bytes(content)

    def resumed(self, place: Path, said: Noticed) -> None:
        self.seen = None
        with said():
            command.resume(folder=place, as_json=False)

    def read_half(self, place: Path) -> bool:
        said = Noticed()
        self.resumed(place, said)
        if self.seen is None:
            return False
        resumed, start = self.seen
        good_experiment, good = self.start
        if start is None:
            return not said  # begun anew, which is said
        if resumed != good_experiment:
            raise Wrong("another experiment is resumed")
        t = start.snapshot.t
        if start.records != good.records[:t] or self.bits(start) != self.good_bits[t]:
            raise Wrong("a run is resumed with other numbers, silently")
        return True

    def bits(self, start: Any) -> bytes:
        return in_order(to_bytes(start.snapshot, self.experiment.build_method(), {}))

    def read_whole(self, place: Path) -> bool:
        taken = 0
        for read in (self.load, self.report, self.again, self.analysed):
            try:
                taken += read(place)
            except Exception as error:
                if fault := self.fault(error, place.parent):
                    raise Wrong(f"{read.__name__}: {fault}") from error
        return taken == 4

    def load(self, place: Path) -> bool:
        said = Noticed()
        with said():
            result = fedcc.load(place)
        if not said and not same_result(result, self.good):
            raise Wrong("fedcc.load gives other numbers, silently")
        return True

    def report(self, place: Path) -> bool:
        found = find_records([place])
        for one in found.runs:
            if replace(one, file=self.record.file, name=self.record.name) != self.record and not found.problems:
                raise Wrong("report: other numbers, silently")
        return bool(found.runs)

    def again(self, place: Path) -> bool:
        """``fedcc resume`` of a finished run changes nothing."""
        self.resumed(place, Noticed())
        if (place / "summary.json").is_file() and self.seen is not None:
            raise Wrong("a finished run is run again")
        return True

    def analysed(self, place: Path) -> bool:
        said = Noticed()
        with said():
            analyse.analyse(place, device="cpu")
        if not said and not same_result(self.used, self.good):
            raise Wrong("analyse uses other models, silently")
        return True


class CheckpointFiles(RunFolders):
    """Checkpoints whose checksum is right and whose content is not: passed over or refused, with the file's name."""

    name = "checkpoint"

    def make(self, rng: random.Random) -> Case:
        names = [n for n in self.files[HALF] if n.startswith("checkpoint-")]
        name = rng.choice(names)
        content = with_header(rng, self.small[name]) if rng.random() < 0.7 else mutated_bytes(rng, self.small[name])
        digest = blake2b(content, digest_size=CHECKSUM_BYTES).hexdigest()
        t = name.split("-")[1]
        return {f"{HALF}/checkpoint-{t}-{digest}.safetensors": content}

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.small = {n: c for n, c in self.files[HALF].items() if n.startswith("checkpoint-")}

    def begin(self, folder: Path) -> None:
        super().begin(folder)
        self.federation = self.experiment.federation()

    def check(self, case: Case, folder: Path) -> bool:
        [(name, content)] = case.items()
        assert content is not None
        path = folder / name
        known = path.exists()
        path.write_bytes(content)
        try:
            with frozen_clock():
                found = Checkpoints(folder / HALF, self.experiment, self.federation).read(path, [])
        finally:
            if not known:
                path.unlink()
        if [r["round"] for r in found.records] != list(range(1, found.snapshot.t + 1)):
            raise Wrong("a checkpoint with other rounds")
        return True


class Models(Target):
    """``fedcc.load`` of small networks: ``models.json`` and ``models.safetensors``."""

    name, refusals = "models", (ValueError, OSError)

    def prepare(self, folder: Path) -> None:
        self.files: list[dict[str, bytes]] = []
        self.good = []
        for name in ("fedavg", "fedcc"):
            made = make(name)
            arch = Arch((Mlp(),), made.outputs(3), (DIMENSIONS,))
            models = [Model(arch, dict(build(arch, Key(k)).state_dict())) for k in range(2)]
            trained = Trained(3, dict(enumerate(models)), {"global": models[0]} if name == "fedavg" else {})
            result = Result(made, trained, View(1.0), "float32", [{"round": 1, "accuracy": 50.0}], 1.0)
            result.save(folder / name)
            self.files.append(content_of(folder / name))
            self.good.append(Result.load(folder / name, models=[Mlp()]))

    def make(self, rng: random.Random) -> Case:
        n = rng.randrange(len(self.files))
        case: dict[str, bytes | None] = dict(self.files[n])
        for _ in range(rng.choice((1, 1, 2))):
            name = rng.choice(sorted(self.files[n]))
            case[name] = damaged(rng, name, self.files[n][name]) if rng.random() < 0.98 else None
        return {**case, "which": str(n).encode()}

    def check(self, case: Case, folder: Path) -> bool:
        for name, content in case.items():
            (folder / name).unlink(missing_ok=True)
            if content is not None:
                (folder / name).write_bytes(content)
        good = self.good[int(case["which"] or b"0")]
        said = Noticed()
        with said():
            result = fedcc.load(folder, models=[Mlp()])
        if not said and not same_result(result, good):
            raise Wrong("fedcc.load gives other numbers, silently")
        for model in (*result.trained.clients.values(), *result.trained.server.values()):
            if any(v.is_floating_point() and not bool(v.isfinite().all()) for v in model.state.values()):
                raise Wrong("weights that are not finite are loaded")
        return True
