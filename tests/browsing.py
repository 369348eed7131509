"""What tests in a real browser share: the browser, axe-core, and the documentation as a site, each made once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
AXE = "axe-core@4.11.0"
OFFLINE = """
import socket, sys
def refuse(*_, **__): raise OSError("no network in this test")
socket.socket.connect = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(["build", "--quiet", "--site-dir", sys.argv[1]])
"""


@pytest.fixture(scope="module")  # not longer: while it is there, no other test can use asyncio
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).exists():
        pytest.skip("no chromium")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first of all test processes fills."""
    shared = factory.getbasetemp()
    place = (shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared) / name
    with FileLock(f"{place}.lock"):
        if not place.exists():
            part = place.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(part)
            part.rename(place)
    return place


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built without a network and without a warning."""

    def make(place: Path) -> None:
        quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
        words = [sys.executable, "-c", OFFLINE, str(place)]
        done = subprocess.run(words, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300, check=False)
        assert (done.returncode, done.stderr) == (0, "")

    return once(tmp_path_factory, "site", make)


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Serious violations of a page's accessibility, as axe-core sees it."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("axe-core comes from npm, which is not installed")

    def make(place: Path) -> None:
        done = subprocess.run(
            [npm, "pack", "--silent", AXE], cwd=place, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            pytest.skip(f"npm cannot fetch {AXE}: {done.stderr[-200:]}")
        with tarfile.open(next(place.glob("axe-core-*.tgz"))) as opened:
            opened.extract("package/axe.min.js", place, filter="data")

    script = (once(tmp_path_factory, "axe", make) / "package" / "axe.min.js").read_text()

    def serious(page: Any, part: str = "document") -> list[str]:
        if not page.evaluate("typeof axe === 'object'"):
            page.evaluate(script)
        options = {"resultTypes": ["violations"], "preload": False}  # it would ask for style sheets by itself
        found = page.evaluate(f"axe.run({part}, {json.dumps(options)})")["violations"]
        lines = [f"{v['impact']} {v['id']}: {n['html'][:120]}" for v in found for n in v["nodes"][:3]]
        return [line for line in lines if line.startswith(("serious", "critical"))]

    return serious
