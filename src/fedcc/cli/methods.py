"""``fedcc methods``."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import MISSING
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from fedcc.cli.console import console, table
from fedcc.cli.options import Json
from fedcc.core.options import options_of

if TYPE_CHECKING:
    from fedcc.core.method import AnyMethod


def methods(
    name: Annotated[
        str | None, Argument(help="The method to explain, or module:Class of your own. Without it, all are listed.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods, or one method's settings with their meaning and source."""
    from rich.text import Text

    from fedcc.code import allow, installed
    from fedcc.methods import BEYOND, METHODS, find_method

    allow(name)
    known = METHODS if name is None else {name: find_method(name)}
    if as_json:
        descriptions = {n: about(kind) for n, kind in known.items()}
        typer.echo(json.dumps(descriptions if name is None else descriptions[name], indent=1))
        return
    terminal = console()
    if name is None:
        listing = table("name", "method, family, source; settings")
        for n, kind in known.items():
            if kind is BEYOND[0]:
                listing.add_row("", "\nbeyond the paper")
            text = ", ".join(f"{f['name']}={f['default']}" for f in about(kind)["settings"])
            listing.add_row(n, f"{kind().label}, {kind.family}, {kind.source}")
            if text:
                listing.add_row("", Text(text, style="dim"))
        for n, point in installed("fedcc.methods").items():  # not imported for a list
            listing.add_row(n, f"installed: {point.value}")
        terminal.print(listing)
        terminal.print("\n`fedcc methods NAME` explains one; `fedcc run NAME --set name=value` sets them.")
        return
    kind = known[name]
    terminal.print(Text(f"{kind.__name__}: {about(kind)['summary']}", style="bold"))
    terminal.print(Text(f"{kind.family}; {kind.source}\n"))
    terminal.print(Text(paragraphs(sys.modules[kind.__module__].__doc__ or "") + "\n"))
    settings = [f.values() for f in about(kind)["settings"]]
    rows = table("setting", "default", "allowed", "meaning", "source", rows=settings)
    terminal.print(rows if settings else "no settings of its own")


def paragraphs(text: str) -> str:
    """A docstring without its line breaks within paragraphs, so that a terminal can break it where its lines end.

    >>> paragraphs("A, which\\nis B:\\n\\n- c\\n  d\\n")
    'A, which is B:\\n\\n- c\\n  d'
    """
    return re.sub(r"(?<=\S)\n(?=[^\s*-])", " ", text.strip())


def about(kind: type[AnyMethod]) -> dict[str, Any]:
    """A method and its settings, as plain values."""
    from fedcc.methods import BEYOND

    return {
        "method": kind.__name__,
        "family": kind.family,
        "beyond_paper": kind in BEYOND,
        "source": kind.source,
        "note": kind.note,
        "summary": (kind.__doc__ or "").strip().splitlines()[0],
        "settings": [
            {
                "name": o.name,
                "default": None if o.default is MISSING else o.default,
                "allowed": o.allowed,
                "meaning": o.marks.get("meaning", ""),
                "source": o.marks.get("source", ""),
            }
            for o in options_of(kind).values()
        ],
    }
