"""Flower's program for one message at a site, except that the text of an error stays there.

What fails outside the app, such as unpacking it on a full disk, Flower answers with the error's text. All that its
program sends goes through one function, ``push_message``: here it sends the code alone, and the audit log has a line.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

PROGRAM = "flwr-clientapp"
REASON = "an error at the site, outside the app; its own log says which"


def main() -> None:
    """Be the program; the arguments are in ``sys.argv``."""
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    keep_reasons(import_module("flwr.supernode.runtime.run_clientapp"))
    flwr_clientapp()


def keep_reasons(program: Any) -> None:
    """Have the module of Flower's program keep errors' texts to itself; it is not run if it sends in another way."""
    from flwr import __version__

    try:
        push, uses = program.push_message, set(program.run_clientapp.__code__.co_names)
        known = push.__code__.co_varnames[: push.__code__.co_argcount] == ("client", "message", "context")
    except AttributeError:
        known, uses = False, set()
    if not known or "push_message" not in uses or "PushMessages" in uses:
        sys.exit(f"fedcc: flwr {__version__} sends answers in a way that this fedcc does not know; install flwr 1.41")

    def push_message(client: Any, message: Any, context: Any) -> None:
        if message.has_error():
            message.error = type(message.error)(message.error.code, REASON)
            _note(message.metadata.message_type, context)
        push(client, message, context)

    program.push_message = push_message


def _note(purpose: str, context: Any) -> None:
    """Write the line of the audit log, if that is possible: what has failed may be the disk."""
    from fedcc.flower.policy import AuditLog
    from fedcc.flower.site_error import log_error

    try:
        AuditLog(Path(str(context.node_config["site"])) / "state").answered(purpose, {"error": "failed"}, {})
    except Exception as error:  # the server learns no more than the code in any case
        log_error(error)


if __name__ == "__main__":
    sys.argv[0] = PROGRAM
    main()
