"""The report as one HTML page, complete in itself: figures are drawn by plotly, which is part of the page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from fedcc.methods import METHODS
from fedcc.report import paper
from fedcc.report.cells import ACCURACIES, TESTS, MethodRow, Rows, Table
from fedcc.report.paper import Scenario
from fedcc.report.records import Records, RunRecord
from fedcc.report.standings import filled, leads, standings
from fedcc.report.style import PALETTE, look
from fedcc.report.tables import client_table, reading_tables
from fedcc.report.titles import scenario_title, skew_title, title_of
from fedcc.report.values import natural, printable, relative_link

FILES = ("summary.json", "analysis.json", "metrics.jsonl", "experiment.toml", "environment.json", "partition.npz")
LOGGED = {"majority": "majority classes |C_J|", "alpha": "mean alpha", "unknown": "mean unknown probability"}
MOST_CLIENTS = 100  # lines in one picture
MOST_CLASSES = 100  # rows of a confusion matrix
TEMPLATE = Path(__file__).parent / "template"


def page(records: Records, tables: Sequence[Table], out: Path, title: str, downloads: Sequence[str] = ()) -> str:
    """The whole page, for the folder ``out``; ``downloads`` are files there that it links to."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(TEMPLATE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    groups, addresses = _run_groups(tables)
    methods = {row.method: row.label for t in tables for row in t.rows}
    order = [m for m in METHODS if m in methods] + [m for m in methods if m not in METHODS]
    scenes = [s for t in tables for s in _scenes(t, addresses)]
    first = max(reversed(scenes), key=lambda s: s["weight"], default=None)  # of equals the paper's hardest
    data = {
        "looks": {m: look(m)._asdict() for m in methods},
        "palette": PALETTE,
        "logged": LOGGED,
        "scenes": scenes,
        "first": first["id"] if first else None,
    }
    return environment.get_template("page.html").render(
        title=title,
        records=records,
        tables=tables,
        client_tables=[c for t in tables if (c := client_table(t))],
        reading_tables=reading_tables,
        groups=groups,
        addresses=addresses,
        methods=[(m, methods[m], look(m)) for m in order],
        data_sets=list(dict.fromkeys(d for t in tables for d in t.data if t.has_runs(d))),
        scenes=scenes,
        headline=headline(tables),
        standings={t.slug: standings(t) for t in tables if t.of_paper},
        files=lambda run: _files(run, out),
        title_of=title_of,
        skew_title=skew_title,
        scenario_title=scenario_title,
        paper_methods=paper.METHODS,
        tests=TESTS,
        accuracies=ACCURACIES,
        downloads=downloads,
        most_clients=MOST_CLIENTS,
        last=last_value,
        css=Markup((TEMPLATE / "page.css").read_text()),
        script=Markup((TEMPLATE / "page.js").read_text()),
        plotly=Markup(get_plotlyjs()),
        data=Markup(embedded(data)),
    )


def embedded(data: Any) -> str:
    """JSON for a script element, whatever texts it holds."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text  # other characters are ASCII escapes already


def last_value(values: Sequence[float | None]) -> str:
    """The last number of a series; a dash if there is none."""
    return next((f"{v:.2f}" for v in reversed(values) if v is not None), "–")


def headline(tables: Sequence[Table]) -> list[str]:
    """The main results."""
    lines = []
    for table in tables:
        if not table.variants and (scenarios := leads(table)):
            won = sum(lead.margins["final"][1].points >= 0 for lead in scenarios)
            where = f" in {won} of {len(scenarios)} scenarios" if len(scenarios) > 1 else ""
            is_ahead = "is ahead" if won else "is not ahead"
            lines.append(f"{table.title}: after the final round FedCC {is_ahead} of the others{where}.")
    if done := sum(filled(t) for t in tables if t.of_paper):
        lines.append(f"{done} of the {len(paper.TABLE1)} cells of the paper's Table I have a run.")
    return lines


def _run_groups(tables: Sequence[Table]) -> tuple[list[tuple[Table, MethodRow, Scenario]], dict[str, str]]:
    """The cells with runs, and the address of each run's cell by its name; other tables repeat cells, or parts."""
    groups: list[tuple[Table, MethodRow, Scenario]] = []
    addresses: dict[str, str] = {}
    for table in tables:
        for row in table.rows:
            for scenario, cell in row.cells.items():
                if cell.runs and cell.runs[0].name not in addresses:
                    groups.append((table, row, scenario))
                    addresses |= {run.name: f"runs-{len(groups)}" for run in cell.runs}
    return groups, addresses


