"""``fedcc federation demo``: an experiment in the simulator and across processes on Flower, compared bit by bit."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedcc.engine import choose_device, engine
from fedcc.engine.threads import fixed_threads
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.options import Measurement
from fedcc.experiments.progress import Step, steps
from fedcc.experiments.rounds import Simulation, run_rounds
from fedcc.experiments.store import RunFolder
from fedcc.federation import Federation
from fedcc.flower.codec import fingerprint
from fedcc.flower.create import create_federation
from fedcc.flower.folder import FederationFolder
from fedcc.flower.logs import LogFollower
from fedcc.flower.programs import ChildProcess, FlowerError, free_port

CLIENTS = ("north", "east", "south", "west")
LIMIT, STOP_SECONDS = 600.0, 30.0  # for a federation to finish; for a program to end those that it has started


@dataclass(frozen=True)
class RunTrace:
    """What a run sent and reached: the fingerprint of each uplink by round and client, the accuracy, the seconds."""

    uplinks: dict[tuple[int, str], str]
    accuracy: float
    seconds: float


def compare(out: Path, methods: Sequence[str], options: Mapping[str, Any], console: Console) -> bool:
    """Run each method both ways and print the comparison; whether all is equal."""
    table = Table("method", "round", *CLIENTS, box=None, header_style="bold", pad_edge=False)
    equal, lines = True, []
    with steps(console) as step:
        for method in methods:
            same, line = compare_method(out, method, options, console, step, table)
            equal &= same
            lines.append(line)
    console.print("\nThe fingerprint of every upload in the simulator; = where a client on Flower sent the same bits.")
    console.print(table)
    for line in lines:
        console.print(line)
    console.print(
        "All uplinks and accuracies equal the simulator's, bit for bit" if equal else "NOT EQUAL to the simulator"
    )
    return equal


def compare_method(
    out: Path, method: str, options: Mapping[str, Any], console: Console, step: Step, table: Table
) -> tuple[bool, str]:
    """Run one method both ways and add rows to the table; whether all is equal, and a line on accuracy and time."""
    everybody, all_options = dict.fromkeys(CLIENTS), {"device": "cpu", "skew": "classes:3", "rounds": 3, **options}
    rules, port = {"quorum": len(CLIENTS)}, free_port()
    folder = create_federation(
        out / method, method, everybody, options=all_options, port=port, rules=rules, simulate_sites=True
    )
    rounds = folder.experiment.training.rounds
    console.print(f"{method}: a server and {len(CLIENTS)} clients over TLS, each with its key, in {folder.path}")
    step(f"{method} on Flower: starting, rounds", 0, rounds)

    def say(line: str) -> None:
        if "round 1: asking" in line:
            step(f"{method} on Flower, rounds", 0, rounds)
        if done := re.search(r"round (\d+) of \d+ is done.*", line):  # without date and level
            console.print(f"  {done[0]}")
            step(f"{method} on Flower, rounds", int(done[1]), rounds)

    real = federated(folder, say, lambda: step(f"{method} on Flower: ending, programs", 0, 2 + len(CLIENTS)))
    console.print(f"{method}: the simulator, the same experiment")
    step(f"{method} in the simulator, rounds", 0, rounds)
    simulated = simulate(folder.experiment, round_done=lambda t: step(f"{method} in the simulator, rounds", t, rounds))
    for t in sorted({t for t, _ in simulated.uplinks}):
        pairs = [(simulated.uplinks[t, name][:8], real.uplinks.get((t, name), "none")[:8]) for name in CLIENTS]
        table.add_row(method, str(t), *(_compared(a, b) for a, b in pairs))
    accuracy = _compared(f"{simulated.accuracy:.4f} %", f"{real.accuracy:.4f} %")
    line = f"{method}: accuracy {accuracy}; {simulated.seconds:.0f} s, on Flower {real.seconds:.0f} s"
    return (real.uplinks, real.accuracy) == (simulated.uplinks, simulated.accuracy), line


def _compared(simulated: str, real: str) -> str:
    return f"{simulated} =" if simulated == real else f"{simulated} / {real}"


def simulate(
    experiment: Experiment,
    federation: Federation | None = None,
    names: Sequence[str] = CLIENTS,
    round_done: Callable[[int], None] = lambda *_: None,
) -> RunTrace:
    """An experiment as ``fedcc run`` would run it, with the fingerprint of every uplink; only its end is evaluated.

    ``federation`` is its data if the sites' is their own, ``names`` are those of the clients. ``round_done`` is called
    after each round.
    """
    e, start_time = experiment, time.perf_counter()
    executor = engine(e.machine.engine, choose_device(e.machine.device), e.machine.precision)
    uplinks: dict[tuple[int, str], str] = {}
    with fixed_threads(e.machine.threads):
        measurement = Measurement(client_accuracy=False, readings=False)
        simulation = Simulation(e.build_method(), federation or e.federation(), e.training, measurement, executor)
        for done in run_rounds(simulation, e.training.rounds, evaluate_every=e.training.rounds):
            uplinks |= {(done.t, names[k]): fingerprint(up) for k, up in done.messages.sent.items()}
            round_done(done.t)
    return RunTrace(uplinks, done.record["accuracy"], time.perf_counter() - start_time)


def federated(
    folder: FederationFolder, say: Callable[[str], None], ending: Callable[[], None] = lambda: None
) -> RunTrace:
    """The same on Flower: what the clients say they sent, and the accuracy that the server measured.

    ``say`` is told the run's log, ``ending`` is called when the programs begin to end, also by a signal.
    """
    path, start_time = folder.path, time.perf_counter()
    with ExitStack() as programs:

        def start(log: Path, *arguments: Any) -> ChildProcess:
            words = [sys.executable, "-P", "-m", "fedcc", "federation", *map(str, arguments)]
            return programs.enter_context(closing(ChildProcess(words, os.environ, log, patience=STOP_SECONDS)))

        server = start(path / "server.log", "server", path, "--bind", "127.0.0.1")
        server.wait_until(lambda: "ready" in server.log.read_text(), LIMIT)
        clients = []
        for site in map(folder.site, folder.clients):
            options = ("--data", site / "data.npz", "--device", "cpu", "--share-model")
            clients.append(start(site / "client.log", "client", site, *options))
        follower = LogFollower(path / "run.log", say)
        run = start(follower.path, "run", path)

        def end() -> None:  # all at once: each takes seconds
            ending()
            for program in (run, *clients):
                program.process.terminate()

        programs.callback(end)

        def finished() -> bool:
            for client in clients:
                client.check()
            ended = run.process.poll() is not None
            follower.poll()
            return ended

        server.wait_until(finished, LIMIT)
    summary = RunFolder(folder.run).summary()
    if summary is None:
        raise FlowerError(f"the federation has not finished; see {path / 'run.log'}")
    return RunTrace(sent_uplinks(folder), summary["accuracy"]["final"], time.perf_counter() - start_time)


def sent_uplinks(folder: FederationFolder) -> dict[tuple[int, str], str]:
    """The fingerprints of what the sites say they sent, whose folders are on this machine."""
    uplinks = {}
    for name in folder.clients:
        for file in (folder.site(name) / "state").glob("*/rounds.jsonl"):
            for line in map(json.loads, file.read_text().splitlines()):
                uplinks[line["round"], name] = line["sent"]
    return uplinks
