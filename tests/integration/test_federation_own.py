"""Federations on tables, with networks that only their sites know: in this process, and as processes over TLS."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

import fedcc
from fedcc.experiments.store import RunFolder
from fedcc.flower import cohort as cohort_module
from fedcc.flower.demo import RunTrace, sent_uplinks, simulate
from fedcc.flower.folder import FederationFolder
from federation import LocalTransport, real
from own_sites import FACTORIES, SITES, OwnSites, make_own_sites
from program import call

SAME: Any = {"rounds": 2, "epochs": 3, "lr": 0.01, "device": "cpu", "client_accuracy": False}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort_module, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(cohort_module, "ONLINE_SECONDS", 0.0)
    monkeypatch.setattr("fedcc.code._allowed", set())
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "site_nets", raising=False)


def found(folder: FederationFolder) -> tuple[dict[tuple[int, str], str], float]:
    summary = RunFolder(folder.run).summary()
    assert summary is not None
    return sent_uplinks(folder), summary["accuracy"]["final"]


def simulated(sites: OwnSites) -> tuple[dict[tuple[int, str], str], float]:
    trace: RunTrace = simulate(sites.folder.experiment, sites.simulated, SITES)
    return trace.uplinks, trace.accuracy


@pytest.mark.parametrize("method", ["fedcc", "fedmd", "fedct"])
def test_tables_and_own_networks_give_the_simulators_numbers(method: str, tmp_path: Path) -> None:
    sites = make_own_sites(tmp_path, method)
    transport = LocalTransport(sites.folder, config=sites.config())
    transport.server().train()
    uplinks, accuracy = simulated(sites)
    assert len(uplinks) == 2 * len(SITES)
    assert found(sites.folder) == (uplinks, accuracy)
    purposes = [purpose for _, purpose, _ in transport.sent]
    assert "query.model" not in purposes, "nobody is asked for a model that the server cannot use"
    assert purposes.count("query.predict") == 3


def test_a_server_that_was_stopped_resumes_without_knowing_the_networks(tmp_path: Path) -> None:
    sites = make_own_sites(tmp_path)

    class Cut(Exception):
        pass

    def cut(*message: object) -> None:
        if message == ("east", "train", 2):
            raise Cut

    with pytest.raises(Cut):
        LocalTransport(sites.folder, config=sites.config(), fault=cut).server().train()
    LocalTransport(sites.folder, config=sites.config()).server().train()
    assert found(sites.folder) == simulated(sites)


def test_another_network_than_the_one_that_was_trained_is_refused(tmp_path: Path) -> None:
    sites = make_own_sites(tmp_path)
    config = sites.config()

    def change(*message: object) -> None:
        t = message[2]
        config["east"]["network"] = "mlp" if t == 2 else config["east"]["network"]

    transport = LocalTransport(sites.folder, config=config, fault=change)
    with pytest.raises(cohort_module.NoQuorum):
        transport.server().train()
    assert {key for key in sent_uplinks(sites.folder) if key[1] == "east"} == {(1, "east")}


def test_what_such_a_run_can_and_cannot_do_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = make_own_sites(tmp_path)
    transport = LocalTransport(sites.folder, config=sites.config())
    transport.server().train()
    run = sites.folder.run
    reason = "north, east, south keep their models at their sites"
    for words in (("export", run, tmp_path / "out.onnx"), ("predict", run, sites.tables["east"]), ("distil", run)):
        call(capsys, *words).refused(reason, "fedcc federation predict")
    assert not (tmp_path / "out.onnx").exists()
    monkeypatch.setattr("fedcc.flower.superlink.check_server", lambda _: None)
    monkeypatch.setattr("fedcc.flower.superlink._run_app", lambda *_: transport.server().query(
        sites.folder.query / "input.npz", sites.folder.query / "output.npz"))  # fmt: skip
    out = tmp_path / "out.npz"
    done = call(capsys, "federation", "predict", sites.folder.path, sites.tables["east"], "--out", out)
    assert done.code == 0, done
    own = fedcc.run("fedcc", federation=sites.simulated, **SAME)
    scores = np.load(out)["scores"]
    assert (scores == own.scores(sites.simulated.private[1].x).numpy()).all()
    assert np.isin(scores.argmax(1), [2, 3]).mean() > 0.5


@pytest.mark.slow
def test_processes_over_tls_give_the_simulators_numbers(tmp_path: Path) -> None:
    """Must hold for every upload and the final accuracy: each site has its own table and its own network."""
    sites = make_own_sites(tmp_path)
    with real(sites.folder, tmp_path / "programs") as federation:
        federation.server()
        for name in SITES:
            place = federation.home / f"{name}-{len(federation.started)}"
            place.mkdir(parents=True)  # the client's current folder
            (place / "site_nets.py").write_text((sites.code[name] / "site_nets.py").read_text())
            federation.client(name, "--network", f"site_nets:{FACTORIES[name]}", data=sites.tables[name])
        done = federation.run().end(300)
        assert done.code == 0, done
        uplinks, accuracy = simulated(sites)
        assert len(uplinks) == 2 * len(SITES)
        assert found(sites.folder) == (uplinks, accuracy)
        asked = federation.start("predict", "predict", sites.folder.path, sites.tables["south"], "--out", "o.npz")
        assert asked.end(120).code == 0
    own = fedcc.run("fedcc", federation=sites.simulated, **SAME)
    assert own.accuracy == accuracy
    for path in sites.folder.path.rglob("*"):
        if path.is_file() and "state" not in path.parts:
            assert b"site_nets" not in path.read_bytes(), "the network is known to its site alone"
    assert json.loads((sites.folder.run / "summary.json").read_text())["federation"]["kept_models"] == list(SITES)
