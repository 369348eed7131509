"""The report's page in a real browser: one session, a few visits, everything that a reader can do."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import synthetic
from browsing import once
from fedcc.report.records import find_records
from fedcc.report.tables import tables

pytestmark = pytest.mark.slow

SOME = (("cifar10", "classes:2"), ("cifar10", "classes:1"), ("cifar100", "classes:10"))
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
EVIL = '<img src=x onerror="document.title=1">'
CHARTS = {
    "curves": ("curves", "log"),
    "cost": ("images", "sent", "seconds"),
    "classes": ("by-class", "confusion", "by-client"),
    "known": ("partition", "known"),
    "models": ("example", "margins", "embeddings"),
    "compare": ("pair",),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report: Table I in part with two seeds, and digits with everything that a run may hold."""
    from fedcc.report.write import write_report

    def make(place: Path) -> None:
        synthetic.folders(place / "runs", ("fedavg", "fedlc", "fedmd", "fedhkt", "fedcc"), SOME, 2)
        synthetic.folders(
            place / "runs", ("fedavg", "fedcc", "centralized"), [("digits", "classes:1")], 1, ("fedavg", "fedcc")
        )
        synthetic.write(
            synthetic.record("fedavg", 33.0, data="cifar10", skew="classes:2", epochs=85), place / "runs" / "b"
        )
        synthetic.write(synthetic.record("fedconcat", data="cifar10", skew="classes:2"), place / "runs" / "c")
        synthetic.write(synthetic.record(data="digits", settings={"lam": 0.5}), place / "runs" / "v")
        odd = synthetic.record(data="digits", confused=True)  # every text of it is markup
        odd |= {"method": EVIL, "device": EVIL, "command": EVIL, "skew": EVIL, "commit": EVIL, "classes": [EVIL] * 10}
        odd["experiment"] |= {"method": EVIL, "skew": EVIL, "wire": EVIL}
        odd["versions"] = {EVIL: EVIL}
        odd["uploads"] = {EVIL: {str(k): [0.5] * odd["rounds"] for k in range(10)}}
        odd["warnings"] = [{"round": 1, "client": "0", "reason": EVIL}]
        synthetic.write(odd, place / "runs" / "odd", analysed=True)
        (place / "runs" / "w").mkdir()
        (place / "runs" / "w" / "x.json").write_text('{"<b>": "</script>"}')
        found = find_records([place / "runs"])
        assert any(run.warnings and run.confusion and run.analysis for run in found.runs)
        write_report(found, tables(found.runs), place / "report", figures=False)

    return once(tmp_path_factory, "report", make)


class Watched:
    """The page in a browser, and everything that it complains about or asks for."""

    def __init__(self, browser: Any, file: Path, place: Path, **options: Any):
        self.file, self.place = file, place
        self.page = browser.new_context(**options).new_page()
        self.noise: list[str] = []
        self.page.on("console", lambda m: self.noise.append(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda e: self.noise.append(f"error: {e}"))
        self.page.on("request", self._asked)
        self.visit()

    def _asked(self, request: Any) -> None:
        if request.url.partition("#")[0] != self.file.as_uri() and not request.url.startswith(("data:", "blob:")):
            self.noise.append(f"request: {request.url}")

    def visit(self, address: str = "") -> None:
        self.page.goto("about:blank")
        self.page.goto(self.file.as_uri() + address)
        self.page.wait_for_selector("html[data-ready]")

    def shot(self, name: str, **options: Any) -> None:
        folder = Path(os.environ.get("FEDCC_SCREENSHOTS") or self.place)
        folder.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=folder / f"{name}.png", **options)
        assert (folder / f"{name}.png").stat().st_size > 10_000

    def column(self, table: str, skew: str, data: str) -> list[tuple[str, str]]:
        """Method and shown text of one column, top to bottom, hidden rows left out."""
        read = """([table, skew, data]) => [...document.querySelectorAll(`table[data-name="${table}"] tbody tr`)]
            .filter(r => !r.hidden)
            .map(r => [r.cells[0], r.querySelector(`td[data-skew="${skew}"][data-data="${data}"]`)])
            .map(cells => cells.map(c => c.innerText))"""
        return [(m, " ".join(v.split())) for m, v in self.page.evaluate(read, [table, skew, data])]

    def saved(self, action: Any) -> tuple[str, bytes]:
        """The name and the content of the file that an action saves."""
        with self.page.expect_download() as waiting:
            action()
        return waiting.value.suggested_filename, Path(waiting.value.path()).read_bytes()


