"""What a table consists of: cells with mean and spread, rows of a method, and the table itself."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedcc.methods import METHODS
from fedcc.report.paper import Printed, Scenario
from fedcc.report.records import RunRecord

Accuracy = Literal["final", "best"]
ACCURACIES: tuple[Accuracy, ...] = ("final", "best")


@dataclass(frozen=True)
class Value:
    """The mean of some numbers, and the sample standard deviation where there are two or more."""

    mean: float
    spread: float | None
    n: int

    @staticmethod
    def of(numbers: Iterable[float]) -> Value | None:
        if not (values := list(numbers)):
            return None
        return Value(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))

    def __str__(self) -> str:
        return f"{self.mean:.1f}" + (f" ±{self.spread:.1f}" if self.spread is not None else "")


@dataclass(frozen=True)
class Cell:
    """One method in one scenario: a run per seed, and the paper's number."""

    runs: tuple[RunRecord, ...] = ()
    printed: Printed | None = None
    marks: Mapping[Accuracy, int] = field(default_factory=dict)  # 1 the best of its column, 2 the second best

    @property
    def final(self) -> Value | None:
        return self.value("final")

    def value(self, accuracy: Accuracy) -> Value | None:
        return Value.of(self.by_seed(accuracy).values())

    def by_seed(self, accuracy: Accuracy) -> dict[int, float]:
        return {r.seed: getattr(r, accuracy) for r in self.runs}

    def reread(self, name: str) -> dict[int, float]:
        """By seed, the final accuracy of another reading of the same models, if the run recorded it."""
        return {r.seed: r.readings[name].final for r in self.runs if name in r.readings}


@dataclass(frozen=True)
class MethodRow:
    """A method, or a variant of one, over the scenarios."""

    method: str
    label: str
    extra: str  # how it differs from the method with its defaults
    cells: Mapping[Scenario, Cell]

    @property
    def title(self) -> str:
        return f"{self.label}, {self.extra}" if self.extra else self.label

    @property
    def name(self) -> tuple[str, str]:
        """The label in two: the method, and the rest in smaller type."""
        name, _, note = self.label.partition(" (")
        return name, ", ".join(filter(None, (note.rstrip(")"), self.extra)))

    @property
    def bound(self) -> bool:
        """Shares nothing or everything, so it does not compete."""
        kind = METHODS.get(self.method)
        return kind is not None and kind.family == "bound"


@dataclass(frozen=True)
class Table:
    """Methods by scenarios, all of one protocol."""

    slug: str  # names its files and its place on a page
    title: str
    protocol: str  # in words
    scenarios: tuple[Scenario, ...]
    rows: tuple[MethodRow, ...]
    of_paper: bool  # the paper's protocol on the paper's data sets: Table I
    with_paper: bool  # the paper's numbers can be compared with these
    variants: bool = False

    @property
    def runs(self) -> list[RunRecord]:
        return [r for row in self.rows for cell in row.cells.values() for r in cell.runs]

    @property
    def data(self) -> list[str]:
        return list(dict.fromkeys(d for d, _ in self.scenarios))

    def scenarios_of(self, data: str) -> tuple[Scenario, ...]:
        return tuple(s for s in self.scenarios if s[0] == data)

    def has_runs(self, data: str) -> bool:
        return any(row.cells[s].runs for row in self.rows for s in self.scenarios_of(data))

    @property
    def seeds(self) -> str:
        """How many seeds its cells have: ``1``, or ``1 to 3``."""
        numbers = {len(c.runs) for row in self.rows for c in row.cells.values() if c.runs}
        return str(min(numbers)) if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"
