"""One look for each method wherever it is drawn: colours that colour-blind eyes tell apart, dashes beyond them."""

from __future__ import annotations

from typing import NamedTuple

from fedcc.methods import METHODS

INK = "ink"  # the colour of text, whatever the background
OURS = "#D55E00"
HUES = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK, "#8C6BB1")
GREY = "#888888"
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}  # as matplotlib says it


class Look(NamedTuple):
    """A colour, and a dash by the name that it has in plotly."""

    colour: str
    dash: str
    width: float = 1.8

    @property
    def print(self) -> dict[str, object]:
        """The same for matplotlib, on white."""
        colour = "black" if self.colour == INK else self.colour
        return {"color": colour, "linestyle": DASHES[self.dash], "linewidth": self.width}


def look(method: str) -> Look:
    """FedCC stands out; families differ by their dashes."""
    if method == "fedcc":
        return Look(OURS, "solid", 3.0)
    kind = METHODS.get(method)
    if kind is None:
        return Look(HUES[sum(map(ord, method)) % len(HUES)], "dashdot")
    others = [n for n, k in METHODS.items() if k.family == kind.family and n != "fedcc"]
    i = others.index(method)
    if kind.family == "bound":
        return Look(GREY, ("dashdot", "dot", "longdash")[i % 3])
    first, turn = ("solid", 0) if kind.family == "parameters" else ("dash", 1)  # FedAvg and FedMD: two hues
    return Look(HUES[(i + turn) % len(HUES)], (first, "dot")[i // len(HUES) % 2])
