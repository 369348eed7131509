"""`fedcc report`: the command, the documents made by it, a large report, and its page in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pytest

import synthetic
from fedcc.report import markdown
from fedcc.report.records import find_records
from fedcc.report.tables import tables
from fedcc.report.write import picture_description
from program import QUICK, call

ROOT = Path(__file__).resolve().parents[2]
AGAIN = "run `fedcc report results --readme README.md --markdown docs/results.md`"
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
SOME = (("cifar10", "classes:2"), ("cifar10", "classes:1"), ("cifar100", "classes:10"))


def test_the_documents_are_up_to_date() -> None:
    found = find_records([ROOT / "results"])
    assert found.problems == ()
    made = tables(found.runs)
    assert (ROOT / "docs" / "results.md").read_text() == markdown.page(found, made, ROOT / "docs"), AGAIN
    readme = (ROOT / "README.md").read_text()
    assert readme == markdown.replace_block(readme, markdown.readme_block(made), "README.md"), AGAIN
    assert escape(picture_description(made), quote=False) in (ROOT / markdown.PICTURE).read_text(), AGAIN


def test_the_command_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.folders(
        tmp_path / "runs", ("fedavg", "fedcc"), [("digits", "classes:1")], 1, analysed=("fedavg", "fedcc")
    )
    synthetic.write(synthetic.record("fedcc", **dict(zip(("data", "skew"), SOME[0], strict=True))), tmp_path / "c.json")
    (tmp_path / "runs" / "broken.json").write_text("{")
    out = tmp_path / "report"
    done = call(capsys, "report", tmp_path / "runs", tmp_path / "c.json", "--out", out)
    assert done.code == 0, done
    assert "warning: runs/broken.json: is not valid JSON" in done.err
    names = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    tabular = {
        f"tables/{n}.{e}"
        for n in (
            "digits",
            "digits-clients",
            "digits-re-estimated",
            "digits-readings",
            "table1",
            "table1-readings",
            "table2",
        )
        for e in ("md", "csv", "tex")
    }
    assert tabular | {"index.html", "tables/runs.csv", "tables/report.tex", "tables/table1-paper.tex"} <= names
    drawn = {n.partition("_digits-classes-1_")[2].removesuffix(".pdf") for n in names if n.endswith(".pdf")}
    assert {"curves", "bytes", "partition", "fedcc_log", "margins", "embeddings", "fedcc_example"} <= drawn
    assert {n for n in names if n.endswith(".png")} == {n[:-3] + "png" for n in names if n.endswith(".pdf")}
    html = (out / "index.html").read_text()
    assert 'href="../runs/digits_classes-1/fedcc/seed0/summary.json"' in html
    assert "broken.json" in html
    assert "averaged" in html
    assert html.count("re-estimated on the public images") == 1
    assert html.count("<small>read with mirror,trust=4</small>") == 2  # digits, and Table I


def test_a_run_of_now_is_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "run", "fedcc", *QUICK, "--out", tmp_path / "runs" / "a").code == 0
    found = find_records([tmp_path / "runs"])
    assert found.problems == ()
    (run,) = found.runs
    stored = json.loads((tmp_path / "runs" / "a" / "summary.json").read_text())
    assert run.final == stored["accuracy"]["final"]
    assert run.protocol == (("models", "resnet8"), ("rounds", "1"), ("epochs", "1"), ("fraction", "0.2"))
    assert set(run.tests) == {"local", "global", "valid", "valid_labels", "local_full"}
    assert len(run.counts) == 10
    assert sum(run.traffic.rounds) == run.traffic.total
    assert {"majority", "alpha", "unknown"} <= set(run.log)


def test_the_readmes_block_and_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "results", tmp_path / "results")
    readme = tmp_path / "README.md"
    readme.write_text("nothing to see\n")
    call(capsys, "report", "results", "--readme", readme).failed("README.md must have one line", markdown.BEGIN, code=2)
    assert readme.read_text() == "nothing to see\n"
    readme.write_text(f"above\n{markdown.BEGIN}\n{markdown.END}\nbelow\n")
    assert call(capsys, "report", "results", "--readme", "README.md", "--markdown", "docs/results.md").code == 0
    text = readme.read_text()
    assert text.startswith(f"above\n{markdown.BEGIN}\n")
    assert text.endswith(f"{markdown.END}\nbelow\n")
    record = json.loads(Path("results/cifar10_classes-1_fedcc_seed0.json").read_text())
    assert re.search(rf"^\| CIFAR-10, N = 1 \| \d+ \| {record['accuracy']['final']:.1f}", text, re.M)
    assert "| 67.3 ±1.8 | 12.7 ±0.7 (FedConcat) | **+54.6** |" in text  # the paper's
    assert markdown.MISSING not in text
    assert (tmp_path / "docs" / "results.md").read_text() == (ROOT / "docs" / "results.md").read_text()
    assert (tmp_path / markdown.PICTURE).read_text().startswith("<?xml")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "docs", "results"]  # and no report/


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_nothing_to_report_is_an_error(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    call(capsys, "report", tmp_path / name, "--out", tmp_path / "r").refused(name)
    assert not (tmp_path / "r").exists()


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex")
def test_latex_compiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.folders(tmp_path / "runs", ("fedavg", "fedhkt", "fedcc"), SOME, 2)
    assert call(capsys, "report", tmp_path / "runs", "--out", tmp_path / "r", "--no-figures").code == 0
    done = subprocess.run(
        ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "report.tex"],
        cwd=tmp_path / "r" / "tables", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.slow
def test_the_whole_of_table_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.folders(tmp_path / "runs", analysed=("fedavg", "fedcc"))
    begun, used = time.perf_counter(), time.process_time()
    done = call(capsys, "report", tmp_path / "runs", "--out", tmp_path / "r")
    took, worked = time.perf_counter() - begun, time.process_time() - used
    assert done.code == 0, done
    assert "576 runs" in done.out
    size = (tmp_path / "r" / "index.html").stat().st_size
    with capsys.disabled():
        print(f"\n576 run folders: {took:.1f} s ({worked:.1f} s of work in this process), page {size / 1e6:.1f} MB")
    assert size < 20e6
    assert worked < 20


# ------------------------------------------------------------------------------------------------------ a real browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).exists():
        pytest.skip("no chromium")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report: Table I in part with two seeds, and digits with everything that a run may hold."""
    from fedcc.report.write import write_report

    place = tmp_path_factory.mktemp("report")
    synthetic.folders(place / "runs", ("fedavg", "fedlc", "fedmd", "fedhkt", "fedcc"), SOME, 2)
    synthetic.folders(
        place / "runs", ("fedavg", "fedcc", "centralized"), [("digits", "classes:1")], 1, ("fedavg", "fedcc")
    )
    synthetic.write(synthetic.record("fedavg", 33.0, data="cifar10", skew="classes:2", epochs=85), place / "runs" / "b")
    synthetic.write(synthetic.record("fedconcat", data="cifar10", skew="classes:2"), place / "runs" / "c")
    synthetic.write(synthetic.record(data="digits", settings={"lam": 0.5}), place / "runs" / "v")
    (place / "runs" / "w").mkdir()
    (place / "runs" / "w" / "x.json").write_text('{"<b>": "</script>"}')
    found = find_records([place / "runs"])
    write_report(found, tables(found.runs), place / "report", figures=False)
    return place


