"""The life of a federation of four sites, with real programs of two installed versions."""

from __future__ import annotations

import csv
import json
import re
import shutil
import ssl
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from sklearn.datasets import load_iris

from fedcc.experiments.store import RunFolder
from fedcc.flower.fleet import ROUTES
from fedcc.flower.folder import FederationFolder
from fedcc.flower.keys import make_key_pair, read_certificates
from fedcc.flower.programs import free_port
from program import call, wait_until
from wheels import Installed, all_ended, build_wheel, install, raised_patch

pytestmark = pytest.mark.slow
ROUNDS = 5
FLOWERS = ("setosa", "versicolor", "virginica")


def write_table(path: Path, start: int, step: int) -> Path:
    iris = load_iris()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c", "d", "species"])
        writer.writerows([*iris.data[i], FLOWERS[iris.target[i]]] for i in range(start, 150, step))
    return path


class Life:
    """A federation's server and its sites, each with a folder of its own."""

    def __init__(self, place: Path, capsys: pytest.CaptureFixture[str]):
        self.place, self.capsys, self.fed = place, capsys, place / "fed"
        self.started: list[Installed] = []
        self.data = {name: write_table(place / f"{name}.csv", 1 + k, 7) for k, name in enumerate("abcde")}
        self.numbers = count()

    def fedcc(self, *words: Any) -> str:
        """What an operator's or a site's short command says; it must succeed."""
        done = call(self.capsys, "federation", *words)
        assert done.code == 0, (words, done)
        return done.out

    def start(self, programs: Path, *words: Any) -> Installed:
        self.started.append(Installed(programs, self.place / f"{next(self.numbers)}-{words[0]}.log", *words))
        return self.started[-1]

    def site(self, name: str) -> Path:
        return self.place / "at" / name

    def join(self, name: str) -> None:
        """The site makes its key, the operator adds it by the fingerprint that the site reads out, and sends files."""
        said = self.fedcc("join", name, "--folder", self.site(name))
        fingerprint = re.search(r"Read out to the operator: (.*)", said)
        assert fingerprint is not None
        sent = self.place / f"{name}.pub"
        shutil.copy(self.site(name) / f"{name}.pub", sent)
        self.fedcc("add", self.fed, name, sent, "--fingerprint", fingerprint[1])
        for file in (self.fed / "sites" / name).iterdir():
            assert file.name != "site.key"
            shutil.copy(file, self.site(name))

    def client(self, programs: Path, name: str) -> Installed:
        words = ("--data", self.data[name], "--device", "cpu", "--share-model")
        return self.start(programs, "client", self.site(name), *words)

    def log(self) -> str:
        path = self.fed / "operator" / "run.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, text: str, seconds: float = 240) -> None:
        """Wait until the run says something; any program that ends before is an error."""
        wait_until(lambda: text in self.log(), seconds)

    def records(self) -> list[dict[str, Any]]:
        return RunFolder(self.fed / "run").metrics()


def refused_everywhere(site: Path, key: Path, port: int) -> bool:
    """Whether the server refuses a key at every route that clients call."""
    from base64 import b64encode

    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    private: Any = load_ssh_private_key(key.read_bytes(), None)
    stamp = now().isoformat()
    headers = {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(private.public_key())).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(private, stamp.encode("ascii"))).decode(),
        TIMESTAMP_HEADER: stamp,
    }
    context = ssl.create_default_context(cafile=str(site / "ca.crt"))
    answers = [httpx.post(f"https://localhost:{port}{path}", headers=headers, verify=context) for path in ROUTES]
    signed = ["signed with the key of a registered client" in answer.text for answer in answers]
    assert all(signed) or not any(signed), [(a.url, a.status_code) for a in answers]
    return all(signed)


