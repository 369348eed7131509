"""The logs of a federation: lines with date and level, as text or JSON, in files that are rotated."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol

from fedcc.core.naming import printable

Level = Literal["info", "warning", "error"]
LogFormat = Literal["text", "json"]
FORMAT_VARIABLE = "FEDCC_LOG_FORMAT"  # how the server's own app writes its log
LARGEST = 10 * 2**20  # bytes of a log before it is rotated
KEPT = 5  # rotated logs: NAME.1, the latest, to NAME.5
TEXT = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) (INFO|WARNING|ERROR) (.*)", re.DOTALL)


@dataclass(frozen=True)
class LogLine:
    """A line of a log.

    >>> line = LogLine("round 1 is done", time=datetime(2026, 3, 1, 9, 30))
    >>> line.text
    '2026-03-01 09:30:00.000 INFO round 1 is done'
    >>> LogLine.parse(line.text) == line == LogLine.parse(line.json)
    True
    """

    message: str
    level: Level = "info"
    time: datetime = field(default_factory=lambda: datetime.now().astimezone())

    @property
    def text(self) -> str:
        """One line, whatever the message has: it may hold words of others, and a terminal shows it."""
        time = f"{self.time:%Y-%m-%d %H:%M:%S}.{self.time.microsecond // 1000:03}"
        return f"{time} {self.level.upper()} {printable(self.message)}"

    @property
    def json(self) -> str:
        time = self.time.isoformat(timespec="milliseconds")
        return json.dumps({"time": time, "level": self.level, "message": self.message})

    def write(self, form: str) -> str:
        return self.json if form == "json" else self.text

    @staticmethod
    def parse(line: str, level: Level = "info") -> LogLine:
        """A line of either form; of any other, the line is the message, of this level, and the time is now."""
        if match := TEXT.fullmatch(line):
            written: Level = match[2].lower()  # type: ignore[assignment]
            return LogLine(match[3], written, datetime.fromisoformat(match[1]))
        try:
            entry = json.loads(line)
            return LogLine(entry["message"], entry["level"], datetime.fromisoformat(entry["time"]))
        except (ValueError, TypeError, KeyError):
            return LogLine(line, level)


class Say(Protocol):
    """How a program tells its user something."""

    def __call__(self, message: str, level: Level = "info") -> None: ...


class LogFile:
    """A file of log lines. Every line opens it again, so that it may be rotated or removed at any time."""

    def __init__(self, path: Path, form: str = "text"):
        self.path, self.form = path, form

    def say(self, message: str, level: Level = "info") -> None:
        rotate(self.path)
        with self.path.open("a") as file:
            file.write(LogLine(message, level).write(self.form) + "\n")


def console_log(echo: Callable[[str], None], form: LogFormat) -> Say:
    """A function that echoes a message as a line of a log; one that is a line already keeps its time and level."""
    return lambda message, level="info": echo(LogLine.parse(message, level).write(form))


def _older(path: Path, n: int) -> Path:
    return path.with_name(f"{path.name}.{n}")


def rotate(path: Path, *, copy: bool = False, largest: int = LARGEST, kept: int = KEPT) -> bool:
    """Move a log that has grown too large out of the way; the oldest is deleted.

    ``copy`` is for a log that a process keeps open: it is copied and emptied. The process must append to it.
    """
    if not path.exists() or path.stat().st_size < largest:
        return False
    for n in range(kept - 1, 0, -1):
        if _older(path, n).exists():
            _older(path, n).replace(_older(path, n + 1))
    if copy:
        shutil.copyfile(path, _older(path, 1))
        shutil.copymode(path, _older(path, 1))
        os.truncate(path, 0)
    else:
        path.replace(_older(path, 1))
    return True


class LogFollower:
    """Passes on the lines that are added to a file, which may be rotated in between.

    What others made it say cannot control a terminal.
    """

    def __init__(self, path: Path, on_line: Callable[[str], None]):
        self.path, self.on_line = path, on_line
        self.file = _number(path)
        self.position = path.stat().st_size if path.exists() else 0

    def poll(self) -> None:
        """Pass on those since the last call; one that is still being written is left for the next."""
        older = _older(self.path, 1)
        if (now := _number(self.path)) != self.file:  # renamed
            if self.file is not None and _number(older) == self.file:
                self._pass_on(older)
            self.file, self.position = now, 0
        elif now is not None and self.path.stat().st_size < self.position:  # copied and emptied
            if older.exists() and older.stat().st_size > self.position:
                self._pass_on(older)
            self.position = 0
        if now is not None:
            self._pass_on(self.path)

    def _pass_on(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self.position)
            lines = file.read().split(b"\n")[:-1]
        for line in lines:
            self.position += len(line) + 1
            self.on_line(printable(line.decode(errors="replace")))


def _number(path: Path) -> int | None:
    """A file's number, which a rename does not change."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
