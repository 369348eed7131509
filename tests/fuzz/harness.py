"""Run targets on generated inputs, in forked workers under a watchdog.

An input is derived from (target, seed, index) and nothing else, so ``make fuzz TARGET=cifar SEED=0 INDEX=123`` makes it
again. A worker takes a chunk of inputs and notes in shared memory which one it is at and since when. The parent kills
a worker that is at one input for too long; a worker that dies, or whose memory has grown too much, has a finding at
that input, and the rest of its chunk goes to another one.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedcc.errors import error_line

Case = Mapping[str, bytes | None]
"""An input: files by name (None: not there), or other named bytes."""

SECONDS = 10.0  # of a processor for one input
SLEEP = 6  # times as long if it sleeps
GROWTH = 2**30  # bytes of memory
CHUNK = 250  # inputs for one worker process
EXAMPLES = 3  # inputs kept of each finding


class Wrong(Exception):
    """What a target says about an input that was neither refused as documented nor accepted unharmed."""


class Target(ABC):
    """Something that reads what others wrote."""

    name: str
    refusals: tuple[type[BaseException], ...] = (ValueError,)  # how it may refuse
    fast: bool = True  # takes a part of what is left after every target has its share

    def prepare(self, folder: Path) -> None:  # noqa: B027
        """Make valid examples; once, before workers are forked."""

    def begin(self, folder: Path) -> None:  # noqa: B027
        """Set up a worker's own, empty folder."""

    @abstractmethod
    def make(self, rng: random.Random) -> Case:
        """An input."""

    @abstractmethod
    def check(self, case: Case, folder: Path) -> bool:
        """Read it: True if it is accepted, False (or one of the refusals) if not; :class:`Wrong` if that is a fault."""

    def case(self, seed: int, index: int) -> Case:
        return self.make(random.Random(f"{self.name}/{seed}/{index}"))

    def fault(self, error: BaseException, folder: Path) -> str:
        """What is wrong with an exception, in words; empty for a refusal as it should be."""
        if isinstance(error, Wrong):
            return str(error)
        if isinstance(error, MemoryError | RecursionError | UnicodeError | json.JSONDecodeError):
            return f"{type(error).__name__} came through"
        if not isinstance(error, self.refusals):
            return f"{type(error).__name__} is not among the refusals"
        text = error_line(error)
        if not str(error).strip() or "this should not happen" in text:
            return "the refusal says nothing"
        if str(folder) not in text and self.names_files:
            return "the refusal names no file"
        return ""

    names_files: bool = True


@dataclass
class Finding:
    """One kind of fault of one target, at the inputs where it was met."""

    target: str
    what: str  # how it shows
    where: str  # the last place in the project
    details: str  # message and traceback of the first
    indices: list[int]
    count: int = 1

    @property
    def key(self) -> tuple[str, str, str]:
        return self.target, self.what, self.where


@dataclass
class Tally:
    """What became of one target's inputs."""

    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0  # of a processor
    findings: dict[tuple[str, str, str], Finding] = field(default_factory=dict)

    def add(self, finding: Finding) -> bool:
        """Count it; whether it is a new one."""
        known = self.findings.setdefault(finding.key, finding)
        if known is not finding:
            known.count += finding.count
            known.indices += finding.indices[: max(0, EXAMPLES - len(known.indices))]
        return known is finding


@dataclass
class Limits:
    """When an input took too much."""

    seconds: float = SECONDS
    growth: int = GROWTH


# ------------------------------------------------------------------------------------------------------------- a worker


@dataclass(frozen=True)
class Chunk:
    """Inputs of one target, ``first`` up to but without ``last``."""

    target: Target
    first: int
    last: int


class Slot:
    """What a worker and its parent share: the input it is at, since when, and how many it accepted."""

    layout = struct.Struct("qddqq")

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, self.layout.size)

    def note(self, index: int, accepted: int, done: int) -> None:
        self.layout.pack_into(self.memory, 0, index, time.monotonic(), time.process_time(), accepted, done)

    def read(self) -> tuple[int, float, float, int, int]:
        index, since, spent, accepted, done = self.layout.unpack_from(self.memory, 0)
        return index, since, spent, accepted, done


