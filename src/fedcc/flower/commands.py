"""``fedcc federation``: make a federation folder, and run its server, its clients and its rounds on Flower."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcc.core.files import uninterrupted, written_whole

app = typer.Typer(help="Federations across machines, on Flower.", no_args_is_help=True)


@app.callback()
def needed() -> None:
    if find_spec("flwr") is None or find_spec("cryptography") is None:
        raise ValueError("federations need Flower: pip install 'fedcc[flower]'")


Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="the federation's folder")]
REGISTERED = "fedcc"  # the name of the SuperLink in Flower's configuration
RETRY = 10.0  # seconds until a client tries again


@app.command()
def init(
    folder: Folder,
    client: Annotated[list[str], typer.Option("--client", help="a client, NAME or NAME=MODEL; once for each")],
    method: Annotated[str, typer.Option(help="the method's name; `fedcc methods` lists them")] = "fedcc",
    host: Annotated[
        list[str] | None, typer.Option("--host", help="a name or address of the server; the first is told to sites")
    ] = None,
    port: Annotated[int, typer.Option(help="the server's port")] = 9092,
    quorum: Annotated[int | None, typer.Option(help="clients that make a round; two thirds by default")] = None,
    deadline: Annotated[float | None, typer.Option(help="seconds that a round lasts at most; 3600")] = None,
    grace: Annotated[float | None, typer.Option(help="seconds for the others once there is a quorum; 60")] = None,
    patience: Annotated[int | None, typer.Option(help="deadlines without a quorum until the run stops; 10")] = None,
    strikes: Annotated[int | None, typer.Option(help="failures in a row that set a client aside; 3")] = None,
    data: Annotated[str | None, typer.Option(help="data set of the public and test images; digits by default")] = None,
    public_file: Annotated[
        Path | None, typer.Option("--public-file", help="own public images instead: NPZ with x, uint8 [N, C, H, W]")
    ] = None,
    test_file: Annotated[Path | None, typer.Option("--test-file", help="own test set: NPZ with x and y")] = None,
    class_name: Annotated[
        list[str] | None, typer.Option("--class", help="with --public-file: the classes' names, in order")
    ] = None,
    simulate_sites: Annotated[
        bool, typer.Option("--simulate-sites", help="split the data set as `fedcc run` would, a data.npz for each site")
    ] = False,
    skew: Annotated[str | None, typer.Option(help="of that split: dirichlet:ETA, classes:N or iid")] = None,
    models: Annotated[str | None, typer.Option(help="networks, given in turn to clients that name none")] = None,
    rounds: Annotated[int | None, typer.Option(help="rounds T")] = None,
    epochs: Annotated[int | None, typer.Option(help="local epochs E per phase")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of everything random; 0 by default")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="a method's setting, name=value; repeatable")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Adam's learning rate")] = None,
    batch: Annotated[int | None, typer.Option(help="batch size")] = None,
    reset: Annotated[str | None, typer.Option(help="when Adam starts anew: phase or round")] = None,
    public: Annotated[float | None, typer.Option(help="share of the training set that is public")] = None,
    fraction: Annotated[float | None, typer.Option(help="keep this share of the training set")] = None,
    augment: Annotated[str | None, typer.Option(help="none, standard, strong, or a list such as hole=0.5")] = None,
    wire: Annotated[str | None, typer.Option(help="number format: fp32, fp16, int8 or int8-stochastic")] = None,
    device: Annotated[str | None, typer.Option(help="the server's: auto, cpu or cuda")] = None,
    threads: Annotated[int | None, typer.Option(help="torch threads")] = None,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="where data sets lie")] = None,
) -> None:
    """Make a federation folder: experiment, certificates, a key and a folder for each site."""
    from fedcc.experiments.experiment import parse_settings
    from fedcc.flower.folder import client_names
    from fedcc.flower.init import make_folder, readable

    given: dict[str, Any] = {
        "data": data, "skew": skew, "models": models, "rounds": rounds, "epochs": epochs, "seed": seed, "lr": lr,
        "batch": batch, "reset": reset, "public": public, "fraction": fraction, "augment": augment, "wire": wire,
        "device": device, "threads": threads,
    }  # fmt: skip
    rules = {"quorum": quorum, "deadline": deadline, "grace": grace, "patience": patience, "strikes": strikes}
    made = make_folder(
        folder,
        method,
        client_names(client),
        settings=parse_settings(method, settings or []),
        given={name: value for name, value in given.items() if value is not None},
        hosts=host or [],
        port=port,
        rules=rules,
        data_dir=data_dir,
        public_file=public_file,
        test_file=test_file,
        class_names=tuple(class_name or ()),
        simulate_sites=simulate_sites,
    )
    typer.echo(readable(made))
    typer.echo(
        f"hand over, by a way that nobody else can read: {', '.join(str(folder / 'sites' / n) for n in made.clients)}"
    )
    typer.echo(f"keep to yourself: {folder / 'operator'}")


@app.command()
def server(
    folder: Folder,
    bind: Annotated[str, typer.Option(help="the address to listen on")] = "0.0.0.0",
) -> None:
    """Run the server until Ctrl-C: Flower's SuperLink, to which the sites connect."""
    from fedcc.flower import processes
    from fedcc.flower.folder import ENVIRONMENT, FederationFolder
    from fedcc.flower.gate import superlink_command

    made = FederationFolder.read(folder.resolve())
    operator, inner = made.operator, processes.free_port()
    home = operator / "home"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{REGISTERED}"\n\n[superlink.{REGISTERED}]\naddress = "127.0.0.1:{inner}"\n'
        f"root-certificates = {json.dumps(str(operator / 'ca.crt'))}\n"
    )
    env = processes.environment(home, made.experiment.machine.threads, **{ENVIRONMENT: str(made.path)})
    if processes.listening("127.0.0.1", made.port):
        raise ValueError(
            f"port {made.port} is in use; another server may be running, or change it in {folder}/federation.toml"
        )
    arguments = superlink_command(
        f"{bind}:{made.port}",
        *("--host", "127.0.0.1", "--port", str(inner)),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        *("--ssl-ca-certfile", str(operator / "ca.crt")),
        *("--ssl-certfile", str(operator / "server.crt"), "--ssl-keyfile", str(operator / "server.key")),
        signature=operator / "app.json",
    )
    with stopping(processes.Child(arguments, env, operator / "superlink.log")) as child:
        ready = lambda: child.ended() is not None or processes.listening("127.0.0.1", inner)  # noqa: E731
        processes.wait_for(ready, 60, "Flower's SuperLink has not started")
        if child.ended() is None:
            processes.register({name: made.key(name) for name in made.clients}, REGISTERED, env)
            written(operator / "server.json", {"pid": os.getpid(), "port": made.port, "inner": inner})
            typer.echo(f"ready: sites connect to {made.address}; `fedcc federation run {folder}` starts the rounds")
        while child.ended() is None:
            time.sleep(0.2)
        raise processes.FlowerError(f"Flower's SuperLink has ended ({child.ended()}): {child.tail()}; see {child.log}")


