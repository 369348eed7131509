"""One HTML page that needs nothing else: tables in the page itself, figures drawn by plotly, which comes with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from fedcc.methods import METHODS
from fedcc.report import paper
from fedcc.report.cells import ACCURACIES, MethodRow, Table
from fedcc.report.client_tables import TESTS, client_table
from fedcc.report.paper import Scenario
from fedcc.report.readings import readings
from fedcc.report.records import Records, RunRecord
from fedcc.report.standings import filled, leads, standing
from fedcc.report.style import PALETTE, look
from fedcc.report.titles import scenario_title, skew_title, title_of
from fedcc.report.values import natural, printable, relative_link

FILES = ("summary.json", "analysis.json", "metrics.jsonl", "experiment.toml", "environment.json", "partition.npz")
LOGGED = {"majority": "majority classes |C_J|", "alpha": "mean alpha", "unknown": "mean unknown probability"}
MOST_CLIENTS = 100  # lines in one picture
TEMPLATE = Path(__file__).parent / "template"


def page(found: Records, tables: Sequence[Table], out: Path, title: str, downloads: Sequence[str] = ()) -> str:
    """The whole page, to be written into the folder ``out``; ``downloads`` are files there that it links to."""
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
    cells = Cells(tables)
    methods = {row.method: row.label for t in tables for row in t.rows}
    known = list(METHODS)
    order = sorted(methods, key=lambda m: known.index(m) if m in known else len(known))
    scenes = [s for t in tables for s in _scenes(t, cells)]
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
        found=found,
        tables=tables,
        client_tables=[c for t in tables if not t.variants and (c := client_table(t))],
        readings=readings,
        cells=cells,
        groups=cells.groups,
        methods=[(m, methods[m], METHODS[m].family if m in METHODS else "other", look(m)) for m in order],
        data_sets=list(dict.fromkeys(d for t in tables for d in t.data if t.ran(d))),
        scenes=scenes,
        headline=headline(tables),
        standings={t.slug: standing(t) for t in tables if t.of_paper},
        files=lambda run: _files(run, out),
        title_of=title_of,
        skew_title=skew_title,
        scenario_title=scenario_title,
        paper_methods=paper.METHODS,
        tests=TESTS,
        accuracies=ACCURACIES,
        downloads=downloads,
        css=Markup((TEMPLATE / "page.css").read_text()),
        script=Markup((TEMPLATE / "page.js").read_text()),
        plotly=Markup(get_plotlyjs()),
        data=Markup(embedded(data)),
    )


def embedded(data: Any) -> str:
    """JSON that may stand inside a script element, whatever texts it holds."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text  # other characters are ASCII escapes already


def headline(tables: Sequence[Table]) -> list[str]:
    """The first things to know, from what is there."""
    lines = []
    for table in tables:
        if table.variants:
            continue
        if asked := leads(table):
            won = sum(lead.margins["final"][1].points >= 0 for lead in asked)
            said = "is ahead of the others" if won else "is not ahead of the others"
            where = f" in {won} of {len(asked)} scenarios" if len(asked) > 1 else ""
            lines.append(f"{table.title}: after the final round FedCC {said}{where}.")
    if done := sum(filled(t) for t in tables if t.of_paper):
        lines.append(f"{done} of the {len(paper.TABLE1)} cells of the paper's Table I have a run.")
    return lines


# ------------------------------------------------------------------------------------------------ cells and their runs


@dataclass(frozen=True)
class Group:
    """The runs of one cell, in the list that numbers link to."""

    id: str
    table: Table
    row: MethodRow
    scenario: Scenario
    runs: tuple[RunRecord, ...]


class Cells:
    """Every cell that has runs, and the place in the list of runs that its number links to."""

    def __init__(self, tables: Sequence[Table]):
        self.groups: list[Group] = []
        self._ids: dict[str, str] = {}  # by a run's name: other tables repeat cells, or some of their runs
        for table in tables:
            for row in table.rows:
                for scenario, cell in row.cells.items():
                    if cell.runs and cell.runs[0].name not in self._ids:
                        place = f"runs-{len(self.groups) + 1}"
                        self._ids |= {r.name: place for r in cell.runs}
                        self.groups.append(Group(place, table, row, scenario, cell.runs))

    def id(self, runs: Sequence[RunRecord]) -> str:
        return self._ids[runs[0].name]


