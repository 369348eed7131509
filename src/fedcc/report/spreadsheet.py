"""Tables as CSV for programs and spreadsheets, a line per cell."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from fedcc.report.cells import ACCURACIES, TESTS, Table
from fedcc.report.records import RunRecord
from fedcc.report.values import printable


def comparison(table: Table) -> str:
    head = ["method", "variant", "data", "skew", "seeds", "final", "final_spread", "best", "best_spread"]
    head += ["paper", "paper_spread", "records"]
    lines = []
    for row in table.rows:
        for s, cell in row.cells.items():
            numbers = [n for v in map(cell.value, ACCURACIES) for n in ((v.mean, v.spread) if v else (None, None))]
            printed, names = cell.printed.get("final", ("", ""))[:2], " ".join(r.name for r in cell.runs)
            lines.append([row.label, row.extra, *s, len(cell.runs), *map(_number, numbers), *printed, names])
    return _csv(head, lines)


def clients(table: Table) -> str:
    head = ["method", "variant", "data", "skew", "test", "seeds", "mean", "over_clients", "over_seeds"]
    head += ["paper", "paper_spread", "records"]
    lines = []
    for row, s, test in product(table.rows, table.scenarios, TESTS):
        numbers, runs = row.cells[s].own(test) or (None, None, None), row.cells[s].tested(test)
        printed, names = row.cells[s].printed.get(test, ("", ""))[:2], " ".join(r.name for r in runs)
        lines.append([row.label, row.extra, *s, test, len(runs), *map(_number, numbers), *printed, names])
    return _csv(head, lines)


def runs(records: Sequence[RunRecord], beside: Path) -> str:
    """Every run with its provenance."""
    head = ["name", "method", "settings", "protocol", "data", "skew", "seed", "final", "best", "best_round", "bytes"]
    head += ["seconds", "engine", "device", "precision", "commit", "versions", "record", "command"]
    lines = [
        [
            r.name, r.label, _pairs(r.changed_settings), _pairs(r.protocol), r.data, r.skew, r.seed, r.final, r.best,
            r.best_round, r.traffic.total, r.seconds, r.engine, r.device, r.precision, r.commit,
            _pairs(r.versions.items()), printable(Path(os.path.relpath(r.file, beside)).as_posix()), r.command,
        ]
        for r in records
    ]  # fmt: skip
    return _csv(head, lines)


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return " ".join(f"{n}={v}" for n, v in pairs)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _csv(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Text that a spreadsheet would take for a formula starts with an apostrophe."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    for line in lines:
        writer.writerow([f"'{v}" if isinstance(v, str) and v[:1] in ("=", "+", "-", "@", "\t") else v for v in line])
    return file.getvalue()
