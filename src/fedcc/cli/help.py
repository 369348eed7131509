"""How ``--help`` lists commands and arguments."""

from __future__ import annotations

from typing import Any

import click
import typer.core
import typer.main


class Commands(typer.core.TyperGroup):
    """A group of commands, listed with the whole first paragraph of each: click cuts it off in mid-sentence."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, " ".join((c.help or "").split("\n\n")[0].split())) for name, c in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class DescribedArgument(typer.core.TyperArgument):
    """An argument whose help is shown once: click 8.5 forgets it, or has a list of its own besides typer's."""

    def __init__(self, *, help: str | None = None, **words: Any):
        super().__init__(**words)
        self.meaning = help

    def get_help_record(self, ctx: click.Context) -> Any:
        self.help = self.meaning
        try:
            return super().get_help_record(ctx)
        finally:
            self.help = None


typer.main.TyperArgument = DescribedArgument  # type: ignore[attr-defined]
