"""The report as files: a page, tables as Markdown, CSV and LaTeX, figures for print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedcc.core.files import make_folder, open_whole
from fedcc.report import latex, markdown, spreadsheet
from fedcc.report.cells import Table
from fedcc.report.client_tables import client_table
from fedcc.report.readings import reading_tables
from fedcc.report.records import Records

TITLE = "Federated learning under label skew"


def write_report(
    records: Records, tables: Sequence[Table], out: Path, *, title: str = TITLE, figures: bool = True
) -> list[Path]:
    """Write the whole report into a folder; returns the files, the page first."""
    from fedcc.report.gallery import draw
    from fedcc.report.page import page

    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; --out must name a folder")
    files = [_write(out / "tables" / name, text) for name, text in _tables(records, tables, out / "tables")]
    links = [f"tables/{file.name}" for file in files]
    if figures:
        files += draw(tables, out / "figures")
    return [_write(out / "index.html", page(records, tables, out, title, links)), *files]


def _tables(records: Records, tables: Sequence[Table], beside: Path) -> Iterator[tuple[str, str]]:
    inputs = []
    for table in tables:
        yield f"{table.slug}.md", markdown.section(table, beside)
        yield f"{table.slug}.csv", spreadsheet.comparison(table)
        yield f"{table.slug}.tex", latex.comparison(table)
        inputs.append(table.slug)
        if table.with_paper:
            yield f"{table.slug}-paper.tex", latex.comparison(table, with_paper=True)
            inputs.append(f"{table.slug}-paper")
        for readings in (r.table for r in reading_tables(table)):
            yield f"{readings.slug}.md", "\n".join(markdown.comparison(readings, d, beside) for d in readings.data)
            yield f"{readings.slug}.csv", spreadsheet.comparison(readings)
            yield f"{readings.slug}.tex", latex.comparison(readings)
            inputs.append(readings.slug)
        if clients := None if table.variants else client_table(table):
            yield f"{clients.slug}.md", "\n".join(markdown.clients(clients, d) for d in clients.data)
            yield f"{clients.slug}.csv", spreadsheet.clients(clients)
            yield f"{clients.slug}.tex", latex.clients(clients)
            inputs.append(clients.slug)
    yield "report.tex", latex.document(inputs)
    yield "runs.csv", spreadsheet.runs(records.runs, beside)


def write_page(records: Records, tables: Sequence[Table], file: Path) -> Path:
    """Write everything as one Markdown page."""
    return _write(file, markdown.page(records, tables, file.parent))


def write_readme(tables: Sequence[Table], file: Path) -> Path:
    """Rewrite the block of a README that holds the paper's table."""
    block = markdown.readme_block(tables, file.parent)
    return _write(file, markdown.replace_block(file.read_text(), block, file.name))


def _write(path: Path, text: str) -> Path:
    make_folder(path.parent)
    with open_whole(path) as file:
        file.write(text.encode())
    return path
