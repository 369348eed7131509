"""``fedcc federation``: create a federation folder, and run its server, its clients and its rounds on Flower."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from fedcc.cli.console import console, say_starting, table
from fedcc.cli.help import Commands
from fedcc.cli.options import Json, Settings, run_options, take
from fedcc.experiments.options import OPTIONS
from fedcc.flower.rules import Rules

federation_app = typer.Typer(
    cls=Commands, help="Set up and run federations across machines, on Flower.", no_args_is_help=True
)
Folder = Annotated[Path, Argument(metavar="FOLDER", help="The federation's folder.")]
LogFormatOption = Annotated[Literal["text", "json"], Option(help="Write log lines in this format.")]
SIGNS = ("known", "agreement", "relation", "size", "direction", "trust")  # that `status` shows of uploads
SIMULATED = ("clients", "participation", "client_accuracy", "deterministic")  # options that only the simulator has


@federation_app.callback()
def check_installed() -> None:
    if find_spec("flwr") is None or find_spec("cryptography") is None:
        raise ValueError("federations need Flower: pip install '.[flower]' in fedcc's checkout")


@federation_app.command()
@run_options(Rules, *(name for name in OPTIONS if name not in SIMULATED), "data_dir")
def init(
    options: dict[str, Any],
    folder: Folder,
    client: Annotated[
        list[str],
        Option("--client", help="Add a client: NAME, NAME=MODEL, or NAME=own if it brings its network; repeatable."),
    ],
    method: Annotated[str, Option(help="Train by this method; `fedcc methods` lists them.")] = "fedcc",
    settings: Settings = None,
    host: Annotated[
        list[str] | None,
        Option(
            "--host", help="Put this name or address into the server's certificate; repeatable. Sites use the first."
        ),
    ] = None,
    port: Annotated[int, Option(help="Let the server listen on this port.")] = 9092,
    public_file: Annotated[
        Path | None,
        Option(
            "--public-file", help="Use public samples of your own: an NPZ file with x, a table, or a folder of images."
        ),
    ] = None,
    test_file: Annotated[
        Path | None, Option("--test-file", help="Use a test set of your own, in any form that a site's data may have.")
    ] = None,
    class_name: Annotated[
        list[str] | None, Option("--class", help="With --public-file, name the classes in order; repeatable.")
    ] = None,
    simulate_sites: Annotated[
        bool, Option("--simulate-sites", help="Split the data set as `fedcc run` would, into a data.npz for each site.")
    ] = False,
    make_keys: Annotated[
        bool, Option("--make-keys", help="Make the sites' private keys here instead of at the sites.")
    ] = False,
) -> None:
    """Create a federation folder: experiment, certificates, and a folder for each site.

    The sites make their own keys with `fedcc federation join`, and `fedcc federation add` takes the public halves.
    """
    from fedcc.code import allow
    from fedcc.experiments.experiment import parse_settings
    from fedcc.flower.create import create_federation
    from fedcc.flower.folder import parse_clients
    from fedcc.flower.keys import federation_fingerprint

    allow(str(options.get("data", "")))
    federation = create_federation(
        folder,
        method,
        parse_clients(client),
        settings=parse_settings(method, settings) if settings else {},
        rules=take(Rules, options),
        data_dir=options.pop("data_dir", None),
        options=options,
        hosts=host or [],
        port=port,
        public_file=public_file,
        test_file=test_file,
        class_names=tuple(class_name or ()),
        simulate_sites=simulate_sites,
        make_keys=make_keys,
    )
    e = federation.experiment
    networks = ", ".join(f"{name} ({model})" for name, model in federation.clients.items())
    typer.echo(
        f"{e.build_method().label} on {e.split.data}: {networks}; T={e.training.rounds}, E={e.training.epochs}; "
        f"{federation.task.public} public {federation.task.samples_text}; server {federation.address}"
    )
    sites = ", ".join(str(folder / "sites" / name) for name in federation.clients)
    if make_keys or simulate_sites:
        typer.echo(f"Send over a confidential channel: {sites}")
    else:
        typer.echo(f"Send: {sites}")
        typer.echo(f"Each site makes its key with `fedcc federation join NAME`; for the NAME.pub that it sends: "
                   f"`fedcc federation add {folder} NAME NAME.pub`")  # fmt: skip
    typer.echo(f"Keep private: {folder / 'operator'}")
    typer.echo(f"Fingerprint of the federation: {federation_fingerprint(federation.operator)}")


@federation_app.command()
def server(
    folder: Folder,
    bind: Annotated[str, Option(help="Listen on this address.")] = "0.0.0.0",
    metrics: Annotated[
        str | None, Option(metavar="HOST:PORT", help="Serve /healthz and Prometheus' /metrics there, without TLS.")
    ] = None,
    log_format: LogFormatOption = "text",
) -> None:
    """Run the server until Ctrl-C: Flower's SuperLink, which the sites connect to."""
    from fedcc.flower.folder import FederationFolder
    from fedcc.flower.logs import FORMAT_VARIABLE, console_log
    from fedcc.flower.superlink import serve

    os.environ[FORMAT_VARIABLE] = log_format  # of run.log, which Flower's child writes
    serve(FederationFolder.open(folder.resolve()), bind, console_log(typer.echo, log_format), metrics)


