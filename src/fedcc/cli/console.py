"""Where commands write."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedcc.core.naming import printable
from fedcc.signals import Interrupted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

USUAL_WIDTH = 80  # of a terminal that does not tell its own


def console(stderr: bool = False) -> Console:
    """The terminal, or text wide enough for tables."""
    from rich.console import Console

    terminal = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not terminal.is_terminal:
        terminal.width = 120
    elif not terminal.width:
        terminal.width = USUAL_WIDTH
    return terminal


def show(terminal: Console, text: str) -> None:
    """A line, broken between words on a terminal that is too narrow; elsewhere it stays whole."""
    terminal.print(broken(text, terminal.width) if terminal.is_terminal else text, soft_wrap=True)


def broken(text: str, width: int) -> str:
    """A text broken between words; a command, which is between backticks, stays on one line so that it can be copied.

    >>> print(broken("it stopped; resume it with `fedcc resume runs/a` or remove it", 20))
    it stopped; resume
    it with
    `fedcc resume runs/a`
    or remove it
    """
    import textwrap

    whole = re.sub("`[^`]*`", lambda command: command[0].replace(" ", "\0"), text)
    return textwrap.fill(whole, width, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


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
    line = printable(f"fedcc: {text}")  # errors may hold the words of others
    if sys.stderr.isatty():
        try:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
        except OSError:
            width = 0
        line = broken(line, max(20, width or USUAL_WIDTH))
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