def _files(run: RunRecord, out: Path) -> list[tuple[str, str]]:
    """A run's files as names and links relative to the page."""
    files = [run.file.with_name(name) for name in FILES] if run.in_folder else [run.file]
    if run.analysis_file is not None and run.analysis_file not in files:
        files.insert(1, run.analysis_file)
    return [(printable(f.name), relative_link(f, out)) for f in files if f.is_file()]


def _scenes(table: Table, addresses: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The data of the figures of each scenario that has runs."""
    for s in table.scenarios:
        if rows := table.rows_with_runs(s):
            runs = [run for _, own in rows for run in own]
            by_seed = {run.seed: run.counts for run in reversed(runs) if run.counts}  # of a seed's runs the first
            yield {
                "id": f"{table.slug}/{s[0]}/{s[1]}",
                "data": s[0],
                "table": table.title,
                "title": scenario_title(s),
                "weight": (any(r.analysis for r in runs), not table.variants, len(runs)),
                "rows": [_lines(row, own, addresses[own[0].name]) for row, own in rows],
                "partitions": [{"seed": seed, "counts": by_seed[seed]} for seed in sorted(by_seed)],
                "logs": list(_logs(rows)),
                "confusions": list(_confusions(rows)),
                "analyses": list(_analyses(rows)),
            }


def _lines(row: MethodRow, runs: Sequence[RunRecord], link: str) -> dict[str, Any]:
    totals = [[] if r.traffic.total is None else [r.traffic.total] for r in runs]
    return {
        "method": row.method,
        "label": row.title,
        "link": link,
        "variant": bool(row.extra),
        "seeds": [r.seed for r in runs],
        "asked": max(r.requested_rounds for r in runs),
        "curves": [_rounded(r.curve) for r in runs],
        "targets": [_rounded(r.targets) for r in runs if any(v is not None for v in r.targets)],
        "sent": [list(accumulate(r.traffic.rounds)) or total for r, total in zip(runs, totals, strict=True)],
    }


def _rounded(values: Iterable[float | None], digits: int = 2) -> list[float | None]:
    return [None if v is None else round(v, digits) for v in values]


def _logs(rows: Rows) -> Iterator[dict[str, Any]]:
    for row, runs in rows:
        if run := next((r for r in runs if set(LOGGED) & set(r.log)), None):
            series = {}
            for name in [name for name in LOGGED if name in run.log]:
                clients = sorted(run.log[name], key=natural)[:MOST_CLIENTS]
                series[name] = {client: _rounded(run.log[name][client], 4) for client in clients}
            yield {"label": row.title, "seed": run.seed, "series": series}


def _confusions(rows: Rows) -> Iterator[dict[str, Any]]:
    """Of the first seed that has one; with many classes it is too large for a page."""
    for row, runs in rows:
        if run := next((r for r in runs if 1 < len(r.confusion) <= MOST_CLASSES), None):
            names = run.class_names if len(run.class_names) == len(run.confusion) else range(len(run.confusion))
            yield {"label": row.title, "seed": run.seed, "names": list(map(str, names)), "rows": run.confusion}


def _analyses(rows: Rows) -> Iterator[dict[str, Any]]:
    """Of the first run that has one; a page with every seed's would be too large."""
    for row, runs in rows:
        for seed, analysis in [(r.seed, dict(r.analysis)) for r in runs if r.analysis][:1]:
            if embeddings := analysis.get("embeddings"):
                analysis["embeddings"] = {**embeddings, "panels": [_small(panel) for panel in embeddings["panels"]]}
            yield {"label": row.title, "method": row.method, "seed": seed, **analysis}


def _small(panel: Mapping[str, Any]) -> dict[str, Any]:
    """A panel with points on a grid of a thousand steps: as fine as a screen, in a third of the bytes."""
    points = np.array(panel["points"], float)
    points -= points.min(0)
    x, y = np.rint(999 * points / (points.max() or 1.0)).astype(int).T.tolist()
    return {**{k: v for k, v in panel.items() if k != "points"}, "x": x, "y": y}
