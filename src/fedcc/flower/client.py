"""A client at its site: one round of the method on its own data, and what it keeps on its own disk.

Every message from the server is served by a new process, so all that lasts between rounds lies in the site's folder.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcc.core.digests import DamagedFile
from fedcc.core.messages import carried
from fedcc.core.method import AnyMethod
from fedcc.core.model import Model
from fedcc.core.requests import Predict
from fedcc.core.rng import Key
from fedcc.core.samples import Samples
from fedcc.engine import choose_device, default_engine, default_precision, drive, engine
from fedcc.engine.threads import fixed_threads
from fedcc.experiments.packing import from_bytes, read_header, readable, to_bytes
from fedcc.experiments.round_files import RoundFiles
from fedcc.federate import build_client, first_model
from fedcc.flower.data import site_samples
from fedcc.flower.fingerprint import fingerprint
from fedcc.flower.folder import Site

FORMAT = 1
KEEP = 2  # rounds: a server that goes back by one finds the client where it was


@dataclass(frozen=True, eq=False)
class ClientSnapshot:
    """A client after a round: the fingerprint of what it received, what it sent, its model and its memory."""

    t: int
    received: str
    up: Any
    model: Model
    memory: dict[str, Any]
    log: dict[str, float]


class ClientSnapshots:
    """The snapshots of one run on a site's disk, in the format of checkpoints."""

    def __init__(self, folder: Path, method: AnyMethod, device: torch.device):
        self.files, self.method, self.device = RoundFiles(folder, "round"), method, device

    def after(self, t: int) -> ClientSnapshot | None:
        """The client after round t; None if there is no such file or it is damaged."""
        path = self.files.paths().get(t)
        if path is None:
            return None
        try:
            content = self.files.read(path)
        except DamagedFile as error:
            print(f"fedcc: {path} is not used: {error}")
            return None
        with readable(path):
            about, tree = read_header(content)
            if about != {"format": FORMAT}:
                raise ValueError(f"format {about.get('format')}, this fedcc reads format {FORMAT}")
            return from_bytes(ClientSnapshot, content, tree, self.method, device=self.device)

    def before(self, t: int) -> ClientSnapshot | None:
        """Where round t starts: after the latest round before it or, if the server went back further, the first."""
        rounds = sorted(self.files.paths(), key=lambda r: (r >= t, -r if r < t else r))
        return next((snapshot for snapshot in map(self.after, rounds) if snapshot is not None), None)

    def write(self, snapshot: ClientSnapshot) -> None:
        content = to_bytes(snapshot, self.method, {"format": FORMAT})
        t = snapshot.t
        self.files.write(t, content, obsolete=lambda rounds: [r for r in rounds if not t - KEEP < r <= t])


class SiteClient:
    """A site's client in one run."""

    def __init__(self, site: Site, run: str, *, data: Path, device: str = "auto", threads: int = 1):
        self.site, self.run, self.data, self.threads = site, run, data, threads
        self.method, self.device = site.experiment.build_method(), choose_device(device)
        self.folder = site.state / run
        self.folder.mkdir(parents=True, exist_ok=True)
        self.snapshots = ClientSnapshots(self.folder, self.method, self.device)
        machine = site.experiment.machine
        same = torch.device(machine.device).type == self.device.type
        precision = machine.precision if same else default_precision(self.device)
        self.engine = engine(default_engine(self.device), self.device, precision)

    def round(self, t: int, down: Any) -> ClientSnapshot:
        """One round; a round that was computed from the same downlink before is not computed again."""
        from filelock import FileLock

        with FileLock(self.folder / "lock"), fixed_threads(self.threads):  # a killed node's child may still be working
            received = fingerprint(down)
            snapshot = self.snapshots.after(t)
            if snapshot is not None and snapshot.received == received:
                return snapshot
            begun, e, task = time.perf_counter(), self.site.experiment, self.site.task
            client = build_client(
                task.public_samples(self.site.path / "public.npz").to(self.device),
                task.classes,
                e.training.recipe(),
                e.training.seed,
                self.site.number,
                task.arch(self.method, self.site.model),
                site_samples(self.data, task).to(self.device),
            )
            before = self.snapshots.before(t)
            if before is None:
                client.model = self.engine.serve([first_model(client)])[0]
            else:
                client.model, client.memory = before.model, before.memory
            client.begin(t)
            up = drive([self.method.client(client, down)], self.engine)[0]
            log = {n: float(v) for n, v in client.log.items()}
            snapshot = ClientSnapshot(t, received, up, client.model, client.memory, log)
            self.snapshots.write(snapshot)
            self.note(snapshot, time.perf_counter() - begun)
            return snapshot

    def upload_key(self, t: int) -> Key:
        """The key of the draws that round an upload."""
        return Key(self.site.experiment.training.seed, t, self.site.number, "wire", "up")

    def note(self, snapshot: ClientSnapshot, seconds: float) -> None:
        """Add a line for the site's own eyes: what the client logged, and the fingerprint of what it sent."""
        sent = fingerprint(carried(snapshot.up, self.site.experiment.training.wire, self.upload_key(snapshot.t)))
        line = {"round": snapshot.t, "sent": sent, "log": snapshot.log, "seconds": round(seconds, 3)}
        with (self.folder / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def latest(self) -> ClientSnapshot:
        """The client after its last round."""
        snapshot = self.snapshots.before(2**31)
        if snapshot is None:
            raise ValueError(f"{self.site.name} has taken part in no round of run {self.run} yet")
        return snapshot

    def predict(self, x: Tensor) -> Tensor:
        """Its own model's logits for these images."""
        with fixed_threads(self.threads):
            samples = Samples({"x": x.to(self.device)}, self.site.task.view)
            logits: Tensor = self.engine.serve([Predict(self.latest().model, samples)])[0].logits
            return logits.cpu()
