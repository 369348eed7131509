"""Figures of what ``fedcc analyse`` finds in trained models: the paper's Figs. 1 to 3."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcc.report.figures import ONE_COLUMN, TWO_COLUMNS, Styles, literal, new_figure, styled, wrapped
from fedcc.report.style import BLUE, GREEN, OURS, distinct_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def margins_figure(methods: Mapping[str, Mapping[str, Any]], title: str = "", styles: Styles | None = None) -> Figure:
    """Histograms of all clients' decision margins with log counts and their means (Fig. 2), by method."""
    figure = new_figure(ONE_COLUMN, 2.8 + 0.15 * len(methods))
    axes = figure.subplots()
    for name, margins, style in styled(methods, styles):
        for clients in [m for m in margins["models"] if m["name"] == "clients"][:1]:
            colour, edges = style["color"], margins["edges"]
            label = f"{name}, mean {clients['mean']:+.2f}".replace("-", "\N{MINUS SIGN}")
            axes.stairs(clients["counts"], edges, color=colour, fill=True, alpha=0.15)
            axes.stairs(clients["counts"], edges, color=colour, linewidth=1.2, label=label)
            axes.axvline(clients["mean"], color=colour, linestyle="--", linewidth=1.2)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xticks([-1, -0.5, 0, 0.5, 1], ["−1", "−0.5", "0", "0.5", "1"])
    axes.set(xlim=(-1, 1), xlabel="decision margin", ylabel="test samples, all clients")
    axes.set_title(wrapped(title, ONE_COLUMN), fontsize=9)
    if axes.get_legend_handles_labels()[0]:  # below the axes, where it hides no line
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    axes.set_ylim(bottom=0.7)
    return figure


