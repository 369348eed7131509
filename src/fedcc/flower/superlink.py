"""The operator's side of a federation: run Flower's SuperLink, have it run the app, and follow that."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcc.core.files import open_whole, write_whole
from fedcc.core.naming import printable
from fedcc.experiments.result import Result
from fedcc.experiments.store import RunFolder
from fedcc.flower.address import write_address
from fedcc.flower.command import CommandSigner
from fedcc.flower.data import new_inputs
from fedcc.flower.folder import ENVIRONMENT, FederationFolder
from fedcc.flower.gate import superlink_command
from fedcc.flower.gate_report import Report
from fedcc.flower.lifetime import Reminder, warnings_of
from fedcc.flower.logs import LogFollower, Say
from fedcc.flower.members import SUPERLINK, changing, register_members
from fedcc.flower.metrics import MetricsListener, Watch, client_keys
from fedcc.flower.programs import (
    ChildProcess,
    FlowerError,
    close_to_others,
    environment,
    flwr,
    forget_apps,
    free_port,
    is_listening,
)
from fedcc.flower.succession import FILE, finish_rotation, forget_old_authorities
from fedcc.processes import is_alive

LOCAL = "127.0.0.1"
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}  # large buffers go back to the system
ENDING_SECONDS = 30.0  # for an earlier app to end
START_SECONDS = 120.0  # for the SuperLink to start, and for it to start a run


def serve(folder: FederationFolder, bind: str, say: Say, metrics: str | None = None) -> None:
    """Run the SuperLink until it is interrupted; if it ends by itself, that is an error.

    ``metrics`` is the address, HOST:PORT, at which the federation can be watched.
    """
    close_to_others(folder.operator, folder.run)
    operator, port = folder.operator, free_port()
    CommandSigner(folder.command_key)  # an error if it is missing
    finish_rotation(folder.command_key)
    forget_old_authorities(operator)
    check_server_files(operator)
    remind = Reminder(lambda: warnings_of(folder), say)
    home = operator / "home"
    home.mkdir(exist_ok=True)
    forget_apps(home)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{SUPERLINK}"\n\n[superlink.{SUPERLINK}]\naddress = "{LOCAL}:{port}"\n'
        f"root-certificates = {json.dumps(str(operator / 'ca.crt'))}\n"
    )
    env = environment(home, folder.experiment.machine.threads, **{ENVIRONMENT: str(folder.path)}, **RETURN_MEMORY)
    if is_listening(LOCAL, folder.port):
        raise ValueError(
            f"port {folder.port} is in use; is another server running? {folder.path}/federation.toml sets the port"
        )
    arguments = superlink_command(
        write_address(bind, folder.port),
        *("--host", LOCAL, "--port", str(port)),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        *("--ssl-ca-certfile", str(operator / "ca.crt")),
        *("--ssl-certfile", str(operator / "server.crt"), "--ssl-keyfile", str(operator / "server.key")),
        signature=operator / "app.json",
        succession=operator / FILE,
    )
    with ExitStack() as ends:
        child = ends.enter_context(closing(ChildProcess(arguments, env, operator / "superlink.log")))
        child.wait_until(lambda: is_listening(LOCAL, port), START_SECONDS)
        server = {"pid": os.getpid(), "port": folder.port, "inner": port}
        write_whole(server_file(folder), json.dumps(server))  # first: who changes the clients now registers them
        register_members(folder, env)
        if metrics is not None:
            watch = Watch(folder, port, lambda: read_status(folder), child.process.pid)
            ends.enter_context(closing(MetricsListener(metrics, watch)))
            say(f"metrics: http://{metrics}/metrics and /healthz")
        say(f"ready: sites connect to {folder.address}; `fedcc federation run` starts the rounds")
        child.wait_until(remind)


def is_serving(folder: FederationFolder) -> bool:
    """Whether the server runs, as seen from here: not one of another container."""
    path = server_file(folder)
    if not path.exists():
        return False
    try:
        server = json.loads(path.read_bytes())
        pid, inner = int(server["pid"]), int(server["inner"])
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is damaged: a server that starts writes it again") from None
    return is_alive(pid) and is_listening(LOCAL, inner)  # process ids are reused


def server_file(folder: FederationFolder) -> Path:
    """Where a server that has started says how it is reached on its machine."""
    return folder.operator / "server.json"


def fetch_report(folder: FederationFolder) -> Report:
    """What the running server's gate tells its owner."""
    return Report.fetch(json.loads(server_file(folder).read_text())["inner"], folder.operator / "ca.crt")


