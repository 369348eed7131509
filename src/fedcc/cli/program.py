"""The program: its commands, and how it ends."""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated

import click
import typer.core

import fedcc.cli.federation_life  # noqa: F401  adds commands
from fedcc import __version__
from fedcc.cli.bench import bench
from fedcc.cli.console import say, warn
from fedcc.cli.data import data_app, skew
from fedcc.cli.demo import demo
from fedcc.cli.federation import federation_app
from fedcc.cli.help import Commands
from fedcc.cli.methods import methods
from fedcc.cli.predict import distil, export, predict
from fedcc.cli.report import analyse, report
from fedcc.cli.run import resume, run
from fedcc.cli.sweep import sweep
from fedcc.core.naming import nearest_name, unknown
from fedcc.errors import error_line, warnings_to
from fedcc.experiments.options import current_words
from fedcc.signals import Interrupted, Signals, is_program

app = typer.Typer(
    name="fedcc",
    cls=Commands,
    help="Federated learning by distillation, with clients that may answer 'unknown'.",
    epilog="`fedcc COMMAND --help` explains a command. Start with `fedcc demo`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


for command in (run, resume, sweep, predict, distil, export, analyse, report, demo, methods, skew, bench):
    app.command()(command)
app.add_typer(data_app, name="data")
app.add_typer(federation_app, name="federation")


def main() -> None:
    """The program: 0 on success, 1 on failure, 2 for wrong usage, 130 or 143 when stopped; no traceback.

    FEDCC_DEBUG=1 shows the traceback.
    """
    typer.core.HAS_RICH = False  # or help has "\\[default: ..." in it: typer escapes for rich markup that is turned off
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # not seekable
                stream.reconfigure(errors="backslashreplace")  # names of files may be anything
    signals = Signals()
    try:
        signals.catch()
        with warnings_to(warn):
            code = app(current_words(sys.argv[1:]), standalone_mode=False, prog_name="fedcc")
        signals.over = True
    except BaseException as error:
        signals.over = True
        code = answer(error)
    finally:
        signals.restore(to_default=is_program())
    sys.exit(code if isinstance(code, int) else 0)


def answer(error: BaseException) -> int:
    """Report how a call ended; returns the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return 2
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "fedcc"
        say(f"{usage(error)} (see `{command} --help`)")
        return 2
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if not isinstance(error, Exception | Interrupted):
        raise error
    if os.environ.get("FEDCC_DEBUG"):
        traceback.print_exception(error)
    say(error_line(error))
    return error.code if isinstance(error, Interrupted) else 2 if isinstance(error, ValueError) else 1


def usage(error: click.UsageError) -> str:
    """What is wrong with the call, with the nearest known name."""
    context = error.ctx.command if error.ctx else None
    if isinstance(error, click.NoSuchOption) and context is not None:
        names = [o for p in context.params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")]
        return str(unknown("option", error.option_name, names)).partition(" Known:")[0].rstrip(".")
    if isinstance(context, click.Group) and (word := re.search(r"No such command '(.*?)'", error.message)):
        error_text = str(unknown("command", word[1], context.commands))
        return error_text if error.ctx and error.ctx.parent else with_method(error_text, word[1], context.commands)
    return error.format_message().rstrip(".")


def with_method(text: str, word: str, commands: Iterable[str]) -> str:
    """The line on an unknown command; a word that is most like a method's name is taken for that."""
    from fedcc.methods import METHODS

    near = nearest_name(word.lower(), [*commands, *METHODS])
    if near not in METHODS:
        return text
    start, _, known = text.partition(" Known:")
    return f"{start.partition(';')[0].rstrip('.')}; did you mean `fedcc run {near}`? Known commands:{known}"
