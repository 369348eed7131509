"""The documents say what is so: their code runs, their names exist, their table of methods is the one there is.

``python tests/integration/test_docs.py`` writes docs/methods.md's table anew.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

import fedcc
from fedcc.methods import BEYOND, METHODS, PAPER
from fedcc.report.markdown import BEGIN, END

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
METHODS_TABLE = re.compile(r"(?<=<!-- methods -->\n).*?(?=<!-- /methods -->)", re.DOTALL)


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """A module to run code in: dataclasses look up the module that they were made in."""
    made = ModuleType("documented")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_code_runs_and_prints_what_the_page_shows(
    page: Path, module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    for code in blocks(page):
        capsys.readouterr()
        exec(compile(code, page.name, "exec"), module.__dict__)
        printed = capsys.readouterr().out
        shown = re.match(r"\n```text\n(.*?)^```$", text[text.index(code) + len(code) + 4 :], re.DOTALL | re.MULTILINE)
        if shown is not None:
            assert printed.strip() == shown[1].strip()


# ----------------------------------------------------------------------------------------------------- console blocks

COMMAND = re.compile(r"^(?:\$ )?((?:fedcc|make) .*)", re.MULTILINE)
SHELL = re.compile(r"^(?:<!-- (tested|not run): (.*?) -->\n+)?```(console|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = 9  # at most so many blocks may carry a reason why they are not run


def shell_blocks(page: Path) -> list[tuple[str, str, str]]:
    """The blocks for a shell: how they are covered ("tested", "not run", or "" if run here), by what, and the text."""
    return [(how, what, text) for how, what, _, text in SHELL.findall(page.read_text())]


def test_every_console_block_is_run_or_says_why_not() -> None:
    """A block is run below, or names the test that runs its commands, or gives a reason."""
    covered = [(page.name, how, what) for page in PAGES for how, what, _ in shell_blocks(page)]
    fences = sum(len(re.findall(r"^```(?:console|sh|bash|shell)$", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert len(covered) == fences, "a block has another form than the ones known here"
    reasons = [f"{page}: {what}" for page, how, what in covered if how == "not run"]
    assert len(reasons) <= NOT_RUN, "\n".join(reasons)
    assert all(len(reason.split()) > 3 for reason in reasons)


TESTED = [(page, what, text) for page in PAGES for how, what, text in shell_blocks(page) if how == "tested"]


@pytest.mark.parametrize(("page", "what", "text"), TESTED, ids=[f"{page.name}:{what}" for page, what, _ in TESTED])
def test_the_tests_that_a_block_names_run_its_commands(page: Path, what: str, text: str) -> None:
    """They exist, and their files have each command's name and options; the Makefile has each target."""
    source = (ROOT / "tests" / "federation.py").read_text()
    for one in what.split(", "):
        file, _, name = one.partition("::")
        source += (ROOT / file).read_text()
        assert f"def {name}(" in source, f"{page.name} names {one}, which does not exist"
    for command in COMMAND.findall(text.replace("\\\n", " ")):
        program, *words = shlex.split(command, comments=True)
        if program == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            continue
        name = words[:2] if words[0] == "federation" else words[:1]
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        for word in [*name, *options]:
            assert re.search(rf"(?<![\w-]){word}(?![\w-])", source), (
                f"no test that {page.name} names has {word}: {command}"
            )


