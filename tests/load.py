"""Many light clients beside a few real sites: how long dispatch and rounds take.

``python tests/load.py --light 100 --real 4 --rounds 6`` runs a server, real sites, and light clients in one process,
and prints the median and the 95th percentile. A light client has a registered key and speaks Flower's protocol as a
SuperNode does, with the same polling, but its answer is canned: every sample is "unknown".
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import torch
from flwr.app import RecordDict
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.run_pb2 import GetRunRequest

from attacker import Attacker, texts_of
from fedcc.core.messages import Predictions
from fedcc.flower.codec import encode, write_content
from fedcc.flower.folder import FederationFolder
from fedcc.flower.logs import LogLine
from federation import Real, make, real
from program import descendants, wait_until

POLL_SECONDS, HEARTBEAT_SECONDS = 3.0, 30.0  # a SuperNode's


class LightClient(Attacker):
    """A client that answers every round at once, and hands over no model."""

    def __init__(self, site: Path, port: int, upload: torch.Tensor):
        super().__init__(site, port)
        self.upload, self.runs = upload, set[int]()
        self.received: dict[int, float] = {}  # round: when its message had arrived
        self.answered: dict[int, float] = {}
        self.problems: list[str] = []

    def work(self, over: threading.Event) -> None:
        beat = time.monotonic()
        while not over.is_set():
            try:
                if time.monotonic() - beat > HEARTBEAT_SECONDS:
                    beat = time.monotonic()
                    request = SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT_SECONDS)
                    self.client.SendNodeHeartbeat(request)
                if not self.step():
                    over.wait(POLL_SECONDS)
            except httpx.HTTPError as error:
                self.problems.append(f"{type(error).__name__}: {error}"[:200])
                over.wait(POLL_SECONDS)

    def step(self) -> bool:
        """Answer a message, if there is one."""
        answer = self.client.PullMessages(PullMessagesRequest(node=self.node))
        if not answer.messages_list:
            return False
        run = answer.messages_list[0].metadata.run_id
        if run not in self.runs:  # a SuperNode asks for the app once per run
            self.runs.add(run)
            app = self.client.GetRun(GetRunRequest(node=self.node, run_id=run)).run.fab_hash
            self.client.GetFab(GetFabRequest(node=self.node, hash_str=app, run_id=run))
        asked = self.contents(answer)
        self.confirm(run, asked.metadata.message_id)
        texts = texts_of(asked)
        t, train = int(texts["round"]), asked.metadata.message_type == "train"
        if train:
            self.received[t] = time.time()
            encoded = encode(Predictions(self.upload), "fp32", run=texts["run"], round=t)
            content: RecordDict = write_content({"nonce": texts["nonce"]}, encoded)
        else:
            content = write_content({"nonce": texts["nonce"], "declined": "yes"})
        about = {"run_id": run, "reply_to_message_id": asked.metadata.message_id,
                 "message_type": asked.metadata.message_type, "group_id": asked.metadata.group_id}  # fmt: skip
        self.push(self.message(content, **about))
        if train:
            self.answered[t] = time.time()
        return True


@contextmanager
def light_clients(folder: FederationFolder, names: list[str]) -> Iterator[list[LightClient]]:
    """Clients with these sites' keys, each in a thread of this process."""
    upload = torch.full((folder.task.public, len(folder.task.names) + 1), 0.0)
    upload[:, -1] = 1.0  # unknown
    over = threading.Event()
    clients = [LightClient(folder.path / "sites" / name, folder.port, upload) for name in names]
    threads = [threading.Thread(target=client.work, args=(over,), daemon=True) for client in clients]
    for n, thread in enumerate(threads):
        thread.start()
        time.sleep(POLL_SECONDS / len(threads) if n < len(threads) else 0)  # they do not poll all at once
    try:
        yield clients
    finally:
        over.set()
        for thread in threads:
            thread.join(10)


