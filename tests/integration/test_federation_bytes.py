"""What a round really sends, counted at the client's socket, against what the record says it sends."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from fedcc.experiments.store import RunFolder
from fedcc.flower.create import create_federation
from fedcc.flower.programs import free_port
from federation import real
from program import wait_until

pytestmark = pytest.mark.slow

PUBLIC, CLASSES, ROUNDS, IDLE = 5_000, 100, 3, 20.0  # CIFAR-100's; seconds


class Relay:
    """A TCP relay before a port that counts what goes through it."""

    def __init__(self, port: int):
        self.target, self.listener = port, socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.up = self.down = 0
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self.listener.accept()
                threading.Thread(target=self.pass_on, args=(near,), daemon=True).start()

    def pass_on(self, near: socket.socket) -> None:
        with suppress(OSError), near, socket.create_connection(("127.0.0.1", self.target)) as far:
            while True:
                for ready in select.select([near, far], [], [])[0]:
                    if not (part := ready.recv(1 << 16)):
                        return
                    if ready is near:
                        self.up += len(part)
                        far.sendall(part)
                    else:
                        self.down += len(part)
                        near.sendall(part)

    @property
    def count(self) -> np.ndarray:
        return np.array([self.up, self.down])


@contextmanager
def relay(port: int) -> Iterator[Relay]:
    made = Relay(port)
    try:
        yield made
    finally:
        made.listener.close()


def test_bytes_at_the_socket_are_those_of_the_record(tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    """5,000 x 101 probabilities up and 5,000 x 100 down; idle traffic subtracted, within 10 %."""
    draws = np.random.default_rng(0)
    np.savez(tmp_path / "public.npz", x=draws.integers(0, 256, (PUBLIC, 1, 8, 8), dtype=np.uint8))
    folder = create_federation(
        tmp_path / "f", "fedcc", {"only": None}, settings={}, hosts=[], port=free_port(), rules={},
        options={"models": "resnet8", "rounds": ROUNDS, "epochs": 1, "batch": 256, "device": "cpu"},
        public_file=tmp_path / "public.npz", class_names=tuple(f"c{n}" for n in range(CLASSES)), make_keys=True,
    )  # fmt: skip
    site = folder.path / "sites" / "only"
    y = np.arange(300) % CLASSES
    np.savez(site / "data.npz", x=draws.integers(0, 256, (300, 1, 8, 8), dtype=np.uint8), y=y)
    with real(folder, tmp_path / "programs") as federation, relay(folder.port) as counted:
        federation.server()
        client = federation.client("only", "--server", f"localhost:{counted.port}")
        wait_until(lambda: "connected" in federation.said(client), 90)
        time.sleep(3)
        before = counted.count
        time.sleep(IDLE)
        idle = (counted.count - before) / IDLE  # bytes a second
        before, begun = counted.count, time.monotonic()
        done = federation.run().end(240)
        assert done.code == 0, done
        measured = counted.count - before - idle * (time.monotonic() - begun)
    records = RunFolder(folder.run).metrics()
    said = np.array([[r["bytes"]["up"], r["bytes"]["down"]] for r in records]).sum(0)
    assert list(said) == [ROUNDS * PUBLIC * (CLASSES + 1) * 4, (ROUNDS - 1) * PUBLIC * CLASSES * 4]
    assert (abs(measured / said - 1) < 0.1).all(), (measured, said)
    (lines,) = (site / "state").glob("*/rounds.jsonl")
    work = [json.loads(line)["seconds"] for line in lines.read_text().splitlines()]
    waits = [r["seconds"]["clients"] - own for r, own in zip(records, work, strict=True)]
    more = (measured - said) / ROUNDS
    text = (
        f"at the socket {measured[0]:,.0f} up, {measured[1]:,.0f} down; the record says {said[0]:,} and {said[1]:,}; "
        f"more per round {more[0]:,.0f} and {more[1]:,.0f} bytes; idle {idle[0]:.0f} and {idle[1]:.0f} bytes a second; "
        f"seconds beyond the client's own work {', '.join(f'{s:.1f}' for s in waits)}"
    )
    record_property("overhead", text)
    print(text)