def embeddings_figure(methods: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Embedded features coloured by class (Fig. 3): every panel of each method's ``embeddings`` of an analysis."""
    from matplotlib.lines import Line2D

    panels_drawn = [(name, method["labels"], panel) for name, method in methods.items() for panel in method["panels"]]
    number = 1 + max((max(labels) for _, labels, _ in panels_drawn), default=0)
    width = ONE_COLUMN if len(panels_drawn) <= 2 else TWO_COLUMNS
    each = width / max(1, len(panels_drawn))
    figure = new_figure(width, each + 0.75)
    colours = distinct_colours(number)
    subplots = figure.subplots(1, max(1, len(panels_drawn)), squeeze=False)[0]
    for axes, letter, (name, labels, panel) in zip(subplots, ascii_lowercase, panels_drawn, strict=False):
        x, y = np.asarray(panel["points"]).T
        size = float(np.clip(1500 / len(x), 1, 8))
        axes.scatter(x, y, s=size, c=[colours[c] for c in labels], linewidths=0)
        axes.set(xticks=[], yticks=[], box_aspect=1)
        axes.set_title(wrapped(f"({letter}) {name} {panel['name']}", each), fontsize=8)
        axes.set_xlabel(f"purity {panel['purity']:.2f}", fontsize=7)
    if number <= 20:
        dots = [Line2D([], [], linestyle="", marker="o", markersize=4, color=colour) for colour in colours]
        figure.legend(
            dots,
            [*map(str, range(number))],
            loc="outside lower center",
            ncols=10,
            fontsize=7,
            frameon=False,
            handletextpad=0.1,
        )
    return figure


def example_figure(example: Mapping[str, Any]) -> Figure:
    """One public image, the clients' answers and their aggregates (Fig. 1); of many classes the 20 most probable."""
    total, example = len(example["classes"]), _most_probable(example, 20)
    names, clients, label = [*map(literal, example["classes"])], example["clients"], example["label"]
    figure = new_figure(TWO_COLUMNS, 2.8 + 0.14 * min(len(clients), 40))
    widths = [1.6, 3, 3 * (len(names) + 1) / len(names), 0.9]
    grid = figure.add_gridspec(2, 4, width_ratios=widths, height_ratios=[max(2, len(clients) / 4), 1.3])
    picture = figure.add_subplot(grid[0, 0])
    pixels = decoded(example["image"])
    picture.imshow(pixels, cmap="gray" if pixels.ndim == 2 else None, vmin=0, vmax=255, interpolation="nearest")
    picture.set(xticks=[], yticks=[])
    picture.set_title(f"image {example['public']}", fontsize=8)
    picture.set_xlabel("label not known" if label is None else f"hidden label:\n{names[label]}", fontsize=7)
    if right := example.get("accuracy"):
        lines = f"over all public\nimages the mean is\nright in {right['plain']:.1f} %,"
        lines += f"\nFedCC's in {right['unknown']:.1f} %"
        below = figure.add_subplot(grid[1, 0])
        below.set_axis_off()
        below.text(0.5, 0.5, lines, ha="center", va="center", fontsize=7)

    sides = (
        ("plain", "(a) forced to name a class", "plain mean"),
        ("unknown", "(b) “unknown” allowed", "FedCC's aggregate"),
    )
    for column, (side, title, aggregate) in enumerate(sides, start=1):
        heat = figure.add_subplot(grid[0, column])
        _answers(heat, np.array([c[side] for c in clients]), len(names))
        heat.set_title(title + (f"\n{len(names)} of {total} classes" if total > len(names) else ""), fontsize=8)
        numbered = column == 1 and len(clients) <= 40
        heat.set_yticks(range(len(clients)) if numbered else [], [f"client {c['client']}" for c in clients] * numbered)
        heat.tick_params(labelsize=7, length=0)
        bars = figure.add_subplot(grid[1, column])
        bars.set_xlim(heat.get_xlim())
        _aggregate(bars, example["aggregates"][side], names, label, aggregate)
        if side == "unknown":
            bars.tick_params(labelleft=False)
            heat.set_xticks([len(names)], ["unknown"], color=BLUE.light)
        else:
            bars.set_ylabel("probability", fontsize=8)
    trust = figure.add_subplot(grid[0, 3])
    trust.barh(range(len(clients)), [c["weight"] for c in clients], color="#777777", height=0.8)
    trust.set(ylim=(len(clients) - 0.5, -0.5), yticks=[])
    trust.set_title("trust μ", fontsize=8)
    trust.tick_params(labelsize=7)
    trust.spines[["top", "right"]].set_visible(False)
    return figure


def _most_probable(example: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """An example with at most so many classes: its own, and those with the most probability."""
    names, label = example["classes"], example["label"]
    if len(names) <= number:
        return example
    mass = np.add(*(np.array(example["aggregates"][side]) for side in ("plain", "unknown")))
    mass += np.mean([c["unknown"][:-1] for c in example["clients"]], 0)
    if label is not None:
        mass[label] = np.inf
    classes = sorted(np.argsort(-mass, kind="stable")[:number].tolist())

    def part(values: Sequence[Any]) -> list[Any]:
        return [values[c] for c in classes] + list(values[len(names) :])  # "unknown" comes last

    return {
        **example,
        "classes": part(names),
        "label": None if label is None else classes.index(label),
        "clients": [{**c, "plain": part(c["plain"]), "unknown": part(c["unknown"])} for c in example["clients"]],
        "aggregates": {side: part(values) for side, values in example["aggregates"].items()},
    }


def _answers(axes: Axes, table: np.ndarray, classes: int) -> None:
    """Probabilities [clients, classes] as shades, then "unknown" in blue."""
    from matplotlib.colors import to_rgb

    full = np.array([to_rgb("black")] * classes + [to_rgb(BLUE.light)])[: table.shape[1]]
    axes.imshow(1 - table[..., None] * (1 - full), aspect="auto", interpolation="nearest")
    axes.set_xticks([])
    if table.shape[1] > classes:
        axes.axvline(classes - 0.5, color="#999999", linewidth=0.8)


def _aggregate(axes: Axes, values: Sequence[float], names: Sequence[str], label: int | None, title: str) -> None:
    """A prediction as bars; the class that it names is green if right, red if wrong."""
    top = int(np.argmax(values))
    colours = ["#BBBBBB"] * len(names)
    colours[top] = "#555555" if label is None else GREEN.light if top == label else OURS.light
    axes.bar(range(len(names)), values, color=colours, width=0.8)
    axes.set(ylim=(0, 1.05), yticks=[0, 0.5, 1])
    axes.set_title(f"{title}: {names[top]} ({values[top]:.2f})", fontsize=7)
    axes.set_xticks(range(len(names)), names, rotation=90 if max(map(len, names)) > 2 else 0)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def decoded(address: str) -> np.ndarray:
    """The pixels of a ``data:image/png;base64,`` address: [H, W], or [H, W, 3]."""
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))) as image:
        return np.asarray(image)