def train(folder: FederationFolder, overwrite: bool, say: Say) -> float | None:
    """Start or resume the rounds, follow them to the end, and return the final accuracy, if there is a test set."""
    close_to_others(folder.operator, folder.run)
    files = RunFolder(folder.run)
    if not overwrite and files.summary() is not None:
        say(f"{folder.run} holds the finished run; there is nothing to do (--overwrite starts again)")
    else:
        check_server(folder)
        with alone(folder, say, ENDING_SECONDS if overwrite else math.inf):
            if overwrite:
                run_file(folder).unlink(missing_ok=True)  # first: under the old name the sites have trained models
                if folder.run.is_dir():
                    files.clear()
            if files.summary() is None:  # no earlier run has finished meanwhile
                _start(folder, say)
    summary = files.summary()
    return summary["accuracy"]["final"] if summary else None


def _start(folder: FederationFolder, say: Say) -> None:
    for warning in warnings_of(folder):
        say(f"warning: {warning}", "warning")
    if not (folder.run / "experiment.toml").exists():  # a new run, also if somebody has deleted the folder
        with changing(folder) as now:
            folder = now.with_counted_clients()
            folder.write()
        write_whole(run_file(folder), json.dumps({"run": secrets.token_hex(8)}))
    _run_app(folder, "train", folder.operator, say)


def predict(folder: FederationFolder, source: Path, target: Path, say: Say) -> int:
    """Predict the inputs of a file with the models that the server has, or by asking the clients; their number.

    Clients that are revoked by now have no part in it.
    """
    x = new_inputs(source, folder.task)
    if (folder.run / "models.json").exists():
        result = Result.load(folder.run)
        revoked = {list(folder.clients).index(name) for name in folder.revoked}
        models = {k: model for k, model in result.trained.clients.items() if k not in revoked}
        if result.method.uploads_models and not models:
            raise ValueError(
                f"{folder.run} holds models of revoked clients only; `fedcc federation run --overwrite` trains others"
            )
        scores = replace(result, trained=replace(result.trained, clients=models)).scores(x).numpy()
        with open_whole(target) as file:
            np.savez(file, scores=scores, labels=scores.argmax(-1))
    else:
        check_server(folder)
        with alone(folder, say, ENDING_SECONDS):
            (folder.query / "output.npz").unlink(missing_ok=True)
            np.savez(folder.query / "input.npz", x=x)
            _run_app(folder, "predict", folder.query, say)
            shutil.copyfile(folder.query / "output.npz", target)
    return len(x)


def run_file(folder: FederationFolder) -> Path:
    """Where the run's name is kept: the sites have their models under it."""
    return folder.operator / "run.json"


def run_name(folder: FederationFolder) -> str:
    """The run's name; with another one the sites would start with new models."""
    try:
        return re.fullmatch(r"[0-9a-f]{16}", json.loads(run_file(folder).read_bytes())["run"])[0]  # type: ignore[index]
    except (OSError, ValueError, TypeError, KeyError):
        advice = "restore it from a copy, or start a new run with `fedcc federation run --overwrite`"
        raise ValueError(f"{run_file(folder)} is missing or damaged: {advice}") from None


def check_server_files(operator: Path) -> None:
    """Refuse damaged files that SuperLink needs to start."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(operator / "server.crt", operator / "server.key")
    except ssl.SSLError:
        advice = "`fedcc federation renew` makes both again"
        raise ValueError(f"{operator / 'server.key'} is damaged, or not the key of server.crt: {advice}") from None
    try:
        json.loads((operator / "app.json").read_bytes())["fedcc"]
    except (ValueError, TypeError, KeyError):
        advice = "restore it from a copy"
        raise ValueError(f"{operator / 'app.json'} is damaged: it must hold the app's signature; {advice}") from None


def check_server(folder: FederationFolder) -> None:
    """Raise an error if no server answers this user: before anything is deleted or written."""
    if not is_serving(folder):
        raise ValueError(f"the server is not running; `fedcc federation server {folder.path}` starts it")
    try:
        fetch_report(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        advice = "run this under the server's account, or try again"
        raise FlowerError(f"the server cannot be asked: {printable(str(error))}; {advice}") from None


@contextmanager
def alone(folder: FederationFolder, say: Say, patience: float) -> Iterator[None]:
    """Keep other runs and predictions from starting during the block; refused while there is one.

    Two at a time would take each other's ``status.json`` for their own, and the second would ask the sites again what
    the first has asked. The server's app may outlive the program that has started it: it is followed to its end, for
    so many seconds.
    """
    from filelock import FileLock, Timeout

    try:
        starts = FileLock(folder.operator / "start.lock").acquire(timeout=0)
    except Timeout:
        shown = f"`fedcc federation status {folder.path}` shows it"
        raise FlowerError(f"a run or a prediction is in progress: {shown}") from None
    with starts:
        _let_end(folder, say, patience)
        yield


def _let_end(folder: FederationFolder, say: Say, patience: float) -> None:
    """Return when the server's earlier app has ended; Ctrl-C stops it."""
    from filelock import FileLock, Timeout

    lock, end = FileLock(folder.operator / "run.lock"), time.monotonic() + patience
    follower, said = LogFollower(folder.operator / "run.log", say), False
    with _stopping_on_signal(folder, lambda: _stored_status(folder.operator).get("flower_run"), say):
        while True:
            try:
                with lock.acquire(timeout=0.2):
                    return
            except Timeout:
                if time.monotonic() > end:
                    advice = "`fedcc federation run` follows it, and Ctrl-C then stops it"
                    raise FlowerError(f"an earlier run is still in progress: {advice}") from None
            if not said:
                say("an earlier run is still in progress: waiting for its end")
                said = True
            follower.poll()


