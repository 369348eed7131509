"""Figures for print and for a quick look. Matplotlib is imported where it is used."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcc.core.files import make_folder, written_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
    for (name, curve), colour in zip(runs.items(), _colours(len(runs)), strict=True):
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
    _finish(axes, title)
    return figure


def bytes_figure(
    runs: Mapping[str, Mapping[str, Any]], title: str = "", styles: Mapping[str, Mapping[str, Any]] | None = None
) -> Figure:
    """Accuracy against the bytes sent and received so far, a line per run; ``runs`` are summaries by name.

    A hollow point stands where a method ends that needs the clients' models for its predictions.
    """
    figure = _figure(6.0, 3.8)
    axes = figure.subplots()
    for (name, summary), colour in zip(runs.items(), _colours(len(runs)), strict=True):
        if curve := accuracy_by_bytes(summary):
            sent, accuracy = zip(*curve, strict=True)
            style = {"color": colour} | dict((styles or {}).get(name, {}))
            colour = style["color"]
            axes.plot(np.array(sent) / 1e6, accuracy, marker="o", markersize=4, label=name, **style)
            if models := summary["bytes"]["models"]:
                end = [sent[-1] / 1e6, (sent[-1] + models) / 1e6]
                axes.plot(end, [accuracy[-1]] * 2, ":o", markersize=5, color=colour, markerfacecolor="none")
    handed = any(summary["bytes"]["models"] for summary in runs.values())
    axes.set_xlabel("megabytes up and down, all clients" + ("; hollow: and their models at the end" if handed else ""))
    axes.set_ylabel("accuracy on the global test set (%)")
    if axes.lines:
        axes.set_xscale("log")
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
    figure = _figure(3.2 * max(1, len(names)) + 0.8, 3.0)
    for axes, name in zip(np.ravel(figure.subplots(1, max(1, len(names)))), names, strict=False):
        clients = log[name]
        for (k, values), colour in zip(clients.items(), _class_colours(len(clients)), strict=False):
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


def margins_figure(
    panels: Mapping[str, Mapping[str, Mapping[str, Any]]],
    model: str = "clients",
    styles: Mapping[str, Mapping[str, Any]] | None = None,
) -> Figure:
    """Histograms of decision margins with log counts and their means (Fig. 2), a panel per scenario.

    A panel holds the ``margins`` of an analysis by method; ``model`` says whose: ``clients``, ``global``, ``client 0``.
    """
    figure = _figure(3.5 * max(1, len(panels)) + 0.2, 3.1)
    drawn = figure.subplots(1, max(1, len(panels)), sharey=True, squeeze=False)[0]
    for axes, (title, methods) in zip(drawn, panels.items(), strict=False):
        for (name, found), colour in zip(methods.items(), _colours(len(methods)), strict=True):
            one = next((m for m in found["models"] if m["name"] == model), None)
            if one is None:
                continue
            colour = (styles or {}).get(name, {}).get("color", colour)
            label = f"{name}, mean {one['mean']:+.2f}".replace("-", "\N{MINUS SIGN}")
            axes.stairs(one["counts"], found["edges"], color=colour, fill=True, alpha=0.15)
            axes.stairs(one["counts"], found["edges"], color=colour, linewidth=1.2, label=label)
            axes.axvline(one["mean"], color=colour, linestyle="--", linewidth=1.2)
        axes.axvline(0, color="grey", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_xlim(-1, 1)
        axes.set_xticks([-1, -0.5, 0, 0.5, 1], ["−1", "−0.5", "0", "0.5", "1"])
        axes.set_xlabel("decision margin")
        axes.set_title(title, fontsize=9)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, loc="upper center", framealpha=1, edgecolor="none")
    lines = max((len(methods) for methods in panels.values()), default=0)
    drawn[0].set_ylim(0.7, 2.0 ** (1 + lines) * drawn[0].get_ylim()[1])  # the legend stands above the histograms
    drawn[0].set_ylabel("test samples, all clients" if model == "clients" else "test samples")
    return figure


def embeddings_figure(panels: Mapping[str, Mapping[str, Any]], classes: Sequence[str] = ()) -> Figure:
    """Embedded features coloured by class (Fig. 3): every panel of each method's ``embeddings`` of an analysis."""
    shown = [(name, found["labels"], panel) for name, found in panels.items() for panel in found["panels"]]
    number = 1 + max((max(labels) for _, labels, _ in shown), default=0)
    figure = _figure(2.3 * max(1, len(shown)), 2.9)
    drawn = figure.subplots(1, max(1, len(shown)), squeeze=False)[0]
    colours = _class_colours(number)
    for axes, letter, (name, labels, panel) in zip(drawn, "abcdefghijklmnopqrstuvwxyz", shown, strict=False):
        x, y = np.asarray(panel["points"]).T
        size = float(np.clip(3000 / len(x), 2, 12))
        axes.scatter(x, y, s=size, c=[colours[c] for c in labels], linewidths=0)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_box_aspect(1)
        axes.set_title(f"({letter}) {name} {panel['name']}", fontsize=9)
        axes.set_xlabel(f"purity {panel['purity']:.2f}", fontsize=8)
    if number <= 20:
        from matplotlib.lines import Line2D

        names = classes or [str(c) for c in range(number)]
        dots = [Line2D([], [], linestyle="", marker="o", markersize=4, color=colours[c]) for c in range(number)]
        figure.legend(
            dots, names[:number], loc="outside lower center", ncols=10, fontsize=7, frameon=False, handletextpad=0.1
        )
    return figure


