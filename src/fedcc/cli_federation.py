"""``fedcc federation``: create a federation folder, and run its server, its clients and its rounds on Flower."""

from __future__ import annotations

import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcc.options import Augment

app = typer.Typer(help="Federations across machines, on Flower.", no_args_is_help=True)


@app.callback()
def check_installed() -> None:
    if find_spec("flwr") is None or find_spec("cryptography") is None:
        raise ValueError("federations need Flower: pip install 'fedcc[flower]'")


Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="the federation's folder")]


@app.command()
def init(
    folder: Folder,
    client: Annotated[list[str], typer.Option("--client", help="a client, NAME or NAME=MODEL; repeatable")],
    method: Annotated[str, typer.Option(help="the method's name; `fedcc methods` lists them")] = "fedcc",
    host: Annotated[
        list[str] | None, typer.Option("--host", help="a name or address of the server; sites use the first")
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
    augment: Augment = None,
    wire: Annotated[str | None, typer.Option(help="number format: fp32, fp16, int8 or int8-stochastic")] = None,
    device: Annotated[str | None, typer.Option(help="the server's: auto, cpu or cuda")] = None,
    threads: Annotated[int | None, typer.Option(help="torch threads")] = None,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="where data sets lie")] = None,
) -> None:
    """Create a federation folder: experiment, certificates, and a folder with a key for each site."""
    from fedcc.experiments.experiment import parse_settings
    from fedcc.flower.create import create_federation
    from fedcc.flower.folder import parse_clients

    options: dict[str, Any] = {
        "data": data, "skew": skew, "models": models, "rounds": rounds, "epochs": epochs, "seed": seed, "lr": lr,
        "batch": batch, "reset": reset, "public": public, "fraction": fraction, "augment": augment, "wire": wire,
        "device": device, "threads": threads,
    }  # fmt: skip
    rules = {"quorum": quorum, "deadline": deadline, "grace": grace, "patience": patience, "strikes": strikes}
    federation = create_federation(
        folder,
        method,
        parse_clients(client),
        settings=parse_settings(method, settings or []),
        options={name: value for name, value in options.items() if value is not None},
        hosts=host or [],
        port=port,
        rules=rules,
        data_dir=data_dir,
        public_file=public_file,
        test_file=test_file,
        class_names=tuple(class_name or ()),
        simulate_sites=simulate_sites,
    )
    e = federation.experiment
    networks = ", ".join(f"{name} ({model})" for name, model in federation.clients.items())
    typer.echo(
        f"{e.made().label} on {e.data}: {networks}; T={e.rounds}, E={e.epochs}; "
        f"{federation.task.public} public images; server {federation.address}"
    )
    sites = ", ".join(str(folder / "sites" / name) for name in federation.clients)
    typer.echo(f"Send over a confidential channel: {sites}")
    typer.echo(f"Keep private: {folder / 'operator'}")


@app.command()
def server(folder: Folder, bind: Annotated[str, typer.Option(help="the address to listen on")] = "0.0.0.0") -> None:
    """Run the server until Ctrl-C: Flower's SuperLink, which the sites connect to."""
    from fedcc.flower.folder import FederationFolder
    from fedcc.flower.superlink import serve

    serve(FederationFolder.read(folder.resolve()), bind, typer.echo)


@app.command()
def client(
    site: Annotated[str, typer.Argument(metavar="SITE", help="the site's folder, or its name")],
    data: Annotated[Path, typer.Option(help="the site's own samples: an NPZ file with x and y, or a folder")],
    model: Annotated[str | None, typer.Option(help="the network, to check that it is the agreed one")] = None,
    server: Annotated[str | None, typer.Option(help="HOST:PORT, if not as in site.toml")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    threads: Annotated[int | None, typer.Option(help="torch threads; the experiment's by default")] = None,
    share_model: Annotated[
        bool, typer.Option("--share-model", help="send the model to the server at the end; also in site.toml")
    ] = False,
) -> None:
    """Take part as a client until Ctrl-C: Flower's SuperNode, restarted when it ends."""
    from fedcc.flower.folder import Site
    from fedcc.flower.supernode import take_part

    own = Site.read(Site.find(site).resolve())
    if model is not None and model != own.model:
        raise ValueError(f"{own.name} has agreed on {own.model}, got --model {model}; ask the operator to change it")

    def say(text: str) -> None:
        typer.echo(f"{time.strftime('%H:%M:%S')} {text}")

    take_part(own, data, say, server=server or "", device=device, threads=threads or 0, share=share_model)


@app.command()
def run(
    folder: Folder,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="start again, replacing the run in the folder")
    ] = False,
) -> None:
    """Start or resume the rounds, and follow them. Ctrl-C stops them; run this again to resume."""
    from fedcc.flower.folder import FederationFolder
    from fedcc.flower.superlink import train

    federation = FederationFolder.read(folder.resolve())
    final = train(federation, overwrite, typer.echo)
    typer.echo(f"{federation.run}" if final is None else f"final {final:.2f} %, {federation.run}")


@app.command()
def predict(
    folder: Folder,
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="NPZ with x: uint8 images like the public ones")],
    out: Annotated[Path, typer.Option("--out", help="NPZ to write: scores and labels")] = Path("predictions.npz"),
) -> None:
    """Predict with the trained federation: with the models that the server has, or by asking the clients."""
    from fedcc.flower import superlink
    from fedcc.flower.folder import FederationFolder

    number = superlink.predict(FederationFolder.read(folder.resolve()), source, out, typer.echo)
    typer.echo(f"{number} predictions: {out}")


@app.command()
def status(
    folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False
) -> None:
    """Show the state of the federation: the round, and every client."""
    from rich.console import Console
    from rich.table import Table

    from fedcc.flower.folder import FederationFolder
    from fedcc.flower.superlink import read_status

    federation = FederationFolder.read(folder.resolve())
    state = read_status(federation)
    if as_json:
        typer.echo(json.dumps(state, indent=1))
        return
    accuracy = "" if state["accuracy"] is None else f", accuracy {state['accuracy']:.2f} %"
    typer.echo(f"server {state['server']}; run {state['state']}, round {state['round']} of {state['rounds']}{accuracy}")
    if state.get("problem"):
        typer.echo(f"problem: {state['problem']}")
    table = Table("client", "connected", "last round", "failures", "", box=None, header_style="bold", pad_edge=False)
    for name in federation.clients:
        row = {"online": False, "answered": 0, "strikes": 0, "aside": False, "problem": ""} | state["clients"].get(
            name, {}
        )
        connected = ("yes" if row["online"] else "no") if state["state"] == "running" else "?"
        problem = f"set aside: {row['problem']}" if row["aside"] else row["problem"]
        table.add_row(name, connected, str(row["answered"]), str(row["strikes"]), problem)
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
    """Compare a server and four clients on this machine with the simulator, on digits: equal bit for bit."""
    from rich.console import Console

    from fedcc.flower.demo import compare
    from fedcc.flower.programs import FlowerError

    options = {"rounds": rounds, "epochs": epochs, "fraction": fraction, "seed": seed}
    options = {name: value for name, value in options.items() if value is not None}
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140)
    if not compare(out.resolve(), tuple(method or ("fedcc", "fedavg")), options, console):
        raise FlowerError("the federation's numbers are not the simulator's")
