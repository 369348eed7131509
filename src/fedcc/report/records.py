"""The records of finished runs: found, read, checked. What others wrote is not trusted; what is odd is said."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from fedcc.data.registry import DATASETS
from fedcc.experiments.experiment import Experiment, present_spelling, setting_text
from fedcc.methods import METHODS, completed, outdated
from fedcc.report import paper

T = TypeVar("T")
LARGEST = 64 * 2**20  # bytes of a file; a record has kilobytes
NUMERICS = ("device", "precision", "threads", "engine", "deterministic")  # how it was computed, not what
ASIDE = ("method", "data", "skew", "seed", "settings", "client_accuracy", *NUMERICS)  # no part of the protocol
Sent = tuple[int | None, tuple[int, ...], int]  # bytes in all, by round, of models at the end
LOCAL_TESTS = ("local", "global", "valid", "valid_labels", "local_full")


class Odd(ValueError):
    """A file, or a part of one, that is not what it should be."""


@dataclass(frozen=True)
class Scored:
    """The accuracies of a run's models read in another way."""

    final: float
    best: float
    best_round: int
    curve: tuple[float | None, ...]


@dataclass(frozen=True)
class Run:
    """One finished run, checked: the part of its record that tables and figures are made from."""

    file: Path  # the record itself
    name: str  # what it is called: its path below the folder that was given
    method: str  # as on the command line
    label: str
    family: str
    data: str
    skew: str
    seed: int
    final: float
    best: float
    best_round: int
    curve: tuple[float | None, ...]  # accuracy, an entry a round
    experiment: Mapping[str, Any]
    settings: Mapping[str, Any]
    command: str
    readings: Mapping[str, Scored] = field(default_factory=dict)  # by name
    targets: tuple[float | None, ...] = ()
    tests: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # Table II: accuracy by test and client
    log: Mapping[str, Mapping[str, tuple[float | None, ...]]] = field(default_factory=dict)  # by name and client
    counts: tuple[tuple[int, ...], ...] = ()  # samples by client and class
    sent: int | None = None  # bytes up and down, all rounds
    sent_rounds: tuple[int, ...] = ()  # the same by round
    handed: int = 0  # bytes of the models handed over at the end
    seconds: float | None = None
    engine: str = ""
    device: str = ""
    precision: str = ""
    commit: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    in_folder: bool = False
    analysis: Mapping[str, Any] | None = None

    @property
    def scenario(self) -> paper.Scenario:
        return self.data, self.skew

    @property
    def changed(self) -> tuple[tuple[str, str], ...]:
        """The method's settings that are not its defaults."""
        kind = METHODS.get(self.method)
        usual = {f.name: f.default for f in fields(kind)} if kind else {}  # type: ignore[arg-type]
        told = {
            n: float(v) if isinstance(usual.get(n), float) and type(v) is int else v
            for n, v in completed(self.method, self.settings).items()
        }
        return tuple((n, setting_text(v)) for n, v in told.items() if n not in usual or usual[n] != v)

    @property
    def protocol(self) -> tuple[tuple[str, str], ...]:
        """The values of the run, other than its method's settings, that are not the data set's defaults."""
        usual = usual_values(self.data, self.family, self.method)
        return tuple(
            (name, setting_text(value))
            for name, value in self.experiment.items()
            if name not in ASIDE and (name not in usual or usual[name] != value)
        )


def usual_values(data: str, family: str, method: str) -> dict[str, Any]:
    """What an experiment on this data set has where nothing else was asked for; empty parts where it is not known."""
    values = {f.name: f.default for f in fields(Experiment) if f.default is not MISSING}
    if data in DATASETS:
        d = DATASETS[data].defaults
        one = family == "parameters" or method == "centralized"
        values |= {"clients": d.clients, "rounds": d.rounds, "epochs": d.epochs}
        values["augment"] = "standard" if d.augment else "none"
        values["models"] = d.shared_model if one else d.models
    return values


# ------------------------------------------------------------------------------------------------ finding and reading


@dataclass(frozen=True)
class Found:
    """The runs below some paths, and what was left out and why."""

    runs: tuple[Run, ...]
    problems: tuple[tuple[str, str], ...]  # name and reason


