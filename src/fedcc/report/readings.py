"""Tables of readings: other ways to predict with the same trained models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedcc.report.cells import Cell, MethodRow, Table


@dataclass(frozen=True)
class ReadingTable:
    """Methods with their own predictions and with other readings of the same models."""

    table: Table
    title: str  # as part of the page of the table that it belongs to
    about: str


RE_ESTIMATED = """\
Parameter-based methods, each global model evaluated twice: with BatchNorm's running statistics as they were averaged,
as in the table above, and with statistics re-estimated on the public images, without labels. Training is the same.
"""

OTHERWISE = """\
The same trained models, read in other ways: what follows "read with" is set for the prediction of the test images
alone. Training and what clients and server send are the same; the first row has the same runs as they are.
"""


def reading_tables(table: Table) -> list[ReadingTable]:
    """The methods of a table that have readings: first averaged models, then others, but not of variants."""
    result = []
    for again in (True, False) if not table.variants else (True,):
        rows = tuple(new for row in table.rows for new in _reading_rows(row, again))
        if not rows:
            continue
        title = "BatchNorm statistics re-estimated" if again else "Other readings"
        readings = replace(
            table,
            slug=f"{table.slug}-{'re-estimated' if again else 'readings'}",
            title=f"{table.title}: {title}",
            scenarios=tuple(s for s in table.scenarios if any(row.cells[s].runs for row in rows)),
            rows=rows,
            of_paper=False,
            with_paper=False,
        )
        result.append(ReadingTable(readings, title, RE_ESTIMATED if again else OTHERWISE))
    return result


def _reading_rows(row: MethodRow, again: bool) -> list[MethodRow]:
    """A row's runs that have such readings: their own prediction, then each reading."""
    names = dict.fromkeys(name for cell in row.cells.values() for run in cell.runs for name in run.readings)
    wanted = [name for name in names if (name == "re-estimated") is again]

    def reading_row(name: str | None, extra: str) -> MethodRow:
        """A cell is empty if one of its runs lacks this reading: all rows are of the same runs."""
        cells = {}
        for scenario, cell in row.cells.items():
            runs = [run for run in cell.runs if any(n in run.readings for n in wanted)]
            if name is not None:
                runs = (
                    [replace(r, **vars(r.readings[name])) for r in runs]
                    if all(name in r.readings for r in runs)
                    else []
                )
            cells[scenario] = Cell(tuple(runs))
        return replace(row, extra=", ".join(filter(None, (row.extra, extra))), cells=cells)

    if not wanted:
        return []
    own = reading_row(None, "averaged" if again else "")
    return [own, *(reading_row(name, name if again else f"read with {name}") for name in wanted)]
