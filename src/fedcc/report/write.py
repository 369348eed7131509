"""The report as files: a page, tables as Markdown, CSV and LaTeX, figures for print."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fedcc.core.files import make_folder, write_whole
from fedcc.report import latex, markdown, spreadsheet
from fedcc.report.cells import Table
from fedcc.report.records import Records
from fedcc.report.standings import duels
from fedcc.report.tables import client_table, reading_tables
from fedcc.report.titles import scenario_title

TITLE = "Federated learning under label skew"


def write_report(
    records: Records,
    tables: Sequence[Table],
    out: Path,
    *,
    title: str = TITLE,
    figures: bool = True,
    drawn: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Write the whole report into a folder; returns the files, the page first.

    ``drawn`` is told, after each figure, how many there are so far and in all.
    """
    from fedcc.report.gallery import draw
    from fedcc.report.page import page

    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; --out must name a folder")
    files = [_write(out / "tables" / name, text) for name, text in _tables(records, tables, out / "tables")]
    links = [f"tables/{file.name}" for file in files]
    if figures:
        files += draw(tables, out / "figures", drawn)
    return [_write(out / "index.html", page(records, tables, out, title, links)), *files]


def _tables(records: Records, tables: Sequence[Table], beside: Path) -> Iterator[tuple[str, str]]:
    inputs = []

    def formats(slug: str, as_markdown: str, as_csv: str, as_latex: str) -> Iterator[tuple[str, str]]:
        yield from ((f"{slug}.md", as_markdown), (f"{slug}.csv", as_csv), (f"{slug}.tex", as_latex))
        inputs.append(slug)

    for table in tables:
        text = markdown.section(table, beside)
        yield from formats(table.slug, text, spreadsheet.comparison(table), latex.comparison(table))
        if table.with_paper:
            yield f"{table.slug}-paper.tex", latex.comparison(table, with_paper=True)
            inputs.append(f"{table.slug}-paper")
        for again in reading_tables(table):
            text = "\n".join(markdown.comparison(again, d, beside) for d in again.data)
            yield from formats(again.slug, text, spreadsheet.comparison(again), latex.comparison(again))
        if own := client_table(table):
            text = "\n".join(markdown.clients(own, d) for d in own.data)
            yield from formats(own.slug, text, spreadsheet.clients(own), latex.clients(own))
    for name, text in (("compute", markdown.compute_section(tables)), ("paired", markdown.paired_section(records))):
        if text:
            yield f"{name}.md", text
    yield "report.tex", latex.document(inputs)
    yield "runs.csv", spreadsheet.runs(records.runs, beside)


def write_page(records: Records, tables: Sequence[Table], file: Path) -> Path:
    """Write everything as one Markdown page."""
    return _write(file, markdown.page(records, tables, file.parent))


def write_readme(tables: Sequence[Table], file: Path) -> Path:
    """Rewrite the block of a README that says whether FedCC is ahead, and draw its picture beside the README."""
    text = markdown.replace_block(file.read_text(), block := markdown.readme_block(tables), file.name)
    if markdown.PICTURE in block:
        from fedcc.report.figures import lead_figure, save

        found = [scenario for table in tables if table.of_paper for scenario in duels(table)]
        save(lead_figure(found), file.parent / markdown.PICTURE, picture_description(tables))
    return _write(file, text)


def picture_description(tables: Sequence[Table]) -> str:
    """What the README's picture shows, in words: its metadata, by which a test sees whether it is current."""
    sides = [
        f"{scenario_title(s.scenario)}, {name}: FedCC {duel.ours.mean:.1f}, {duel.rival} {duel.theirs.mean:.1f}"
        for table in tables
        if table.of_paper
        for s in duels(table)
        for name, duel in (("here", s.here), ("paper", s.paper))
    ]
    return "; ".join(sides)


def _write(path: Path, text: str) -> Path:
    make_folder(path.parent)
    write_whole(path, text)
    return path
