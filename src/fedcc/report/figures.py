"""Figures for print and for a quick look. Matplotlib is imported where it is used."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fedcc.core.files import make_folder, open_whole
from fedcc.report.style import GREY, OURS, PALETTE, distinct_colours
from fedcc.report.titles import scenario_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedcc.report.parts import Log
    from fedcc.report.records import RunRecord
    from fedcc.report.standings import Duel, ScenarioDuels

T = TypeVar("T")
Styles = Mapping[str, Mapping[str, Any]]  # how matplotlib draws each run, by name

METADATA: dict[str, dict[str, Any]] = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
"""By format: no dates in files, so that the same numbers give the same bytes."""

FORMATS = tuple(METADATA)
ONE_COLUMN, TWO_COLUMNS = 3.5, 7.16  # inches: the columns of most journals, so that nothing is scaled in print
LONGEST = 34  # letters in a line of a legend
ACCURACY = "accuracy on the global test set (%)"


def partition_figure(counts: Sequence[Sequence[int]], title: str = "") -> Figure:
    """Samples by client and class as a heat map, with numbers if they fit."""
    table = np.asarray(counts)
    clients, classes = table.shape
    width = ONE_COLUMN if classes <= 10 else TWO_COLUMNS
    figure = new_figure(width, min(9.0, max(2.4, 0.9 + 0.22 * clients)))
    axes = figure.subplots()
    masked_table = np.ma.masked_equal(table, 0)
    image = axes.imshow(masked_table, aspect="auto", cmap="viridis", vmin=0, vmax=max(1, int(table.max())))
    if classes <= 20 and clients <= 30:
        half = table.max() / 2
        for k, c in zip(*np.nonzero(table), strict=True):
            colour = "black" if table[k, c] > half else "white"
            axes.text(c, k, str(table[k, c]), ha="center", va="center", fontsize=5.5, color=colour)
    axes.set(xlabel="class", ylabel="client")
    if clients <= 30:
        axes.set_yticks(range(clients))
    if classes <= 30:
        axes.set_xticks(range(classes))
    axes.tick_params(labelsize=7)
    axes.set_title(wrapped(title, width), fontsize=9)
    figure.colorbar(image, ax=axes, label="samples").ax.tick_params(labelsize=7)
    return figure


def curves_figure(
    runs: Mapping[str, Sequence[tuple[int, float]]],
    title: str = "",
    chance: float | None = None,
    styles: Styles | None = None,
    rounds: int | None = None,
) -> Figure:
    """Accuracy over rounds, a line per run; ``chance`` is a dotted line.

    After ``rounds``, only the last value is drawn, as a marker: a method with more rounds does not squeeze the others.
    """
    from matplotlib.ticker import MaxNLocator

    last = math.inf if rounds is None else rounds
    beyond = last + max(1.0, last / 10)  # the position on the axis of what comes later
    figure = new_figure(TWO_COLUMNS, 3.6)
    axes = figure.subplots()
    for name, curve, style in styled(runs, styles):
        if curve:
            points = [point for point in curve if point[0] <= last]
            later = f" (\N{BLACK DIAMOND} after {curve[-1][0]} rounds)" if len(points) < len(curve) else ""
            label = f"{name} {curve[-1][1]:.1f}{later}"
            axes.plot(*np.array(points).reshape(-1, 2).T, marker="o", markersize=4, label=label, **style)
            if later:
                end = np.array([*points[-1:], (beyond, curve[-1][1])])
                axes.plot(*end.T, ":", marker="D", markersize=7, markevery=[-1], linewidth=1, color=style["color"])
    if chance is not None:
        axes.axhline(chance, linestyle=":", color="grey", linewidth=1, label=f"chance {chance:.1f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if any(curve and curve[-1][0] > last for curve in runs.values()):
        whole = MaxNLocator(integer=True).tick_values(1, last)
        ticks = [int(t) for t in whole if 1 <= t <= 1.5 * last - beyond / 2]
        axes.set_xticks([*ticks, beyond], [*map(str, ticks), "later"])
    axes.set(xlabel="round", ylabel=ACCURACY, ylim=(0, 100))
    axes.grid(alpha=0.3)
    _finish(axes, title)
    return figure


def bytes_figure(runs: Mapping[str, RunRecord], title: str = "", styles: Styles | None = None) -> Figure:
    """Accuracy against the bytes sent and received so far, a line per run.

    A hollow point marks the end of a method that needs the clients' models for its predictions.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = new_figure(TWO_COLUMNS, 3.6)
    axes = figure.subplots()
    for name, run, style in styled(runs, styles):
        if curve := accuracy_by_bytes(run):
            sent, accuracy = zip(*curve, strict=True)
            axes.plot(np.array(sent) / 1e6, accuracy, marker="o", markersize=4, label=name, **style)
            if models := run.traffic.models:
                end = [sent[-1] / 1e6, (sent[-1] + models) / 1e6]
                axes.plot(end, [accuracy[-1]] * 2, ":o", markersize=5, color=style["color"], markerfacecolor="none")
    models = any(run.traffic.models for run in runs.values())
    axes.set_xlabel("megabytes up and down, all clients" + ("\nhollow: and their models at the end" if models else ""))
    if axes.lines:  # plain numbers, as many as fit
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(ylabel=ACCURACY, ylim=(0, 100))
    axes.grid(alpha=0.3, which="both")
    _finish(axes, title)
    return figure


