"""Real federations: Flower's SuperLink behind the gate and SuperNodes with keys over TLS, as processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from fedcc.experiments.store import RunFolder
from fedcc.flower.demo import simulate
from federation import make, real
from program import alive, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("method", ["fedcc", "fedavg"])
def test_uplinks_and_accuracy_are_the_simulators(method: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "a folder", method)  # a path with a space goes through all of Flower's programs
    with real(folder, tmp_path / "programs") as federation:
        server = federation.server()
        clients = [federation.client(name, *(["--share-model"] if name != "east" else [])) for name in folder.clients]
        done = federation.run().end(300)
        assert done.code == 0, done
        found = RunFolder(folder.run).summary()
        assert found is not None
        simulated = simulate(folder.experiment)
        uplinks = {
            (line["round"], name): line["sent"]
            for name in folder.clients
            for path in (folder.path / "sites" / name / "state").glob("*/rounds.jsonl")
            for line in map(json.loads, path.read_text().splitlines())
        }
        assert uplinks == simulated.uplinks
        assert found["accuracy"]["final"] == simulated.accuracy
        if method == "fedcc":
            np.savez(tmp_path / "in.npz", x=folder.test()["x"][:9].numpy())  # type: ignore[index]
            asked = federation.start(
                "predict", "predict", folder.path, tmp_path / "in.npz", "--out", tmp_path / "o.npz"
            )
            assert asked.end(120).code == 0
            assert np.load(tmp_path / "o.npz")["scores"].shape == (9, 10)
        for running in [*clients, server]:
            assert federation.end(running).code == 130
        wait_until(lambda: not any(map(alive, federation.seen)), 30)
