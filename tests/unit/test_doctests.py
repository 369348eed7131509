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
