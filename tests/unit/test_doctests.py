"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import fedcc

MODULES = sorted(m.name for m in pkgutil.walk_packages(fedcc.__path__, "fedcc.") if not m.name.endswith("__main__"))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("fedcc"):
            raise
        pytest.skip(f"{name} needs {missing.name}")
    assert doctest.testmod(module).failed == 0


def test_every_public_name_has_an_example() -> None:
    """Of the methods' classes, one stands for all: they are made and run alike."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    names = set(fedcc.__all__) - {kind.__name__ for kind in fedcc.METHODS.values()} - {"METHODS"}
    found = {name: [t for t in finder.find(getattr(fedcc, name), name) if t.examples] for name in names}
    shown_with_another = {"FinishedRound", "Pause", "Stop"}  # with Observer, which is followed by them
    assert {name for name, examples in found.items() if not examples} == shown_with_another
    assert all(name in fedcc.Observer.__doc__ for name in shown_with_another)


def test_there_are_examples() -> None:
    """Else a change of the collector could switch all of them off in silence."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    counts = {
        name: sum(len(t.examples) for t in finder.find(importlib.import_module(name)))
        for name in (
            "fedcc.core.samples",
            "fedcc.core.rng",
            "fedcc.core.messages",
            "fedcc.nets.resnet",
            "fedcc.engine.plan",
        )
    }
    assert min(counts.values()) > 0
