"""Checkpoints: a federation between two rounds as a file, from which a run resumes bit for bit."""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcc.core.digests import DamagedFile
from fedcc.core.options import check_value
from fedcc.engine import choose_device
from fedcc.experiments.experiment import Experiment, first_difference
from fedcc.experiments.options import DEFAULTS, current_values
from fedcc.experiments.packing import from_bytes, read_header, to_bytes, unreadable_refused
from fedcc.experiments.record import Record, earlier_round
from fedcc.experiments.result import Result
from fedcc.experiments.round_files import RoundFiles
from fedcc.experiments.rounds import FinishedRound, Observer, Pause
from fedcc.experiments.store import RunFolder, RunFolderError, lines
from fedcc.federate import Snapshot
from fedcc.federation import Federation
from fedcc.methods import recorded_settings

FORMAT = 1
KEPT = 2
SHARE = 0.05  # of a run's time, where the interval is left to the run


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Where an unfinished run resumes, and what it has recorded so far."""

    snapshot: Snapshot
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0  # that the run has taken
    size: int = 0  # bytes of the file


class Checkpoints(Observer):
    """The checkpoints in a run's folder: read to resume it, written as an observer.

    One is written after every ``every`` rounds (0: never), or if that is None, whenever it is cheap enough. The last
    ``keep`` of a finished run stay, the very last one only if the run can be extended from it.
    """

    def __init__(
        self, folder: Path, experiment: Experiment, federation: Federation, every: int | None = None, keep: int = 0
    ):
        self.folder, self.method, self.federation = folder, experiment.build_method(), federation
        self.rounds, self.evaluate_every = experiment.training.rounds, experiment.measurement.evaluate_every
        self.device = choose_device(experiment.machine.device)
        self.every, self.keep, self.files = every, keep, RoundFiles(folder, "checkpoint")
        self.identity = json.loads(json.dumps({"experiment": experiment.values(), **federation.digests}))
        self.size = 0  # bytes of the latest
        self.cost = self.last_time = 0.0  # seconds that the latest took, and when it was written
        self.begin(None)

    def begin(self, start: Checkpoint | None) -> None:
        """Begin to observe a run, at a checkpoint if it is resumed; later ones are removed."""
        self.records = list(start.records) if start else []
        self.start_time = time.perf_counter() - (start.seconds if start else 0.0)
        if start:
            self.remove(after=start.snapshot.t)
            self.size = start.size

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken so far."""
        return time.perf_counter() - self.start_time

    def round(self, done: FinishedRound) -> None:
        self.records.append(done.record)
        due = self.affordable() if self.every is None else self.every > 0 and done.t % self.every == 0
        if self.keep and self.every != 0 and (done.is_last or done.request) and not self.method.extension_reason():
            due = True  # the run can be extended from here
        if due or (isinstance(done.request, Pause) and not done.is_last):
            self.write(done.snapshot())

    def end(self, result: Result | None) -> None:
        """Remove the checkpoints that are not to be kept: a finished run no longer needs them."""
        if result is not None:
            self.remove(but=self.kept())

    def kept(self) -> list[Path]:
        """Those that stay when the run has finished."""
        if not self.keep or (self.keep == 1 and self.method.extension_reason()):
            return []
        return self.paths()[-self.keep :]

    def affordable(self) -> bool:
        """Whether another checkpoint as costly as the latest would stay within its share of the time since then."""
        return self.cost <= SHARE * (time.perf_counter() - self.last_time)

    def write(self, snapshot: Snapshot) -> None:
        """Write one, whole even if a signal asks the program to end, and remove those before the last two."""
        start_time = time.perf_counter()
        records = base64.b64encode(zlib.compress(lines(self.records))).decode()
        about = {"format": FORMAT, "seconds": self.seconds, "records": records, **self.identity}
        content = to_bytes(snapshot, self.method, about)
        self.files.write(snapshot.t, content, obsolete=lambda rounds: rounds[:-KEPT])
        self.size, self.last_time = len(content), time.perf_counter()
        self.cost = self.last_time - start_time

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The latest that can be used, and what is wrong with newer ones and with ``metrics.jsonl``."""
        problems: list[str] = []
        for path in reversed(self.paths()):
            try:
                checkpoint = self.read(path, problems)
            except DamagedFile as error:
                problems.append(f"{path} is not used: {error}")
                continue
            self.size = checkpoint.size
            return checkpoint, problems
        return None, problems

    def read(self, path: Path, problems: list[str]) -> Checkpoint:
        content = self.files.read(path)
        with unreadable_refused(path):
            about, tree = read_header(content)
            if about.get("format") != FORMAT:
                raise RunFolderError(f"{path} has format {about.get('format')}, this fedcc reads format {FORMAT}")
            options = about["experiment"] = {**DEFAULTS, **current_values(about["experiment"])}
            settings, reason = recorded_settings(options["method"], options["settings"], options.get("version"))
            if reason:
                raise RunFolderError(f"{path} is a checkpoint of another experiment ({reason})")
            options |= {"settings": json.loads(json.dumps(settings)), "version": self.method.version}
            requested, reason = options["rounds"], self.method.extension_reason()
            if not reason:
                options["rounds"] = self.rounds  # rounds up to a checkpoint do not depend on how many follow
            if difference := first_difference({name: about[name] for name in self.identity}, self.identity):
                text = "{} is {}, here {}".format(*difference)
                raise RunFolderError(f"{path} is a checkpoint of another experiment ({text})")
            check_value("seconds", about["seconds"], float, 0)
            models = self.federation.models or None
            snapshot = from_bytes(Snapshot, content, tree, self.method, models=models, device=self.device)
            check_value("t", snapshot.t, int, 1)
            if requested != self.rounds and snapshot.t >= self.rounds:
                raise RunFolderError(
                    f"{path} is a checkpoint of round {snapshot.t}; rounds must be more, got {self.rounds}"
                )
            records = self.read_records(path, about, snapshot.t, problems)
            if snapshot.t == requested < self.rounds:
                records[-1] = self.not_the_last(records[-1])
        return Checkpoint(snapshot, records, about["seconds"], len(content))

    def read_records(self, path: Path, about: Mapping[str, Any], rounds: int, problems: list[str]) -> list[Record]:
        """The records up to a checkpoint, from itself; older versions left them in ``metrics.jsonl``."""
        metrics = self.folder / "metrics.jsonl"
        if "records" not in about:
            records = RunFolder(self.folder).metrics(about["offset"])
            if [r.get("round") for r in records] != list(range(1, rounds + 1)):
                raise DamagedFile(f"metrics.jsonl lacks some of its {rounds} rounds")
            problems.append(f"{path} was written by an older version, without its records: {metrics} is not checked")
            return records
        content = zlib.decompress(base64.b64decode(about["records"]))
        records = [json.loads(line) for line in content.splitlines()]
        if [r["round"] for r in records] != list(range(1, rounds + 1)):
            raise ValueError(f"it lacks some of its {rounds} rounds")
        if not metrics.exists() or metrics.read_bytes()[: len(content)] != content:
            problems.append(f"{metrics} does not match what the run wrote and is rewritten from {path.name}")
        return records

    def not_the_last(self, record: Record) -> Record:
        """The record of a run's last round as it is in a run of more rounds."""
        public = self.federation.public
        extra = self.method.last_readings(public).keys() - self.method.readings(public).keys()
        return earlier_round(record, evaluated=record["round"] % self.evaluate_every == 0, extra=extra)

    def paths(self) -> list[Path]:
        """The files, the oldest first."""
        return list(self.files.paths().values())

    def remove(self, after: int = 0, but: Sequence[Path] = ()) -> None:
        """Remove those of later rounds but these."""
        self.files.remove(t for t, path in self.files.paths().items() if t > after and path not in but)
