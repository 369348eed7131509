"""What `mkdocs build` adds to the pages in docs/: see mkdocs.yml."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import links
import method_pages
import notebook

ROOT = Path(__file__).parents[2]
OPTIONS = "<!-- options of {} -->"


def on_config(config: Any) -> Any:
    """List the methods' pages, since every registered method has one, and pages that mkdocs.yml does not name."""
    listed = set(paths(config.nav))
    docs = ROOT / "docs"
    if rest := [p for p in sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md")) if p not in listed]:
        config.nav.append({"More": rest})
    section = next(entry["Methods"] for entry in config.nav if "Methods" in entry)
    section.append({"Each method": [f"methods/{name}.md" for name in method_pages.METHODS]})
    return config


def paths(nav: Any) -> Iterator[str]:
    """The pages that a navigation names."""
    for entry in nav if isinstance(nav, list) else nav.values():
        if isinstance(entry, str):
            yield entry
        else:
            yield from paths(entry)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and files that are not in docs/."""

    def add(place: str, content: str | bytes) -> None:
        files.append(File.generated(config, place, content=content))

    for name in ("README.md", *links.PROJECT):
        place = links.place(name)
        assert place is not None
        add(place, links.moved((ROOT / name).read_text(), name, place))
    for place, text in method_pages.pages().items():
        add(place, text)
    for path in [*ROOT.glob("results/*.json"), *ROOT.glob("examples/*.py"), *ROOT.glob("experiments/*.*")]:
        add(str(links.place(path.relative_to(ROOT).as_posix())), path.read_bytes())
    for name in ("LICENSE", "CITATION.cff"):
        add(str(links.place(name)), (ROOT / name).read_bytes())
    for path in (ROOT / "docs").glob("*.ipynb"):
        text, pictures = notebook.page(path)
        add(f"{path.stem}.md", text)
        for name, picture in pictures.items():
            add(name, picture)
    add("report/index.html", "")  # written when the records are in their place
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = page.file.src_uri
    if source == "methods.md":
        for name in method_pages.METHODS:
            markdown = markdown.replace(f"| `{name}` |", f"| [`{name}`](methods/{name}.md) |")
    if source == "report.md":
        title, rest = markdown.split("\n", 1)
        markdown = f"{title}\n\n[The report of this project's results](report/index.html)\n{rest}"
    if source == "results.md":  # make.css gives these long commands room
        markdown = re.sub(r"(\| `fedcc [^`|]*`) \|$", r"\1{ .command } |", markdown, flags=re.MULTILINE)
    if source == "api.md":
        markdown = with_options(markdown)
    generated = source in ("index.md", *(name.lower() for name in links.PROJECT)) or source.startswith("methods/")
    return markdown if generated else links.moved(markdown, f"docs/{source}", source)


def with_options(markdown: str) -> str:
    """Fill in the tables of options, from their declarations."""
    from fedcc.core.options import REQUIRED, options_of
    from fedcc.experiments.options import Machine, Measurement, Split, Training
    from fedcc.report.markdown import code, grid, plain

    for group in (Split, Training, Measurement, Machine):
        mark = OPTIONS.format(group.__name__)
        if mark not in markdown:
            raise ValueError(f"docs/api.md has no line {mark!r}")
        rows = [
            [
                code(o.name),
                "the data set's" if o.default is REQUIRED else code(repr(o.default)),
                plain(o.marks["meaning"]),
            ]
            for o in options_of(group).values()
        ]
        markdown = markdown.replace(mark, grid(["parameter", "default", "meaning"], rows))
    return markdown


def on_post_build(config: Any) -> None:
    """Write the report beside the records that it links to."""
    from fedcc.report.records import find_records
    from fedcc.report.tables import tables
    from fedcc.report.write import write_report

    site = Path(config.site_dir)
    records = find_records([site / "records"])
    write_report(records, tables(records.runs), site / "report", figures=False)
