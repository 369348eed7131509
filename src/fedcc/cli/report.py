"""``fedcc report`` and ``fedcc analyse``: what finished runs show."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from fedcc.cli.console import console, noted, say, say_starting, warn
from fedcc.cli.options import Code, Json, run_options, take
from fedcc.core.digests import DIGEST, UNCHECKED
from fedcc.experiments.options import Analysis


def report(
    paths: Annotated[
        list[Path],
        Argument(metavar="PATH...", help="Run folders, folders of records, and records.", show_default=False),
    ],
    out_dir: Annotated[
        Path | None, Option("--out", help="Write the page, tables and figures to this folder. The default is report/.")
    ] = None,
    readme: Annotated[
        Path | None, Option("--readme", help="Rewrite the marked block of this file, and its picture, instead.")
    ] = None,
    markdown: Annotated[
        Path | None, Option("--markdown", help="Write everything as this one Markdown page instead.")
    ] = None,
    title: Annotated[str | None, Option(help="Give the page this title.")] = None,
    figures: Annotated[bool, Option("--figures/--no-figures", help="Draw figures for print too.")] = True,
) -> None:
    """Make tables, figures and an HTML page from the records of finished runs."""
    terminal = console(stderr=True)
    say_starting(terminal)
    from fedcc.experiments.progress import steps
    from fedcc.report.records import find_records
    from fedcc.report.tables import tables
    from fedcc.report.values import printable
    from fedcc.report.write import TITLE, write_page, write_readme, write_report

    with terminal.status("reading records"):
        records = find_records(paths)
    for name, reason in records.problems:
        warn(f"{name}: {reason}")
    if unchecked := sum(not run.has_digest for run in records.runs):
        say(f"note: records without a digest: {unchecked}; damage to them cannot be detected")
    if not records.runs:
        raise ValueError(f"no record of a finished run below {', '.join(map(printable, paths))}")
    with terminal.status(f"tables of {len(records.runs)} runs"):
        content = tables(records.runs)
    if readme is not None:
        typer.echo(printable(write_readme(content, readme)))
    if markdown is not None:
        typer.echo(printable(write_page(records, content, markdown)))
    if out_dir is not None or (readme is None and markdown is None):
        out = out_dir or Path("report")
        with steps(terminal) as step:
            step("tables", 0, 1)
            files = write_report(
                records, content, out, title=printable(title or TITLE), figures=figures, drawn=partial(step, "figures")
            )
        typer.echo(f"{len(records.runs)} runs, {len(files)} files: {printable(files[0])}")


@run_options(Analysis, "device", "data_dir")
def analyse(
    options: dict[str, Any],
    folders: Annotated[list[Path], Argument(metavar="RUN...", help="The folders of finished runs.")],
    code: Code = None,
    as_json: Json = False,
) -> None:
    """Compute margins, embeddings and an example from a run's models into its analysis.json."""
    from fedcc.code import allow_code
    from fedcc.experiments.analyse import analyse as compute
    from fedcc.experiments.analyse import check

    allow_code(code)
    settings = Analysis(**take(Analysis, options))
    device, data_dir = options.get("device", "auto"), options.get("data_dir")
    for folder in folders:  # before anything is computed
        if DIGEST not in check(folder):
            warn(f"{folder / 'summary.json'} {UNCHECKED}")
    terminal = console(stderr=as_json)
    for folder in folders:
        with terminal.status(f"analysing {folder}"), noted(f"see {folder}"):
            analysis = compute(folder, settings, device=device, data_dir=data_dir)
        if as_json:
            typer.echo(json.dumps(analysis))
            continue
        means = [
            f"{m['name']} {m['mean']:+.3f}" for m in analysis["margins"]["models"] if m["name"] in ("global", "clients")
        ]
        pure = [f"{p['name']} {p['purity']:.3f}" for p in analysis["embeddings"]["panels"]]
        terminal.out(
            f"{analysis['method']}: mean margin {', '.join(means)}; purity {', '.join(pure)}; {folder}/analysis.json"
        )
        for note in analysis["notes"]:
            terminal.out(f"  {note}")
