"""``fedcc bench``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from typer import Option

from fedcc.cli.console import console, table
from fedcc.cli.options import Json, run_options
from fedcc.code import allow
from fedcc.core.options import check_value


@run_options("device", "batch", "augment", "threads")
def bench(
    options: dict[str, Any],
    clients: Annotated[str | None, Option(help="numbers of clients; 1,10,100 on a GPU, 1,4 on a CPU")] = None,
    steps: Annotated[int | None, Option(help="steps per client; 200 on a GPU, 4 on a CPU")] = None,
    model: Annotated[str, Option(help="the network: a built-in one, or module:factory")] = "resnet20",
    as_json: Json = False,
) -> None:
    """Measure the engines on this machine and print one table; ratios are within one run."""
    from fedcc.engine import choose_device
    from fedcc.engine.threads import check_threads, fixed_threads
    from fedcc.experiments.bench import bench as measure
    from fedcc.experiments.environment import environment

    allow(model)
    threads, batch, augment = options.get("threads", 1), options.get("batch", 64), options.get("augment", "standard")
    check_threads(threads)
    device = choose_device(options.get("device", "auto"))
    gpu = device.type == "cuda"
    try:
        numbers = [int(n) for n in (clients or ("1,10,100" if gpu else "1,4")).split(",")]
    except ValueError:
        raise ValueError(f"clients must be whole numbers with commas, got {clients!r}") from None
    length = steps if steps is not None else 200 if gpu else 4
    for what, number in (("steps", length), ("batch", batch), *(("clients", n) for n in numbers)):
        check_value(what, number, int, 1, 65_536)
    terminal = console(stderr=as_json)
    terminal.out(f"{model}, batch {batch}, 32x32 images, {length} steps, {device}; predict is per 1,000 images")
    rows = []
    listing = table("phase", "engine", "clients", "ms / client-step", "faster", "first s", "GiB", "busy %")
    with terminal.status("measuring"), fixed_threads(threads):
        for row in measure(device, numbers, length, model, batch, augment):
            rows.append(asdict(row))
            formats = {"ratio": "{:.1f}x", "first": "{:.1f}", "memory": "{:.2f}", "busy": "{:.0f}"}
            rest = ["" if rows[-1][n] is None else text.format(rows[-1][n]) for n, text in formats.items()]
            listing.add_row(row.phase, row.engine, str(row.clients), f"{row.ms:.3f}", *rest)
    if as_json:
        settings = {"model": model, "batch": batch, "steps": length, "augment": augment}
        record = {"settings": settings, "machine": environment(str(device), threads), "rows": rows}
        typer.echo(json.dumps(record, indent=1))
    else:
        terminal.print(listing)
