"""Table II: the clients' own models."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from fedcc.methods import METHODS
from fedcc.report import paper
from fedcc.report.cells import MethodRow, Table, Value
from fedcc.report.paper import Printed, Scenario
from fedcc.report.records import RunRecord

TESTS = {
    "local": "local",
    "global": "global",
    "valid": "unknown valid",
    "valid_labels": "unknown valid (labels)",
}
"""Table II's columns: test data like the client's own; all test data; the same where "unknown" counts as right for
classes outside the client's majority set, or outside the classes that it holds."""


@dataclass(frozen=True)
class ClientValue:
    """The mean over clients and seeds, with a spread over each."""

    mean: float
    over_clients: float | None  # standard deviation over the clients of a run, averaged over seeds
    over_seeds: float | None  # standard deviation of the runs' means
    n: int


@dataclass(frozen=True)
class ClientCell:
    """One method in one scenario and one test."""

    value: ClientValue | None
    runs: tuple[RunRecord, ...] = ()
    printed: Printed | None = None


@dataclass(frozen=True)
class ClientTable:
    """Table II: the clients' own models, for the scenarios and methods of a table."""

    of: Table
    scenarios: tuple[Scenario, ...]
    rows: tuple[tuple[MethodRow, Mapping[tuple[Scenario, str], ClientCell]], ...]

    @property
    def slug(self) -> str:
        slug = self.of.slug
        return slug.replace("table1", "table2") if slug.startswith("table1") else f"{slug}-clients"

    @property
    def title(self) -> str:
        title = self.of.title
        own = f"{title}: clients' own models"
        return title.replace("Table I", "Table II", 1) if title.startswith("Table I") else own

    @property
    def data(self) -> list[str]:
        return list(dict.fromkeys(d for d, _ in self.scenarios))


def client_table(table: Table) -> ClientTable | None:
    """The clients' own models after their last local training; None if no run has them."""
    rows = []
    for row in table.rows:
        kind = METHODS.get(row.method)
        if kind is not None and not kind.trains_clients:
            continue  # `centralized`: the clients' networks are never trained
        cells = {(s, test): _client_cell(row, s, test, table.with_paper) for s in table.scenarios for test in TESTS}
        if any(c.value for c in cells.values()):
            rows.append((row, cells))
    scenarios = tuple(s for s in table.scenarios if any(cells[s, t].value for _, cells in rows for t in TESTS))
    return ClientTable(table, scenarios, tuple(rows)) if rows else None


def _client_cell(row: MethodRow, scenario: Scenario, test: str, with_paper: bool) -> ClientCell:
    runs = tuple(r for r in row.cells[scenario].runs if _accuracies(r, test))
    by_run = [_accuracies(r, test) for r in runs]
    value = None
    if means := Value.of(map(statistics.fmean, by_run)):
        spread = Value.of(statistics.stdev(v) for v in by_run if len(v) > 1)
        value = ClientValue(means.mean, spread.mean if spread else None, means.spread, means.n)
    printed = None
    if with_paper and not row.extra and test in ("local", "valid"):  # the paper's global column has the rule
        printed = paper.TABLE2.get(("local" if test == "local" else "global", row.method, scenario))
    return ClientCell(value, runs, printed)


def _accuracies(run: RunRecord, test: str) -> list[float]:
    """The clients' accuracies; without "unknown", ``valid`` and ``valid_labels`` are the same as ``global``."""
    if test in ("valid", "valid_labels") and test not in run.tests and run.method != "fedcc":
        test = "global"
    return list(run.tests.get(test, {}).values())
