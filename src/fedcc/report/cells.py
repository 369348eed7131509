"""What a table consists of: cells with mean and spread, rows of a method, and the table itself."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedcc.methods import BEYOND, METHODS
from fedcc.report.paper import Scenario, Value
from fedcc.report.records import Changes, RunRecord

Accuracy = Literal["final", "best"]
ACCURACIES: tuple[Accuracy, ...] = ("final", "best")

TESTS = {"local": "local", "global": "global", "valid": "unknown valid", "valid_labels": "unknown valid (labels)"}
"""Table II's columns: test data like the client's own; all test data; the same where "unknown" counts as right for
classes outside the client's majority set, or outside the classes that it holds."""


@dataclass(frozen=True)
class Cell:
    """One method in one scenario: a run per seed, and the paper's numbers."""

    runs: tuple[RunRecord, ...] = ()
    printed: Mapping[str, Value] = field(default_factory=dict)  # by accuracy, or by test of Table II
    marks: Mapping[Accuracy, int] = field(default_factory=dict)  # 1 the best of its column, 2 the second best

    @property
    def final(self) -> Value | None:
        return self.value("final")

    @property
    def without_first_seed(self) -> Value | None:
        """The final accuracy without seed 0, if at least two other seeds have run too."""
        others = [r.final for r in self.runs if r.seed]
        return Value.of(others) if 1 < len(others) < len(self.runs) else None

    def value(self, accuracy: Accuracy) -> Value | None:
        return Value.of(self.by_seed(accuracy).values())

    def by_seed(self, accuracy: Accuracy) -> dict[int, float]:
        return {r.seed: getattr(r, accuracy) for r in self.runs}

    def reread(self, name: str) -> dict[int, float]:
        """By seed, the final accuracy of another reading of the same models, if the run recorded it."""
        return {r.seed: r.readings[name].final for r in self.runs if name in r.readings}

    def tested(self, test: str) -> list[RunRecord]:
        """The runs that have this test of the clients' own models."""
        return [r for r in self.runs if r.own_accuracies(test)]

    def own(self, test: str) -> Value | None:
        """The clients' own models after their last local training; the spread over clients is averaged over seeds."""
        by_run = [r.own_accuracies(test) for r in self.tested(test)]
        means = Value.of(map(statistics.fmean, by_run))
        over_clients = Value.of(statistics.stdev(values) for values in by_run if len(values) > 1)
        return means and Value(means.mean, over_clients and over_clients.mean, means.spread)


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
        if self.method in METHODS:
            return METHODS[self.method].family == "bound"
        return any(run.family == "bound" for cell in self.cells.values() for run in cell.runs)

    @property
    def beyond(self) -> bool:
        """A method that the paper leaves out."""
        return METHODS.get(self.method) in BEYOND


Rows = list[tuple[MethodRow, tuple[RunRecord, ...]]]  # of one scenario


@dataclass(frozen=True)
class Table:
    """Methods by scenarios, all of one protocol."""

    topic: str  # "paper", "beyond" (methods that the paper leaves out, next to its own) or a data set
    changed: Changes  # the protocol, where it is not the data sets' own
    slug: str  # names its files and its place on a page
    title: str
    protocol: str  # in words
    scenarios: tuple[Scenario, ...]
    rows: tuple[MethodRow, ...]
    of_paper: bool  # the paper's protocol on the paper's data sets: Table I
    with_paper: bool  # the paper's numbers can be compared with these
    variants: bool = False
    about: str = ""  # what it shows, if that is not the methods' accuracies

    @property
    def beyond(self) -> bool:
        return self.topic == "beyond"

    @property
    def runs(self) -> list[RunRecord]:
        return [r for row in self.rows for cell in row.cells.values() for r in cell.runs]

    @property
    def new_rows(self) -> list[MethodRow]:
        """The rows that another table does not have too, as a reference."""
        rows = [row for row in self.rows if not self.variants or row.extra]
        return [row for row in rows if not self.beyond or row.beyond]

    @property
    def data(self) -> list[str]:
        return list(dict.fromkeys(d for d, _ in self.scenarios))

    def scenarios_of(self, data: str) -> tuple[Scenario, ...]:
        return tuple(s for s in self.scenarios if s[0] == data)

    def rows_with_runs(self, scenario: Scenario) -> Rows:
        return [(row, row.cells[scenario].runs) for row in self.rows if row.cells[scenario].runs]

    def has_runs(self, data: str) -> bool:
        return any(map(self.rows_with_runs, self.scenarios_of(data)))

    @property
    def seeds(self) -> str:
        """How many seeds its cells have: ``1``, or ``1 (118 cells), 3 (1 cell)``."""
        numbers = Counter(len(c.runs) for row in self.rows for c in row.cells.values() if c.runs)
        if len(numbers) == 1:
            return str(*numbers)
        return ", ".join(f"{n} ({cells} {'cell' if cells == 1 else 'cells'})" for n, cells in sorted(numbers.items()))
