"""``fedcc federation demo``: an experiment in the simulator and across processes on Flower, compared bit by bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedcc.engine import choose_device, engine
from fedcc.engine.threads import fixed_threads
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.options import Measurement
from fedcc.experiments.rounds import Simulation, run_rounds
from fedcc.experiments.store import RunFolder
from fedcc.flower.fingerprint import fingerprint
from fedcc.flower.folder import FederationFolder
from fedcc.flower.init import make_folder
from fedcc.flower.processes import FlowerError, free_port

CLIENTS = ("north", "east", "south", "west")
WARM = multiprocessing.get_context("forkserver")  # a program that begins with everything imported starts seconds sooner


@dataclass(frozen=True)
class Ran:
    """What a run sent and reached: the fingerprint of each uplink by round and client, the accuracy, the seconds."""

    uplinks: dict[tuple[int, str], str]
    accuracy: float
    seconds: float


def demo(out: Path, methods: tuple[str, ...], given: dict[str, Any], console: Console) -> bool:
    """Run each method both ways and print the comparison; whether all is equal."""
    WARM.set_forkserver_preload(["fedcc.cli", "fedcc.flower.init", "fedcc.flower.server", "sklearn.datasets"])
    equal = True
    table = Table("method", "round", *CLIENTS, "accuracy", "took", box=None, header_style="bold", pad_edge=False)
    for method in methods:
        folder = make_folder(
            out / method,
            method,
            dict.fromkeys(CLIENTS),
            settings={},
            given={"device": "cpu", "skew": "classes:3", **given},
            hosts=[],
            port=free_port(),
            rules={"quorum": len(CLIENTS)},
            simulate_sites=True,
        )
        console.print(f"{method}: a server and {len(CLIENTS)} clients over TLS, each with its key, in {folder.path}")
        real = federated(folder, lambda line: console.print(f"  {line}"))
        console.print(f"{method}: the simulator, the same experiment")
        simulated = simulate(folder.experiment)
        for t in sorted({t for t, _ in simulated.uplinks}):
            cells = []
            for name in CLIENTS:
                mine, theirs = real.uplinks.get((t, name)), simulated.uplinks[t, name]
                equal &= mine == theirs
                cells.append(f"{theirs[:8]} =" if mine == theirs else f"{theirs[:8]} / {(mine or 'none')[:8]}")
            table.add_row(method, str(t), *cells, "", "")
        same = real.accuracy == simulated.accuracy
        equal &= same
        shown = f"{simulated.accuracy:.4f} % {'=' if same else f'/ {real.accuracy:.4f} %'}"
        table.add_row(
            method, "", *[""] * len(CLIENTS), shown, f"{simulated.seconds:.0f} s, on Flower {real.seconds:.0f} s"
        )
    console.print("\nThe fingerprint of every upload in the simulator; = where a client on Flower sent the same bits.")
    console.print(table)
    console.print(
        "every uplink and accuracy is the simulator's, bit for bit" if equal else "NOT EQUAL to the simulator"
    )
    return equal


def simulate(experiment: Experiment) -> Ran:
    """An experiment as ``fedcc run`` would run it, with the fingerprint of every uplink; its end alone is evaluated."""
    e, begun = experiment, time.perf_counter()
    executor = engine(e.machine.engine, choose_device(e.machine.device), e.machine.precision)
    uplinks: dict[tuple[int, str], str] = {}
    with fixed_threads(e.machine.threads):
        measurement = Measurement(client_accuracy=False, readings=False)
        simulation = Simulation(e.build_method(), e.federation(), e.training, measurement, executor)
        for done in run_rounds(simulation, e.training.rounds, evaluate_every=e.training.rounds):
            uplinks |= {(done.t, CLIENTS[k]): fingerprint(up) for k, up in done.messages.ups.items()}
    return Ran(uplinks, done.record["accuracy"], time.perf_counter() - begun)


def federated(folder: FederationFolder, told: Callable[[str], None]) -> Ran:
    """The same with Flower: what the clients say they sent, and the accuracy that the server found."""
    path, begun = folder.path, time.perf_counter()
    with program(path / "server.log", "federation", "server", path, "--bind", "127.0.0.1") as server:
        wait(lambda: "ready" in (path / "server.log").read_text(), [server], path / "server.log")
        with everyone(folder) as clients, program(path / "run.log", "federation", "run", path) as run:
            shown = 0

            def ended() -> bool:
                nonlocal shown
                lines = [n for n in (path / "run.log").read_text().split("\n")[:-1] if " is done with " in n]
                for line in lines[shown:]:
                    told(line)
                shown = len(lines)
                return not run.is_alive()

            wait(ended, [server, *clients], path / "run.log")
    found = RunFolder(folder.run).summary()
    if found is None:
        raise FlowerError(f"the federation has not finished; see {path / 'run.log'}")
    uplinks = {}
    for name in folder.clients:
        for lines in (path / "sites" / name / "state").glob("*/rounds.jsonl"):
            for line in map(json.loads, lines.read_text().splitlines()):
                uplinks[line["round"], name] = line["sent"]
    return Ran(uplinks, found["accuracy"]["final"], time.perf_counter() - begun)


@contextmanager
def everyone(folder: FederationFolder) -> Iterator[list[Any]]:
    """All clients of a folder, on this machine."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        sites = [folder.path / "sites" / name for name in folder.clients]
        options = ("--device", "cpu", "--share-model")
        clients = [
            stack.enter_context(
                program(s / "client.log", "federation", "client", s, "--data", s / "data.npz", *options)
            )
            for s in sites
        ]
        try:
            yield clients
        finally:
            for client in clients:  # all at once: each takes seconds to take its leave
                interrupt(client)


@contextmanager
def program(log: Path, *arguments: Any) -> Iterator[Any]:
    """``fedcc`` with these arguments as a process of its own; it is told to end with the block, as by Ctrl-C."""
    log.touch()
    process = WARM.Process(target=_main, args=([*map(str, arguments)], str(log)))
    process.start()
    try:
        yield process
    finally:
        interrupt(process)
        process.join(30)
        if process.is_alive():
            process.kill()


def interrupt(process: Any) -> None:
    if process.is_alive():
        os.kill(process.pid, signal.SIGINT)


def wait(true: Callable[[], bool], needed: list[Any], log: Path, seconds: float = 600) -> None:
    """Until it is true; an error if one of the needed processes ends before, or if it takes too long."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end or not all(process.is_alive() for process in needed):
            raise FlowerError(f"the federation has ended early; see {log}: {log.read_text()[-500:]}")
        time.sleep(0.1)


def _main(arguments: list[str], log: str) -> None:
    from fedcc.cli import main

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it ends by SIGINT, even where its parent ignores it
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["fedcc", *arguments]
    main()
