"""Tables of the same trained models, read in other ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fedcc.report.cells import Cell, MethodRow, Table
from fedcc.report.records import RunRecord


@dataclass(frozen=True)
class Readings:
    """A table of methods, each as it is and with its models read in other ways."""

    table: Table
    title: str  # below the table that it belongs to
    about: str


RE_ESTIMATED = """\
Parameter-based methods, each global model evaluated twice: with BatchNorm's running statistics as they were averaged,
as in the table above, and with statistics re-estimated on the public images, without labels. Training is the same.
"""

OTHERWISE = """\
The same trained models, read in other ways: what follows "read with" is set for the prediction of the test images
alone. Training and what clients and server send are the same; the first row has the same runs as they are.
"""


def readings(table: Table) -> list[Readings]:
    """The methods of a table that have readings, first averaged models, then the others; variants have the former."""
    found = []
    for again in (True, False) if not table.variants else (True,):
        rows = [new for row in table.rows for new in _read(row, again)]
        title = "BatchNorm statistics re-estimated" if again else "Other readings"
        if rows:
            made = replace(
                table,
                slug=f"{table.slug}-{'re-estimated' if again else 'readings'}",
                title=f"{table.title}: {title}",
                scenarios=tuple(s for s in table.scenarios if any(row.cells[s].runs for row in rows)),
                rows=tuple(rows),
                of_paper=False,
                with_paper=False,
            )
            found.append(Readings(made, title, RE_ESTIMATED if again else OTHERWISE))
    return found


def _read(row: MethodRow, again: bool) -> list[MethodRow]:
    """A row's runs that have such readings, as they are and by each of these."""
    every = [r for cell in row.cells.values() for r in cell.runs]
    names = [n for n in dict.fromkeys(n for r in every for n in r.readings) if (n == "re-estimated") is again]

    def made(word: str, read: Callable[[RunRecord], RunRecord | None]) -> MethodRow:
        """A cell is empty where one of its runs lacks this reading: all rows are of the same runs."""
        cells = {}
        for scenario, cell in row.cells.items():
            found = [read(r) for r in cell.runs if any(n in r.readings for n in names)]
            cells[scenario] = Cell(tuple(r for r in found if r) if all(found) else ())
        return replace(row, extra=", ".join(filter(None, (row.extra, word))), cells=cells)

    def by(name: str) -> Callable[[RunRecord], RunRecord | None]:
        return lambda r: replace(r, **vars(r.readings[name])) if name in r.readings else None

    own = made("averaged" if again else "", lambda r: r)
    return [own, *(made(n if again else f"read with {n}", by(n)) for n in names)] if names else []