def find(paths: Sequence[Path]) -> Found:
    """Every record below these paths: run folders, folders of bare records, single files."""
    runs: dict[Path, Run] = {}
    problems: list[tuple[str, str]] = []
    for path in paths:
        for file, name in _candidates(path, problems):
            key = file.resolve()
            if key in runs:
                continue
            try:
                runs[key] = _read(file, name, problems)
            except Odd as error:
                problems.append((name, str(error)))
    kept: dict[Any, Run] = {}
    for run in sorted(runs.values(), key=lambda r: natural(r.name)):
        same = (run.method, run.scenario, run.changed, run.protocol, run.seed)
        if same in kept:
            problems.append((run.name, f"repeats {kept[same].name}, which is the one that counts"))
        else:
            kept[same] = run
    return Found(tuple(kept.values()), tuple(problems))


def natural(text: str) -> list[tuple[int, int, str]]:
    """A key that sorts seed10 behind seed9."""
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"(\d+)", text) if p]


def _candidates(path: Path, problems: list[tuple[str, str]]) -> Iterator[tuple[Path, str]]:
    """Files that may be records, with their names."""
    top = path.resolve().name
    if path.is_file():
        inside = path.name == "summary.json"
        yield path, f"{path.resolve().parent.name}/{path.name}" if inside else path.name
        return
    if not path.is_dir():
        raise ValueError(f"{path} is not there; name run folders, folders of records or records")
    for place, folders, files in os.walk(path):
        folders.sort()
        here = Path(place)
        name = "/".join((top, *here.relative_to(path).parts))
        if "summary.json" in files:
            yield here / "summary.json", name
        elif "experiment.toml" in files:
            problems.append((name, "is not finished: it has no summary.json"))
        else:
            for file in sorted(files):
                if file.endswith(".json") and not file.endswith(".analysis.json") and not file.startswith("."):
                    yield here / file, f"{name}/{file}"


def _read(file: Path, name: str, problems: list[tuple[str, str]]) -> Run:
    record = _mapping(_json(file), "the file")

    def part(what: str, read: Callable[[], T], otherwise: T) -> T:
        """A part that a record may lack, or that is left out, and said, if it is odd."""
        try:
            return read()
        except Odd as error:
            problems.append((name, f"{what} left out: {error}"))
            return otherwise

    if "format" not in record or "method" not in record:
        raise Odd("is no record of a run: it has no format and method")
    if record["format"] != 1:
        raise Odd(f"has format {_short(record['format'])}; this version reads format 1")
    experiment = present_spelling(_mapping(record.get("experiment"), "experiment"))
    method = _text(experiment.get("method"), "experiment.method").lower()
    settings = {k: _plain(v, k) for k, v in _mapping(record.get("settings"), "settings").items()}
    if old := outdated(method, settings):
        raise Odd(f"does not count: {old}")
    accuracy = _mapping(record.get("accuracy"), "accuracy")
    curve = _series(accuracy.get("rounds"), "accuracy.rounds", 0, 100)
    kind = METHODS.get(method)
    label, note = _text(record["method"], "method"), kind.note if kind else ""
    nothing: Sent = (None, (), 0)
    sent = part("bytes", lambda: _bytes(record.get("bytes"), len(curve)), nothing)
    in_folder = file.name == "summary.json"
    beside = file.with_name("analysis.json" if in_folder else f"{file.stem}.analysis.json")
    versions = record.get("versions")
    return Run(
        file=file,
        name=name,
        method=method,
        label=f"{label} ({note})" if note else label,
        family=_text(record.get("family"), "family"),
        data=_text(record.get("data"), "data"),
        skew=_text(record.get("skew"), "skew"),
        seed=int(_number(record.get("seed"), "seed", 0)),
        final=_number(accuracy.get("final"), "accuracy.final", 0, 100),
        best=_number(accuracy.get("best"), "accuracy.best", 0, 100),
        best_round=int(_number(accuracy.get("best_round"), "accuracy.best_round", 1)),
        curve=curve,
        experiment={k: _plain(v, k) for k, v in experiment.items() if k != "settings"},
        settings=settings,
        command=_text(record.get("command"), "command", 20_000),
        readings=part("readings", lambda: _readings(accuracy.get("readings", {})), {}),
        targets=part("targets", lambda: _series(accuracy.get("targets", []), "accuracy.targets", 0, 100), ()),
        tests=part("accuracies of clients", lambda: _tests(accuracy), {}),
        log=part("log", lambda: _log(record.get("log", {})), {}),
        counts=part("counts", lambda: _counts(record.get("counts", {})), ()),
        sent=sent[0],
        sent_rounds=sent[1],
        handed=sent[2],
        seconds=part("seconds", lambda: _number(record.get("seconds"), "seconds", 0), None),
        engine=_word(record.get("engine")),
        device=_word(record.get("device")),
        precision=_word(record.get("precision")),
        commit=_word(record.get("commit")),
        versions={str(k): _word(v) for k, v in versions.items()} if isinstance(versions, Mapping) else {},
        in_folder=in_folder,
        analysis=part(beside.name, lambda: _analysis(_json(beside)), None) if beside.is_file() else None,
    )


