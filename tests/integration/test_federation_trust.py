"""A client that lies, and sites that share less: with a server and sites as processes of their own.

Of the vulnerabilities that were found, these are about what clients send and what leaves them; docs/threat-model.md,
"What is tested", lists all of them with their tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from faulty_client import FAULTY_PATH, plan
from fedcc.experiments.store import RunFolder
from fedcc.flower.create import create_federation
from fedcc.flower.folder import FederationFolder, Site
from fedcc.flower.programs import free_port
from federation import Real, app_of, make, real
from program import Done, call, wait_until
from synthetic import packed
from tiny import blobs

pytestmark = pytest.mark.slow

LIAR, HONEST = "liar", ("east", "south", "west")


def three_classes(path: Path) -> FederationFolder:
    """The liar and another client have class 0, the others one class each; the public samples have all of them."""
    labels = np.arange(30) % 3
    for name, seed in (("public", 7), ("test", 8)):
        arrays = {"x": blobs(labels.tolist(), 3, seed=seed).numpy(), "y": labels}
        np.savez(path / f"{name}.npz", **(arrays if name == "test" else {"x": arrays["x"]}))
    folder = create_federation(
        path / "f", "fedcc", dict.fromkeys((LIAR, *HONEST), "mlp8"), port=free_port(), make_keys=True,
        options={"rounds": 3, "epochs": 3, "lr": 0.01, "batch": 8, "device": "cpu"}, rules={"quorum": 4},
        public_file=path / "public.npz", test_file=path / "test.npz", class_names=("cat", "dog", "owl"),
        app=app_of("faulty_client:app"),
    )  # fmt: skip
    for seed, (name, c) in enumerate(zip((LIAR, *HONEST), (0, 0, 1, 2), strict=True)):
        np.savez(folder.site(name) / "data.npz", x=blobs([c] * 20, 3, seed=seed).numpy(), y=np.full(20, c))
    return folder


def guard(folder: FederationFolder) -> None:
    """Turn the option on, on the server and at every site, as people would who agree on it."""
    for path in (folder.path, *map(folder.site, folder.clients)):
        text = (path / "experiment.toml").read_text()
        assert text.count("guard_votes = false") == 1
        (path / "experiment.toml").write_text(text.replace("guard_votes = false", "guard_votes = true"))


def run(federation: Real, *options: str) -> float:
    done = federation.start("run", "run", federation.folder.path, *options).end(240)
    assert done.code == 0, done
    summary = RunFolder(federation.folder.run).summary()
    assert summary is not None
    return float(summary["accuracy"]["final"])


def said(federation: Real, *words: Any) -> Done:
    return federation.start(str(words[0]), *words).end(60)


def test_a_lazy_client_ruins_fedcc_unless_votes_are_guarded_and_the_operator_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One site of four answers "class 0, certain" to every public sample and to every question."""
    folder = three_classes(tmp_path)
    plan(folder.site(LIAR), always="constant")
    with real(folder, tmp_path / "programs", PYTHONPATH=FAULTY_PATH) as federation:
        federation.server()
        for name in folder.clients:
            federation.client(name, *(["--share-model"] if name != LIAR else []))
        ruined = run(federation)
        status = said(federation, "status", folder.path).out
        records, log = RunFolder(folder.run).metrics(), (folder.operator / "run.log").read_text()
        call(capsys, "report", folder.run, "--out", tmp_path / "report")
        guard(folder)
        defended = run(federation, "--overwrite")
        guarded = RunFolder(folder.run).metrics()
    assert ruined <= 50
    assert defended >= 70
    for record in (*records, *guarded):
        assert record["warnings"].keys() == {"0"}, "the liar, in every round"
        signs = record["uploads"]
        assert set(signs) == {"0", "1", "2", "3"}
        assert signs["0"]["known"] == 1.0
        assert all({"known", "agreement", "trust", "relation"} <= signs[k].keys() for k in signs)
        assert all(signs[k]["known"] < 1 for k in "123")
    assert guarded[-1]["uploads"]["0"]["trust"] < 0.5 * records[-1]["uploads"]["0"]["trust"]
    assert f"WARNING warning: round 3: {LIAR}: its answers" in log
    assert f"warning: {LIAR}, round 3: its answers" in status
    (row,) = (line.split() for line in status.splitlines() if line.startswith(f"{LIAR} "))
    last = records[-1]["uploads"]["0"]
    assert {f"{last[sign]:.2f}" for sign in ("known", "agreement", "trust")} <= set(row)
    assert not any(f"{name}, round" in status for name in HONEST)
    page = (tmp_path / "report" / "index.html").read_text()
    assert "round 3, client 0: its answers" in packed(page, "content").decode()


def answers(site: Site, purpose: str) -> list[str]:
    """The digests of what a site has sent for a purpose."""
    entries = [e for e in site.audit.entries() if e["kind"] == "answered" and e["purpose"] == purpose]
    assert {e["answer"] for e in entries} <= {"sent"}
    return [e["sha256"] for e in entries]


def test_noisy_answers_are_drawn_once_and_counted_over_restarts_and_runs(tmp_path: Path) -> None:
    """A site is killed and started again, and asked for the same round; then there is a second run."""
    folder = make(tmp_path / "f", "fedcc", ("north", "east"), rounds=1, models="mlp", skew="iid", share="noisy",
                  answer_epsilon=1.0)  # fmt: skip
    site, test = Site.read(folder.site("east")), folder.test()
    assert test is not None
    count = folder.task.public + len(test["x"])
    with real(folder, tmp_path / "programs") as federation:
        federation.server()
        federation.client("north")
        client = federation.client("east")
        wait_until(lambda: "connected" in federation.said(client), 90)
        assert "epsilon 1 for each single answer" in federation.said(client)
        run(federation)
        assert site.audit.ledger().noisy == {(1.0, 11): count}
        federation.kill(client)
        for path in folder.run.glob("*"):  # the operator loses what the run has computed, and asks for the round again
            if path.is_file() and path.name != "experiment.toml":  # without that it would be another run
                path.unlink()
        client = federation.client("east")
        run(federation)
        assert site.audit.ledger().noisy == {(1.0, 11): count}, "nothing new has left"
        assert f"noisy: {count} answers with epsilon 1" in federation.said(client), "the ledger survives a restart"
        for purpose in ("train", "query.predict"):
            first, again = answers(site, purpose)
            assert first == again, "noise would average out"
        run(federation, "--overwrite")  # the same seed and data: round 1 gives the same model
        assert answers(site, "train")[2] == answers(site, "train")[0], "the run's name is the server's choice"
        assert len(list(site.state.glob("*/rounds.jsonl"))) == 2, "it has trained in the new run"
        assert site.audit.ledger().noisy == {(1.0, 11): count}, "nothing new has left"
        shown = said(federation, "audit", site.path).out
        assert f"noisy: {count:,} answers with epsilon 1 per answer (11 different labels)" in shown
        assert f"{1.0 * count:,.4g} at delta 0" in shown
        words = ("init", tmp_path / "g", "--client", "a", "--client", "b", "--method", "fedavg", "--data", "digits",
                 "--skew", "iid", "--share", "noisy")  # fmt: skip
        said(federation, *words).failed("share=noisy is for methods that share predictions", code=2)
    summary = json.loads((folder.run / "summary.json").read_text())
    assert summary["bytes"]["up"] == 2 * folder.task.public, "one byte for each answer"