def _files(run: RunRecord, out: Path) -> list[tuple[str, str]]:
    """A run's files as names and links relative to the page."""
    there = [run.file.with_name(n) for n in FILES] if run.in_folder else [run.file]
    if run.analysis_file is not None and run.analysis_file not in there:
        there.insert(1, run.analysis_file)
    return [(printable(f.name), relative_link(f, out)) for f in there if f.is_file()]


# --------------------------------------------------------------------------------------------- what figures are made of


def _scenes(table: Table, cells: Cells) -> list[dict[str, Any]]:
    """For each scenario of a table that has runs, what its figures show."""
    made = []
    for s in table.scenarios:
        rows = [(row, row.cells[s].runs) for row in table.rows if row.cells[s].runs]
        if not rows:
            continue
        runs = [r for _, own in rows for r in own]
        made.append(
            {
                "id": f"{table.slug}/{s[0]}/{s[1]}",
                "data": s[0],
                "table": table.title,
                "title": scenario_title(s),
                "weight": (any(r.analysis for r in runs), not table.variants, len(runs)),
                "rows": [_lines(row, own, cells) for row, own in rows],
                "partitions": _partitions(runs),
                "logs": [_log(row, own) for row, own in rows if any(set(LOGGED) & set(r.log) for r in own)],
                "analyses": [found for row, own in rows if (found := _analysis(row, own))],
            }
        )
    return made


def _lines(row: MethodRow, runs: Sequence[RunRecord], cells: Cells) -> dict[str, Any]:
    return {
        "method": row.method,
        "label": row.title,
        "link": cells.id(runs),
        "variant": bool(row.extra),
        "seeds": [r.seed for r in runs],
        "asked": max(r.requested_rounds for r in runs),
        "curves": [_rounded(r.curve) for r in runs],
        "targets": [_rounded(r.targets) for r in runs if any(v is not None for v in r.targets)],
        "sent": [
            list(accumulate(r.traffic.rounds)) or ([r.traffic.total] if r.traffic.total is not None else [])
            for r in runs
        ],
    }


def _rounded(values: Iterable[float | None], digits: int = 2) -> list[float | None]:
    return [None if v is None else round(v, digits) for v in values]


def _partitions(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    held: dict[int, RunRecord] = {}
    for run in runs:
        if run.counts:
            held.setdefault(run.seed, run)
    return [{"seed": seed, "counts": held[seed].counts} for seed in sorted(held)]


def _log(row: MethodRow, runs: Sequence[RunRecord]) -> dict[str, Any]:
    run = next(r for r in runs if set(LOGGED) & set(r.log))
    return {
        "label": row.title,
        "seed": run.seed,
        "series": {
            name: {
                client: _rounded(values, 4)
                for client, values in sorted(run.log[name].items(), key=lambda item: natural(item[0]))[:MOST_CLIENTS]
            }
            for name in LOGGED
            if name in run.log
        },
    }


def _analysis(row: MethodRow, runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """The first run's that has one; a page with every seed's would be too large to send."""
    run = next((r for r in runs if r.analysis), None)
    if run is None or run.analysis is None:
        return None
    found = dict(run.analysis)
    if "embeddings" in found:
        found["embeddings"] = {**found["embeddings"], "panels": [_small(p) for p in found["embeddings"]["panels"]]}
    return {"label": row.title, "method": row.method, "seed": run.seed, **found}


def _small(panel: Mapping[str, Any]) -> dict[str, Any]:
    """A panel with points on a grid of a thousand steps: as fine as a screen, and a third of the bytes."""
    xs, ys = zip(*panel["points"], strict=True) if panel["points"] else ((), ())
    low_x, low_y = min(xs, default=0.0), min(ys, default=0.0)
    reach = max(max(xs, default=1.0) - low_x, max(ys, default=1.0) - low_y) or 1.0
    return {
        **{k: v for k, v in panel.items() if k != "points"},
        "x": [round(999 * (x - low_x) / reach) for x in xs],
        "y": [round(999 * (y - low_y) / reach) for y in ys],
    }
