"""The report as files: a page, tables for every purpose, figures for print. Each is written whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedcc.core.files import make_folder, written_whole
from fedcc.report import latex, markdown, spreadsheet
from fedcc.report.cells import Table
from fedcc.report.client_tables import client_table
from fedcc.report.readings import readings
from fedcc.report.records import Records

TITLE = "Federated learning under label skew"


def report(
    found: Records, tables: Sequence[Table], out: Path, *, title: str = TITLE, figures: bool = True
) -> list[Path]:
    """Write the whole report into a folder; the files that are written."""
    from fedcc.report.gallery import draw
    from fedcc.report.page import page

    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; --out must name a folder")
    written = [_write(out / "tables" / name, text) for name, text in _tables(found, tables, out / "tables")]
    if figures:
        written += draw(tables, out / "figures")
    names = [p.relative_to(out).as_posix() for p in written if p.parent.name == "tables"]
    return [_write(out / "index.html", page(found, tables, out, title, names)), *written]


def _tables(found: Records, tables: Sequence[Table], beside: Path) -> Iterator[tuple[str, str]]:
    inputs = []
    for table in tables:
        yield f"{table.slug}.md", markdown.whole(table, beside)
        yield f"{table.slug}.csv", spreadsheet.comparison(table)
        yield f"{table.slug}.tex", latex.comparison(table)
        inputs.append(table.slug)
        if table.with_paper:
            yield f"{table.slug}-paper.tex", latex.comparison(table, with_paper=True)
            inputs.append(f"{table.slug}-paper")
        for read in readings(table):
            again = read.table
            yield f"{again.slug}.md", "\n".join(markdown.comparison(again, d, beside) for d in again.data)
            yield f"{again.slug}.csv", spreadsheet.comparison(again)
            yield f"{again.slug}.tex", latex.comparison(again)
            inputs.append(again.slug)
        if clients := None if table.variants else client_table(table):
            yield f"{clients.slug}.md", "\n".join(markdown.clients(clients, d) for d in clients.data)
            yield f"{clients.slug}.csv", spreadsheet.clients(clients)
            yield f"{clients.slug}.tex", latex.clients(clients)
            inputs.append(clients.slug)
    yield "report.tex", latex.document(inputs)
    yield "runs.csv", spreadsheet.runs(found.runs, beside)


def page_file(found: Records, tables: Sequence[Table], file: Path) -> Path:
    """Write everything as one Markdown page."""
    return _write(file, markdown.page(found, tables, file.parent))


def readme_block(tables: Sequence[Table], file: Path) -> Path:
    """Rewrite the block of a README that holds the paper's table."""
    text = file.read_text()
    return _write(file, markdown.replaced(text, markdown.block(tables, file.parent), file.name))


def _write(path: Path, text: str) -> Path:
    make_folder(path.parent)
    with written_whole(path) as file:
        file.write(text.encode())
    return path