def example_figure(example: Mapping[str, Any]) -> Figure:
    """One public image, what each client says of it with and without "unknown", and what comes of it (Fig. 1).

    Of many classes the foremost 20 are shown.
    """
    total, example = len(example["classes"]), _foremost(example, 20)
    names, clients, label = example["classes"], example["clients"], example["label"]
    figure = _figure(5.2 + 0.3 * len(names), 2.6 + 0.2 * min(len(clients), 40))
    widths = [1.6, 3, 3 * (len(names) + 1) / len(names), 0.9]
    grid = figure.add_gridspec(2, 4, width_ratios=widths, height_ratios=[max(2, len(clients) / 4), 1.3])
    picture = figure.add_subplot(grid[0, 0])
    pixels = decoded(example["image"])
    picture.imshow(pixels, cmap="gray" if pixels.ndim == 2 else None, vmin=0, vmax=255, interpolation="nearest")
    picture.set_xticks([])
    picture.set_yticks([])
    picture.set_title(f"public image {example['public']}", fontsize=9)
    picture.set_xlabel("label not known" if label is None else f"hidden label: {names[label]}", fontsize=8)
    if right := example.get("accuracy"):
        lines = (
            f"over all public images\nthe mean is right in {right['plain']:.1f} %,\nFedCC's in {right['unknown']:.1f} %"
        )
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
        heat.set_title(title + (f", {len(names)} of {total} classes" if total > len(names) else ""), fontsize=9)
        numbered = column == 1 and len(clients) <= 40
        heat.set_yticks(range(len(clients)) if numbered else [], [f"client {c['client']}" for c in clients] * numbered)
        heat.tick_params(labelsize=7, length=0)
        bars = figure.add_subplot(grid[1, column])
        bars.set_xlim(heat.get_xlim())
        _aggregate(bars, example["aggregates"][side], names, label, aggregate)
        if side == "unknown":
            bars.tick_params(labelleft=False)
            heat.set_xticks([len(names)], ["unknown"], color=COLOURS[0])
        else:
            bars.set_ylabel("probability", fontsize=8)
    trust = figure.add_subplot(grid[0, 3])
    trust.barh(range(len(clients)), [c["weight"] for c in clients], color="#777777", height=0.8)
    trust.set_ylim(len(clients) - 0.5, -0.5)
    trust.set_yticks([])
    trust.set_title("trust μ", fontsize=9)
    trust.tick_params(labelsize=7)
    trust.spines[["top", "right"]].set_visible(False)
    return figure


