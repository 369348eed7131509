"""A client at its site: one round of the method on its own data, and what it keeps on its own disk.

Every message from the server is served by a new process, so all that lasts between rounds lies in the site's folder.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcc.core.files import uninterrupted, written_whole
from fedcc.core.messages import carried
from fedcc.core.method import AnyMethod
from fedcc.core.model import Model
from fedcc.core.requests import Predict
from fedcc.core.rng import Key
from fedcc.core.samples import Samples
from fedcc.engine import choose_device, drive, engine, usual_engine, usual_precision
from fedcc.engine.threads import fixed_threads
from fedcc.experiments.checkpoint import DIGEST, header, packed, understood, unpacked
from fedcc.federate import build_client, first_model
from fedcc.flower.data import site_samples
from fedcc.flower.fingerprint import fingerprint
from fedcc.flower.folder import Site

FORMAT = 1
KEPT = 2  # rounds: a server that goes back by one finds the client where it was


@dataclass(frozen=True, eq=False)
class Kept:
    """A client behind a round: what it received (its fingerprint) and sent, its model and its memory."""

    t: int
    received: str
    up: Any
    model: Model
    memory: dict[str, Any]
    log: dict[str, float]


class Rounds:
    """The rounds of one run that a site keeps, as files; the format is that of checkpoints."""

    def __init__(self, folder: Path, method: AnyMethod, device: torch.device):
        self.folder, self.method, self.device = folder, method, device

    def paths(self) -> dict[int, Path]:
        """The files, by round."""
        found = sorted(self.folder.glob("round-*.safetensors"))
        return {int(path.name.split("-")[1]): path for path in found}

    def at(self, t: int) -> Kept | None:
        """The client behind round t, or None if there is no such file or it cannot be used."""
        path = self.paths().get(t)
        if path is None:
            return None
        content = path.read_bytes()
        if f"-{blake2b(content, digest_size=DIGEST).hexdigest()}." not in path.name:
            print(f"fedcc: {path} is not used: its content is not what its checksum says")
            return None
        with understood(path):
            about, tree = header(content)
            if about != {"format": FORMAT}:
                raise ValueError(f"format {about.get('format')}, this fedcc reads format {FORMAT}")
            kept: Kept = unpacked(content, tree, self.method, device=self.device, kind=Kept)
        return kept

    def before(self, t: int) -> Kept | None:
        """Where round t begins: behind the latest round before it or, where the server went back further, the first."""
        rounds = sorted(self.paths(), key=lambda r: (r >= t, -r if r < t else r))
        return next((kept for kept in map(self.at, rounds) if kept is not None), None)

    def write(self, kept: Kept) -> None:
        content = packed(kept, self.method, {"format": FORMAT})
        digest = blake2b(content, digest_size=DIGEST).hexdigest()
        with uninterrupted():
            with written_whole(self.folder / f"round-{kept.t:06d}-{digest}.safetensors") as file:
                file.write(content)
            for t, path in self.paths().items():
                if t <= kept.t - KEPT or t > kept.t:
                    path.unlink()


class SiteClient:
    """A site's client in one run."""

    def __init__(self, site: Site, run: str, *, data: Path, device: str = "auto", threads: int = 1):
        self.site, self.run, self.data, self.threads = site, run, data, threads
        self.method, self.device = site.experiment.build_method(), choose_device(device)
        self.folder = site.state / run
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rounds = Rounds(self.folder, self.method, self.device)
        own = torch.device(site.experiment.machine.device).type == self.device.type
        precision = site.experiment.machine.precision if own else usual_precision(self.device)
        self.engine = engine(usual_engine(self.device), self.device, precision)

    def round(self, t: int, down: Any) -> Kept:
        """One round. A round that was computed already, from the same downlink, is not computed again."""
        from filelock import FileLock

        with FileLock(self.folder / "lock"), fixed_threads(self.threads):  # a killed node's child may still be at work
            received = fingerprint(down)
            kept = self.rounds.at(t)
            if kept is not None and kept.received == received:
                return kept
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
            before = self.rounds.before(t)
            if before is None:
                client.model = self.engine.serve([first_model(client)])[0]
            else:
                client.model, client.memory = before.model, before.memory
            client.begin(t)
            up = drive([self.method.client(client, down)], self.engine)[0]
            log = {n: float(v) for n, v in client.log.items()}
            kept = Kept(t, received, up, client.model, client.memory, log)
            self.rounds.write(kept)
            self.note(kept, time.perf_counter() - begun)
            return kept

    def note(self, kept: Kept, seconds: float) -> None:
        """A line on the round for the site's own eyes: what it noted, and the fingerprint of what it sent."""
        key = Key(self.site.experiment.training.seed, kept.t, self.site.number, "wire", "up")
        sent = fingerprint(carried(kept.up, self.site.experiment.training.wire, key))
        about = {"round": kept.t, "sent": sent, "log": kept.log, "seconds": round(seconds, 3)}
        with (self.folder / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(about) + "\n")

    def latest(self) -> Kept:
        """The client as it stands now."""
        kept = self.rounds.before(2**31)
        if kept is None:
            raise ValueError(f"{self.site.name} has taken part in no round of run {self.run} yet")
        return kept

    def predict(self, x: Tensor) -> Tensor:
        """Its own model's logits on these images."""
        with fixed_threads(self.threads):
            samples = Samples({"x": x.to(self.device)}, self.site.task.view)
            logits: Tensor = self.engine.serve([Predict(self.latest().model, samples)])[0].logits
            return logits.cpu()
