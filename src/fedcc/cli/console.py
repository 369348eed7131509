"""Where commands write."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedcc.signals import Interrupted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def console(stderr: bool = False) -> Console:
    """The terminal, or text wide enough for tables."""
    from rich.console import Console

    terminal = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not terminal.is_terminal:
        terminal.width = 120
    return terminal


def show(terminal: Console, text: str) -> None:
    """A line, broken between words on a terminal that is too narrow; elsewhere it stays whole."""
    terminal.print(text, soft_wrap=not terminal.is_terminal)


def say_starting(terminal: Console) -> None:
    """A sign of life on a terminal before torch is imported, which takes seconds; the next line replaces it."""
    if terminal.is_terminal:
        terminal.file.write("starting\r")
        terminal.file.flush()


def table(*columns: str, rows: Iterable[Iterable[object]] = ()) -> Table:
    """A table without lines."""
    from rich.table import Table

    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*map(str, row))
    return table


def say(text: str) -> None:
    """A line for the user on stderr; on a terminal it is broken between words."""
    line = f"fedcc: {text}"
    if sys.stderr.isatty():
        import os
        import textwrap

        width = max(20, os.get_terminal_size(sys.stderr.fileno()).columns)
        line = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
    print(line, file=sys.stderr)


def warn(text: str) -> None:
    say(f"warning: {text}")


@contextmanager
def noted(note: str, after_signal: Callable[[], str] | None = None) -> Iterator[None]:
    """Add a note to the exception that ends the block early, and another if it is a signal."""
    try:
        yield
    except BaseException as error:
        error.add_note(note)
        if isinstance(error, Interrupted) and after_signal is not None:
            error.add_note(after_signal())
        raise
