"""The app that Flower runs at the server: a federation's rounds, or a query, through Flower's grid."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from fedcc.flower.cohort import Answer, RunLog
from fedcc.flower.folder import ENVIRONMENT, FederationFolder
from fedcc.flower.keys import public_bytes
from fedcc.flower.server import FlowerServer
from fedcc.processes import end_with_parent

DAY = 86_400.0
LOST = (3, 4, 5)  # Flower's codes: message or reply unavailable, node unavailable

app = ServerApp()


class GridTransport:
    """Flower's grid with sites by their names. A site is known by its key, whatever its node number is."""

    def __init__(self, grid: Grid, folder: FederationFolder):
        self.grid, self.ttl = grid, max(DAY, 2 * folder.rules.deadline)
        self.names = {public_bytes(folder.key(name)): name for name in folder.clients}
        self.nodes: dict[str, int] = {}

    def online(self) -> set[str]:
        nodes = self.grid.get_nodes()
        self.nodes = {self.names[node.public_key]: node.node_id for node in nodes if node.public_key in self.names}
        return set(self.nodes)

    def send(self, name: str, purpose: str, t: int, content: RecordDict) -> str | None:
        message = Message(content, self.nodes[name], purpose, ttl=self.ttl, group_id=str(t))
        return next(iter(self.grid.push_messages([message])), None)

    def collect(self, tickets: Sequence[str]) -> list[Answer]:
        if not tickets:
            return []
        return [self.answer(message) for message in self.grid.pull_messages(tickets)]

    def answer(self, message: Message) -> Answer:
        ticket = message.metadata.reply_to_message_id
        if message.has_error():
            reason = " ".join((message.error.reason or "").split())
            if raised := re.fullmatch(r"<class '(.*?)'>:<['\"](.*)['\"]>", reason):  # as Flower writes an exception
                reason = f"{raised[1]}: {raised[2]}"
            return Answer(ticket, error=f"{reason[:500]} (code {message.error.code})", lost=message.error.code in LOST)
        return Answer(ticket, message.content)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, or answer the query in the folder."""
    from filelock import FileLock

    end_with_parent()  # without its SuperLink it would try for ever to reach it
    folder = FederationFolder.read(Path(os.environ[ENVIRONMENT]))
    run, task = str(context.run_config["run"]), str(context.run_config["task"])
    directory = folder.query if task == "predict" else folder.operator
    log = RunLog(directory, run)
    log.update(pid=os.getpid())
    try:
        with FileLock(folder.operator / "run.lock"):  # an earlier one may still be ending
            server = FlowerServer(folder, run, GridTransport(grid, folder), log)
            if task == "predict":
                server.query(directory / "input.npz", directory / "output.npz")
            else:
                server.train()
    except BaseException as error:
        log.update(state="stopped", problem=f"{type(error).__name__}: {error}")
        log.say(f"stopped: {error}")
        raise