def test_the_life_of_a_federation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = build_wheel(tmp_path / "dist")
    old, new = install(wheel, tmp_path / "old"), install(raised_patch(wheel), tmp_path / "new")
    life = Life(tmp_path, capsys)
    fed, port = life.fed, free_port()
    public = write_table(tmp_path / "public.csv", 0, 7)
    words = ("--public-file", public, "--label", "species", "--test-file", write_table(tmp_path / "test.csv", 6, 7))
    classes = [word for name in FLOWERS for word in ("--class", name)]
    rules = ("--quorum", 4, "--grace", 600, "--deadline", 3600, "--strikes", 50)  # a round waits for all its clients
    clients = [word for name in "abcd" for word in ("--client", name)]
    life.fedcc("init", fed, *clients, *words, *classes, *rules, "--rounds", ROUNDS, "--epochs", 1, "--port", port,
               "--device", "cpu")  # fmt: skip
    assert not list(fed.rglob("site.key"))
    with all_ended(life.started):
        # join: four sites with keys of their own
        server = life.start(old, "server", fed, "--bind", "127.0.0.1")
        for name in "abcd":
            life.join(name)
        server.wait_for("ready")
        sites = {name: life.client(old, name) for name in "abcd"}
        run = life.start(old, "run", fed)
        life.wait_for(f"round 1 of {ROUNDS} is done with a, b, c, d")
        sites["d"].end()

        # a round waits for d; it is revoked, and e is added: the round ends without both, the next one waits for e
        life.join("e")
        done = len(life.records())
        life.fedcc("revoke", fed, "d")
        assert refused_everywhere(life.site("d"), life.site("d") / "site.key", port)
        life.wait_for("e is added")
        life.wait_for(f"round {done + 1} of {ROUNDS} is done with a, b, c")
        again = life.client(old, "d")
        again.wait_for("the server does not know this site's key")
        again.end()

        # renew and rotate, while the round waits for e
        life.fedcc("renew", fed)
        life.fedcc("renew", fed, "--ca")
        life.fedcc("rotate", fed)
        shutil.copy(life.site("a") / "site.key", tmp_path / "old-a.key")
        said = life.fedcc("rotate", life.site("a"))
        mark = re.search(r"Read out to the operator: (.*)", said)
        assert mark is not None
        life.fedcc("rotate", fed, life.site("a") / "a.pub", "--client", "a", "--fingerprint", mark[1])
        assert refused_everywhere(life.site("a"), tmp_path / "old-a.key", port)
        make_key_pair(tmp_path / "intruder.key", tmp_path / "intruder.pub")
        assert refused_everywhere(life.site("a"), tmp_path / "intruder.key", port)
        sites["e"] = life.client(old, "e")
        life.wait_for(f"round {done + 2} of {ROUNDS} is done with a, b, c, e")
        assert "trying the site's other key" in sites["a"].said()

        # b is upgraded: a round waits for it, then the versions work together
        sites["b"].end()
        rounds = len(life.records())
        sites["b"] = life.client(new, "b")
        life.wait_for(f"round {rounds + 1} of {ROUNDS} is done with a, b, c, e")

        # the server is upgraded and starts again, with its new CA; the sites accept it
        sites["e"].end()
        if len(life.records()) < ROUNDS:
            run.end()
        server.end()
        resumed = len(life.records())
        server = life.start(new, "server", fed, "--bind", "127.0.0.1")
        server.wait_for("ready")
        sites["e"] = life.client(new, "e")
        run = life.start(new, "run", fed)
        finished = run.ended(300)
        assert finished.code == 0, finished
        assert "final" in finished.out

    # nothing is lost
    records = life.records()
    assert [r["round"] for r in records] == list(range(1, ROUNDS + 1))
    present = ["".join(r["federation"]["present"]) for r in records]
    assert present[0] == "abcd"
    assert present[done] == "abc"
    assert present[done + 1 :] == ["abce"] * (ROUNDS - done - 1)
    assert records[done]["federation"]["added"] == ["e"]
    assert all(r["federation"]["revoked"] == ["d"] for r in records[done:])
    assert resumed < ROUNDS, "the restart came after the last round"
    assert [r["present"] for r in records[done + 1 :]] == [[0, 1, 2, 4]] * (ROUNDS - done - 1)
    summary = json.loads((fed / "run" / "summary.json").read_text())
    assert summary["federation"] == {"clients": list("abcde"), "kept_models": [], "revoked": ["d"]}
    for name in "abce":
        (lines,) = (life.site(name) / "state").glob("*/rounds.jsonl")
        own = [json.loads(line)["round"] for line in lines.read_text().splitlines()]
        assert set(own) == {t for t, names in enumerate(present, 1) if name in names}
        # and nobody but the new CA and the new keys is trusted
        assert (life.site(name) / "command.pub").read_bytes() == (fed / "operator" / "command.pub").read_bytes()
        assert read_certificates(life.site(name) / "ca.crt") == read_certificates(fed / "operator" / "ca.crt")
    assert not (life.site("a") / "previous.key").exists()
    assert FederationFolder.open(fed).members == ["a", "b", "c", "e"]