def starts(folder: FederationFolder) -> dict[int, float]:
    """When each round began, from the server's log."""
    path, found = folder.operator / "run.log", dict[int, float]()
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = LogLine.parse(line)
        if entry.message.endswith(" clients") and ": asking " in entry.message:
            found[int(entry.message.split()[1].rstrip(":"))] = entry.time.timestamp()
    return found


def spread(values: list[float]) -> dict[str, float]:
    """The median, the 95th percentile and the largest."""
    p95 = quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
    return {"median": round(median(values), 2), "p95": round(p95, 2), "largest": round(max(values), 2)}


def cpu_seconds(pids: list[int]) -> float:
    """The processor time that processes have used; unlike wall time it hardly depends on what else the machine does."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def processes(federation: Real, word: bytes) -> list[int]:
    """The federation's processes with this word in their command."""
    found = [pid for running in federation.started if running.process.is_alive() for pid in descendants(running.pid)]
    return [pid for pid in found if word in Path(f"/proc/{pid}/cmdline").read_bytes()]


def measure(place: Path, light: int, sites: int, rounds: int) -> dict[str, Any]:
    """Run a federation of so many light clients and real sites, and return its figures."""
    names = [f"light{n}" for n in range(light)] + [f"real{n}" for n in range(sites)]
    folder = make(place / "f", "fedcc", names, rules={"grace": 30.0}, rounds=rounds, skew="iid", fraction=1.0)
    before = os.getloadavg()[0]
    with real(folder, place / "programs") as federation:
        federation.server()
        for name in names[light:]:
            federation.client(name)
        with light_clients(folder, names[:light]) as clients:
            return _follow(federation, folder, clients, rounds, before)


def _follow(
    federation: Real, folder: FederationFolder, clients: list[LightClient], rounds: int, load: float
) -> dict[str, Any]:
    running = federation.run()
    metrics = folder.run / "metrics.jsonl"

    def records() -> list[dict[str, Any]]:
        return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []

    wait_until(lambda: len(records()) >= 1 or not running.process.is_alive(), 600)
    superlink, app = processes(federation, b"superlink\0--public"), processes(federation, b"flwr-serverapp")
    used = [cpu_seconds(superlink), cpu_seconds(app), time.process_time()]
    wait_until(lambda: len(records()) >= rounds or not running.process.is_alive(), 600)
    used = [
        now - then
        for now, then in zip([cpu_seconds(superlink), cpu_seconds(app), time.process_time()], used, strict=True)
    ]
    began, done = starts(folder), records()
    assert len(done) >= rounds, federation.said(running)
    dispatch, first, answers = defaultdict[int, list[float]](list), [], []
    for client in clients:
        for t, when in client.received.items():
            dispatch[t].append(when - began[t])
    for t in began:
        if times := [client.answered[t] - began[t] for client in clients if t in client.answered]:
            first.append(min(times))
            answers += times
    with suppress(Exception):
        federation.end(running)
    return {
        "light": len(clients),
        "sites": len(folder.clients) - len(clients),
        "rounds": rounds,
        "load average before and after": [round(load, 2), round(os.getloadavg()[0], 2)],
        "dispatch": spread([value for values in dispatch.values() for value in values]),
        "first answer": spread(first),
        "answer of a light client": spread(answers),
        "round": spread([record["seconds"]["clients"] for record in done]),
        "rounds in order": [round(record["seconds"]["clients"], 1) for record in done],
        "processor seconds per round": {
            name: round(seconds / (rounds - 1), 2)
            for name, seconds in zip(("SuperLink", "server's app", "light clients"), used, strict=True)
        },
        "present": [len(record["federation"]["present"]) for record in done],
        "problems of light clients": sum(len(client.problems) for client in clients),
        "a problem": next((problem for client in clients for problem in client.problems), ""),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--light", type=int, default=100, help="light clients, all in this process")
    parser.add_argument("--real", type=int, default=4, help="sites with a process of their own, which train")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, help="a JSON file to write the figures to")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedcc-load-") as place:
        figures = measure(Path(place), given.light, given.real, given.rounds)
    text = json.dumps(figures, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