@pytest.fixture(scope="module")
def desktop(browser: Any, written: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """One visit for all tests; each begins with ``visit`` where the state matters."""
    watched = Watched(browser, written / "report" / "index.html", tmp_path_factory.mktemp("shots"), **DESKTOP)
    yield watched
    watched.page.context.close()


@pytest.fixture
def watched(desktop: Watched) -> Iterator[Watched]:
    desktop.visit()
    yield desktop
    assert desktop.noise == []


def test_the_page_shows_the_tables_and_fedcc_first(watched: Watched, written: Path) -> None:
    page = watched.page
    (table, *_) = tables(find_records([written / "runs"]).runs)
    watched.shot("first-screen")
    heads = page.locator("table[data-name=table1] thead tr:last-child th:visible")
    assert heads.count() == 4  # empty columns are folded
    assert len(watched.column("table1", "classes:2", "cifar10")) == 7  # and so are empty rows
    page.locator("#empty").check()
    assert heads.count() == 13
    shown = watched.column("table1", "classes:2", "cifar10")
    assert shown[0][0] == "FedCC"
    for row in table.rows:
        cell = row.cells["cifar10", "classes:2"]
        ours = "–" if cell.final is None else str(cell.final).replace(" ±", "±")
        printed = cell.printed.get("final")
        theirs = f" {printed.mean:.1f}±{printed.spread:.1f}" if printed else ""
        assert dict(shown)["\n".join(filter(None, row.name))] == ours + theirs
    marked = page.locator("table[data-name=table1] td[data-skew='classes:2'][data-data='cifar10'] .final .m1")
    assert marked.count() == 1
    assert page.locator("#digits-variants").get_attribute("open") is None  # variants are collapsed
    page.locator("nav.contents a", has_text="Variants").click()
    page.locator("#digits-variants summary").click()
    assert "lam=0.5" in page.locator("#digits-variants").inner_text()
    assert "not a record of a run" in page.locator("#problems").inner_text()
    links = page.locator("nav.contents a").evaluate_all("a => a.map(x => x.hash.slice(1))")
    assert {"table1", "digits", "scenario", "table2", "variants", "runs", "problems"} <= set(links)
    assert page.evaluate("ids => ids.every(id => document.getElementById(id))", links)


def test_the_first_screen_shows_the_lead_by_scenario(watched: Watched, written: Path) -> None:
    from fedcc.report.standings import leads

    page = watched.page
    box = page.locator("#leads svg").bounding_box()
    assert box["y"] + box["height"] < 900
    words = page.locator("#leads .lead").all_text_contents()
    expected = [
        f"{lead.margins['final'][1].points:+.1f} over {lead.margins['final'][1].rival}".replace("-", "−")
        for table in tables(find_records([written / "runs"]).runs)
        if not table.variants
        for lead in leads(table)
    ]
    assert words[: len(expected)] == expected
    assert len(expected) >= 4
    page.get_by_label("best", exact=True).check(force=True)
    assert page.locator("#leads .lead").all_text_contents() != words


def test_views_are_switched_and_the_address_holds_them(watched: Watched, written: Path) -> None:
    page = watched.page
    row = next(r for r in tables(find_records([written / "runs"]).runs)[0].rows if r.method == "fedcc")
    cell = row.cells["cifar10", "classes:1"]
    best = cell.value("best")
    assert cell.final is not None
    assert best is not None
    ours = lambda: dict(watched.column("table1", "classes:1", "cifar10"))["FedCC"]  # noqa: E731
    assert ours().split()[0].startswith(f"{cell.final.mean:.1f}")
    page.get_by_label("best", exact=True).check(force=True)
    assert ours().split()[0].startswith(f"{best.mean:.1f}")
    page.get_by_label("paper's numbers").uncheck()
    assert "67.3" not in ours()
    page.locator("#methods summary").click()
    page.locator("#methods input[value=fedmd]").uncheck()
    assert "FedMD" not in dict(watched.column("table1", "classes:1", "cifar10"))
    page.keyboard.press("Escape")
    page.locator("#scene").select_option("table1/cifar10/classes:1")
    page.get_by_role("tab", name="Cost").click()
    page.locator("#search").fill("fedcc digits")
    address = page.evaluate("location.hash")
    assert "FedMD" not in page.locator("#sent").inner_text()

    watched.visit(address)  # as a colleague who gets the link
    assert ours().split()[0].startswith(f"{best.mean:.1f}")
    assert not page.get_by_label("paper's numbers").is_checked()
    assert not page.locator("#methods input[value=fedmd]").is_checked()
    assert page.locator("#scene").input_value() == "table1/cifar10/classes:1"
    assert page.get_by_role("tab", name="Cost").get_attribute("aria-selected") == "true"
    assert page.locator("#sent svg").is_visible()
    assert page.locator("#search").input_value() == "fedcc digits"
    assert page.evaluate("location.hash") == address

    watched.visit("#tab=nonsense&scene=<b>&hide=nobody&view=%E0%A4%A&__proto__=1")  # anything may stand there
    assert page.locator("#curves svg").is_visible()
    watched.visit("#data=cifar100")
    assert page.locator("table[data-name=table1] thead tr:last-child th:visible").count() == 2
    assert page.locator("#digits").is_hidden()
    page.locator("#methods summary").click()
    page.locator("#methods button", has_text="none").click()
    assert watched.column("table1", "classes:10", "cifar100") == []
    watched.shot("menu")


def test_columns_are_sorted(watched: Watched) -> None:
    page = watched.page
    page.locator("#empty").check()
    before = watched.column("table1", "classes:2", "cifar10")
    head = page.locator("table[data-name=table1] thead th[title='classes:2'][data-data='cifar10']")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    values = [
        float(v.split("±")[0].split()[0]) for _, v in watched.column("table1", "classes:2", "cifar10") if v[0] != "–"
    ]
    assert values == sorted(values, reverse=True)
    assert len(values) == 7
    assert watched.column("table1", "classes:2", "cifar10")[-1][1].startswith("–")  # what is missing comes last
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert watched.column("table1", "classes:2", "cifar10")[0][1].split("±")[0].split()[0] == f"{min(values):.1f}"
    head.locator("button").click()
    assert watched.column("table1", "classes:2", "cifar10") == before


def test_a_number_leads_to_its_runs_their_files_and_records(watched: Watched, written: Path) -> None:
    page = watched.page
    link = page.locator("table[data-name=table1] tr[data-method=fedcc] td[data-skew='classes:1'] .final a")
    target = str(link.get_attribute("href"))
    link.click()
    group = page.locator(target)
    group.locator(".run").first.wait_for()
    text = group.inner_text()
    for words in (
        "seed 0",
        "seed 1",
        "fedcc run fedcc --data cifar10 --skew classes:1",
        "commit 0000",
        "images trained",
    ):
        assert words in text
    targets = group.locator(".run a").evaluate_all("links => links.map(a => a.href)")
    assert len(targets) == 10  # five files of two runs
    assert all(Path(t.removeprefix("file://")).is_file() for t in targets)
    name, record = watched.saved(group.get_by_role("button", name="save the record").first.click)
    assert name.endswith(".json")
    assert record == (written / "runs/cifar10_classes-1/fedcc/seed0/summary.json").read_bytes()
    every = page.locator("td a.n").evaluate_all("a => a.map(x => x.getAttribute('href').slice(1))")
    assert page.evaluate("ids => ids.every(id => document.getElementById(id))", every)
    watched.visit(target)
    assert group.get_attribute("open") is not None
    page.locator("#search").fill("digits lam=0.5")
    assert page.locator(".groups > details:visible").count() == 1
    name, archive = watched.saved(page.locator("#save-records").click)
    assert name == "records.tar.gz"
    (written / name).write_bytes(archive)
    with tarfile.open(written / name) as opened:
        assert len(opened.getnames()) == len(find_records([written / "runs"]).runs)


def test_every_chart_is_drawn_labelled_and_has_its_numbers_and_files(watched: Watched) -> None:
    page = watched.page
    assert page.locator("#scene").input_value() == "digits/digits/classes:1"  # the one with most to see
    labels = {}
    for tab, names in CHARTS.items():
        page.locator(f"#tab-{tab}").click()
        for name in names:
            drawing = page.locator(f"#{name} > svg[role=img]")
            assert drawing.count() == 1, name
            labels[name] = str(drawing.get_attribute("aria-label"))
            numbers = page.locator(f"#{name}-figure details.numbers")
            numbers.locator("summary").click()
            numbers.locator("tbody tr").first.wait_for()
            assert page.locator(f"#{name}-figure .tools button").count() == 3
    assert all("Digits, N = 1. " in label for name, label in labels.items() if name != "pair"), labels
    assert re.search(r"^Learning curves, .*FedAvg [\d.]+ %, .*FedCC [\d.]+ %", labels["curves"])
    assert "10 clients in 10 classes" in labels["partition"]
    assert "FedCC global: purity" in labels["embeddings"]
    assert page.locator("#embeddings .cloud").count() == 4
    page.locator("#tab-models").click()
    assert page.locator("#example-image img").evaluate("i => i.naturalWidth") == 8

    button = lambda name, kind: page.locator(f"#{name}-figure .tools button", has_text=kind).click  # noqa: E731
    name, drawing = watched.saved(button("margins", "SVG"))
    assert name == "digits-digits-classes-1-decision-margins.svg"
    assert b"light-dark" not in drawing
    assert drawing.startswith(b"<svg")
    name, pixels = watched.saved(button("margins", "PNG"))
    assert pixels.startswith(b"\x89PNG")
    name, numbers = watched.saved(button("margins", "CSV"))
    assert numbers.startswith(b"method,from,to,samples\r\nFedAvg")
    name, numbers = watched.saved(page.get_by_role("button", name="Table I: save as CSV").click)
    assert name == "table1.csv"
    assert numbers.decode().splitlines()[0].startswith("method,cifar10 classes:2,")


def test_charts_of_a_scenario(watched: Watched, written: Path) -> None:
    page = watched.page
    counts = json.loads((written / "runs/digits_classes-1/fedcc/seed0/summary.json").read_text())
    page.locator("#tab-known").click()
    texts = page.locator("#partition .value").all_text_contents()
    assert sorted(map(int, texts)) == sorted(n for row in counts["counts"].values() for n in row if n)
    shares = [f"{100 * v:.1f}" for row in counts["known"].values() for v in row]
    texts = page.locator("#known .value").all_text_contents()
    assert [float(t) for t in texts] == pytest.approx([float(s) for s in shares], abs=0.61)
    page.locator("#tab-classes").click()
    page.locator("#confused").select_option(label="FedCC, seed 0")
    matrix = counts["confusion"]
    texts = page.locator("#confusion .value").all_text_contents()
    assert len(texts) == sum(n > 0 for row in matrix for n in row)
    assert float(texts[0]) == pytest.approx(100 * matrix[0][0] / sum(matrix[0]), abs=0.51)

    page.locator("#tab-curves").click()
    page.locator("#scenario").get_by_label("public targets").check(force=True)
    assert page.locator("#curves .legend").all_text_contents() == ["FedCC"]
    page.locator("#scenario").get_by_label("prediction").check(force=True)
    for value in page.locator("#scene option").evaluate_all("o => o.map(x => x.value)"):
        page.locator("#scene").select_option(value)
        assert page.locator("#curves .line").count() > 0
    page.locator("#scene").select_option("table1/cifar10/classes:1")
    assert page.locator("#curves .line").count() >= 5
    page.locator("#tab-models").click()
    assert page.locator("#margins").is_hidden()
    assert "margins" in page.locator("#absent").inner_text()

    page.locator("#tab-curves").click()
    page.locator("#scene").select_option("table1/cifar10/classes:2")  # later rounds are one marker
    ticks = page.locator("#curves .tick.x").all_text_contents()
    assert ticks == [*map(str, range(1, 16)), "later"]
    assert "FedConcat (◆ after 215 rounds)" in page.locator("#curves .legend").all_text_contents()
    assert page.locator("#curves .diamond").count() == 1
    page.locator("#methods summary").click()
    page.locator("#methods input[value=fedconcat]").uncheck()
    assert "later" not in page.locator("#curves .tick.x").all_text_contents()


def test_two_runs_are_compared(watched: Watched) -> None:
    page = watched.page
    page.locator("#search").fill("digits lam=0.5")
    page.locator(".groups > details:visible summary").first.click()
    page.locator(".groups > details:visible").get_by_role("button", name="run A").click()
    page.locator("#run-b").select_option(label="FedCC, Digits, N = 1, seed 0")
    rows = page.locator("#differences tbody tr").all_inner_texts()
    assert any(re.fullmatch(r"fedcc\.lam\s+0\.5\s+0\.2", row) for row in rows), rows
    assert not any(row.startswith(("seed", "data", "method")) for row in rows)
    assert page.locator("#pair .line").count() == 2
    address = page.evaluate("location.hash")
    watched.visit(address)
    assert "lam" in page.locator("#differences").inner_text()


def test_keys_reach_everything(watched: Watched) -> None:
    page = watched.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.locator("#tab-curves").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#panel-cost").is_visible()
    assert page.evaluate("document.activeElement.id") == "tab-cost"
    page.keyboard.press("End")
    assert page.locator("#panel-compare").is_visible()
    page.keyboard.press("Home")
    page.locator("#curves").focus()
    page.keyboard.press("End")
    assert page.locator("#curves .tip").is_visible()
    assert re.match(r"round 3, .*FedCC [\d.]+ %", page.locator("p[role=status]").text_content())
    page.keyboard.press("ArrowLeft")
    assert page.locator("p[role=status]").text_content().startswith("round 2, ")
    page.keyboard.press("Escape")
    assert page.locator("#curves .tip").is_hidden()
    page.locator("#curves svg").hover(position={"x": 300, "y": 100})
    assert page.locator("#curves .tip").is_visible()


def test_markup_in_a_record_stays_text(watched: Watched) -> None:
    page = watched.page
    title = page.title()
    options = page.locator("#scene option").evaluate_all("o => o.map(x => [x.value, x.text])")
    odd = next(value for value, text in options if "onerror" in text)
    page.locator("#scene").select_option(odd)
    for tab in CHARTS:
        page.locator(f"#tab-{tab}").click()
    page.locator("#search").fill("onerror")
    for group in page.locator(".groups > details:visible summary").all():
        group.click()
    page.locator(".groups .uploads summary").first.click()
    assert EVIL in page.locator(".groups").inner_text()
    page.locator("#tab-classes").click()
    page.locator("#by-class svg").hover(position={"x": 600, "y": 40})
    assert page.locator("#by-class .tip").is_visible()
    assert page.locator("img[src=x]").count() == 0
    assert page.title() == title


def test_axe_finds_nothing_serious(
    watched: Watched, browser: Any, tmp_path: Path, axe: Callable[..., list[str]]
) -> None:
    dark = Watched(browser, watched.file, tmp_path, color_scheme="dark", **DESKTOP)
    phone = Watched(browser, watched.file, tmp_path, **PHONE)
    for visit in (watched, dark, phone):
        for tab in CHARTS if visit is watched else ("curves", "classes"):
            visit.page.locator(f"#tab-{tab}").click()
            part = "document" if tab == "curves" else "'#scenario'"  # the rest stays the same
            assert axe(visit.page, part) == [], tab
    assert dark.noise == phone.noise == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paper_shows_every_chart_whole(scheme: Any, browser: Any, written: Path, tmp_path: Path) -> None:
    watched = Watched(browser, written / "report" / "index.html", tmp_path, color_scheme=scheme, **DESKTOP)
    page = watched.page
    page.evaluate("""() => {
        window.charts = () => [...document.querySelectorAll("#scenario figure:not([hidden]) .plot")]
            .filter((p) => p.offsetParent)
            .map((p) => [p.querySelector("svg")?.getBoundingClientRect().width ?? 0, p.clientWidth]);
        addEventListener("beforeprint", () => {
            window.printed = charts();
            window.ink = getComputedStyle(document.body).color;
        });
    }""")
    page.pdf(path=tmp_path / "page.pdf", format="A4")
    printed = page.evaluate("printed")
    assert len(printed) == sum(map(len, CHARTS.values()))  # all tabs
    assert all(300 < width <= 650 for width, _ in printed), printed
    assert page.evaluate("ink") == "rgb(29, 33, 38)"
    assert page.evaluate("document.documentElement.className") == ""
    assert all(width == room for width, room in page.evaluate("charts()"))
    assert page.evaluate("charts()")[0][0] > 1000
    page.emulate_media(media="print", color_scheme=scheme)
    page.set_viewport_size({"width": 703, "height": 1000})  # A4 within its margins
    page.wait_for_selector("html.printing")
    assert page.evaluate("document.documentElement.scrollWidth") <= 703
    assert page.locator("#scene-title").inner_text() == ": Digits, N = 1 (Digits)"
    assert watched.noise == []
    page.context.close()


def test_phones_tablets_and_themes(browser: Any, written: Path, tmp_path: Path) -> None:
    watched = Watched(browser, written / "report" / "index.html", tmp_path, **PHONE)
    page, summary = watched.page, watched.page.locator("#methods summary")
    scenes = page.locator("#scene option").evaluate_all("o => o.map(x => x.value)")
    for tab in CHARTS:
        page.locator(f"#tab-{tab}").click()
        for value in [*scenes, "digits/digits/classes:1"]:
            page.locator("#scene").select_option(value)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, (tab, value)
    page.locator("#tab-curves").click()
    watched.shot("phone", full_page=True)
    for width, height in ((390, 844), (390, 500), (800, 600)):
        page.set_viewport_size({"width": width, "height": height})
        summary.click()
        page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )  # it moved
        box = page.locator("#methods > div").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert 100 <= box["height"] <= height - box["y"]
        page.locator("#methods input").first.focus()
        page.keyboard.press("Escape")
        assert page.locator("#methods").get_attribute("open") is None
        assert summary.evaluate("s => s === document.activeElement")
    page.set_viewport_size({"width": 820, "height": 1180})
    page.evaluate("scrollTo(0, 0)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 820
    watched.shot("tablet")
    assert watched.noise == []
    page.context.close()

    dark = Watched(browser, written / "report" / "index.html", tmp_path, color_scheme="dark", **DESKTOP)
    shade = lambda: sum(  # noqa: E731
        int(n) for n in dark.page.evaluate("getComputedStyle(document.body).backgroundColor").strip("rgb()").split(",")
    )
    assert shade() < 150
    dark.shot("dark", full_page=True)
    dark.page.locator("#theme").click()
    assert shade() > 600
    assert dark.noise == []
    dark.page.context.close()
