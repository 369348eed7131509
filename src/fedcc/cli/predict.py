"""``fedcc predict``, ``fedcc distil`` and ``fedcc export``: what a finished run is good for."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcc.cli.console import say
from fedcc.cli.options import Code, Json

if TYPE_CHECKING:
    from fedcc.experiments.result import Result

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run, or of a student.")]


def predict(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="The folder of a run or of a student, or an exported .onnx file.")
    ],
    inputs: Annotated[
        Path, typer.Argument(metavar="INPUT", help="An image, a folder of images, a table or an .npz file.")
    ],
    abstain: Annotated[float | None, typer.Option(min=0, max=1, help="Answer 'unknown' below this confidence.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Add the most trusted clients and their votes.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the table to this file.")] = None,
    code: Code = None,
) -> None:
    """Predict the classes of new inputs as a table: class, probability, confidence."""
    if model.suffix == ".onnx":
        from fedcc.exported import Exported

        if explain:
            raise ValueError("an exported model has no votes to explain; use the run's folder")
        write_table(Exported.open(model).rows(inputs, abstain), out)
        return
    from fedcc.inputs import read_inputs

    result = load_result(model, code)
    names, x = read_inputs(inputs, result.shape, result.dtype, result.encoding)
    write_table(predicted_rows(result, names, x, abstain, explain), out)


def load_result(folder: Path, code: list[str] | None) -> Result:
    """A run's result; code of the user's own is imported only if it is named."""
    from fedcc.code import allow_code
    from fedcc.experiments.result import load

    allow_code(code)
    return load(folder)


def predicted_rows(
    result: Result, names: list[str], x: Any, abstain: float | None, explain: bool
) -> Iterator[dict[str, str]]:
    """One row per input."""
    from fedcc.exported import rows

    answer = result.answer(x)
    if answer.probabilities.ndim != 2:
        raise ValueError(f"{result.method.name} has one model per client and no common prediction")
    arrays = {name: value.numpy() for name, value in vars(answer).items() if value is not None}
    explanation = result.explain(x) if explain else None
    for i, row in enumerate(rows(names, result.classes, arrays, abstain)):
        yield row if explanation is None else row | {"who knew": "; ".join(explanation.lines(i))}


def write_table(rows: Iterable[dict[str, Any]], out: Path | None) -> None:
    """Write rows as CSV, to a file or to the terminal."""
    import io

    from fedcc.core.files import write_whole

    listed = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(listed[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(listed)
    if out is None:
        sys.stdout.write(text.getvalue())
    else:
        write_whole(out, text.getvalue().encode())
        say(f"{len(listed)} predictions: {out}")


def distil(
    folder: Run,
    model: Annotated[str | None, typer.Option(help="Train this network. The default is the first client's.")] = None,
    public: Annotated[
        Path | None,
        typer.Option(help="Learn from these samples, as for `fedcc predict`. The default is the run's public ones."),
    ] = None,
    epochs: Annotated[
        int, typer.Option(min=1, help="Train for this many epochs over the public samples and their mixtures.")
    ] = 10,
    mixes: Annotated[int, typer.Option(min=0, max=1000, help="Make this many mixtures for each public sample.")] = 19,
    sharpness: Annotated[float, typer.Option(min=0, help="Raise the targets' probabilities to this power.")] = 4.0,
    seed: Annotated[int, typer.Option(min=0, help="Set the seed of everything random.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the student to this folder; it may replace another student only. The default is RUN/student."
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Find data sets in this folder. The default is $FEDCC_DATA, else a cache folder."),
    ] = None,
    code: Code = None,
    as_json: Json = False,
) -> None:
    """Train one network on the public samples with a run's predictions as targets."""
    import json

    from fedcc.code import allow, allow_code
    from fedcc.experiments.distil import distil_run

    allow(model)
    allow_code(code)
    student = distil_run(folder, model, inputs=public, epochs=epochs, mixes=mixes, sharpness=sharpness, seed=seed,
                         out=out, data_dir=data_dir)  # fmt: skip
    if as_json:
        typer.echo(json.dumps(student.values()))
        return
    typer.echo(student.line())


def export(
    folder: Run,
    target: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file to write: FILE.onnx, or FILE.pt2 for torch.export.")
    ],
    code: Code = None,
) -> None:
    """Write a run's prediction, by the method's own rule, as one file."""
    from fedcc.experiments.export import export as write

    result = load_result(folder, code)
    typer.echo(f"{result.method.label}, {write(result, target)} networks, {len(result.classes)} classes: {target}")
