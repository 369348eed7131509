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

DASHES: dict[str, tuple[float, ...]] = {
    "solid": (),
    "dash": (4, 2),
    "dot": (1, 1.6),
    "dashdot": (5, 1.6, 1, 1.6),
    "longdash": (8, 3),
    "dashdotdot": (5, 1.6, 1, 1.6, 1, 1.6),
    "twodash": (8, 2, 3, 2),
}
"""Lengths of strokes and gaps, in widths of the line; as matplotlib and SVG take them."""

FAMILIES = {"parameters": ("solid", "dot"), "distillation": ("dash", "dashdot")}  # one dash, then a turn of the hues
OTHERS = ("longdash", "twodash", "dashdotdot")  # of other families, and of other packages


class Look(NamedTuple):
    """A colour, and a dash by its name in ``DASHES``."""

    colour: Colour
    dash: str
    width: float = 1.8

    @property
    def print(self) -> dict[str, object]:
        """The same for matplotlib, on white."""
        strokes = DASHES[self.dash]
        return {
            "color": self.colour.light,
            "linestyle": (0, strokes) if strokes else "-",
            "linewidth": self.width,
        }

    @property
    def strokes(self) -> str:
        """The same for SVG's ``stroke-dasharray``."""
        return " ".join(f"{self.width * part:g}" for part in DASHES[self.dash])


def look(method: str) -> Look:
    """FedCC stands out; families, and what is beyond the paper, differ by their dashes."""
    if method == "fedcc":
        return Look(OURS, "solid", 3.0)
    kind = METHODS.get(method)
    if kind is None:
        return Look(HUES[sum(map(ord, method)) % len(HUES)], OTHERS[-1])
    if kind in BEYOND:
        i = BEYOND.index(kind)
        return Look(HUES[i % len(HUES)], OTHERS[i // len(HUES) % 2])
    others = [n for n, k in METHODS.items() if k.family == kind.family and k not in BEYOND and n != "fedcc"]
    i = others.index(method)
    if kind.family == "bound":
        return Look(GREY, ("dashdot", "dot", "longdash")[i % 3])
    dashes = FAMILIES.get(kind.family, ()) + OTHERS[:-1]
    turn = kind.family != "parameters"  # FedAvg and FedMD have two hues
    return Look(HUES[(i + turn) % len(HUES)], dashes[i // len(HUES) % len(dashes)])


def distinct_colours(number: int) -> list[str]:
    """As many colours on white: the palette, or a wheel of hues where that is too small; neighbours differ in shade."""
    if number <= len(PALETTE):
        return [colour.light for colour in PALETTE[:number]]
    wheel = [hls_to_rgb(i / number, (0.36, 0.22)[i % 2], 0.65) for i in range(number)]
    return ["#" + "".join(f"{round(255 * part):02X}" for part in rgb) for rgb in wheel]