def _foremost(example: Mapping[str, Any], most: int) -> Mapping[str, Any]:
    """An example with at most so many classes: its own, and those that get the most from clients and aggregates."""
    names, label = example["classes"], example["label"]
    if len(names) <= most:
        return example
    mass = np.add(*(np.array(example["aggregates"][side]) for side in ("plain", "unknown")))
    mass += np.mean([c["unknown"][:-1] for c in example["clients"]], 0)
    if label is not None:
        mass[label] = np.inf
    kept = sorted(np.argsort(-mass, kind="stable")[:most].tolist())

    def part(values: Sequence[Any]) -> list[Any]:
        return [values[c] for c in kept] + list(values[len(names) :])  # "unknown" comes behind them

    return {
        **example,
        "classes": part(names),
        "label": None if label is None else kept.index(label),
        "clients": [{**c, "plain": part(c["plain"]), "unknown": part(c["unknown"])} for c in example["clients"]],
        "aggregates": {side: part(values) for side, values in example["aggregates"].items()},
    }


def _answers(axes: Axes, table: np.ndarray, classes: int) -> None:
    """Probabilities [clients, classes] as shades, "unknown" behind them in blue."""
    from matplotlib.colors import to_rgb

    full = np.array([to_rgb("black")] * classes + [to_rgb(COLOURS[0])])[: table.shape[1]]
    axes.imshow(1 - table[..., None] * (1 - full), aspect="auto", interpolation="nearest")
    axes.set_xticks([])
    if table.shape[1] > classes:
        axes.axvline(classes - 0.5, color="#999999", linewidth=0.8)


def _aggregate(axes: Axes, values: Sequence[float], names: Sequence[str], label: int | None, title: str) -> None:
    """A prediction as bars; the class that it names is green if right, red if wrong."""
    named = int(np.argmax(values))
    colours = ["#BBBBBB"] * len(names)
    colours[named] = "#555555" if label is None else COLOURS[2] if named == label else COLOURS[1]
    axes.bar(range(len(names)), values, color=colours, width=0.8)
    axes.set_ylim(0, 1.05)
    axes.set_yticks([0, 0.5, 1])
    axes.set_title(f"{title}: {names[named]} ({values[named]:.2f})", fontsize=8)
    axes.set_xticks(range(len(names)), names, rotation=90 if max(map(len, names)) > 2 else 0)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def decoded(address: str) -> np.ndarray:
    """The pixels of a ``data:image/png;base64,`` address: [H, W], or [H, W, 3]."""
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))) as image:
        return np.asarray(image)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure whole, in the format its name ends in."""
    ending = path.suffix.lstrip(".").lower()
    if ending not in FORMATS:
        raise ValueError(f"a figure's name must end in {', '.join('.' + f for f in FORMATS)}, got {path.name!r}")
    from matplotlib import rc_context

    make_folder(path.parent)
    with rc_context({"svg.hashsalt": "fedcc"}), written_whole(path) as file:
        figure.savefig(file, format=ending, dpi=150, metadata=_undated(ending))
    return path


def _undated(ending: str) -> dict[str, Any]:
    """No dates in files: the same numbers give the same bytes (the salt does it for the names inside an svg)."""
    return {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[ending]


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _finish(axes: Axes, title: str) -> None:
    """The legend beside the axes, and the title."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    if title:
        axes.set_title(title, fontsize=10)


def _colours(number: int) -> list[str]:
    """So many colours, from the start again where there are more."""
    return [COLOURS[i % len(COLOURS)] for i in range(number)]


def _class_colours(number: int) -> list[Any]:
    """A colour for each class: distinct ones up to 20, then neighbours on a wheel."""
    from matplotlib import colormaps

    if number <= 10:
        return list(colormaps["tab10"].colors)  # type: ignore[attr-defined]
    if number <= 20:
        return list(colormaps["tab20"].colors)  # type: ignore[attr-defined]
    return list(colormaps["hsv"](np.linspace(0, 1, number, endpoint=False)))


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    """Values with gaps where there are none."""
    return np.array([np.nan if v is None else v for v in values])
