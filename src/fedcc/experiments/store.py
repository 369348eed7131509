"""The run folder, written during the run: whole files, and one line a round that is there or not, never half."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcc.code import OWN, code_changes, is_reference
from fedcc.core.digests import BESIDE, DIGEST, UNCHECKED, DamagedFile, check_files, file_digest, read_json, write_json
from fedcc.core.files import is_temporary, make_folder, uninterrupted, write_whole
from fedcc.core.naming import shortened
from fedcc.core.options import check_value
from fedcc.data.partition import Partition
from fedcc.experiments.environment import environment
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.record import Record
from fedcc.experiments.toml import load

REMAINS = ("metrics.jsonl", "environment.json", "partition.npz")  # what a process killed at the start may leave
RESULTS = ("analysis.json", "summary.json", "models.json", "models.safetensors", "tracking.json")
FILES = (*RESULTS, *REMAINS, "experiment.toml")
LOCK = ".lock"
LONGEST = 3_900  # bytes of a run folder's path: systems allow 4,096, with the names of its files
CHECKPOINT = r"checkpoint-\d+-[0-9a-f]+\.safetensors"


class RunFolderError(ValueError):
    """A folder that cannot take this run."""


class Unfinished(RunFolderError):
    """A folder that already holds this run, unfinished."""


class InUse(RunFolderError):
    """A folder in which another process runs."""


class RunFolder:
    """One run's files; docs/run-folder.md says what each holds."""

    def __init__(self, path: Path):
        self.path = path
        self.digests: dict[str, str] = {}  # of the files that describe the run, once it has begun

    def check(self, experiment: Experiment, overwrite: bool = False) -> None:
        """Refuse a folder that cannot take this run; nothing is changed."""
        if len(os.fsencode(self.path.absolute())) > LONGEST:
            raise RunFolderError(f"--out must be at most {LONGEST:,} bytes long, got {shortened(str(self.path))}")
        for path in (self.path, *self.path.parents):
            if path.exists() and not path.is_dir():
                raise RunFolderError(f"{path} is a file; --out must name a folder")
        names = {p.name for p in self.path.iterdir()} if self.path.is_dir() else set()
        if "experiment.toml" not in names:
            foreign = sorted(name for name in names if name not in (*REMAINS, LOCK) and not is_temporary(name))
            if foreign:
                raise RunFolderError(f"{self.path} holds other files ({foreign[0]}); choose another --out")
        elif not overwrite:
            try:
                same = Experiment.read(self.path / "experiment.toml") == experiment
            except ValueError:
                same = False
            state = "finished" if "summary.json" in names else "unfinished"
            text = f"{self.path} holds {'this run already' if same else 'another run'} ({state})"
            if same and state == "unfinished":
                raise Unfinished(f"{text}; resume it with `{self.resume}`, or --overwrite it")
            raise RunFolderError(f"{text}; choose another --out, or --overwrite it")

    @property
    def resume(self) -> str:
        """The command that resumes its run, with the code of the user's own that it has to name."""
        words = ["fedcc", "resume", str(self.path)]
        with contextlib.suppress(ValueError):  # no file, or one that says itself what is wrong with it
            table = load(self.path / "experiment.toml")
            names = [table.get("method"), table.get("data"), *str(table.get("models", "")).split(",")]
            for name in dict.fromkeys(map(str.strip, map(str, names))):
                words += ["--code", name] if is_reference(name) and not name.startswith(OWN) else []
        return shlex.join(words)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from running in the folder during the block.

        The system releases the lock when its holder dies, however it dies; a lock file that is left means nothing.
        """
        from filelock import FileLock, Timeout

        new, path = _missing_folders(self.path), self.path / LOCK
        lock = FileLock(path)
        for attempt in range(10):
            try:
                make_folder(self.path)
                lock.acquire(timeout=0)
                break
            except FileNotFoundError:  # another process removed a folder that it had made and not used
                if attempt == 9:
                    raise
            except Timeout:
                holder = path.read_text().strip() if path.exists() else ""
                who = f"another process ({holder})" if holder else "another process"
                raise InUse(f"{self.path} is in use by {who}; wait for it, or choose another --out") from None
        try:
            with contextlib.suppress(OSError):  # the text is for people
                path.write_text(f"{os.getpid()} on {platform.node()}\n")
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()  # before the release: whoever waits for this file sees that it is gone
            lock.release()
            _remove_empty(new)

    def begin(self, experiment: Experiment, partition: Partition | None) -> None:
        """Make the folder of a new run, replacing what :meth:`check` let pass; all of it or nothing."""
        new = _missing_folders(self.path)
        try:
            make_folder(self.path)
            self.clear()
            text = experiment.toml().encode()
            self._describe(experiment, partition, hashlib.sha256(text).hexdigest())
            write_whole(self.path / "metrics.jsonl", b"")
            write_whole(self.path / "experiment.toml", text)  # last: it says that the run has begun
        except BaseException:
            with contextlib.suppress(OSError):
                self.clear()
                _remove_empty(new)
            raise

    def clear(self) -> None:
        """Remove a run's own files, ``experiment.toml`` last; others stay."""
        partial = [path for path in self.path.iterdir() if _is_partial(path.name)]
        for path in (*partial, *(self.path / name for name in FILES)):
            path.unlink(missing_ok=True)

    def check_description(self) -> list[str]:
        """Refuse an unfinished run whose description has changed since it began; notes on what cannot be checked."""
        path = self.path / "environment.json"
        if not path.exists():
            return [f"{path} is missing and is written again: damage to the files next to it cannot be detected"]
        about = read_json(path)
        check_files(path, about)
        missing = [self.path / name for name in about.get(BESIDE, {}) if not (self.path / name).exists()]
        notes = [] if DIGEST in about else [f"{path} {UNCHECKED}"]
        return notes + [f"{path} is missing and is written again" for path in missing]

    def reopen(self, experiment: Experiment) -> None:
        """Make the folder that of an unfinished run of more rounds; what is left can be resumed wherever it stops."""
        machine, text = self.path / "environment.json", experiment.toml().encode()
        about = read_json(machine) if machine.exists() else None
        with uninterrupted():
            for name in ("summary.json", "analysis.json", "models.json", "models.safetensors"):
                (self.path / name).unlink(missing_ok=True)
            machine.unlink(missing_ok=True)  # it holds the digest of the description, which changes now
            write_whole(self.path / "experiment.toml", text)
            if about is not None:
                digests = {**about.get(BESIDE, {}), "experiment.toml": hashlib.sha256(text).hexdigest()}
                write_json(machine, about | {BESIDE: digests})

    def code_changes(self) -> list[str]:
        """Notes on code of the user's own that has changed since the run began."""
        path = self.path / "environment.json"
        recorded = read_json(path).get("code", {}) if path.exists() else {}
        return code_changes(recorded, path) if isinstance(recorded, dict) else []

    def restore(self, experiment: Experiment, partition: Partition | None, records: Sequence[Record]) -> None:
        """Restore the files of an unfinished run to the state of a checkpoint."""
        for path in self.path.iterdir():
            if is_temporary(path.name):
                path.unlink()
        self._describe(experiment, partition, file_digest(self.path / "experiment.toml"))
        write_whole(self.path / "metrics.jsonl", lines(records))

    def _describe(self, experiment: Experiment, partition: Partition | None, digest: str) -> None:
        """Write ``partition.npz`` and ``environment.json``, unless they are there."""
        split, machine = self.path / "partition.npz", self.path / "environment.json"
        self.digests = {"experiment.toml": digest}
        missing = partition is not None and not split.exists()
        if partition is not None:
            if missing:
                partition.save(split)
            self.digests[split.name] = file_digest(split)
        if missing or not machine.exists():
            options = experiment.machine
            about = read_json(machine) if machine.exists() else environment(options.device, options.threads)
            code = experiment.code_digests()
            write_json(machine, ({"code": code} if code else {}) | about | {BESIDE: dict(self.digests)})
        self.digests[machine.name] = file_digest(machine)

    def finish(self, summary: Mapping[str, Any], records: Sequence[Record], checkpoints: Sequence[Path]) -> None:
        """Write the summary of the finished run, with the digests of its files and the checkpoints that stay."""
        digests = self.digests | {"metrics.jsonl": hashlib.sha256(lines(records)).hexdigest()}
        if (models := self.path / "models.json").exists():
            digests[models.name] = file_digest(models)
        names = [path.name for path in checkpoints]
        write_json(self.path / "summary.json", {**summary, "checkpoints": names, BESIDE: digests})

    def tidy(self) -> None:
        """Remove the files of a process that was killed between writing its summary and removing them."""
        if self._leftovers() or (self.path / LOCK).exists():
            with contextlib.suppress(InUse), self.lock():
                for path in self._leftovers():
                    path.unlink()

    def _leftovers(self) -> list[Path]:
        summary = self.summary()
        if summary is None or "checkpoints" not in summary:  # older ones do not say which checkpoints stay
            return []
        return [p for p in self.path.iterdir() if _is_partial(p.name) and p.name not in summary["checkpoints"]]

    def add(self, record: Record) -> None:
        """Append a round; if the line does not fit on the disk, none of it stays."""
        path, line = self.path / "metrics.jsonl", lines([record])
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            before = os.fstat(file).st_size
            try:
                while line:
                    line = line[os.write(file, line) :]
                os.fsync(file)
            except BaseException as error:
                if line or isinstance(error, OSError):  # a signal after the last byte undoes nothing
                    os.ftruncate(file, before)
                if isinstance(error, OSError):
                    error.filename = str(path)
                raise
        finally:
            os.close(file)

    def metrics(self, size: int | None = None) -> list[Record]:
        """The rounds so far, or in the first ``size`` bytes; a line that is still being written is left out."""
        path = self.path / "metrics.jsonl"
        whole = path.read_bytes()[:size].split(b"\n")[:-1] if path.exists() else []
        try:
            return [dict(json.loads(line)) for line in whole]
        except (ValueError, TypeError, RecursionError) as error:
            raise DamagedFile(f"{path} is damaged: each line must be a JSON object ({error})") from None

    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, or None; a folder whose files do not match its digests is refused."""
        path = self.path / "summary.json"
        if not path.exists():
            return None
        summary = read_json(path)
        for name in ("accuracy", "experiment"):
            if not isinstance(summary.get(name), dict):
                raise DamagedFile(f"{path} is damaged: it has no {name!r}")
        try:
            check_value(f"{path} is damaged: accuracy.final", summary["accuracy"].get("final"), float | None, 0, 100)
        except ValueError as error:
            raise DamagedFile(str(error)) from None
        check_files(path, summary)
        return summary


def lines(records: Sequence[Record]) -> bytes:
    """Rounds as ``metrics.jsonl`` holds them."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def _is_partial(name: str) -> bool:
    """Whether a file is a temporary one or a checkpoint."""
    return is_temporary(name) or re.fullmatch(CHECKPOINT, name) is not None


def _missing_folders(path: Path) -> list[Path]:
    return [p for p in (path, *path.parents) if not p.exists()]


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, the deepest first, as long as they are empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
