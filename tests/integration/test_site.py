"""The documentation as a site: it builds without a warning or a network, and its notebook runs."""

from __future__ import annotations

import doctest
import html.parser
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

import fedcc
from scripts import loaded

ROOT = Path(__file__).resolve().parents[2]


class Addresses(html.parser.HTMLParser):
    """The addresses in a page: those that a browser loads by itself, and those of links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name == "src" or (name == "href" and tag == "link")):
                self.loaded.append(value)
            elif value and name == "href" and tag == "a":
                self.linked.append(value)


def test_links_follow_the_files() -> None:
    found = doctest.testmod(loaded("docs/make/links.py"))
    assert found.attempted > 1
    assert not found.failed


def test_the_source_distribution_has_what_the_site_is_made_of() -> None:
    """The project's own pages, the files that are copied as they are, and all that a page links to."""
    links = loaded("docs/make/links.py")
    needed = {"README.md", "mkdocs.yml", "docs", *links.PROJECT, *(name.rstrip("/") for name in links.FILES)}
    for page in (ROOT / name for name in (*links.PROJECT, "README.md")):
        targets = re.findall(r"\]\(([^)#:]+)[#)]", page.read_text())
        needed |= {(ROOT / target).resolve().relative_to(ROOT).parts[0] for target in targets}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert needed <= set(build["include"])
    assert all((ROOT / name).exists() for name in build["include"])


def test_every_method_has_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "make")
    pages = loaded("docs/make/method_pages.py").pages()
    assert set(pages) == {f"methods/{name}.md" for name in fedcc.METHODS}
    for name, kind in fedcc.METHODS.items():
        text = pages[f"methods/{name}.md"]
        assert text.startswith(f"# {kind.__name__}")
        assert re.findall("^## (.*)", text, re.MULTILINE) == [
            "Idea", "Messages", "Settings", "Our numbers", "Deviations and choices"
        ]  # fmt: skip
    assert re.search(
        r"^\| CIFAR-10.* \| Table I \| as it is \| .*\]\(\.\./records/", pages["methods/fedcc.md"], re.MULTILINE
    )


def test_the_table_of_costs_is_current() -> None:
    """Every method's line says what its clients share; of quick ones all that a run would say."""
    which = loaded("docs/make/which_method.py")
    written = which.WHICH.search(which.PAGE.read_text())[0]
    for name, kind in fedcc.METHODS.items():
        cells = [kind().label, which.shares(kind), *(which.costs(name) if name in ("fedct", "local") else [])]
        assert f"| {' | '.join(cells)} |" in written, "run `make pages`"


@pytest.mark.slow
def test_the_site(site: Path) -> None:
    """Strict: a broken link or anchor, or a page without a place, is a warning, and a warning is an error."""
    for name, kind in fedcc.METHODS.items():
        text = (site / "methods" / f"{name}.html").read_text()
        assert kind.__name__ in text
        assert all(f'id="{part}"' in text for part in ("idea", "messages", "settings", "our-numbers"))
    assert "records/" in (site / "methods" / "fedcc.html").read_text()
    for page in site.rglob("*.html"):
        addresses = Addresses(page.read_text())
        assert not [a for a in addresses.loaded if re.match(r"(https?:)?//", a)], f"{page.name} loads from elsewhere"
        if page.name == "404.html":  # its addresses begin at the site's root, wherever that will be
            continue
        for address in addresses.loaded + addresses.linked:
            path = unquote(urldefrag(address).url)
            if path and not re.match(r"[a-z]+:", path):
                assert (page.parent / path).exists(), f"{page.relative_to(site)} leads to {address}"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible(scheme: str, site: Path, browser: Any, axe: Callable[..., list[str]]) -> None:
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    for name in ("index", "methods/fedcc", "api", "notebook", "operate"):
        page.goto((site / f"{name}.html").as_uri())
        assert axe(page) == [], name
    context.close()


@pytest.mark.slow
def test_tables_are_neither_cut_nor_pages_tall(site: Path, browser: Any) -> None:
    """The first page's table fits a desktop, and a long command has room: in a narrow column it is a row of a page."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto((site / "index.html").as_uri())
    page.wait_for_selector(".md-typeset__scrollwrap")
    wide = "areas => areas.filter(a => a.scrollWidth > a.clientWidth).length"
    assert page.locator(".md-typeset__scrollwrap").evaluate_all(wide) == 0
    page.goto((site / "results.html").as_uri())
    page.wait_for_selector(".md-typeset__scrollwrap")
    tallest = "rows => Math.max(...rows.map(r => r.getBoundingClientRect().height))"
    assert page.locator("tr").evaluate_all(tallest) < 250
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["index", "lab/speed"])
def test_pages_opened_as_files_can_be_searched(name: str, site: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((site / f"{name}.html").as_uri())
    page.locator("[data-md-component=search-query]").click()
    page.keyboard.type("guard_votes")
    first = page.locator(".md-search-result__link").first
    first.wait_for()
    assert "attacks.html" in first.get_attribute("href")
    page.close()


@pytest.mark.slow
def test_the_notebook(tmp_path: Path) -> None:
    """It runs, and FedCC is where the text says: far above FedAvg."""
    loaded("docs/make/execute.py").execute(ROOT / "docs" / "notebook.ipynb", tmp_path / "out.ipynb")
    cells = json.loads((tmp_path / "out.ipynb").read_text())["cells"]
    printed = "".join("".join(o.get("text", "")) for c in cells for o in c.get("outputs", []))
    fedavg, ours = re.search(r"FedAvg: ([\d.]+) %", printed), re.search(r"([\d.]+) % of all images", printed)
    assert fedavg
    assert ours
    assert float(fedavg[1]) < 40 < 85 < float(ours[1])
    stored = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())["cells"]
    assert all(cell["outputs"] for cell in stored if cell["cell_type"] == "code"), "run `make pages`"
