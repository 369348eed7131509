"""The report as one HTML page, complete in itself: tables, a small script that draws the charts, and the records."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from fedcc.methods import METHODS
from fedcc.report import paper
from fedcc.report.cells import ACCURACIES, TESTS, MethodRow, Table
from fedcc.report.page_data import archive, as_json, packed, page_data, run_groups
from fedcc.report.records import Records
from fedcc.report.standings import filled, leads, standings
from fedcc.report.style import look
from fedcc.report.tables import client_table, reading_tables
from fedcc.report.titles import scenario_title, skew_title, title_of

TEMPLATE = Path(__file__).parent / "template"
SCRIPTS = ("dom", "lines", "heat", "figure", "views", "runs", "tables", "main")
"""Files of the page's script, in order: they are joined into one, so each sees the functions of all."""


def page(records: Records, tables: Sequence[Table], out: Path, title: str, downloads: Sequence[str] = ()) -> str:
    """The whole page, for the folder ``out``; ``downloads`` are files there that it links to."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    groups, addresses = run_groups(tables)
    methods = {row.method: row.label for t in tables for row in t.rows}
    order = ["fedcc", *METHODS, *methods]
    tar, places = archive(groups)
    script = page_script()
    return environment.get_template("page.html").render(
        title=title,
        records=records,
        tables=tables,
        client_tables=[c for t in tables if (c := client_table(t))],
        reading_tables=reading_tables,
        groups=groups,
        addresses=addresses,
        methods=[(m, methods[m], look(m)) for m in dict.fromkeys(order) if m in methods],
        data_sets=list(dict.fromkeys(d for t in tables for d in t.data if t.has_runs(d))),
        headline=headline(tables),
        standings={t.slug: standings(t) for t in tables if t.of_paper},
        ours_first=ours_first,
        empty={t.slug: {s for s in t.scenarios if not t.rows_with_runs(s)} for t in tables},
        title_of=title_of,
        skew_title=skew_title,
        scenario_title=scenario_title,
        paper_methods=paper.METHODS,
        tests=TESTS,
        accuracies=ACCURACIES,
        downloads=downloads,
        css=Markup((TEMPLATE / "page.css").read_text()),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=packed(as_json(page_data(tables, groups, places, out))),
        archive=packed(tar),
    )


def page_script() -> str:
    """The page's own script; its hash is the only one that the page allows to run."""
    parts = [(TEMPLATE / f"{name}.js").read_text() for name in SCRIPTS]
    return '"use strict";\n(async () => {\n' + "\n".join(parts) + "})();\n"


def ours_first(rows: Sequence[MethodRow]) -> list[MethodRow]:
    """FedCC before the methods that it is compared with."""
    return sorted(rows, key=lambda row: row.method != "fedcc")


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
