"""A process with everything imported, from which Flower's process for each message is forked.

Flower starts ``flwr-clientapp`` anew for every message, and importing torch there would take longer than a small round.
So a client forks :class:`Warm` before it does anything else, and puts a ``flwr-clientapp`` of its own first on Flower's
path. That launcher hands its arguments, environment and output to the warm process, which forks a child to be the
program, and ends as the child ends. Without a warm process it becomes Flower's own program.

As the launcher this file is run by itself and imports nothing of the project.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

PROGRAM = "flwr-clientapp"


class Warm:
    """The warm process and the launcher, in a folder of the site's own."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        place = os.open(folder, os.O_PATH)  # a path of any length: a socket's may have 108 characters
        try:
            (folder / "socket").unlink(missing_ok=True)
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(f"/proc/self/fd/{place}/socket")
        finally:
            os.close(place)
        self.listener.listen(8)
        real = shlex.quote(str(Path(sys.executable).parent / PROGRAM))
        words = [sys.executable, "-I", "-S", __file__, str(folder)]
        launcher = folder / PROGRAM
        launcher.write_text(f'#!/bin/sh\nFEDCC_COLD={real} exec {shlex.join(words)} "$@"\n')
        launcher.chmod(0o700)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.serve()
            finally:
                os._exit(1)
        self.listener.close()

    def stop(self) -> None:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGTERM)
            os.waitpid(self.pid, 0)
        (self.folder / "socket").unlink(missing_ok=True)

    def serve(self) -> None:
        os.setsid()
        end_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

        import fedcc.flower.client_app  # noqa: F401

        while True:
            connection, _ = self.listener.accept()
            if os.fork() == 0:  # it forks once more, so that nobody is waited for here
                with connection:
                    self.listener.close()
                    attend(connection, flwr_clientapp)
                os._exit(0)
            connection.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def attend(connection: socket.socket, program: object) -> None:
    """Be the program that a launcher asks for, and tell it how it ended."""
    end_with_parent()
    text, handles, _, _ = socket.recv_fds(connection, 2**20, 2)
    while not text.endswith(b"\n"):
        text += connection.recv(2**20)
    asked = json.loads(text)
    pid = os.fork()
    if pid == 0:
        end_with_parent()
        code = 1
        try:
            connection.close()
            os.dup2(handles[0], 1)
            os.dup2(handles[1], 2)
            os.chdir(asked["folder"])
            os.environ.clear()
            os.environ.update(asked["environment"])
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = asked["arguments"]
            program()  # type: ignore[operator]
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code & 0xFF)
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def end_with_parent() -> None:
    """SIGKILL when the parent ends, however it ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def launch(folder: str, arguments: list[str]) -> int:
    """Have the warm process be Flower's program, or be it ourselves."""
    cold = os.environ.pop("FEDCC_COLD")
    try:
        place = os.open(folder, os.O_PATH)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"/proc/self/fd/{place}/socket")
    except OSError:
        os.execv(cold, [PROGRAM, *arguments])
    asked = {"arguments": [PROGRAM, *arguments], "folder": str(Path.cwd()), "environment": dict(os.environ)}
    text = (json.dumps(asked) + "\n").encode()
    sent = socket.send_fds(connection, [text], [1, 2])
    connection.sendall(text[sent:])
    answer = connection.recv(64)
    code = int(answer) if answer else 1
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1], sys.argv[2:]))