@federation_app.command()
@run_options("device", "threads")
def client(
    options: dict[str, Any],
    site: Annotated[str, Argument(metavar="SITE", help="The site's folder, or its name.")],
    data: Annotated[
        Path, Option(help="Train on these samples of the site: an NPZ file with x and y, a table, or a folder.")
    ],
    label: Annotated[
        str, Option(help="Read labels from this column of a table, if the operator has not named it.")
    ] = "",
    network: Annotated[str, Option(help="Use this network, a name or module:factory, if `init` has NAME=own.")] = "",
    model: Annotated[str | None, Option(help="Check that this network is the agreed one.")] = None,
    server: Annotated[str | None, Option(help="Connect to this HOST:PORT instead of the one in site.toml.")] = None,
    share_model: Annotated[
        bool, Option("--share-model", help="Send the model to the server at the end; site.toml may say so, too.")
    ] = False,
    log_format: LogFormatOption = "text",
) -> None:
    """Take part as a client until Ctrl-C. Flower's SuperNode is restarted if it ends."""
    from fedcc.flower.folder import Site
    from fedcc.flower.logs import console_log
    from fedcc.flower.supernode import take_part

    own = Site.open(Site.find(site).resolve())
    if model is not None and model != own.model:
        raise ValueError(f"{own.name} has agreed on {own.model}, got --model {model}; ask the operator to change it")

    say = console_log(typer.echo, log_format)
    take_part(own, data, say, server=server, share_model=share_model, label=label, network=network, **options)


@federation_app.command()
def audit(
    site: Annotated[str, Argument(metavar="SITE", help="The site's folder, or its name.")], as_json: Json = False
) -> None:
    """Show what a site was asked and what it has answered, and check that its log is intact."""
    from fedcc.flower.folder import Site
    from fedcc.flower.supernode import policy_text

    own = Site.open(Site.find(site).resolve())
    entries = own.audit.entries()
    if as_json:
        typer.echo(json.dumps(entries, indent=1))
        return
    rows = table("time (UTC)", "", "purpose", "run", "round", "new samples", "share", "answers", "answer", "bytes")
    for entry in entries:
        # so short that a line fits into 120 columns; --json has both in full
        when, number = entry["time"][:19].replace("T", " "), str(entry.get("run", ""))[:8]
        cells = (entry.get(name, "") for name in ("round", "samples", "share", "answers", "answer", "bytes"))
        rows.add_row(when, entry["kind"], entry["purpose"], number, *map(str, cells))
    console().print(rows)
    typer.echo(f"{own.name}: {len(entries)} lines, each follows from the one before it")
    for text in (policy_text(own), own.audit.ledger().text()):
        if text:
            typer.echo(text)


