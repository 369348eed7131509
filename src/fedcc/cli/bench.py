"""``fedcc bench``."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from fedcc.cli.console import console, noted, table
from fedcc.cli.options import Json, run_options
from fedcc.code import allow
from fedcc.core.options import check_value

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fedcc.experiments.bench import Setup
    from fedcc.experiments.bench_networks import BenchNetwork

    Keep = Callable[..., None]  # of a row, with the name of its table


@run_options("device", "batch", "augment", "threads")
def bench(
    options: dict[str, Any],
    clients: Annotated[
        str | None,
        Option(help="Measure with these numbers of clients. The default is 1,10,100 on a GPU and 1,4 on a CPU."),
    ] = None,
    steps: Annotated[
        int | None, Option(help="Take this many steps per client. The default is 200 on a GPU and 4 on a CPU.")
    ] = None,
    model: Annotated[str, Option(help="Measure this network, a built-in one or module:factory.")] = "resnet20",
    shape: Annotated[
        str,
        Option(help="Give inputs this shape: channels,height,width for images, any other for numbers or --tokens."),
    ] = "3,32,32",
    tokens: Annotated[
        int, Option(help="Make inputs of this many different tokens; --shape is then their number per input.")
    ] = 0,
    predicted: Annotated[
        int | None,
        Option(
            "--images",
            help="Predict this many images, or other inputs. The default is 10,000 on a GPU and 1,000 on a CPU.",
        ),
    ] = None,
    every: Annotated[
        bool, Option("--all", help="Measure nine networks in a fit of 10 clients (2 on a CPU), and five runs.")
    ] = False,
    out: Annotated[Path | None, Option(help="Write the record to this JSON file too.")] = None,
    as_json: Json = False,
) -> None:
    """Measure the engines on this machine and print one table."""
    from fedcc.core.files import write_whole
    from fedcc.engine import choose_device, default_precision
    from fedcc.engine.threads import check_threads, fixed_threads
    from fedcc.experiments.bench import Setup
    from fedcc.experiments.bench_networks import BenchNetwork
    from fedcc.experiments.environment import environment
    from fedcc.nets import network

    allow(model)
    threads, batch, augment = options.get("threads", 1), options.get("batch", 64), options.get("augment", "standard")
    check_threads(threads)
    device = choose_device(options.get("device", "auto"))
    gpu = device.type == "cuda"
    numbers = _numbers("clients", clients or (("10" if gpu else "2") if every else "1,10,100" if gpu else "1,4"))
    if every and (len(numbers) > 1 or (model, shape, tokens, predicted) != ("resnet20", "3,32,32", 0, None)):
        raise ValueError("--all compares networks of its own: give --clients one number, and no network or inputs")
    length = steps if steps is not None else 200 if gpu else 4
    images = predicted if predicted is not None else 10_000 if gpu else 1_000
    check_value("images", images, int, 1, 1_000_000)
    check_value("steps", length, int, 1, 65_536)
    check_value("batch", batch, int, 1, 65_536)
    check_value("tokens", tokens, int, 0, 10_000_000)
    size = tuple(_numbers("shape", shape))
    own = BenchNetwork(model, network(model, size), size, tokens)
    if not own.images and "augment" in options:
        raise ValueError("--augment is for images: --shape channels,height,width")
    terminal = console(stderr=as_json)
    setup = Setup(device, default_precision(device), length, batch, augment, images)
    measured = f"batch {batch}, {length} steps, {device}"
    settings = {"model": "all"} if every else {"model": model, "shape": size, "tokens": tokens, "images": images}
    settings |= {"batch": batch, "steps": length, "augment": augment, "precision": setup.usual}
    record: dict[str, Any] = {"settings": settings, "machine": environment(str(device), threads), "rows": []}

    def write() -> None:
        if out is not None:
            write_whole(out, json.dumps(record, indent=1) + "\n")

    def keep(row: Any, rows: str = "rows") -> None:
        record.setdefault(rows, []).append(asdict(row))
        write()

    write()  # so that a file that cannot be written ends this now
    with fixed_threads(threads), noted(f"the rows until then are in {out}") if out else nullcontext():
        if every:
            terminal.out(f"a fit of {numbers[0]} clients, {measured}; ms per client-step")
            listings = [_networks(terminal, keep, setup, numbers[0]), _runs(terminal, keep, setup)]
        else:
            inputs = (
                f"{shape} of {tokens:,} tokens" if tokens else f"{'images' if own.images else 'numbers'} of {shape}"
            )
            terminal.out(f"{model}, {inputs}, {measured}; predict is per 1,000 inputs")
            listings = [_engines(terminal, keep, setup, numbers, own)]
    if as_json:
        typer.echo(json.dumps(record, indent=1))
    else:
        terminal.print(*listings, sep="\n\n")


def _numbers(name: str, text: str) -> list[int]:
    """Whole numbers with commas."""
    try:
        numbers = [int(n) for n in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} must be integers separated by commas, got {text!r}") from None
    for number in numbers:
        check_value(name, number, int, 1, 65_536)
    return numbers


def _short(text: str) -> str:
    """A cell; the record has the whole text."""
    return textwrap.shorten(text, 60, placeholder="...")


def _engines(terminal: Console, keep: Keep, setup: Setup, clients: list[int], own: BenchNetwork) -> Table:
    """One network by each engine."""
    from fedcc.experiments.bench import bench as measure

    listing = table(
        "phase", "engine", "clients", "ms / client-step", "faster", "first s", "GiB", "busy %", "how computed"
    )
    formats = {"ratio": "{:.1f}x", "first": "{:.1f}", "memory": "{:.2f}", "busy": "{:.0f}"}
    with terminal.status("measuring"):
        for row in measure(setup, clients, own):
            keep(row)
            rest = ["" if (value := getattr(row, n)) is None else text.format(value) for n, text in formats.items()]
            listing.add_row(row.phase, row.engine, str(row.clients), f"{row.ms:.3f}", *rest, _short(row.way))
    return listing


def _networks(terminal: Console, keep: Keep, setup: Setup, clients: int) -> Table:
    """Each of the networks by the plain and the fused engine."""
    from fedcc.experiments.bench import FailedRow, bench_all
    from fedcc.experiments.bench_networks import BENCH_NETWORKS

    names = ("plain fp32", "plain bf16", f"fused {setup.usual}", "faster", "GFLOP", "% of a product", "first s", "GiB")
    listing = table("network", "how computed", *names)
    with terminal.status("measuring") as status:
        for number, row in enumerate(bench_all(setup, clients, BENCH_NETWORKS), 1):
            keep(row)
            status.update(f"measuring, {number} of {len(BENCH_NETWORKS)} networks")
            if isinstance(row, FailedRow):
                listing.add_row(row.network, _short(row.reason))
                continue
            times = ["" if ms is None else f"{ms:.3f}" for ms in (row.plain, row.plain_bf16, row.fused)]
            rest = [f"{row.ratio:.1f}x", f"{row.gflop:.2f}", f"{row.share:.1f}", f"{row.first:.1f}"]
            listing.add_row(
                row.network, _short(row.way), *times, *rest, "" if row.memory is None else f"{row.memory:.2f}"
            )
    return listing


def _runs(terminal: Console, keep: Keep, setup: Setup) -> Table:
    """Whole runs with the engine and the number format that are usual on the device."""
    from fedcc.experiments.bench import bench_runs
    from fedcc.experiments.bench_networks import BENCH_RUNS

    listing = table("run on made-up images, without evaluation", "last round, s", "all, s", "GiB")
    with terminal.status("measuring runs"):
        for row in bench_runs(setup, BENCH_RUNS):
            keep(row, "runs")
            numbers = ["" if number is None else f"{number:.2f}" for number in (row.round, row.total, row.memory)]
            listing.add_row(str(row.run), *([_short(row.reason)] if row.reason else numbers))
    return listing
