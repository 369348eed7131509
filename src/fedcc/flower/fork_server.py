"""A process with everything imported, from which Flower's process for each message is forked.

A client puts a ``flwr-clientapp`` of its own first on Flower's path: a launcher that sends its arguments, environment
and output to the fork server, which forks a child to be the program, and exits as the child exits. Without a fork
server it becomes the program. It is this file, run by itself, and imports nothing of the project.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import socketserver
import sys
from contextlib import suppress
from pathlib import Path

PROGRAM = "flwr-clientapp"


class ForkServer:
    """The process and its launcher, in a folder of the site."""

    def __init__(self, folder: Path):
        self.folder, parent = folder, os.getpid()
        folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-I", "-S", __file__, str(folder)]
        launcher = folder / PROGRAM
        launcher.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        launcher.chmod(0o700)
        (folder / "socket").unlink(missing_ok=True)
        listener = Listener(socket_path(folder), Program)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                serve(listener, parent)
            finally:
                os._exit(1)
        listener.server_close()

    def close(self) -> None:
        from fedcc.core.files import uninterrupted

        with uninterrupted(), suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGTERM)
            os.waitpid(self.pid, 0)
        (self.folder / "socket").unlink(missing_ok=True)


def socket_path(folder: Path) -> str:
    """A short path of the folder's socket: it may have at most 108 characters."""
    return f"/proc/self/fd/{os.open(folder, os.O_PATH)}/socket"


def serve(listener: Listener, parent: int) -> None:
    """Import what the program needs, and run it for every launcher that connects."""
    from fedcc.processes import end_with_parent

    os.setsid()
    end_with_parent(parent=parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import flwr.supernode.cli.flwr_clientapp  # noqa: F401

    import fedcc.flower.client_app
    import fedcc.flower.clientapp  # noqa: F401

    listener.serve_forever()


class Listener(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """Forks for every connection."""


class Program(socketserver.BaseRequestHandler):
    """Is Flower's program for a launcher, and sends it the exit code."""

    def handle(self) -> None:
        from fedcc.flower import clientapp
        from fedcc.processes import end_with_parent

        end_with_parent()
        code = 1
        try:
            text, handles, _, _ = socket.recv_fds(self.request, 2**20, 2)
            while not text.endswith(b"\n"):
                text += self.request.recv(2**20)
            request = json.loads(text)
            os.dup2(handles[0], 1)
            os.dup2(handles[1], 2)
            os.chdir(request["folder"])
            os.environ.clear()
            os.environ.update(request["environment"])
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = request["arguments"]
            clientapp.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            with suppress(OSError):
                self.request.sendall(f"{code & 0xFF}\n".encode())
            os._exit(code & 0xFF)


def launch(folder: str, *arguments: str) -> int:
    """Have the fork server run the program and return its exit code, or become the program."""
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(socket_path(Path(folder)))
    except OSError:
        os.execv(sys.executable, [sys.executable, "-P", "-m", "fedcc.flower.clientapp", *arguments])
    request = {"arguments": [PROGRAM, *arguments], "folder": str(Path.cwd()), "environment": dict(os.environ)}
    text = (json.dumps(request) + "\n").encode()
    sent = socket.send_fds(connection, [text], [1, 2])
    connection.sendall(text[sent:])
    reply = connection.recv(64)
    return int(reply) if reply else 1  # none if it was killed


if __name__ == "__main__":
    sys.exit(launch(*sys.argv[1:]))
