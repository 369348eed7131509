"""The mutants of the syntax tree are small changes of the source, fixed by a hash."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from fedcc.methods import METHODS
from syntax_mutants import SOURCE, Mutant, all_mutants, explanations, mutants_of, report, sample

MUTANTS = all_mutants()


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("return -x", ["x"]),
        ("return x * y", ["x / y", "x", "y"]),
        ("return x and y", ["x or y", "x", "y"]),
        ("return x < y", ["x <= y"]),
        ("return x is None", ["x is not None"]),
        ("return x[1:]", ["x[:]", "x[2:]"]),
        ("return x[:, -1]", ["x[:, 0]"]),
        ("return 0.5", ["1.0"]),
        ("return True", ["False"]),
        ("return x.abs()", ["x"]),
        ("return f(x, y)", ["f(y, x)"]),
        ("return f(x, dim=y)", ["f(x)"]),
        ("return x if y else z", ["z if y else x"]),
        ("return [x for x in y if x]", ["[x for x in y]"]),
        ("if x:\n        y = x", ["if not x:\n    y = x", "pass"]),
        ("x.y = z", ["pass"]),
        ("f(x)", ["pass"]),
        ("f('fit')", ["pass", "f('fitx')"]),
        ("raise ValueError(f'{x} is {y + 1}')", []),
        ('"""What it is."""', []),
    ],
)
def test_the_changes(line: str, changes: list[str]) -> None:
    assert [mutant_text(mutant) for mutant in mutants_of(f"def f(x: int = 1, *y):\n    {line}")] == changes


def mutant_text(mutant: Mutant) -> str:
    with mutant.applied():
        [function] = mutant.tree.body
        assert isinstance(function, ast.FunctionDef)
        return ast.unparse(function.body[0]).removeprefix("return ")


def test_a_change_is_undone() -> None:
    text = "def f(x):\n    return x + 1"
    [first, *_] = mutants_of(text)
    assert first.compiled() != mutants_of(text)[1].compiled()
    assert ast.unparse(first.tree) == text


def test_renames_elsewhere_change_no_sample() -> None:
    text = "def f(x, y):\n    return x * y + 1\n\n\ndef g(x):\n    return -x"
    renamed = text.replace("g(x)", "h(z)").replace("-x", "-z").replace("x * y", "x * w").replace("f(x, y)", "f(x, w)")
    chances = [m.chance for m in mutants_of(text, "a.py") if m.function == "f"]
    assert chances == [m.chance for m in mutants_of(renamed, "b.py") if m.function == "f"]
    assert len(set(chances)) == len(chances)


def test_the_sample_is_large_and_every_method_is_in_it() -> None:
    chosen = sample(MUTANTS)
    assert len(chosen) >= 500
    files = Counter(m.file for m in chosen)
    homes = {Path(kind.__module__.replace(".", "/")).name for kind in METHODS.values()}
    assert {name for name in homes if not files[f"methods/{name}.py"]} == set()


def test_every_mutant_compiles() -> None:
    for mutant in sample(MUTANTS):
        assert mutant.compiled().co_filename == str(SOURCE / mutant.file)


def test_few_are_explained_and_each_is_there() -> None:
    there = {(m.file, m.function, m.change) for m in sample(MUTANTS)}
    table = explanations()
    assert set(table) - there == set()
    assert all(len(reason) > 20 for reason in table.values())
    assert len(table) < len(there) / 10


def test_what_makes_the_command_fail(capsys: pytest.CaptureFixture[str]) -> None:
    [mutant, *_] = mutants_of("def f(x):\n    return x + 1", "a.py")
    table = {("a.py", "f", mutant.change): "for a reason"}
    for explained, end, status in [
        ({}, "killed", 0),
        ({}, "alive", 1),
        ({}, "broken", 1),
        (table, "alive", 0),
        (table, "killed", 1),  # then the explanation is wrong
        (table, "broken", 1),
        (table | {("a.py", "f", "gone"): "for a reason"}, "alive", 1),
    ]:
        assert report({mutant: (end, "")}, explained) == status
    assert "a.py                     |       1 |      1 |         0" in capsys.readouterr().out