def accuracy_by_bytes(run: RunRecord) -> list[tuple[int, float]]:
    """(bytes so far, accuracy) of the evaluated rounds in which something had been sent, as far as it is known."""
    rounds = zip(accumulate(run.traffic.rounds), run.curve, strict=False)
    return [(total, accuracy) for total, accuracy in rounds if total and accuracy is not None]


def lead_figure(scenarios: Sequence[ScenarioDuels]) -> Figure:
    """FedCC and its nearest rival in every scenario, a panel for what was measured here and one for the paper."""
    figure = new_figure(9.0, 1.1 + 0.52 * len(scenarios))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, title, side in zip(panels, ("measured here", "the paper"), ("here", "paper"), strict=True):
        sides: list[Duel] = [getattr(s, side) for s in scenarios]
        rows = np.arange(len(sides))
        for values, colour, shift, name in (
            ([d.ours.mean for d in sides], OURS.light, -0.2, "FedCC"),
            ([d.theirs.mean for d in sides], GREY.light, 0.2, "best rival"),
        ):
            axes.barh(rows + shift, values, height=0.38, color=colour, label=name)
        for row, duel in enumerate(sides):
            axes.text(duel.ours.mean + 1, row - 0.2, f"{duel.ours.mean:.1f}", va="center", fontsize=8)
            text = f"{duel.theirs.mean:.1f} {literal(duel.rival)}"
            axes.text(duel.theirs.mean + 1, row + 0.2, text, va="center", fontsize=8)
        axes.set(xlim=(0, 112), ylim=(len(sides) - 0.5, -0.5), xticks=range(0, 101, 20))
        axes.set_xlabel(ACCURACY, fontsize=9)
        axes.set_title(title, fontsize=11)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(rows, [literal(scenario_title(s.scenario)) for s in scenarios])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


LOGGED = {
    "majority": "majority classes $|C_J|$",
    "alpha": "mean of α over public samples",
    "unknown": "mean probability of “unknown”",
}


def log_figure(log: Log, title: str = "") -> Figure:
    """What FedCC's clients logged, a panel for each of ``LOGGED``, a line per client; ``log`` is that of a summary."""
    from matplotlib.ticker import MaxNLocator

    names = [name for name in LOGGED if name in log]
    figure = new_figure(TWO_COLUMNS if len(names) > 1 else ONE_COLUMN, 2.5)
    for axes, name in zip(np.ravel(figure.subplots(1, max(1, len(names)))), names, strict=False):
        for (k, values), colour in zip(log[name].items(), distinct_colours(len(log[name])), strict=True):
            rounds, known = np.arange(1, len(values) + 1), np.array(values, float)  # None becomes a gap
            axes.plot(rounds, known, marker="o", markersize=3, linewidth=1, color=colour, label=f"client {k}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("round", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.set_title(LOGGED[name], fontsize=8)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    if names and len(log[names[0]]) <= 20:
        lines = figure.axes[0].get_legend_handles_labels()
        figure.legend(*lines, fontsize=6, loc="outside right center", frameon=False)
    figure.suptitle(wrapped(title, float(figure.get_figwidth())), fontsize=9)
    return figure


def save(figure: Figure, path: Path, description: str | None = None) -> Path:
    """Write a figure in the format its name ends in; a description stands in the metadata of a PNG or SVG."""
    ending = path.suffix.lstrip(".").lower()
    if ending not in FORMATS:
        raise ValueError(f"a figure's name must end in {', '.join('.' + f for f in FORMATS)}, got {path.name!r}")
    from matplotlib import rc_context

    make_folder(path.parent)  # the salt makes names inside an svg the same each time
    with rc_context({"svg.hashsalt": "fedcc", "pdf.fonttype": 42}), open_whole(path) as file:
        figure.savefig(
            file,
            format=ending,
            dpi=150,
            metadata=METADATA[ending] | ({"Description": description} if description else {}),
        )
    return path


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def styled(runs: Mapping[str, T], styles: Styles | None) -> Iterator[tuple[str, T, dict[str, Any]]]:
    """Names, runs and their styles; without one, a run has the next colour of the palette."""
    for i, (name, run) in enumerate(runs.items()):
        yield name, run, {"color": PALETTE[i % len(PALETTE)].light} | dict((styles or {}).get(name, {}))


def literal(text: str) -> str:
    """Text without formulas between dollar signs."""
    return text.replace("$", r"\$")


def wrapped(title: str, width: float) -> str:
    """A title in lines that fit this many inches."""
    return textwrap.fill(title, int(13 * width))


def _finish(axes: Axes, title: str) -> None:
    """Add the title, and the legend beside the axes, where it has room for long names."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        lines = [textwrap.fill(label, LONGEST) for label in labels]
        axes.legend(handles, lines, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.set_title(wrapped(title, TWO_COLUMNS), fontsize=9)
