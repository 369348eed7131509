"""Figures for print and for a quick look. Matplotlib is imported where it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcc.core.files import make_folder, written_whole
from fedcc.report.style import PALETTE, distinct_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "pdf", "svg")


def partition_figure(counts: Sequence[Sequence[int]], title: str = "") -> Figure:
    """Who holds what: a heat map, clients down, classes across; numbers where they fit."""
    table = np.asarray(counts)
    clients, classes = table.shape
    figure = new_figure(min(14.0, max(4.0, 1.5 + 0.45 * classes)), min(14.0, max(3.0, 1.2 + 0.32 * clients)))
    axes = figure.subplots()
    shown = np.ma.masked_equal(table, 0)
    image = axes.imshow(shown, aspect="auto", cmap="viridis", vmin=0, vmax=max(1, int(table.max())))
    if table.size <= 400:
        half = table.max() / 2
        for k, c in zip(*np.nonzero(table), strict=True):
            colour = "black" if table[k, c] > half else "white"
            axes.text(c, k, str(table[k, c]), ha="center", va="center", fontsize=7, color=colour)
    axes.set_xlabel("class")
    axes.set_ylabel("client")
    if clients <= 30:
        axes.set_yticks(range(clients))
    if classes <= 30:
        axes.set_xticks(range(classes))
    if title:
        axes.set_title(title, fontsize=10)
    figure.colorbar(image, ax=axes, label="samples")
    return figure


def curves_figure(
    runs: Mapping[str, Sequence[tuple[int, float]]],
    title: str = "",
    chance: float | None = None,
    styles: Mapping[str, Mapping[str, Any]] | None = None,
    rounds: int | None = None,
) -> Figure:
    """Accuracy over rounds, a line per run, in its style where there is one; ``chance`` is drawn as a dotted line.

    What comes after ``rounds`` is one marker at the end: the extra rounds of one method do not squeeze the others.
    """
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(6.0, 3.8)
    axes = figure.subplots()
    for (name, curve), colour in zip(runs.items(), colours(len(runs)), strict=True):
        if curve:
            style = {"color": colour} | dict((styles or {}).get(name, {}))
            shown = [point for point in curve if rounds is None or point[0] <= rounds]
            later = f" (\N{BLACK DIAMOND} after {curve[-1][0]} rounds)" if len(shown) < len(curve) else ""
            label = f"{name} {curve[-1][1]:.1f}{later}"
            axes.plot(*np.array(shown).reshape(-1, 2).T, marker="o", markersize=4, label=label, **style)
            if rounds is not None and later:
                end = np.array([*shown[-1:], (_later(rounds), curve[-1][1])])
                axes.plot(*end.T, ":", marker="D", markersize=7, markevery=[-1], linewidth=1, color=style["color"])
    if chance is not None:
        axes.axhline(chance, linestyle=":", color="grey", linewidth=1, label=f"chance {chance:.1f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if rounds is not None and any(curve and curve[-1][0] > rounds for curve in runs.values()):
        whole = MaxNLocator(integer=True).tick_values(1, rounds)
        ticks = [int(t) for t in whole if 1 <= t <= 1.5 * rounds - _later(rounds) / 2]
        axes.set_xticks([*ticks, _later(rounds)], [*map(str, ticks), "later"])
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy on the global test set (%)")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    _finish(axes, title)
    return figure


def _later(rounds: int) -> float:
    """Where what comes after so many rounds stands on their axis."""
    return rounds + max(1.0, rounds / 10)


def bytes_figure(
    runs: Mapping[str, Mapping[str, Any]], title: str = "", styles: Mapping[str, Mapping[str, Any]] | None = None
) -> Figure:
    """Accuracy against the bytes sent and received so far, a line per run; ``runs`` are summaries by name.

    A hollow point stands where a method ends that needs the clients' models for its predictions.
    """
    figure = new_figure(6.0, 3.8)
    axes = figure.subplots()
    for (name, summary), colour in zip(runs.items(), colours(len(runs)), strict=True):
        if curve := accuracy_by_bytes(summary):
            sent, accuracy = zip(*curve, strict=True)
            style = {"color": colour} | dict((styles or {}).get(name, {}))
            colour = style["color"]
            axes.plot(np.array(sent) / 1e6, accuracy, marker="o", markersize=4, label=name, **style)
            if models := summary["bytes"]["models"]:
                end = [sent[-1] / 1e6, (sent[-1] + models) / 1e6]
                axes.plot(end, [accuracy[-1]] * 2, ":o", markersize=5, color=colour, markerfacecolor="none")
    handed = any(summary["bytes"]["models"] for summary in runs.values())
    axes.set_xlabel("megabytes up and down, all clients" + ("\nhollow: and their models at the end" if handed else ""))
    axes.set_ylabel("accuracy on the global test set (%)")
    if axes.lines:
        _log_scale(axes)
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3, which="both")
    _finish(axes, title)
    return figure


def accuracy_by_bytes(summary: Mapping[str, Any]) -> list[tuple[int, float]]:
    """(bytes so far, accuracy) of the evaluated rounds in which something had been sent.

    Nothing for records that have no bytes by round.
    """
    by_round = summary["bytes"].get("rounds")
    if by_round is None:
        return []
    sent = np.cumsum(np.add(by_round["up"], by_round["down"])).tolist()
    rounds = zip(sent, summary["accuracy"]["rounds"], strict=True)
    return [(total, accuracy) for total, accuracy in rounds if total and accuracy is not None]


LOGGED = {
    "majority": "majority classes $|C_J|$",
    "alpha": "mean of α over public samples",
    "unknown": "mean probability of “unknown”",
}


def log_figure(log: Mapping[str, Mapping[str, Sequence[float | None]]], title: str = "") -> Figure:
    """What FedCC's clients noted, a panel for each of ``LOGGED``, a line per client; ``log`` is that of a summary."""
    from matplotlib.ticker import MaxNLocator

    names = [name for name in LOGGED if name in log]
    figure = new_figure(3.2 * max(1, len(names)) + 0.8, 3.0)
    for axes, name in zip(np.ravel(figure.subplots(1, max(1, len(names)))), names, strict=False):
        clients = log[name]
        for (k, values), colour in zip(clients.items(), distinct_colours(len(clients)), strict=True):
            rounds = np.arange(1, len(values) + 1)
            axes.plot(
                rounds, _numbers(values), marker="o", markersize=3, linewidth=1, color=colour, label=f"client {k}"
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("round")
        axes.set_title(LOGGED[name], fontsize=9)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    if names and len(log[names[0]]) <= 20:
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(), fontsize=7, loc="outside right center", frameon=False
        )
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure whole, in the format its name ends in."""
    ending = path.suffix.lstrip(".").lower()
    if ending not in FORMATS:
        raise ValueError(f"a figure's name must end in {', '.join('.' + f for f in FORMATS)}, got {path.name!r}")
    from matplotlib import rc_context

    make_folder(path.parent)
    with rc_context({"svg.hashsalt": "fedcc", "pdf.fonttype": 42}), written_whole(path) as file:
        figure.savefig(file, format=ending, dpi=150, metadata=_undated(ending))
    return path


def _undated(ending: str) -> dict[str, Any]:
    """No dates in files: the same numbers give the same bytes (the salt does it for the names inside an svg)."""
    return {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[ending]


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _finish(axes: Axes, title: str) -> None:
    """The legend beside the axes, which makes room for long names, and the title."""
    if labels := axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        axes.figure.set_figwidth(max(6.0, 4.8 + 0.075 * max(map(len, labels))))  # type: ignore[union-attr]
    if title:
        axes.set_title(title, fontsize=10)


def literal(text: str) -> str:
    """Text of others as it is: no formula between dollar signs."""
    return text.replace("$", r"\$")


def _log_scale(axes: Axes) -> None:
    """A logarithmic x axis with plain numbers, as many as fit."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def colours(number: int) -> list[str]:
    """So many colours, from the start again where there are more."""
    return [PALETTE[i % len(PALETTE)].light for i in range(number)]


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    """Values with gaps where there are none."""
    return np.array([np.nan if v is None else v for v in values])
