"""The command line, one module per group of commands. Modules import little: ``--help`` is fast."""

from fedcc.cli.program import app, main

__all__ = ["app", "main"]
