"""Which figures for print there are: a PDF and a PNG of each, named after table, scenario and subject."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcc.report.analysis_figures import embeddings_figure, example_figure, margins_figure
from fedcc.report.cells import MethodRow, Table
from fedcc.report.figures import LOGGED, bytes_figure, curves_figure, literal, log_figure, partition_figure, save
from fedcc.report.style import look
from fedcc.report.titles import scenario_title, skew_title, slug, title_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedcc.report.paper import Scenario
    from fedcc.report.records import RunRecord

Rows = Sequence[tuple[MethodRow, Sequence["RunRecord"]]]
MANY = 6  # figures that are worth a process
COMPARED = ("fedavg", "fedcc")  # the paper's Figs. 2 and 3


def draw(tables: Sequence[Table], out: Path) -> list[Path]:
    """Draw all figures into a folder; many of them on all cores, as each takes a third of a second."""
    tasks = [(make, out / name) for name, make in pictures(tables)]
    workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, len(tasks) // MANY)
    if workers < 2 or "fork" not in multiprocessing.get_all_start_methods():
        return [path for task in tasks for path in _draw(*task)]
    import matplotlib.backends.backend_pdf  # noqa: F401  here, so that workers, being forked, have it already

    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, mp_context=fork, initializer=_undisturbed)
    try:
        futures = [pool.submit(_draw, *task) for task in tasks]
        return [path for future in futures for path in future.result()]
    finally:
        pool.shutdown(cancel_futures=True)


def _undisturbed() -> None:
    """The parent alone answers Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _draw(make: Callable[[], Figure], path: Path) -> list[Path]:
    figure = make()
    pdf = save(figure, path.with_name(f"{path.name}.pdf"))
    figure.set_layout_engine(None)  # it lies where the first file has it
    return [pdf, save(figure, path.with_name(f"{path.name}.png"))]


def pictures(tables: Sequence[Table]) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """The figures' names, and what draws each."""
    partitions: set[tuple[Any, ...]] = set()
    for table in tables:
        for s in table.scenarios:
            rows = [(row, row.cells[s].runs) for row in table.rows if row.cells[s].runs]
            if not rows:
                continue
            about, name = literal(heading(table, s)), f"{table.slug}_{slug(' '.join(s))}"
            styles = {literal(row.title): look(row.method).print for row, _ in rows if not row.extra}
            yield f"{name}_curves", partial(curves_figure, _curves(rows), about, styles=styles, rounds=_asked(rows))
            if any(runs[0].traffic.rounds for _, runs in rows):
                yield f"{name}_bytes", partial(bytes_figure, _sent(rows), about, styles)
            held = next((r for _, runs in rows for r in runs if r.counts), None)
            if held is not None and (key := (s, held.seed, held.counts)) not in partitions:
                partitions.add(key)
                whose = literal(f"{scenario_title(s)}, seed {held.seed}")
                yield f"{name}_partition", partial(partition_figure, held.counts, whose)
            for row, runs in rows:
                noted = next((r for r in runs if set(LOGGED) & set(r.log)), None)
                if noted is not None:
                    yield (
                        f"{name}_{slug(row.title)}_log",
                        partial(log_figure, noted.log, literal(f"{row.title}, {scenario_title(s)}, seed {noted.seed}")),
                    )
            yield from _analysed(rows, name, literal(scenario_title(s)), styles)


def _asked(rows: Rows) -> int:
    """The rounds T of a table's protocol."""
    return max(r.requested_rounds for _, runs in rows for r in runs)


def heading(table: Table, scenario: Scenario) -> str:
    """A figure's title: its table and scenario; the data set once where the table is named after it."""
    data, skew = title_of(scenario[0]), skew_title(scenario[1])
    return f"{table.title}, {skew}" if table.title.startswith(data) else f"{table.title}: {data}, {skew}"


def _curves(rows: Rows) -> dict[str, list[tuple[int, float]]]:
    """Mean accuracy over seeds, by round."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row, runs in rows:
        lines[literal(row.title)] = []
        for t, values in enumerate(zip(*(r.curve for r in runs), strict=False), start=1):
            known = [v for v in values if v is not None]
            if known:
                lines[literal(row.title)].append((t, sum(known) / len(known)))
    return lines


def _sent(rows: Rows) -> dict[str, dict[str, Any]]:
    """The first seed's accuracies and bytes, as a summary has them."""
    return {
        literal(row.title): {
            "bytes": {
                "rounds": {"up": r.traffic.rounds, "down": [0] * len(r.traffic.rounds)},
                "models": r.traffic.models,
            },
            "accuracy": {"rounds": r.curve},
        }
        for row, (r, *_) in rows
        if r.traffic.rounds
    }


def _analysed(
    rows: Rows, name: str, about: str, styles: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Figs. 1 to 3 from what `fedcc analyse` found: FedAvg beside FedCC where there are both."""
    found = [(row, a) for row, runs in rows if (a := next((r.analysis for r in runs if r.analysis), None))]
    paired = [(row, a) for row, a in found if row.method in COMPARED and not row.extra] or found[:2]
    if held := {literal(row.title): a["margins"] for row, a in paired if a.get("margins")}:
        yield f"{name}_margins", partial(margins_figure, {about: held}, styles=styles)
    if held := {literal(row.title): a["embeddings"] for row, a in paired if a.get("embeddings")}:
        yield f"{name}_embeddings", partial(embeddings_figure, held)
    for row, a in found:
        if a.get("example"):
            yield f"{name}_{slug(row.title)}_example", partial(example_figure, a["example"])
