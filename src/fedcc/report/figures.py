"""Figures for print and for a quick look. Matplotlib is imported where it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcc.core.files import written_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "pdf", "svg")
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#999999",
)  # safe for colour-blind eyes


def partition_figure(counts: Sequence[Sequence[int]], title: str = "") -> Figure:
    """Who holds what: a heat map, clients down, classes across; numbers where they fit."""
    table = np.asarray(counts)
    clients, classes = table.shape
    figure = _figure(min(14.0, max(4.0, 1.5 + 0.45 * classes)), min(14.0, max(3.0, 1.2 + 0.32 * clients)))
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
) -> Figure:
    """Accuracy over rounds, a line per run, in its style where there is one; ``chance`` is drawn as a dotted line."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(6.0, 3.8)
    axes = figure.subplots()
    for (name, curve), colour in zip(runs.items(), COLOURS * (1 + len(runs) // len(COLOURS)), strict=False):
        if curve:
            rounds, accuracy = zip(*curve, strict=True)
            style = {"color": colour} | dict((styles or {}).get(name, {}))
            axes.plot(rounds, accuracy, marker="o", markersize=4, label=f"{name} {accuracy[-1]:.1f}", **style)
    if chance is not None:
        axes.axhline(chance, linestyle=":", color="grey", linewidth=1, label=f"chance {chance:.1f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy on the global test set (%)")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    if title:
        axes.set_title(title, fontsize=10)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure whole, in the format its name ends in."""
    ending = path.suffix.lstrip(".").lower()
    if ending not in FORMATS:
        raise ValueError(f"a figure's name must end in {', '.join('.' + f for f in FORMATS)}, got {path.name!r}")
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "fedcc"}), written_whole(path) as file:
        figure.savefig(file, format=ending, dpi=150, bbox_inches="tight", metadata=_undated(ending))
    return path


def _undated(ending: str) -> dict[str, Any]:
    """No dates in files: the same numbers give the same bytes (the salt does it for the names inside an svg)."""
    return {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[ending]


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