@federation_app.command()
def run(
    folder: Folder,
    overwrite: Annotated[bool, Option("--overwrite", help="Start again, and replace the run in the folder.")] = False,
    log_format: LogFormatOption = "text",
) -> None:
    """Start or resume the rounds, and follow them. Ctrl-C stops them; run this again to resume."""
    from fedcc.flower.folder import FederationFolder
    from fedcc.flower.logs import console_log
    from fedcc.flower.superlink import train

    federation = FederationFolder.open(folder.resolve())
    say = console_log(typer.echo, log_format)
    final = train(federation, overwrite, say)
    last = f"{folder / 'run'}" if final is None else f"final {final:.2f} %, {folder / 'run'}"
    say(last) if log_format == "json" else typer.echo(last)


@federation_app.command()
def predict(
    folder: Folder,
    source: Annotated[
        Path, Argument(metavar="INPUT", help="An NPZ file with x, a table, an image or a folder of images.")
    ],
    out: Annotated[Path, Option("--out", help="Write scores and labels to this NPZ file.")] = Path("predictions.npz"),
) -> None:
    """Predict with the trained federation: with the models that the server has, or by asking the clients."""
    from fedcc.flower import superlink
    from fedcc.flower.folder import FederationFolder
    from fedcc.flower.logs import console_log

    say = console_log(typer.echo, "text")
    number = superlink.predict(FederationFolder.open(folder.resolve()), source, out, say)
    typer.echo(f"{number} predictions: {out}")


@federation_app.command()
def status(folder: Folder, as_json: Json = False) -> None:
    """Show the state of the federation: the round, and every client."""
    from fedcc.flower.door import REFUSALS
    from fedcc.flower.folder import FederationFolder
    from fedcc.flower.superlink import read_status

    federation = FederationFolder.open(folder.resolve())
    state = read_status(federation)
    if as_json:
        typer.echo(json.dumps(state, indent=1))
        return
    accuracy = "" if state["accuracy"] is None else f", accuracy {state['accuracy']:.2f} %"
    typer.echo(f"server {state['server']}; run {state['state']}, round {state['round']} of {state['rounds']}{accuracy}")
    if state.get("problem"):
        typer.echo(f"problem: {state['problem']}")
    for warning in state["warnings"]:
        typer.echo(f"warning: {warning}")
    signs = [s for s in SIGNS if any(s in row.get("uploads", {}) for row in state["clients"].values())]
    clients = table("client", "connected", "last round", "failures", *signs, "")
    for name in federation.clients:
        row: dict[str, Any] = {
            "online": False,
            "answered": 0,
            "strikes": 0,
            "aside": False,
            "problem": "",
            "uploads": {},
        }
        row |= state["clients"].get(name, {})
        connected = "?" if state["connected"] is None else "yes" if name in state["connected"] else "no"
        problem = f"set aside: {row['problem']}" if row["aside"] else str(row["problem"])
        if name not in federation.members:
            problem = "revoked" if name in federation.revoked else "has not sent its key yet"
        numbers = [f"{row['uploads'][sign]:.2f}" if sign in row["uploads"] else "" for sign in signs]
        clients.add_row(name, connected, str(row["answered"]), str(row["strikes"]), *numbers, problem)
    console().print(clients)
    for name, row in state["clients"].items():
        if row.get("warning"):
            typer.echo(f"warning: {name}, {row['warning']}")
    for name, number in state["refusals"].items():
        if number >= REFUSALS:
            typer.echo(f"warning: {name}: {number:,} of its requests were refused since the server started")


@federation_app.command()
@run_options("rounds", "epochs", "fraction", "seed")
def demo(
    options: dict[str, Any],
    out: Annotated[Path, Option("--out", help="Make the federations in this folder, which must be empty.")] = Path(
        "runs/federation-demo"
    ),
    method: Annotated[
        list[str] | None, Option(help="Compare this method; repeatable. The default is fedcc and fedavg.")
    ] = None,
) -> None:
    """Compare a server and four clients on this machine with the simulator, bit for bit, on digits."""
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; remove it or choose another --out")
    terminal = console()
    say_starting(terminal)
    from fedcc.flower.demo import compare
    from fedcc.flower.programs import FlowerError

    if not compare(out.resolve(), method or ["fedcc", "fedavg"], options, terminal):
        raise FlowerError("the federation's numbers are not the simulator's")
