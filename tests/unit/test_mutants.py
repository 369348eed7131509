"""The tables of mutants and of properties stay true to the source and the tests that they name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from fedcc.methods import METHODS
from mutants import RELEVANT, TESTS, Mutant, report, table

MUTANTS = table()
PAGE = TESTS.parent / "docs" / "properties.md"
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text())))


def test_every_old_text_is_there_exactly_once() -> None:
    assert [f"{m.name} in {m.file}: {m.occurs()} times" for m in MUTANTS if m.occurs() != 1] == []


def test_every_method_has_its_mutants() -> None:
    found = Counter(m.method for m in MUTANTS)
    assert {name: found[name] for name in METHODS if found[name] < 6} == {}
    assert min(found[name] for name in ("losses", "gradients", "averaging", "clustering")) >= 6


def test_no_mutant_twice() -> None:
    assert [c for c, n in Counter((m.file, m.old, m.new) for m in MUTANTS).items() if n > 1] == []
    assert [c for c, n in Counter((m.method, m.breaks) for m in MUTANTS).items() if n > 1] == []


def test_few_are_equivalent_and_each_says_why() -> None:
    assert all(len(m.equivalent) > 20 for m in MUTANTS if m.equivalent)
    assert sum(bool(m.equivalent) for m in MUTANTS) < len(MUTANTS) / 20


def test_every_mutant_meets_its_tests() -> None:
    assert all((TESTS / name).exists() for names in RELEVANT.values() for name in names)
    assert all(m.tests() for m in MUTANTS)


@pytest.mark.parametrize("text", ["[fedavg]\n# nothing\n- a\n+ a\n", "[fedavg]\n# nothing\n+ a\n", "[fedavg]\nwhat\n"])
def test_a_table_that_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        table(text)


def test_what_makes_the_command_fail(capsys: pytest.CaptureFixture[str]) -> None:
    plain = Mutant("fedavg", 1, "methods/fedavg.py", "a", "b", "something")
    alike = Mutant("fedavg", 2, "methods/fedavg.py", "a", "b", "nothing", "for a reason")
    ends = {"killed": ("failed", "test"), "alive": ("passed", ""), "broken": ("broken", "error")}
    for mutant, fate, status in [
        (plain, "killed", 0),
        (plain, "alive", 1),
        (plain, "broken", 1),
        (alike, "alive", 0),
        (alike, "killed", 1),  # then it is not equivalent
        (alike, "broken", 1),
    ]:
        assert report([mutant], {mutant.name: ends[fate]}) == status
    assert "fedavg       |       1 |      1 |          0" in capsys.readouterr().out


# -- docs/properties.md


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_named_tests_exist(file: str) -> None:
    assert {name for other, name in NAMED if other == file} <= functions(TESTS / file)


def test_every_row_names_a_test_and_every_method_has_rows() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "| test |" not in line]
    assert [row for row in rows if not re.search(r"`[\w/]+\.py::test_\w+` \|$", row)] == []
    shown = {row.split("|")[1].strip().lower() for row in rows}
    assert set(METHODS) - shown == {"local", "centralized"}  # section 1.6: tests/unit/test_baselines.py