def without_numbers(line: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"[\d.,:]+", "0", line)).strip()


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(not how for how, _, _ in shell_blocks(p))], ids=lambda p: p.name
)
def test_console_blocks_print_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same lines, but for numbers; a command that is shown with an error ends with it."""
    from program import call  # not above: this file is also a script

    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    for _, _, text in (block for block in shell_blocks(page) if not block[0]):
        commands = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:] if "$ " in text else text.splitlines()
        for command in commands:
            line, _, shown = command.partition("\n")
            program, *words = shlex.split(line, comments=True)
            assert program == "fedcc", f"{page.name}: only fedcc is run here, mark the block with {program!r}"
            done = call(capsys, *words)
            assert (done.code != 0) == shown.startswith("fedcc: "), done.err
            printed = {without_numbers(line) for line in (done.out + done.err).splitlines()}
            assert {without_numbers(line) for line in shown.splitlines()} - {"0"} <= printed


# ------------------------------------------------------------------------------------------------ single documents


def test_fedprox_is_short_and_right(module: ModuleType) -> None:
    code = blocks(ROOT / "docs" / "add-a-method.md")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    exec(code, module.__dict__)
    federation = fedcc.Federation.named("digits", skew="classes:2", clients=5, models="resnet8")

    def trained(method: Any) -> dict[str, torch.Tensor]:
        return dict(fedcc.run(method, federation, rounds=2, epochs=1).trained.server["global"].state)

    plain, without, with_ = (trained(m) for m in (fedcc.FedAvg(), module.FedProx(mu=0), module.FedProx(mu=1.0)))
    assert all(torch.equal(plain[name], without[name]) for name in plain)
    assert not torch.equal(plain["head.weight"], with_["head.weight"])


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_links_to_other_sites_are_https_and_well_formed() -> None:
    """Without a network: whether they are still there is not known."""
    texts = [(page.name, page.read_text()) for page in [*PAGES, *(ROOT / "docs").glob("*.ipynb")]]
    found = [(name, u) for name, t in texts for u in re.findall(r"(?:\]\(|<)(\w+://[^)>]*)[)>]", t)]
    assert found
    for name, url in found:
        parts = urlsplit(url)
        assert parts.scheme == "https", f"{name} links to {url}"
        assert re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", parts.netloc), f"{name} links to {url}"
        assert not re.search(r"[\s\\\"]|[.,;]$", url), f"{name} links to {url}"


def test_the_readme_is_short() -> None:
    """What it is, when to use it, the commands, the results, where to read on: the rest belongs in docs/."""
    before, _, rest = (ROOT / "README.md").read_text().partition(BEGIN)
    written = before + rest.partition(END)[2]
    assert len(written.splitlines()) <= 80
    assert len(written.split()) <= 750


def test_the_version_is_the_same_everywhere() -> None:
    stated = {
        "pyproject.toml": r'^version = "(.*)"$',
        "CITATION.cff": r"^version: (.*)$",
        "CHANGELOG.md": r"^## ([\d.]+)(?: \(unreleased\)|, \d{4}-\d\d-\d\d)$",
        "SECURITY.md": r"now ([\d.]*\d)\.$",
    }
    found = {name: re.search(rule, (ROOT / name).read_text(), re.MULTILINE) for name, rule in stated.items()}
    versions = {name: match[1] for name, match in found.items() if match}
    minor = fedcc.__version__.rpartition(".")[0]
    assert versions == dict.fromkeys(stated, fedcc.__version__) | {"SECURITY.md": minor}


# ------------------------------------------------------------------------------------------------- docs/paper-map.md


def resolved(name: str) -> Any:
    """The object of a dotted name: the longest part that is a module, then attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


def rows(page: Path) -> list[list[str]]:
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


MAP = ROOT / "docs" / "paper-map.md"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(fedcc\.[\w.]+)`", MAP.read_text()))))
def test_named_code_exists(name: str) -> None:
    resolved(name)


def test_every_equation_and_line_is_mapped() -> None:
    first = {row[0] for row in rows(MAP)}
    assert {f"({n})" for n in range(1, 12)} <= first
    assert {f"{n}" for n in range(1, 20)} <= first
    for row in rows(MAP):
        if re.fullmatch(r"\(?\d+\)?", row[0]):
            assert "`fedcc." in row[2] or row[2] == "nothing to compute", f"{row[0]} is mapped to nothing"


def test_settings_have_the_stated_values() -> None:
    checked = 0
    for row in rows(MAP):
        if len(row) == 3 and (value := re.fullmatch(r"`([^`]+)`", row[1])) and row[2].startswith("`fedcc."):
            assert str(resolved(row[2].strip("`"))) == value[1], row[0]
            checked += 1
    assert checked >= 12


# -------------------------------------------------------------------------------------------------- docs/methods.md

TABLE_PAGE = ROOT / "docs" / "methods.md"


def methods_table() -> str:
    """The paper's methods, then those beyond it."""
    tables = []
    for kinds in (PAPER, BEYOND):
        lines = ["| name | method | family | what it does | source |", "|---|---|---|---|---|"]
        for kind in kinds:
            summary = (kind.__doc__ or "").strip().splitlines()[0]
            noted = f"{kind.__name__} ({kind.note})" if kind.note else kind.__name__
            lines.append(f"| `{kind.__name__.lower()}` | {noted} | {kind.family} | {summary} | {kind.source} |")
        tables.append("\n".join(lines) + "\n")
    return "\nBeyond the paper:\n\n".join(tables)


def test_the_table_of_methods_is_current() -> None:
    shown = METHODS_TABLE.search(TABLE_PAGE.read_text())
    assert shown is not None
    assert shown[0] == methods_table(), "run `python tests/integration/test_docs.py` to write it anew"


@pytest.mark.parametrize("kind", [fedcc.FedCC, fedcc.FedMD, fedcc.SSL])
def test_every_setting_stands_in_the_deviations(kind: Any) -> None:
    text = (ROOT / "docs" / "deviations.md").read_text()
    assert not [f.name for f in fields(kind) if not re.search(rf"`{f.name}[`=]", text)]


@pytest.mark.parametrize("name", METHODS)
def test_a_reconstruction_is_marked_beside_its_numbers_and_explained(name: str) -> None:
    text = (ROOT / "docs" / "deviations.md").read_text()
    section = re.search(rf"^## {METHODS[name].__name__}\n\n(.*)", text, re.MULTILINE)
    assert ("reconstruction" in METHODS[name].note) == (section is not None and section[1].startswith("**A reconstr"))


if __name__ == "__main__":
    TABLE_PAGE.write_text(METHODS_TABLE.sub(lambda _: methods_table(), TABLE_PAGE.read_text()))