class Watched:
    """The page in a browser, and everything that it complains about or asks for."""

    def __init__(self, browser: Any, file: Path, **options: Any):
        self.page = browser.new_context(**options).new_page()
        self.noise: list[str] = []
        self.page.on("console", lambda m: self.noise.append(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda e: self.noise.append(f"error: {e}"))
        self.page.on("request", lambda r: r.url == file.as_uri() or self.noise.append(f"request: {r.url}"))
        self.page.goto(file.as_uri())

    def drawn(self) -> None:
        self.page.locator("#scenario").scroll_into_view_if_needed()
        self.page.wait_for_selector("#curves .main-svg")

    def shot(self, name: str, **options: Any) -> None:
        folder = Path(os.environ.get("FEDCC_SCREENSHOTS") or self.place)
        folder.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=folder / f"{name}.png", **options)
        assert (folder / f"{name}.png").stat().st_size > 10_000

    place = Path()

    def column(self, table: str, skew: str, data: str) -> list[tuple[str, str]]:
        """Method and shown text of one column, top to bottom, hidden rows left out."""
        read = """([table, skew, data]) => [...document.querySelectorAll(`#${table} tbody tr`)]
            .filter(r => !r.hidden)
            .map(r => [r.cells[0], r.querySelector(`td[data-skew="${skew}"][data-data="${data}"]`)])
            .map(cells => cells.map(c => c.innerText))"""
        return [(m, " ".join(v.split())) for m, v in self.page.evaluate(read, [table, skew, data])]


