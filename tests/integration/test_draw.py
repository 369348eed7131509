"""The page on which one draws a digit: in a real browser it votes and trusts as fedcc does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcc.methods import abstention as eq
from scripts import loaded

pytestmark = pytest.mark.slow

ASK = """([model, images, switches]) => {
    const networks = fedcc.networks(model ?? fedcc.model);
    return images.map((image) => fedcc.ask(networks, model ?? fedcc.model, image, switches));
}"""
RING = [[0.5 + 0.25 * math.sin(a / 4), 0.5 - 0.35 * math.cos(a / 4)] for a in range(26)]
DRAWINGS = {
    "0": [RING],
    "1": [[[0.5, 0.1], [0.5, 0.9]]],
    "7": [[[0.3, 0.15], [0.7, 0.15], [0.45, 0.85]]],
    "4": [[[0.6, 0.1], [0.22, 0.62], [0.8, 0.62]], [[0.62, 0.35], [0.62, 0.92]]],
}


class Page:
    """The page, and everything that it complains about or asks a network for."""

    def __init__(self, browser: Any, site: Path, **options: Any):
        self.page = browser.new_context(**options).new_page()
        self.noise: list[str] = []
        self.page.on("console", lambda m: self.noise.append(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda e: self.noise.append(f"error: {e}"))
        self.page.on("request", lambda r: self.noise.append(r.url) if r.url.startswith("http") else None)
        self.page.goto((site / "draw.html").as_uri())
        self.page.wait_for_selector("#draw[data-ready]", state="attached")

    def ask(self, images: torch.Tensor, model: Any = None, **switches: Any) -> dict[str, torch.Tensor]:
        """What the browser's functions answer, stacked over the images."""
        found = self.page.evaluate(ASK, [model, images.flatten(1).tolist(), switches])
        return {name: torch.tensor([one[name] for one in found]) for name in ("votes", "trust", "answer", "forced")}

    def draw(self, strokes: list[list[list[float]]]) -> str:
        self.page.locator("#draw").get_by_role("button", name="Clear").click(force=True)
        box, mouse = self.page.locator("#draw .paper").bounding_box(), self.page.mouse
        for first, *rest in strokes:
            mouse.move(box["x"] + first[0] * box["width"], box["y"] + first[1] * box["height"])
            mouse.down()
            for x, y in rest:
                mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=4)
            mouse.up()
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return self.answer

    @property
    def answer(self) -> str:
        return str(self.page.locator("#draw .answer strong").inner_text())


@pytest.fixture(scope="module")
def opened(browser: Any, site: Path) -> Iterator[Page]:
    page = Page(browser, site, viewport={"width": 1280, "height": 900})
    yield page
    assert page.noise == []
    page.page.context.close()


@pytest.fixture(scope="module")
def program() -> Any:
    return loaded("docs/make/draw_model.py")


def test_the_browser_votes_and_trusts_as_fedcc_does(opened: Page, program: Any) -> None:
    federation, result = program.trained(rounds=1, epochs=10, seed=0)
    images = federation.test.x
    model = program.exported(federation, result)
    found, explained, answer = opened.ask(images, model), result.explain(images), result.answer(images)
    votes = found["votes"].transpose(0, 1)  # [clients, images, classes + 1]
    near = lambda a, b: float((a - b).abs().max()) < 1e-3  # noqa: E731
    assert near(votes[..., :-1], explained.votes)
    assert near(found["trust"].T, explained.trust)
    assert near(found["answer"][:, -1], answer.unknown)
    known = found["answer"][:, :-1]
    assert near(known / known.sum(-1, keepdim=True), answer.probabilities)
    assert near(found["forced"], (explained.votes / explained.votes.sum(-1, keepdim=True)).mean(0))
    assert explained.trust.max() > 0.15, "clients that all say the same would show nothing"

    liar = torch.eye(11)[0]
    habits = torch.tensor(model["habits"])
    for switches in ({"guard": True}, {"guard": True, "liar": 3}, {"liar": 3}):
        cast, means = votes.clone(), habits.clone()
        if "liar" in switches:
            cast[3], means[3] = liar, liar[:-1]
        counted = eq.guarded(cast, means, eq.loudest(means)) if "guard" in switches else cast
        found = opened.ask(images, model, **switches)
        assert near(found["trust"].T, eq.trust(counted)), switches
        assert near(found["answer"], eq.aggregate(counted)), switches