def _json(file: Path) -> Any:
    try:
        if file.stat().st_size > LARGEST:
            raise Odd(f"is larger than {LARGEST // 2**20} MB")
        return json.loads(file.read_bytes())
    except OSError as error:
        raise Odd(f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, Odd):
            raise
        raise Odd(f"is not valid JSON: {_short(error)}") from None


# ----------------------------------------------------------------------------------------------------------- checking


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Odd(f"{what} must be an object, got {_short(value)}")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise Odd(f"{what} must be a list, got {_short(value)}")
    return value


def _text(value: Any, what: str, longest: int = 200) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > longest:
        raise Odd(f"{what} must be a text of at most {longest} characters, got {_short(value)}")
    return value


def _word(value: Any) -> str:
    """A text for people that may be missing."""
    return _short(value) if isinstance(value, str) else ""


def _number(value: Any, what: str, low: float = -math.inf, high: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Odd(f"{what} must be a finite number, got {_short(value)}")
    if not low <= value <= high:
        raise Odd(f"{what} must be from {low:g} to {high:g}, got {_short(value)}")
    return value


def _plain(value: Any, what: str) -> Any:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and len(value) <= 200):
        return value
    return _number(value, what)


def _series(value: Any, what: str, low: float = -math.inf, high: float = math.inf) -> tuple[float | None, ...]:
    return tuple(None if v is None else _number(v, what, low, high) for v in _list(value, what))


def _readings(value: Any) -> dict[str, Scored]:
    """Not every method has them, nor have records from before they were stored."""
    found = {}
    for name, one in _mapping(value, "accuracy.readings").items():
        what = f"accuracy.readings.{_short(_text(name, 'the name of a reading'))}"
        stored = _mapping(one, what)
        found[name] = Scored(
            final=_number(stored.get("final"), f"{what}.final", 0, 100),
            best=_number(stored.get("best"), f"{what}.best", 0, 100),
            best_round=int(_number(stored.get("best_round"), f"{what}.best_round", 1)),
            curve=_series(stored.get("rounds"), f"{what}.rounds", 0, 100),
        )
    return found