@pytest.fixture
def watched(browser: Any, written: Path, tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(browser, written / "report" / "index.html", viewport={"width": 1280, "height": 900})
    watched.place = tmp_path
    yield watched
    assert watched.noise == []
    watched.page.context.close()


@pytest.mark.slow
def test_the_page_shows_the_tables(watched: Watched, written: Path) -> None:
    (table, *_) = tables(find_records([written / "runs"]).runs)
    shown = dict(watched.column("table1", "classes:2", "cifar10"))
    for row in table.rows:
        cell = row.cells["cifar10", "classes:2"]
        text = shown["\n".join(filter(None, row.name))]
        ours = "–" if cell.final is None else str(cell.final).replace(" ±", "±")
        printed = cell.printed.get("final")
        theirs = f" {printed.mean:.1f}±{printed.spread:.1f}" if printed else ""
        assert text == ours + theirs
    marked = watched.page.locator("#table1 tbody td[data-skew='classes:2'][data-data='cifar10'] .final .m1")
    assert marked.count() == 1
    assert "lam=0.5" in watched.page.locator("#digits-variants").inner_text()
    assert "not a record of a run" in watched.page.locator("#problems").inner_text()
    watched.drawn()
    watched.shot("light", full_page=True)


@pytest.mark.slow
def test_views_are_switched(watched: Watched, written: Path) -> None:
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
    visible = lambda: page.locator("#table1 thead tr:last-child th:visible").count()  # noqa: E731
    assert visible() == 13
    page.get_by_label("CIFAR-100", exact=True).check(force=True)
    assert visible() == 5
    assert page.locator("#digits").is_hidden()
    page.get_by_label("all", exact=True).check(force=True)
    page.locator("#methods summary").click()
    page.locator("#methods input[value=fedmd]").uncheck()
    assert "FedMD" not in dict(watched.column("table1", "classes:1", "cifar10"))
    page.locator("#methods button", has_text="none").click()
    assert watched.column("table1", "classes:1", "cifar10") == []
    watched.shot("menu")


@pytest.mark.slow
def test_columns_are_sorted(watched: Watched) -> None:
    page = watched.page
    before = watched.column("table1", "classes:2", "cifar10")
    head = page.locator("#table1 thead th[title='classes:2'][data-data='cifar10']")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    values = [
        float(v.split("±")[0].split()[0]) for _, v in watched.column("table1", "classes:2", "cifar10") if v[0] != "–"
    ]
    assert values == sorted(values, reverse=True)
    assert len(values) == 7
    assert watched.column("table1", "classes:2", "cifar10")[-1][1].startswith("–")  # what is missing comes last
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert watched.column("table1", "classes:2", "cifar10")[0][1].split("±")[0].split()[0] == f"{min(values):.1f}"
    head.locator("button").click()
    assert watched.column("table1", "classes:2", "cifar10") == before


@pytest.mark.slow
def test_a_number_leads_to_its_runs_and_their_files(watched: Watched) -> None:
    page = watched.page
    link = page.locator("#table1 tr[data-method=fedcc] td[data-skew='classes:1'] .final a")
    link.click()
    group = page.locator(str(link.get_attribute("href")))
    assert group.get_attribute("open") is not None
    text = group.inner_text()
    assert "seed 0" in text
    assert "seed 1" in text
    assert "fedcc run fedcc --data cifar10 --skew classes:1" in text
    assert "commit 0000" in text
    targets = group.locator(".run a").evaluate_all("links => links.map(a => a.href)")
    assert len(targets) == 10  # five files of two runs
    assert all(Path(t.removeprefix("file://")).is_file() for t in targets)
    every = page.locator("td a.n").evaluate_all("a => a.map(x => x.getAttribute('href').slice(1))")
    assert page.evaluate("ids => ids.every(id => document.getElementById(id))", every)
    page.locator("#search").fill("digits lam")
    assert page.locator(".groups details:visible").count() == 1


@pytest.mark.slow
def test_figures_are_drawn_for_each_scenario(watched: Watched) -> None:
    page = watched.page
    watched.drawn()
    assert page.locator("#scene").input_value() == "digits/digits/classes:1"  # the one with most to see
    for name in ("curves", "sent", "partition", "log", "margins", "embeddings"):
        assert page.locator(f"#{name} .main-svg").count() > 0, name
    assert page.locator("#example img").evaluate("i => i.naturalWidth") == 8
    assert page.locator("#embeddings .scatterlayer .trace").count() == 4
    page.locator("#scenario").get_by_label("public targets").check(force=True)
    assert (
        page.locator("#curves .legendtext").all_inner_texts() == ["FedCC"]
        or page.locator("#curves .traces").count() <= 1
    )
    page.locator("#scenario").get_by_label("prediction").check(force=True)
    for value in page.locator("#scene option").evaluate_all("o => o.map(x => x.value)"):
        page.locator("#scene").select_option(value)
        assert page.locator("#curves .main-svg").count() > 0
    page.locator("#scene").select_option("table1/cifar10/classes:1")
    assert page.locator("#curves .traces").count() >= 5
    assert page.locator("#margins").is_hidden()
    assert "margins" in page.locator("#absent").inner_text()


@pytest.mark.slow
def test_later_rounds_are_one_marker_on_the_page(watched: Watched) -> None:
    page = watched.page
    watched.drawn()
    page.locator("#scene").select_option("table1/cifar10/classes:2")
    left, right = page.evaluate("document.getElementById('curves')._fullLayout.xaxis.range")
    assert right - left < 18
    ticks = page.locator("#curves .xtick text").all_text_contents()
    assert ticks == [*map(str, range(1, 16)), "later"]
    legend = page.locator("#curves .legendtext").all_text_contents()
    assert "FedConcat (◆ after 215 rounds)" in legend
    marks = "document.getElementById('curves').data.filter(t => t.marker?.symbol === 'diamond').map(t => [t.x, t.y])"
    ((where, _),) = page.evaluate(marks)
    assert where == ["later"]
    page.locator("#methods summary").click()
    page.locator("#methods input[value=fedconcat]").uncheck()
    assert "later" not in page.locator("#curves .xtick text").all_text_contents()


@pytest.mark.slow
def test_partition_colours_begin_at_zero_with_counts(watched: Watched, written: Path) -> None:
    watched.drawn()
    read = "(({zmin, zmax}) => [zmin, zmax])(document.getElementById('partition').data[0])"
    counts = json.loads((written / "runs/digits_classes-1/fedavg/seed0/summary.json").read_text())["counts"].values()
    assert watched.page.evaluate(read) == [0, max(map(max, counts))]
    texts = watched.page.locator("#partition .heatmap-label text").all_text_contents()
    assert sorted(map(int, texts)) == sorted(n for row in counts for n in row if n)


@pytest.mark.slow
def test_every_chart_has_a_label_for_screen_readers(watched: Watched) -> None:
    watched.drawn()
    read = """name => { const box = document.getElementById(name);
        return (name === "example" ? box.lastElementChild : box).getAttribute("aria-label"); }"""
    labels = {
        name: watched.page.evaluate(read, name)
        for name in ("curves", "sent", "partition", "log", "example", "margins", "embeddings")
    }
    assert watched.page.locator("#scenario .js-plotly-plot[role=img]").count() == len(labels)
    for name, label in labels.items():
        assert "Digits, N = 1. " in label, name
    assert re.search(r"^Learning curves, .* FedAvg [\d.]+ %, .*FedCC [\d.]+ %", labels["curves"])
    assert "10 clients in 10 classes" in labels["partition"]
    assert "FedCC global: purity" in labels["embeddings"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paper_shows_every_chart_whole(scheme: Any, browser: Any, written: Path, tmp_path: Path) -> None:
    watched = Watched(
        browser, written / "report" / "index.html", color_scheme=scheme, viewport={"width": 1280, "height": 900}
    )
    page = watched.page
    page.evaluate("""() => {
        window.charts = () => [...document.querySelectorAll("#scenario figure:not([hidden]) .plot")]
            .filter((p) => !(p instanceof SVGElement))
            .map((p) => [p.querySelector(".main-svg")?.getBoundingClientRect().width ?? 0, p.clientWidth]);
        addEventListener("beforeprint", () => {
            window.printed = charts();
            window.ink = getComputedStyle(document.body).color;
        });
    }""")
    page.pdf(path=tmp_path / "page.pdf", format="A4")  # nothing was scrolled to
    printed = page.evaluate("printed")
    assert len(printed) == 7
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


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(390, 844), (390, 500), (800, 600)])
def test_the_methods_menu_stays_on_the_screen(width: int, height: int, browser: Any, written: Path) -> None:
    watched = Watched(browser, written / "report" / "index.html", viewport={"width": width, "height": height})
    page, summary = watched.page, watched.page.locator("#methods summary")
    summary.click()
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")  # it moved
    box = page.locator("#methods > div").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert 100 <= box["height"] <= height - box["y"]
    page.locator("#methods input").first.focus()
    page.keyboard.press("Escape")
    assert page.locator("#methods").get_attribute("open") is None
    assert summary.evaluate("s => s === document.activeElement")
    assert watched.noise == []


@pytest.mark.slow
def test_dark_and_light(browser: Any, written: Path, tmp_path: Path) -> None:
    watched = Watched(
        browser, written / "report" / "index.html", color_scheme="dark", viewport={"width": 1280, "height": 900}
    )
    watched.place = tmp_path
    shade = lambda: sum(  # noqa: E731
        int(n)
        for n in watched.page.evaluate("getComputedStyle(document.body).backgroundColor").strip("rgb()").split(",")
    )
    assert shade() < 150
    watched.drawn()
    watched.shot("dark", full_page=True)
    watched.page.locator("#theme").click()
    assert shade() > 600
    assert watched.noise == []


@pytest.mark.slow
def test_a_phone_shows_it_without_sideways_scrolling(browser: Any, written: Path, tmp_path: Path) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
    watched = Watched(browser, written / "report" / "index.html", **phone)
    watched.place = tmp_path
    watched.drawn()
    for value in watched.page.locator("#scene option").evaluate_all("o => o.map(x => x.value)"):
        watched.page.locator("#scene").select_option(value)
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390
    watched.page.locator("#scene").select_option("digits/digits/classes:1")
    watched.shot("phone", full_page=True)
    assert watched.noise == []