def test_the_stored_federation_is_as_good_as_the_page_says(opened: Page, site: Path) -> None:
    from fedcc.data import load

    digits = load("digits")
    images, labels = torch.as_tensor(digits.test_x), torch.as_tensor(digits.test_y)
    right = lambda found, name: 100 * float((found[name][:, :10].argmax(-1) == labels).float().mean())  # noqa: E731
    said = {n: float(opened.page.locator(f"[data-draw={n}]").first.inner_text()) for n in ("accuracy", "forced")}
    honest, spoiled = opened.ask(images), opened.ask(images, liar=3)
    assert right(honest, "answer") == pytest.approx(said["accuracy"], abs=0.3)
    assert right(honest, "forced") == pytest.approx(said["forced"], abs=0.3)
    assert said["accuracy"] > 95
    assert right(spoiled, "answer") < 30
    assert right(opened.ask(images, liar=3, guard=True), "answer") > 90
    assert sum(path.stat().st_size for path in (site / "draw").iterdir()) < 600_000


def test_drawings_are_read_and_switches_work(opened: Page) -> None:
    page = opened.page
    for digit, strokes in DRAWINGS.items():
        assert opened.draw(strokes) == digit
    small = [[[0.4 + 0.1 * x, 0.6 + 0.1 * y] for x, y in stroke] for stroke in DRAWINGS["7"]]
    assert opened.draw(small) == "7", "size and place do not matter"
    page.get_by_label("Client 3 lies").check()
    page.locator("#draw .liar").wait_for()
    assert opened.draw(DRAWINGS["7"]) == "0"
    page.get_by_label("The server guards the votes").check()
    assert opened.draw(DRAWINGS["7"]) == "7"
    for box in page.locator("#draw input").all():
        box.uncheck()
    page.locator("#draw").get_by_role("button", name="Show a 4").focus()  # no mouse
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('#draw .answer strong')?.textContent === '4'")
    assert "knows 4" in page.locator("#draw .answer").inner_text()
    shown = page.evaluate("fedcc.shown")
    cells = page.locator("#draw tbody tr").nth(0).locator("td").all_inner_texts()
    assert [0 if c == "·" else int(c) for c in cells[:-1]] == [round(100 * v) for v in shown["votes"][0]]
    trust = page.locator("#draw tbody td.trust").all_inner_texts()
    assert [int(t.split()[0]) for t in trust] == [*(round(100 * t) for t in shown["trust"]), 100]
    page.locator("#draw").get_by_role("button", name="Clear").click()
    page.wait_for_function("document.querySelector('#draw .answer').textContent.startsWith('Draw')")
    assert set(page.locator("#draw tbody td").all_inner_texts()) == {""}


def test_phones_darkness_and_axe(opened: Page, browser: Any, site: Path, axe: Callable[..., list[str]]) -> None:
    opened.draw(DRAWINGS["0"])
    assert axe(opened.page) == []
    size = {"width": 390, "height": 844}
    phone = Page(browser, site, viewport=size, is_mobile=True, has_touch=True, color_scheme="dark")
    box = phone.page.locator("#draw .paper").bounding_box()
    phone.page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    phone.page.locator("#draw .answer strong").wait_for()
    assert phone.draw(DRAWINGS["1"]) == "1"
    assert phone.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert phone.page.evaluate("document.querySelector('#draw table').scrollWidth") <= 390
    assert axe(phone.page, "'#draw'") == []
    assert phone.noise == []
    phone.page.context.close()
