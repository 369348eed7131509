"""A site's side of a federation: connect with Flower's SuperNode, and start it again whenever it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

from fedcc.core.files import write_whole
from fedcc.engine import choose_device
from fedcc.experiments.toml import dumps
from fedcc.flower.command import read_public_key
from fedcc.flower.data import site_samples
from fedcc.flower.folder import Site
from fedcc.flower.fork_server import ForkServer
from fedcc.flower.gate import supernode_command
from fedcc.flower.programs import ChildProcess, LogFollower, environment, free_port, unreachable_reason

RETRY_SECONDS = 10.0
Say = Callable[[str], None]

EXPLANATIONS = {  # parts of Flower's log lines, and what they mean to a site
    "SuperNode ID": "connected",
    "Receiving: train": "working on a round",
    "Receiving: query.model": "the server asks for the model",
    "Receiving: query.predict": "the server asks for predictions",
    "Sent successfully": "answered",
    "/v1/fleet/activate-node'": "the server does not know this site's key, or a clock is off by over 5 minutes",
    "401 Unauthorized": "the server was restarted and does not know this session",
    "Failed to activate": "the server still holds an earlier session of this site",
}


def take_part(
    site: Site,
    data: Path,
    say: Say,
    *,
    server: str | None = None,
    device: str = "auto",
    threads: int | None = None,
    share_model: bool = False,
) -> None:
    """Take part in a federation until interrupted; the folder says what is not given."""
    server, threads = server or site.server, threads or site.experiment.machine.threads
    key = site.path / "site.key"
    for file in (key, site.path / "ca.crt", site.path / "app.yaml"):
        if not file.is_file():
            raise ValueError(f"{file} is missing; the operator sends it with the site's folder")
    read_public_key(site.path / "command.pub")
    if key.stat().st_mode & 0o077:
        raise ValueError(f"{key} can be read by others; chmod 600 {key}")
    samples = site_samples(data, site.task)
    site.task.public_samples(site.path / "public.npz")
    say(f"{site.name}: {len(samples)} samples of {data}, {site.model}, server {server}")
    site.state.mkdir(exist_ok=True)
    config = {"site": str(site.path), "data": str(data.resolve()), "device": device, "threads": threads,
              "share-model": share_model or site.share_model}  # fmt: skip
    write_whole(site.state / "node.toml", dumps(config))
    with closing(ForkServer(site.state / "warm")) as fork_server:  # before CUDA is initialised: no fork survives that
        choose_device(device)
        env = environment(site.state / "home", threads)
        env["PATH"] = f"{fork_server.folder}{os.pathsep}{env['PATH']}"
        while True:
            for tries in count():
                if (reason := unreachable_reason(server, site.path / "ca.crt")) is None:
                    break
                if not tries:
                    say(f"the server cannot be reached ({reason}); retrying until it can be")
                time.sleep(min(RETRY_SECONDS, 2**tries))
            _run_supernode(site, server, env, say)
            say(f"the connection has ended; retrying in {RETRY_SECONDS:g} s (a server may keep a session for a minute)")
            time.sleep(RETRY_SECONDS)


def _run_supernode(site: Site, server: str, env: dict[str, str], say: Say) -> None:
    arguments = supernode_command(
        *("--superlink", server, "--root-certificates", str(site.path / "ca.crt")),
        *("--auth-supernode-private-key", str(site.path / "site.key")),
        *("--trusted-entities", str(site.path / "app.yaml")),
        *("--node-config", str(site.state / "node.toml")),
        *("--host", "127.0.0.1", "--port", str(free_port())),
    )

    def explain(line: str) -> None:
        text = line.partition("INFO")[2].partition(":")[2].strip() or line
        for part, meaning in EXPLANATIONS.items():
            if part in text:
                say(meaning)
                return
        if "ERROR" in line or "Error:" in line or "fedcc:" in line:
            say(text)

    follower = LogFollower(site.state / "supernode.log", explain)
    with closing(ChildProcess(arguments, env, follower.path)) as child:
        ended = False
        while not ended:
            time.sleep(0.2)
            ended = child.process.poll() is not None  # asked first, so that its last lines are there
            follower.poll()
