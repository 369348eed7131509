"""All figures for print, a PDF and a PNG of each, named after table, scenario and subject."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcc.report.analysis_figures import embeddings_figure, example_figure, margins_figure
from fedcc.report.cells import Rows, Table
from fedcc.report.figures import LOGGED, bytes_figure, curves_figure, literal, log_figure, partition_figure, save
from fedcc.report.style import look
from fedcc.report.titles import scenario_title, skew_title, slug, title_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pictures = Iterator[tuple[str, Callable[[], "Figure"]]]  # a file's name without its ending, and what draws it
FIGURES_PER_PROCESS = 6  # fewer are not worth a process
COMPARED = ("fedavg", "fedcc")  # the paper's Figs. 2 and 3


def draw(tables: Sequence[Table], out: Path, drawn: Callable[[int, int], None] | None = None) -> list[Path]:
    """Draw all figures into a folder, on all cores if they are many: each takes a third of a second.

    ``drawn`` is told, after each, how many there are so far and in all.
    """
    tasks = [(make, out / name) for name, make in pictures(tables)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    workers = min(cores, len(tasks) // FIGURES_PER_PROCESS)
    if workers < 2 or "fork" not in multiprocessing.get_all_start_methods():
        return _collected((_draw(*task) for task in tasks), len(tasks), drawn)
    import matplotlib.backends.backend_pdf  # noqa: F401  forked workers have it then

    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, mp_context=fork, initializer=_ignore_interrupts)
    try:
        futures = [pool.submit(_draw, *task) for task in tasks]
        return _collected((future.result() for future in futures), len(tasks), drawn)
    finally:
        pool.shutdown(cancel_futures=True)


def _collected(files: Iterable[list[Path]], total: int, drawn: Callable[[int, int], None] | None) -> list[Path]:
    paths: list[Path] = []
    for number, pair in enumerate(files, start=1):
        paths += pair
        if drawn is not None:
            drawn(number, total)
    return paths


def _ignore_interrupts() -> None:
    """Only the parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _draw(make: Callable[[], Figure], path: Path) -> list[Path]:
    figure = make()
    pdf = save(figure, path.with_name(f"{path.name}.pdf"))
    figure.set_layout_engine(None)  # the PNG keeps the layout of the PDF
    return [pdf, save(figure, path.with_name(f"{path.name}.png"))]


def pictures(tables: Sequence[Table]) -> Pictures:
    partitions: set[tuple[Any, ...]] = set()
    for table in tables:
        for s in table.scenarios:
            if not (rows := table.rows_with_runs(s)):
                continue
            once = f"{table.title}, {skew_title(s[1])}"  # the data set is named once
            title = literal(once if table.title.startswith(title_of(s[0])) else f"{table.title}: {scenario_title(s)}")
            name = f"{table.slug}_{slug(' '.join(s))}"
            styles = {literal(row.title): look(row.method).print for row, _ in rows if not row.extra}
            rounds = max(run.requested_rounds for _, runs in rows for run in runs)
            yield f"{name}_curves", partial(curves_figure, _curves(rows), title, styles=styles, rounds=rounds)
            if sent := {literal(row.title): runs[0] for row, runs in rows if runs[0].traffic.rounds}:
                yield f"{name}_bytes", partial(bytes_figure, sent, title, styles)
            run = next((r for _, runs in rows for r in runs if r.counts), None)
            if run is not None and (key := (s, run.seed, run.counts)) not in partitions:
                partitions.add(key)
                title = literal(f"{scenario_title(s)}, seed {run.seed}")
                yield f"{name}_partition", partial(partition_figure, run.counts, title)
            for row, runs in rows:
                if run := next((r for r in runs if set(LOGGED) & set(r.log)), None):
                    title = literal(f"{row.title}, {scenario_title(s)}, seed {run.seed}")
                    yield f"{name}_{slug(row.title)}_log", partial(log_figure, run.log, title)
            yield from _analysis_pictures(rows, name, literal(scenario_title(s)), styles)


def _curves(rows: Rows) -> dict[str, list[tuple[int, float]]]:
    """Mean accuracy over seeds, by round."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row, runs in rows:
        by_round = zip(*(r.curve for r in runs), strict=False)
        known = [[v for v in values if v is not None] for values in by_round]
        curves[literal(row.title)] = [(t, sum(vs) / len(vs)) for t, vs in enumerate(known, start=1) if vs]
    return curves


def _analysis_pictures(rows: Rows, name: str, title: str, styles: Mapping[str, Mapping[str, Any]]) -> Pictures:
    """Figs. 1 to 3 from the results of `fedcc analyse`: FedAvg beside FedCC if there are both."""
    analyses = [(row, a) for row, runs in rows if (a := next((r.analysis for r in runs if r.analysis), None))]
    pair = [(row, a) for row, a in analyses if row.method in COMPARED and not row.extra] or analyses[:2]
    if margins := {literal(row.title): a["margins"] for row, a in pair if a.get("margins")}:
        yield f"{name}_margins", partial(margins_figure, margins, title, styles)
    if embeddings := {literal(row.title): a["embeddings"] for row, a in pair if a.get("embeddings")}:
        yield f"{name}_embeddings", partial(embeddings_figure, embeddings)
    for row, a in analyses:
        if a.get("example"):
            yield f"{name}_{slug(row.title)}_example", partial(example_figure, a["example"])
