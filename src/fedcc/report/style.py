"""The one source of colours: a look for each method wherever it is drawn, and a palette for everything else."""

from __future__ import annotations

from colorsys import hls_to_rgb
from typing import NamedTuple

from fedcc.methods import BEYOND, METHODS


class Colour(NamedTuple):
    """For a light background and for a dark one; each stands out by at least 3:1, WCAG's least for lines."""

    light: str
    dark: str


INK = Colour("#1D2126", "#E6E8EA")  # the colour of text
OURS = Colour("#D55E00", "#D55E00")
BLUE = Colour("#0064AC", "#2F7DE1")
GREEN = Colour("#009E73", "#00A87D")
PINK = Colour("#D94FA5", "#DE6FB4")
AMBER = Colour("#734700", "#E8A820")
SKY = Colour("#3598E8", "#7FD4FF")
PURPLE = Colour("#5A2A9C", "#B38AFF")
WINE = Colour("#8C1D40", "#D9436A")
OLIVE = Colour("#748A00", "#B4D000")
GREY = Colour("#888888", "#8E8E8E")
HUES = (BLUE, GREEN, PINK, AMBER, SKY, INK, PURPLE)
PALETTE = (BLUE, GREEN, PINK, AMBER, SKY, PURPLE, WINE, OLIVE, GREY, OURS)  # for variants, clients, classes
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}  # as matplotlib says it


class Look(NamedTuple):
    """A colour, and a dash by the name that it has in plotly."""

    colour: Colour
    dash: str
    width: float = 1.8

    @property
    def print(self) -> dict[str, object]:
        """The same for matplotlib, on white."""
        return {"color": self.colour.light, "linestyle": DASHES[self.dash], "linewidth": self.width}


def look(method: str) -> Look:
    """FedCC stands out; families, and what is beyond the paper, differ by their dashes."""
    if method == "fedcc":
        return Look(OURS, "solid", 3.0)
    kind = METHODS.get(method)
    if kind is None:
        return Look(HUES[sum(map(ord, method)) % len(HUES)], "dashdot")
    if kind in BEYOND:
        i = BEYOND.index(kind)
        return Look(HUES[i % len(HUES)], ("longdash", "dashdot")[i // len(HUES) % 2])
    others = [n for n, k in METHODS.items() if k.family == kind.family and k not in BEYOND and n != "fedcc"]
    i = others.index(method)
    if kind.family == "bound":
        return Look(GREY, ("dashdot", "dot", "longdash")[i % 3])
    first, turn = ("solid", 0) if kind.family == "parameters" else ("dash", 1)  # FedAvg and FedMD: two hues
    return Look(HUES[(i + turn) % len(HUES)], (first, "dot")[i // len(HUES) % 2])


def distinct_colours(number: int) -> list[str]:
    """As many colours on white: the palette, or a wheel of hues where that is too small; neighbours differ in shade."""
    if number <= len(PALETTE):
        return [colour.light for colour in PALETTE[:number]]
    wheel = [hls_to_rgb(i / number, (0.36, 0.22)[i % 2], 0.65) for i in range(number)]
    return ["#" + "".join(f"{round(255 * part):02X}" for part in rgb) for rgb in wheel]
