"""How ``--help`` lists commands."""

from __future__ import annotations

import click
import typer.core


class Commands(typer.core.TyperGroup):
    """A group of commands, listed with the whole first paragraph of each: click cuts it off in mid-sentence."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, " ".join((c.help or "").split("\n\n")[0].split())) for name, c in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
