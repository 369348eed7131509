"""Run a notebook and keep its results: ``python docs/make/execute.py docs/notebook.ipynb [OUT.ipynb]``."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def execute(source: Path, target: Path) -> None:
    """Run all cells in a fresh kernel; an error in one of them is raised."""
    notebook = nbformat.read(source, as_version=4)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(source.parent)}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
    nbformat.write(notebook, target)


if __name__ == "__main__":
    execute(Path(sys.argv[1]), Path(sys.argv[-1]))