@app.command()
def client(
    site: Annotated[str, typer.Argument(metavar="SITE", help="the site's folder, or its name")],
    data: Annotated[Path, typer.Option(help="the site's own samples: an NPZ file with x and y, or a folder")],
    model: Annotated[str | None, typer.Option(help="the network, to make sure it is the agreed one")] = None,
    server: Annotated[str | None, typer.Option(help="HOST:PORT, if not as in site.toml")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    threads: Annotated[int | None, typer.Option(help="torch threads; the experiment's by default")] = None,
    share_model: Annotated[
        bool, typer.Option("--share-model", help="hand the model over at the end; site.toml can say so too")
    ] = False,
) -> None:
    """Take part as a client until Ctrl-C: Flower's SuperNode, restarted when it ends."""
    from fedcc.engine import choose_device
    from fedcc.experiments.toml import dumps
    from fedcc.flower import processes
    from fedcc.flower.data import site_samples
    from fedcc.flower.folder import Site
    from fedcc.flower.warm import Warm

    place = Site.find(site).resolve()
    about = Site.read(place)
    if model is not None and model != about.model:
        raise ValueError(
            f"{about.name} has agreed on {about.model}, got --model {model}; ask the operator to change it"
        )
    key = place / "site.key"
    for handed in (key, place / "ca.crt", place / "app.yaml"):
        if not handed.is_file():
            raise ValueError(f"{handed} is not there; the operator hands it over with the site's folder")
    if key.stat().st_mode & 0o077:
        raise ValueError(f"{key} can be read by others; chmod 600 {key}")
    samples = site_samples(data, about.task)
    about.task.public_samples(place / "public.npz")
    typer.echo(f"{about.name}: {len(samples)} samples of {data}, {about.model}, server {server or about.server}")
    about.state.mkdir(exist_ok=True)
    number = threads or about.experiment.machine.threads
    config = {"site": str(place), "data": str(data.resolve()), "device": device, "threads": number,
              "share-model": share_model or about.share_model}  # fmt: skip
    with written_whole(about.state / "node.toml") as file:
        file.write(dumps(config).encode())
    with stopping(Warm(about.state / "warm")) as warm:  # before CUDA is looked for, which no fork survives
        choose_device(device)
        env = processes.environment(about.state / "home", number)
        env["PATH"] = f"{warm.folder}{os.pathsep}{env['PATH']}"
        _connected(about, server or about.server, env)


def _connected(about: Any, server: str, env: dict[str, str]) -> None:
    """Flower's SuperNode, started anew whenever it ends."""
    from fedcc.flower import processes
    from fedcc.flower.gate import supernode_command

    place, key, tries = about.path, about.path / "site.key", 0
    while True:
        if (problem := processes.reached(server, place / "ca.crt")) is not None:
            if not tries:
                say(f"the server cannot be reached ({problem}); trying until it can")
            time.sleep(min(RETRY, 2**tries))
            tries += 1
            continue
        tries = 0
        arguments = supernode_command(
            *("--superlink", server, "--root-certificates", str(place / "ca.crt")),
            *("--auth-supernode-private-key", str(key), "--trusted-entities", str(place / "app.yaml")),
            *("--node-config", str(about.state / "node.toml")),
            *("--host", "127.0.0.1", "--port", str(processes.free_port())),
        )
        with stopping(processes.Child(arguments, env, about.state / "supernode.log", read=True)) as child:
            child.follow(lambda line: say(told) if (told := explained(line)) else None)
        say(f"the connection has ended; trying again in {RETRY:g} s (a server may hold a lost session for a minute)")
        time.sleep(RETRY)


def explained(line: str) -> str | None:
    """A line of Flower's log in words for the site, or None."""
    text = line.partition("INFO")[2].partition(":")[2].strip() or line
    for sign, words in (
        ("SuperNode ID", "connected"),
        ("Receiving: train", "a round has come; at work"),
        ("Receiving: query.model", "the server asks for the model"),
        ("Receiving: query.predict", "the server asks for predictions"),
        ("Sent successfully", "answered"),
        ("401 Unauthorized", "the server has been started anew and does not know this session"),
        ("Failed to activate", "the server does not know this site's key, or still holds an earlier session of it"),
    ):
        if sign in text:
            return words
    return text if "ERROR" in line or "Error:" in line or "fedcc:" in line else None


@app.command()
def run(
    folder: Folder,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="begin anew, in place of the run that is there")
    ] = False,
) -> None:
    """Start the rounds, or go on with them, and watch until they are done. Ctrl-C stops them; this goes on."""
    from fedcc.experiments.store import RunFolder
    from fedcc.flower.folder import FederationFolder

    made = FederationFolder.read(folder.resolve())
    files, tag = RunFolder(made.run), made.operator / "run.json"
    if overwrite and made.run.is_dir():
        files.clear()
        tag.unlink(missing_ok=True)
    if files.summary() is not None:
        typer.echo(f"{folder / 'run'} holds the finished run; there is nothing to do (--overwrite begins anew)")
        return
    if not tag.exists():
        written(tag, {"run": secrets.token_hex(8)})
    _watched(made, json.loads(tag.read_text())["run"], "train", made.operator)
    found = files.summary()
    final = found["accuracy"]["final"] if found else None
    typer.echo(f"{made.run}" if final is None else f"final {final:.2f} %, {made.run}")


