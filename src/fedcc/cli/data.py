"""``fedcc data`` and ``fedcc skew``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from fedcc.cli.console import console, table
from fedcc.cli.help import Commands
from fedcc.cli.options import Json, run_options

data_app = typer.Typer(cls=Commands, help="List, fetch and check data sets.", no_args_is_help=True)


@run_options("data", "skew", "clients", "seed", "public", "resize", "label", "test", "data_dir")
def skew(
    options: dict[str, Any],
    picture: Annotated[Path, Option("--out", help="Write the picture to this file: .png, .pdf or .svg.")] = Path(
        "skew.png"
    ),
    as_json: Json = False,
) -> None:
    """Show which client would hold what: print a table of clients and classes, and draw it."""
    from fedcc.federation import Federation
    from fedcc.report.figures import FORMATS, partition_figure, save

    if picture.suffix.lstrip(".").lower() not in FORMATS:
        raise ValueError(f"--out must end in {', '.join('.' + f for f in FORMATS)}, got {picture.name!r}")
    options["resize"] = options.get("resize") or None  # 0: their own size
    federation = Federation.named(folder=options.pop("data_dir", None), **options)
    seed = options.get("seed", 0)
    split = federation.partition
    assert split is not None
    counts = split.counts
    title = f"{federation.data}, {federation.skew}, {len(counts)} clients, seed {seed}"
    save(partition_figure(counts.tolist(), title), picture)
    if as_json:
        about = {"data": federation.data, "skew": federation.skew, "seed": seed, "public": len(split.public)}
        about |= {"counts": counts.tolist(), "moved": split.moved, "sha256": split.sha256, "picture": str(picture)}
        typer.echo(json.dumps(about))
        return
    terminal = console()
    moved = f"; {split.moved} samples moved to reach the minimum" if split.moved else ""
    terminal.print(f"{title}; {len(split.public)} public samples{moved}")
    rows: list[list[object]] = []
    if counts.shape[1] <= 20:
        columns = ["client", *map(str, range(counts.shape[1])), "all"]
        rows += ([k, *(n or "." for n in row), row.sum()] for k, row in enumerate(counts))
    else:
        columns = ["client", "samples", "classes", "most of"]
        for k, row in enumerate(counts):
            most = ", ".join(f"{c} ({row[c]})" for c in row.argsort()[::-1][:6] if row[c])
            rows.append([k, row.sum(), (row > 0).sum(), most])
    terminal.print(table(*columns, rows=rows))
    terminal.out(f"picture: {picture}")


@data_app.command("list")
@run_options("data_dir")
def data_list(options: dict[str, Any], as_json: Json = False) -> None:
    """List the data sets, and which of them are here."""
    from fedcc.code import installed
    from fedcc.data import DATASETS
    from fedcc.data.fetch import data_folder

    folder = data_folder(options.get("data_dir"))
    here = {d.name: d.embedded or not d.missing(folder) for d in DATASETS.values()}
    if as_json:
        names = ("name", "title", "train", "test", "classes", "shape", "source")
        rows = [{n: getattr(d, n) for n in names} | {"here": here[d.name]} for d in DATASETS.values()]
        typer.echo(json.dumps(rows, indent=1))
        return
    terminal = console()
    listing = table("name", "title", "train", "test", "classes", "shape", "here")
    for d in DATASETS.values():
        numbers = (f"{d.train:,}", f"{d.test:,}", str(d.classes), "x".join(map(str, d.shape)))
        listing.add_row(d.name, d.title, *numbers, "yes" if here[d.name] else "no")
    for name, point in installed("fedcc.data").items():  # not imported for a list
        listing.add_row(name, f"installed: {point.value}", "", "", "", "", "yes")
    terminal.print(listing)
    terminal.out(f"data folder: {folder}")


@data_app.command("fetch")
@run_options("data_dir")
def data_fetch(
    options: dict[str, Any],
    name: Annotated[str, Argument(help="The name of the data set; `fedcc data list` lists them.")],
) -> None:
    """Download and verify a data set unless it is already here."""
    from fedcc.data import find_dataset
    from fedcc.data.fetch import fetch

    if find_dataset(name).embedded:
        typer.echo(f"{find_dataset(name).name} comes with scikit-learn; there is nothing to fetch")
        return
    typer.echo(f"{find_dataset(name).name}: {fetch(name, options.get('data_dir'))}")


@data_app.command("check")
@run_options("data_dir")
def data_check(
    options: dict[str, Any],
    name: Annotated[str, Argument(help="The name of the data set; `fedcc data list` lists them.")],
    as_json: Json = False,
) -> None:
    """Compare a data set's files with upstream's checksums."""
    from fedcc.data.dataset import DataError
    from fedcc.data.fetch import check

    files = check(name, options.get("data_dir"))
    if as_json:
        typer.echo(json.dumps([c._asdict() for c in files], indent=1))
    else:
        rows = ((c.file, c.expected, c.found, "ok" if c.ok else "differs") for c in files)
        console().print(table("file", "expected", "found", "", rows=rows))
    if odd := sum(not c.ok for c in files):
        raise DataError(f"{name}: {odd} of {len(files)} files are missing or not upstream's")