@contextmanager
def _stopping_on_signal(folder: FederationFolder, flower_run: Callable[[], object], say: Say) -> Iterator[None]:
    """A signal in the block also stops the app, by the number that Flower has given the run."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and (number := flower_run()) is not None:
            say("stopping the run")
            with suppress(FlowerError):  # there may be nothing left to stop
                flwr(["stop", str(number), SUPERLINK], environment(folder.operator / "home"))
        raise


def _run_app(folder: FederationFolder, task: str, directory: Path, say: Say) -> None:
    """Have the SuperLink run the app, pass on what it logs, and return when it has finished."""
    env = environment(folder.operator / "home")
    status_file, config = directory / "status.json", directory / "config.toml"
    status_file.unlink(missing_ok=True)
    follower = LogFollower(directory / "run.log", say)
    config.write_text(f'run = "{run_name(folder)}"\ntask = "{task}"\n')
    answer = flwr(["run", str(folder.operator / "app"), SUPERLINK, "--run-config", str(config)], env)
    start, superlink_log = time.monotonic(), folder.operator / "superlink.log"
    with _stopping_on_signal(folder, lambda: answer["run-id"], say):
        while True:
            status = _stored_status(directory)
            follower.poll()
            if status.get("state") == "finished":
                return
            if status.get("state") == "stopped":
                then = "; `fedcc federation run` resumes from the last round" if task == "train" else ""
                raise FlowerError(f"{status['problem']}{then}")
            if status and not is_alive(status["pid"]):
                raise FlowerError(f"the server's process has ended; see {superlink_log}, then run again")
            if not status and time.monotonic() - start > START_SECONDS:
                raise FlowerError(f"the SuperLink has not started the run; see {superlink_log}")
            time.sleep(0.2)


def _stored_status(directory: Path) -> dict[str, Any]:
    """``status.json`` of the server's app, if it has begun."""
    path = directory / "status.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def read_status(folder: FederationFolder) -> dict[str, Any]:
    """Where the federation stands: ``status.json``, the state of the server, and the last accuracy."""
    path = folder.operator / "status.json"
    status: dict[str, Any] = {"state": "not started", "round": 0, "clients": {}}
    try:
        if path.exists():
            status |= dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError):
        raise ValueError(f"{path} is damaged: delete it, the next `fedcc federation run` writes it again") from None
    status["server"] = "running" if is_serving(folder) else "not running"
    status["connected"], status["refusals"] = None, {}  # as long as the server does not say
    with suppress(OSError, ValueError, KeyError, TypeError):
        if status["server"] == "running":
            report, keys = fetch_report(folder), client_keys(folder)
            status["connected"] = sorted(name for key, name in keys.items() if key in report.online)
            status["refusals"] = {name: report.refusals[key] for key, name in keys.items() if key in report.refusals}
    if status["state"] == "running" and not (status["server"] == "running" and is_alive(status.get("pid", 0))):
        status["state"] = "stopped"
    status["warnings"] = warnings_of(folder)
    status["rounds"] = folder.experiment.build_method().rounds(folder.experiment.training.rounds)
    accuracies = [record["accuracy"] for record in RunFolder(folder.run).metrics()]
    status["accuracy"] = next((a for a in reversed(accuracies) if a is not None), None)
    return status
