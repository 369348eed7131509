"""A federation of several hosts: network namespaces with addresses of their own, on one bridge, with links to cut."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from faulty_client import FAULTY_PATH, go, plan
from fedcc.experiments.store import RunFolder
from fedcc.flower.demo import simulate
from federation import app_of, make, real
from program import wait_until

SERVER = "10.77.0.1"


def ip(*words: str, of: str | None = None) -> None:
    """``ip``, in a namespace."""
    subprocess.run(["ip", *(("-n", of) if of else ()), *words], check=True, capture_output=True, text=True)


def lacking() -> str | None:
    """Why there can be no namespaces here, or None."""
    if shutil.which("ip") is None:
        return "needs ip (iproute2)"
    if os.getuid() != 0:
        return "needs root"
    name = f"fedcc{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        ip("link", "add", "fedcc-try", "type", "bridge", of=name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


class Hosts:
    """Namespaces on a bridge, which has one of its own; nothing of the machine's own network is touched."""

    def __init__(self, names: Sequence[str]):
        self.prefix = f"fedcc{os.getpid()}-"
        self.switch, self.names = f"{self.prefix}switch", list(names)

    def namespace(self, name: str) -> str:
        return f"{self.prefix}{name}"

    def up(self) -> None:
        ip("netns", "add", self.switch)
        ip("link", "add", "bridge", "type", "bridge", of=self.switch)
        ip("link", "set", "bridge", "up", of=self.switch)
        for number, name in enumerate(self.names, 1):
            host, port = self.namespace(name), f"to-{number}"
            ip("netns", "add", host)
            ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host, of=self.switch)
            ip("link", "set", port, "master", "bridge", "up", of=self.switch)
            ip("address", "add", f"10.77.0.{number}/24", "dev", "eth0", of=host)
            for device in ("lo", "eth0"):
                ip("link", "set", device, "up", of=host)

    def cut(self, name: str) -> None:
        """What is sent is lost, and nobody is told."""
        ip("link", "set", self.port(name), "nomaster", of=self.switch)

    def heal(self, name: str) -> None:
        ip("link", "set", self.port(name), "master", "bridge", of=self.switch)

    def port(self, name: str) -> str:
        return f"to-{self.names.index(name) + 1}"

    def down(self) -> None:
        for name in (*map(self.namespace, self.names), self.switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    made = Hosts(names)
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.mark.slow
def test_links_that_are_cut_in_mid_round_and_heal(tmp_path: Path) -> None:
    """In round 2 brief is cut off for some seconds, long until the server has given it up; both finish their work in
    the meantime. They come back by themselves, nothing is lost: all that is sent is the simulator's."""
    if reason := lacking():
        pytest.skip(reason)
    names = ("near", "brief", "long", "other")
    rules = {"deadline": 60.0, "patience": 10}
    folder = make(
        tmp_path / "f", "fedcc", names, rules=rules, rounds=3, hosts=[SERVER], app=app_of("faulty_client:app")
    )
    for name in ("brief", "long"):
        plan(folder.path / "sites" / name, r2="hold")
    log = folder.operator / "run.log"
    with hosts("server", *names) as network, real(folder, tmp_path / "programs", PYTHONPATH=FAULTY_PATH) as federation:
        federation.namespaces = {name: network.namespace(name) for name in ("server", *names)}
        federation.namespaces["run"] = federation.namespaces["status"] = network.namespace("server")
        federation.server(bind="0.0.0.0")
        for name in names:
            federation.client(name, "--share-model")
        run = federation.run()
        for name in ("brief", "long"):
            wait_until(lambda name=name: (folder.path / "sites" / name / "begun-2").exists(), 180)  # type: ignore[misc]
        for name in ("brief", "long"):
            network.cut(name)
            go(folder.path / "sites" / name, 2)
        for name in ("brief", "long"):  # they finish without the server
            wait_until(lambda name=name: rounds(folder.path / "sites" / name) == [1, 2], 60)  # type: ignore[misc]
        time.sleep(10)
        assert "round 2: brief" not in log.read_text()
        network.heal("brief")
        wait_until(lambda: "round 2: brief has answered" in log.read_text(), 60)
        assert "brief is disconnected" not in log.read_text()
        wait_until(lambda: "long is disconnected" in log.read_text(), 120)
        done = federation.start("status", "status", folder.path).end(60)
        assert any(line.split()[:2] == ["long", "no"] for line in done.out.splitlines()), done
        network.heal("long")
        done = run.end(240)
        assert done.code == 0, done
        said = (folder.operator / "superlink.log").read_text()
        assert all(f"10.77.0.{number}:" in said for number in range(2, 6)), "each has an address of its own"
    assert [r["federation"]["present"] for r in RunFolder(folder.run).metrics()] == [list(names)] * 3
    simulated = simulate(folder.experiment)
    sent = {
        (line["round"], k): line["sent"]
        for k, name in enumerate(names)
        for path in (folder.path / "sites" / name / "state").glob("*/rounds.jsonl")
        for line in map(json.loads, path.read_text().splitlines())
    }
    numbers = {name: k for k, name in enumerate(("north", "east", "south", "west"))}
    assert sent == {(t, numbers[name]): s for (t, name), s in simulated.uplinks.items()}
    found = RunFolder(folder.run).summary()
    assert found is not None
    assert found["accuracy"]["final"] == simulated.accuracy


def rounds(site: Path) -> list[int]:
    found = list((site / "state").glob("*/rounds.jsonl"))
    return [json.loads(line)["round"] for path in found for line in path.read_text().splitlines()]