@app.command()
def predict(
    folder: Folder,
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="NPZ with x: uint8 images like the public ones")],
    out: Annotated[Path, typer.Option("--out", help="NPZ to write: scores and labels")] = Path("predictions.npz"),
) -> None:
    """Predict with the trained federation: with the models it was handed, or by asking the clients."""
    import numpy as np

    from fedcc.experiments.result import Result
    from fedcc.flower.data import checked_images
    from fedcc.flower.folder import FederationFolder, arrays

    made = FederationFolder.read(folder.resolve())
    x = arrays(source, "x")["x"]
    checked_images(source, x, made.task)
    if (made.run / "models.json").exists():
        scores = Result.load(made.run).scores(x).numpy()
        with written_whole(out) as file:
            np.savez(file, scores=scores, labels=scores.argmax(-1))
    else:
        place = made.operator / "query"
        (place / "output.npz").unlink(missing_ok=True)
        shutil.copyfile(source, place / "input.npz")
        _watched(made, json.loads((made.operator / "run.json").read_text())["run"], "predict", place)
        shutil.copyfile(place / "output.npz", out)
    typer.echo(f"{len(x)} predictions: {out}")


def _watched(made: Any, run: str, task: str, place: Path) -> None:
    """Have Flower's SuperLink run the app, show what it says, and end with it."""
    from fedcc.flower.processes import FlowerError, environment, flwr

    if not _server_alive(made.operator):
        raise ValueError(f"the server is not running; `fedcc federation server {made.path}` starts it")
    env = environment(made.operator / "home")
    status, log = place / "status.json", place / "run.log"
    status.unlink(missing_ok=True)
    begin = log.stat().st_size if log.exists() else 0
    config = place / "config.toml"
    config.write_text(f'run = "{run}"\ntask = "{task}"\n')
    started = flwr(["run", str(made.operator / "app"), REGISTERED, "--run-config", str(config)], env)
    number = str(started["run-id"])
    try:
        waiting_since = time.monotonic()
        while True:
            if log.exists() and log.stat().st_size > begin:
                with log.open("rb") as file:
                    file.seek(begin)
                    new = file.read()
                text = new[: new.rfind(b"\n") + 1]
                begin += len(text)
                sys.stdout.write(text.decode())
                sys.stdout.flush()
            about = json.loads(status.read_text()) if status.exists() else {}
            if about.get("state") == "finished":
                return
            if about.get("state") == "stopped":
                raise FlowerError(f"{about['problem']}; `fedcc federation run` goes on from the last round")
            if about and not alive(about["pid"]):
                raise FlowerError(
                    f"the server's process has ended; see {made.operator / 'superlink.log'}, then run again"
                )
            if not about and time.monotonic() - waiting_since > 120:
                raise FlowerError(f"the SuperLink has not started the run; see {made.operator / 'superlink.log'}")
            time.sleep(0.2)
    except BaseException as error:
        if not isinstance(error, Exception):  # a signal
            typer.echo("stopping the run", err=True)
            with suppress(FlowerError):  # there may be nothing left to stop
                flwr(["stop", number, REGISTERED], env)
        raise