def attempt(target: Target, seed: int, index: int, folder: Path) -> tuple[bool, Finding | None]:
    """One input: whether it was accepted, and what is wrong."""
    try:
        case = target.case(seed, index)
    except Exception as error:
        return False, Finding(target.name, "no input was made", type(error).__name__, _details(error), [index])
    try:
        return target.check(case, folder), None
    except Exception as error:
        if fault := target.fault(error, folder):
            return False, Finding(target.name, fault, _where(error), _details(error), [index])
        return False, None


def _where(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/fedcc/" in f.filename]
    last = frames[-1] if frames else None
    return f"{last.filename.rpartition('/fedcc/')[2]}:{last.name}" if last else type(error).__name__


def _details(error: BaseException) -> str:
    lines = traceback.format_exception(error)
    text = "".join(line if len(line) < 4000 else f"{line[:2000]} ... {line[-1000:]}" for line in lines[-40:])
    return text.encode("utf-8", "backslashreplace").decode()


def work(chunk: Chunk, seed: int, slot: Slot, folder: Path, notes: Path, limits: Limits) -> int:
    """A worker: its findings go to ``notes``, the place where it hangs or crashes to ``notes`` + ``.trace``."""
    trace = notes.with_suffix(".trace").open("w")
    faulthandler.enable(trace)
    faulthandler.register(signal.SIGUSR1, trace, all_threads=False)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    before = _held()
    used = _status("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (used + 2 * limits.growth, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    accepted, findings = 0, Tally()
    chunk.target.begin(folder)
    for index in range(chunk.first, chunk.last):
        slot.note(index, accepted, index - chunk.first)
        taken, finding = attempt(chunk.target, seed, index, folder)
        accepted += taken
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        if grown > limits.growth:
            finding = Finding(chunk.target.name, f"memory grew by over {limits.growth / 2**30:g} GiB", "", "", [index])
        if finding is not None:
            findings.add(finding)
            notes.write_text(json.dumps([asdict(f) for f in findings.findings.values()]))
        slot.note(index, accepted, index + 1 - chunk.first)
        if grown > limits.growth:
            return 3  # the peak stays: another worker takes the rest
    return 0


def _held() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


# ----------------------------------------------------------------------------------------------------------- the parent


class Worker:
    """A forked process at a chunk."""

    def __init__(self, chunk: Chunk, seed: int, slot: Slot, place: Path, limits: Limits):
        self.chunk, self.slot, self.seconds = chunk, slot, 0.0
        self.folder, self.notes = place / "files", place / "notes.json"
        shutil.rmtree(place, ignore_errors=True)
        self.folder.mkdir(parents=True)
        slot.layout.pack_into(slot.memory, 0, chunk.first, time.monotonic(), 0.0, 0, 0)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                code = work(chunk, seed, slot, self.folder, self.notes, limits)
            except BaseException:
                self.notes.with_suffix(".trace").write_text(traceback.format_exc())
            finally:
                os._exit(code)

    def late(self, seconds: float) -> bool:
        """Whether its input has taken too long: by its own clock or, if it sleeps, much longer.

        One that waits for a processor, or was stopped, is not late.
        """
        _, since, before, _, _ = self.slot.read()
        waited = time.monotonic() - since
        if waited <= seconds:
            return False
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return spent - before > seconds or (waited > SLEEP * seconds and fields[0] in "SD")

    def kill(self) -> None:
        """Have it say where it is, then end it."""
        for number, pause in ((signal.SIGUSR1, 0.2), (signal.SIGKILL, 0.0)):
            os.kill(self.pid, number)
            time.sleep(pause)

    def ended(self) -> int | None:
        pid, status, used = os.wait4(self.pid, os.WNOHANG)
        self.seconds = used.ru_utime + used.ru_stime
        return os.waitstatus_to_exitcode(status) if pid else None

    def findings(self) -> list[Finding]:
        return [Finding(**f) for f in json.loads(self.notes.read_text())] if self.notes.exists() else []

    def trace(self) -> str:
        path = self.notes.with_suffix(".trace")
        return path.read_text(errors="replace") if path.exists() else ""


Told = Callable[[str, Tally], None]


def fuzz(
    plan: Mapping[Target, Iterable[int] | int],
    seed: int,
    room: Path,
    *,
    jobs: int = 2,
    limits: Limits | None = None,
    progress: Told | None = None,
    found: Callable[[Finding], None] | None = None,
) -> dict[str, Tally]:
    """Each target's inputs (a number of them, or their indices); targets are prepared already."""
    limits = limits or Limits()
    todo: deque[Chunk] = deque()
    for target, inputs in plan.items():
        spans = [(i, i + 1) for i in inputs] if not isinstance(inputs, int) else _spans(inputs)
        todo.extend(Chunk(target, *span) for span in spans)
    tallies = {target.name: Tally() for target in plan}
    slots = deque(range(jobs))
    shared = [Slot() for _ in range(jobs)]
    busy: dict[int, Worker] = {}
    killed: set[int] = set()
    try:
        while todo or busy:
            while todo and slots:
                n = slots.popleft()
                busy[n] = Worker(todo.popleft(), seed, shared[n], room / f"worker-{n}", limits)
            for n, worker in [*busy.items()]:
                code = worker.ended()
                if code is None:
                    if worker.late(limits.seconds) and n not in killed:
                        killed.add(n)
                        worker.kill()
                    continue
                del busy[n]
                slots.append(n)
                name = worker.chunk.target.name
                tally, late = tallies[name], n in killed
                killed.discard(n)
                at, _, _, accepted, done = worker.slot.read()
                tally.accepted += accepted
                tally.seconds += worker.seconds
                findings = worker.findings()
                if code not in (0, 3):
                    what = f"took over {limits.seconds:g} s" if late else _death(code)
                    findings.append(Finding(name, what, _innermost(worker.trace()), worker.trace(), [at]))
                    done += 1
                tally.inputs += done
                if (rest := worker.chunk.first + done) < worker.chunk.last:
                    todo.append(Chunk(worker.chunk.target, rest, worker.chunk.last))
                for finding in findings:
                    if tally.add(finding) and found:
                        found(finding)
                if progress:
                    progress(name, tally)
            time.sleep(0.01)
    finally:
        for worker in busy.values():
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)
    return tallies


def _spans(inputs: int) -> list[tuple[int, int]]:
    return [(first, min(first + CHUNK, inputs)) for first in range(0, inputs, CHUNK)]


def _death(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"the worker ended with {code}"


def _innermost(trace: str) -> str:
    """The place in the project of a trace that faulthandler wrote, innermost first."""
    for line in trace.splitlines():
        if "/fedcc/" in line:
            file, _, rest = line.rpartition("/fedcc/")[2].partition('"')
            return f"{file}:{rest.rpartition(' in ')[2]}"
    return ""


def planned(targets: Sequence[Target], total: int) -> dict[Target, int]:
    """A 25th of the inputs for each, so that a million leaves 40,000; the fast ones share the rest."""
    each = max(1, total // 25) if len(targets) > 1 else total
    rest = max(0, total - each * len(targets))
    eager = [t for t in targets if t.fast] or list(targets)
    return {t: each + (rest // len(eager) if t in eager else 0) for t in targets}


def save(finding: Finding, target: Target, seed: int, place: Path) -> Path:
    """Keep a finding: its inputs and what it says."""
    first = finding.indices[0]
    folder = place / f"{finding.target}-{seed}-{first}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    about = f"{finding.what}\n{finding.where}\nmake fuzz TARGET={finding.target} SEED={seed} INDEX={first}\n"
    (folder / "finding.txt").write_text(f"{about}\n{finding.details}")
    try:
        case = target.case(seed, first)
    except Exception:  # which is the finding
        case = {}
    for name, content in case.items():
        if content is not None:
            file = folder / "input" / name.strip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    return folder


def table(tallies: Mapping[str, Tally]) -> list[dict[str, Any]]:
    """The figures."""
    return [
        {
            "target": name,
            "inputs": t.inputs,
            "accepted": t.accepted,
            "refused": t.inputs - t.accepted,
            "seconds": round(t.seconds, 1),
            "rate": round(t.inputs / t.seconds) if t.seconds else 0,
            "findings": len(t.findings),
        }
        for name, t in tallies.items()
    ]