def _tests(accuracy: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Table II's accuracies; records from before it was stored have the two that are not about "unknown"."""
    stored = accuracy.get("table2")
    if stored is None:
        stored = {"local": accuracy.get("local", {}), "global": accuracy.get("clients", {})}
    return {
        test: {
            str(client): _number(v, f"{test} accuracy", 0, 100)
            for client, v in _mapping(values, test).items()
            if v is not None
        }
        for test, values in _mapping(stored, "accuracy.table2").items()
        if test in LOCAL_TESTS and values
    }


def _log(value: Any) -> dict[str, dict[str, tuple[float | None, ...]]]:
    return {
        _text(name, "a name in log"): {str(c): _series(v, name) for c, v in _mapping(clients, name).items()}
        for name, clients in _mapping(value, "log").items()
    }


def _counts(value: Any) -> tuple[tuple[int, ...], ...]:
    by_client = sorted(_mapping(value, "counts").items(), key=lambda item: natural(str(item[0])))
    rows = tuple(tuple(int(_number(n, "counts", 0)) for n in _list(row, "counts")) for _, row in by_client)
    if len({len(row) for row in rows}) > 1 or (rows and not rows[0]):
        raise Odd("counts must have one entry a class for every client")
    return rows


def _bytes(value: Any, rounds: int) -> Sent:
    stored = _mapping(value, "bytes")
    total = int(_number(stored.get("up"), "bytes.up", 0) + _number(stored.get("down"), "bytes.down", 0))
    handed = int(_number(stored.get("models", 0), "bytes.models", 0))
    if "rounds" not in stored:
        return total, (), handed
    up, down = (_list(_mapping(stored["rounds"], "bytes.rounds").get(w), f"bytes.rounds.{w}") for w in ("up", "down"))
    if not len(up) == len(down) == rounds:
        raise Odd(f"bytes.rounds must have {rounds} entries, got {len(up)} and {len(down)}")
    by_round = (int(_number(u, "bytes", 0) + _number(d, "bytes", 0)) for u, d in zip(up, down, strict=True))
    return total, tuple(by_round), handed


# ----------------------------------------------------------------------------------------------------------- analysis


def _analysis(value: Any) -> dict[str, Any]:
    """What was looked at in the trained models; each of the three parts may be missing."""
    stored = _mapping(value, "analysis")
    read = {"margins": _margins, "embeddings": _embeddings, "example": _example}
    return {name: check(_mapping(stored[name], name)) for name, check in read.items() if stored.get(name) is not None}


def _margins(value: Mapping[str, Any]) -> dict[str, Any]:
    edges = [_number(e, "an edge") for e in _list(value.get("edges"), "edges")]
    models = []
    for m in _list(value.get("models"), "models"):
        counts = [_number(n, "a count", 0) for n in _list(_mapping(m, "a model").get("counts"), "counts")]
        if len(counts) != len(edges) - 1:
            raise Odd(f"margins need a count between two edges, got {len(counts)} for {len(edges)} edges")
        models.append({"name": _text(m.get("name"), "name"), "mean": _number(m.get("mean"), "mean"), "counts": counts})
    return {"edges": edges, "models": models}


def _embeddings(value: Mapping[str, Any]) -> dict[str, Any]:
    labels = [int(_number(n, "a label", 0)) for n in _list(value.get("labels"), "labels")]
    panels = []
    for p in _list(value.get("panels"), "panels"):
        points = [
            [_number(c, "a coordinate") for c in _list(xy, "a point")[:2]]
            for xy in _list(_mapping(p, "a panel").get("points"), "points")
        ]
        if len(points) != len(labels) or any(len(xy) != 2 for xy in points):
            raise Odd(f"a panel needs {len(labels)} points of two coordinates")
        client = p.get("client")
        panels.append(
            {
                "name": _text(p.get("name"), "name"),
                "client": None if client is None else int(_number(client, "client", 0)),
                "points": points,
                "purity": _number(p.get("purity"), "purity", 0, 1),
            }
        )
    return {"samples": len(labels), "labels": labels, "panels": panels}


def _example(value: Mapping[str, Any]) -> dict[str, Any]:
    image = _text(value.get("image"), "image", 2_000_000)
    if not re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/]+=*", image) or not _drawable(image):
        raise Odd("the example's image must be a small PNG as a data URL")
    classes = [_text(str(c), "a class") for c in _list(value.get("classes"), "classes")]

    def shares(stored: Any, length: int) -> list[float]:
        found = [_number(p, "a probability", 0, 1.001) for p in _list(stored, "probabilities")]
        if len(found) != length:
            raise Odd(f"the example needs {length} probabilities, got {len(found)}")
        return found

    clients = [
        {
            "client": int(_number(_mapping(c, "a client").get("client"), "client", 0)),
            "unknown": shares(c.get("unknown"), len(classes) + 1),
            "plain": shares(c.get("plain"), len(classes)),
            "weight": _number(c.get("weight"), "weight", 0),
        }
        for c in _list(value.get("clients"), "clients")
    ]
    both = _mapping(value.get("aggregates"), "aggregates")
    label, right = value.get("label"), value.get("accuracy")
    return {
        "public": int(_number(value.get("public"), "public", 0)),
        "image": image,
        "label": None if label is None else int(_number(label, "label", 0, len(classes) - 1)),
        "classes": classes,
        "clients": clients,
        "aggregates": {name: shares(both.get(name), len(classes)) for name in ("unknown", "plain")},
        "accuracy": {n: _number(_mapping(right, "accuracy").get(n), "accuracy", 0, 100) for n in ("unknown", "plain")}
        if right is not None
        else None,
    }


def _drawable(address: str) -> bool:
    """Whether it is a picture of a size that a data set may have."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])), formats=["PNG"]) as image:
            image.load()
            return max(image.size) <= 1024
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False