@app.command()
def status(
    folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False
) -> None:
    """Where the federation stands: the round, and every client."""
    from rich.console import Console
    from rich.table import Table

    from fedcc.experiments.store import RunFolder
    from fedcc.flower.folder import FederationFolder

    made = FederationFolder.read(folder.resolve())
    path = made.operator / "status.json"
    about: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {"state": "not started", "round": 0, "clients": {}}
    )
    records = RunFolder(made.run).metrics()
    about["server"] = "running" if _server_alive(made.operator) else "not running"
    if about["state"] == "running" and not (about["server"] == "running" and alive(about.get("pid", 0))):
        about["state"] = "stopped"
    about["rounds"] = made.experiment.build_method().rounds(made.experiment.training.rounds)
    about["accuracy"] = next((r["accuracy"] for r in reversed(records) if r["accuracy"] is not None), None)
    if as_json:
        typer.echo(json.dumps(about, indent=1))
        return
    accuracy = "" if about["accuracy"] is None else f", accuracy {about['accuracy']:.2f} %"
    typer.echo(f"server {about['server']}; run {about['state']}, round {about['round']} of {about['rounds']}{accuracy}")
    if about.get("problem"):
        typer.echo(f"problem: {about['problem']}")
    table = Table("client", "connected", "last round", "failures", "", box=None, header_style="bold", pad_edge=False)
    for name in made.clients:
        c = about["clients"].get(name, {})
        state = "set aside: " if c.get("aside") else ""
        connected = ("yes" if c.get("online") else "no") if about["state"] == "running" else "?"
        table.add_row(
            name, connected, str(c.get("answered", 0)), str(c.get("strikes", 0)), state + c.get("problem", "")
        )
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120).print(table)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="an empty folder for the federations")] = Path(
        "runs/federation-demo"
    ),
    method: Annotated[list[str] | None, typer.Option(help="methods; fedcc and fedavg by default")] = None,
    rounds: Annotated[int, typer.Option(help="rounds T")] = 3,
    epochs: Annotated[int | None, typer.Option(help="local epochs E per phase")] = None,
    fraction: Annotated[float | None, typer.Option(help="keep this share of the training set")] = None,
    seed: Annotated[int, typer.Option(help="seed")] = 0,
) -> None:
    """A server and four clients on this machine against the simulator, on digits: equal bit for bit."""
    from rich.console import Console

    from fedcc.flower.demo import demo as show
    from fedcc.flower.processes import FlowerError

    given = {"rounds": rounds, "epochs": epochs, "fraction": fraction, "seed": seed}
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140)
    chosen = {name: value for name, value in given.items() if value is not None}
    if not show(out.resolve(), tuple(method or ("fedcc", "fedavg")), chosen, console):
        raise FlowerError("the federation's numbers are not the simulator's")


def _server_alive(operator: Path) -> bool:
    from fedcc.flower.processes import listening

    path = operator / "server.json"
    about = json.loads(path.read_text()) if path.exists() else {}
    return bool(about) and alive(about["pid"]) and listening("127.0.0.1", about["inner"])  # pids are used again


def alive(pid: int) -> bool:
    """Whether there is such a process; one that has ended but was not waited for yet does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def written(path: Path, content: Any) -> None:
    with written_whole(path) as file:
        file.write(json.dumps(content).encode())


def say(text: str) -> None:
    typer.echo(f"{time.strftime('%H:%M:%S')} {text}")


@contextmanager
def stopping(child: Any) -> Iterator[Any]:
    """A child that ends with the block, however the block ends."""
    try:
        yield child
    finally:
        with uninterrupted():  # a second Ctrl-C leaves nothing behind either
            child.stop()
