"""Which figures for print there are: a PDF and a PNG of each, named after table, scenario and subject."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedcc.report.figures import curves_figure, partition_figure, save
from fedcc.report.style import look
from fedcc.report.tables import Row, Table, scenario_title, slug

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedcc.report.records import Run


def draw(tables: Sequence[Table], out: Path) -> list[Path]:
    """Draw all figures into a folder."""
    written = []
    for name, make in pictures(tables):
        figure = make()
        written += [save(figure, out / f"{name}.{ending}") for ending in ("pdf", "png")]
    return written


def pictures(tables: Sequence[Table]) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """The figures' names, and what draws them."""
    partitions: set[tuple[str, str, int, int]] = set()
    for table in tables:
        for s in table.scenarios:
            rows = [(row, row.cells[s].runs) for row in table.rows if row.cells[s].runs]
            if not rows:
                continue
            title, name = f"{table.title}: {scenario_title(s)}", f"{table.slug}_{slug(' '.join(s))}"
            yield f"{name}_curves", lambda rows=rows, title=title: _curves(rows, title)  # type: ignore[misc]
            run = next((r for _, own in rows for r in own if r.counts), None)
            if run is not None and (key := (*s, len(run.counts), run.seed)) not in partitions:
                partitions.add(key)
                about = f"{scenario_title(s)}, seed {run.seed}"
                yield f"{name}_partition", lambda run=run, about=about: partition_figure(run.counts, about)  # type: ignore[misc]


def _curves(rows: Sequence[tuple[Row, Sequence[Run]]], title: str) -> Figure:
    """Mean accuracy over seeds, by round."""
    lines, styles = {}, {}
    for row, runs in rows:
        rounds = []
        for t, values in enumerate(zip(*(r.curve for r in runs), strict=False), start=1):
            known = [v for v in values if v is not None]
            if known:
                rounds.append((t, sum(known) / len(known)))
        lines[row.title] = rounds
        if not row.extra:
            styles[row.title] = look(row.method).print
    return curves_figure(lines, title, styles=styles)
