"""``fedcc report``: tables, figures and a page from run folders and records."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="run folders, folders of records, records", show_default=False),
    ],
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="folder for the page, tables and figures; report/ by default")
    ] = None,
    readme: Annotated[
        Path | None, typer.Option("--readme", help="rewrite the marked block of this file instead")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="write everything as this one Markdown page instead")
    ] = None,
    title: Annotated[str | None, typer.Option(help="the page's title")] = None,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="draw figures for print too")] = True,
) -> None:
    """Tables, figures and one page to look at, from the records of finished runs."""
    from fedcc.report.records import find_records
    from fedcc.report.tables import tables
    from fedcc.report.values import printable
    from fedcc.report.write import TITLE, write_page, write_readme, write_report

    found = find_records(paths)
    for name, reason in found.problems:
        print(f"fedcc: warning: {name}: {reason}", file=sys.stderr)
    if unchecked := sum(not run.has_digest for run in found.runs):
        print(f"fedcc: note: {unchecked} records have no digest: damage to them cannot be noticed", file=sys.stderr)
    if not found.runs:
        raise ValueError(f"no record of a finished run below {', '.join(map(printable, paths))}")
    made = tables(found.runs)
    if readme is not None:
        typer.echo(printable(write_readme(made, readme)))
    if markdown is not None:
        typer.echo(printable(write_page(found, made, markdown)))
    if out_dir is not None or (readme is None and markdown is None):
        out = out_dir or Path("report")
        written = write_report(found, made, out, title=printable(title or TITLE), figures=figures)
        typer.echo(f"{len(found.runs)} runs, {len(written)} files: {printable(written[0])}")
