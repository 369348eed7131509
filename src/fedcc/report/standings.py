"""What the paper's table lacks, and whether FedCC is ahead."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from fedcc.report import paper
from fedcc.report.cells import ACCURACIES, Accuracy, Cell, Table
from fedcc.report.paper import Scenario, Value


@dataclass(frozen=True)
class Standing:
    """How complete one scenario of the paper's table is; methods by their labels."""

    scenario: Scenario
    missing: tuple[str, ...]  # methods without a run
    fewer: tuple[tuple[str, int], ...]  # methods with fewer seeds than the paper, and how many
    below: tuple[tuple[str, float], ...]  # methods below the paper's number, and by how much


def standings(table: Table) -> list[Standing]:
    """What the paper's table lacks, by scenario."""
    rows = [r for r in table.rows if r.method in paper.METHODS and not r.extra]
    by_scenario = {s: [(r.label, r.cells[s]) for r in rows] for s in table.scenarios}
    return [
        Standing(
            s,
            tuple(label for label, c in cells if not c.runs),
            tuple((label, len(c.runs)) for label, c in cells if 0 < len(c.runs) < paper.SEEDS),
            tuple(
                (label, c.final.mean - printed.mean)
                for label, c in cells
                if c.final and (printed := c.printed.get("final")) and c.final.mean < printed.mean
            ),
        )
        for s, cells in by_scenario.items()
    ]


def filled(table: Table) -> int:
    """How many of the paper's cells have a run."""
    rows = [r for r in table.rows if not r.extra]
    return sum((r.method, s) in paper.TABLE1 and bool(c.runs) for r in rows for s, c in r.cells.items())


@dataclass(frozen=True)
class Margin:
    """By how much a method is ahead of a rival; below 0 it trails."""

    rival: str
    points: float
    seeds: int  # that both have: the margin is over these; 0: between means over different seeds
    of: int  # seeds of the method itself

    @property
    def note(self) -> str:
        """Which seeds it is over, if not all of the method's."""
        if self.seeds == self.of:
            return ""
        return f"{self.seeds} of {self.of} seeds" if self.seeds else "other seeds"


def nearest(ours: Mapping[int, float], rivals: Mapping[str, Mapping[int, float]]) -> Margin | None:
    """The least margin to a rival, each over the seeds that both have, thus on the same data; None without runs."""
    margins = []
    for rival, theirs in rivals.items():
        if ours and theirs:
            points = statistics.fmean(ours.values()) - statistics.fmean(theirs.values())
            if shared := sorted(ours.keys() & theirs.keys()):
                points = statistics.fmean(ours[seed] - theirs[seed] for seed in shared)
            margins.append(Margin(rival, points, len(shared), len(ours)))
    return min(margins, key=lambda margin: margin.points, default=None)


@dataclass(frozen=True)
class Lead:
    """FedCC against the nearest of the others in one scenario."""

    scenario: Scenario
    rivals: int  # others that have runs
    margins: Mapping[Accuracy, tuple[Value, Margin]]  # its own value, and by how much it is ahead
    reread: Margin | None  # of its final value, to others with re-estimated BatchNorm statistics
    printed: Margin | None  # by the paper's numbers


def leads(table: Table) -> list[Lead]:
    """FedCC against its competitors, in every scenario where it has one; beyond the paper, against those alone."""
    others = [r for r in table.rows if not r.bound and r.method != "fedcc" and (r.beyond or not table.beyond)]
    own = [r for r in table.rows if r.method == "fedcc" and not r.extra]
    result = []
    for s in table.scenarios:
        cell = next((r.cells[s] for r in own if r.cells[s].runs), Cell())
        rivals = {r.title: r.cells[s] for r in others}
        margins: dict[Accuracy, tuple[Value, Margin]] = {}
        for accuracy in ACCURACIES:
            margin = nearest(cell.by_seed(accuracy), {name: c.by_seed(accuracy) for name, c in rivals.items()})
            if (value := cell.value(accuracy)) and margin:
                margins[accuracy] = value, margin
        if margins:
            reread = nearest(cell.by_seed("final"), {n: c.reread("re-estimated") for n, c in rivals.items()})
            by_paper = {n: {0: v.mean} for n, c in {"": cell, **rivals}.items() if (v := c.printed.get("final"))}
            printed = nearest(by_paper.pop("", {}), by_paper)
            result.append(Lead(s, len({r.method for r in others if r.cells[s].runs}), margins, reread, printed))
    return result


@dataclass(frozen=True)
class Ranking:
    """Methods by their mean final accuracy over the scenarios in which all of them have a run with one seed."""

    means: tuple[tuple[str, float], ...]  # by label, the highest first
    scenarios: tuple[Scenario, ...]
    of: int  # scenarios in which any of them has such a run


def nearest_rivals(table: Table, seed: int = 0, number: int = 3) -> Ranking | None:
    """The baselines of the paper with the highest means; None before all have run in one scenario."""
    rows = [r for r in table.rows if r.method in paper.METHODS and r.method != "fedcc" and not r.extra]
    finals = {
        r.label: {s: by_seed[seed] for s, c in r.cells.items() if seed in (by_seed := c.by_seed("final"))} for r in rows
    }
    run = [s for s in table.scenarios if any(s in found for found in finals.values())]
    complete = tuple(s for s in run if all(s in found for found in finals.values()))
    if not complete:
        return None
    means = {label: statistics.fmean(found[s] for s in complete) for label, found in finals.items()}
    highest = sorted(means.items(), key=lambda item: -item[1])[:number]
    return Ranking(tuple(highest), complete, len(run))


@dataclass(frozen=True)
class Duel:
    """FedCC's final accuracy beside that of its nearest rival."""

    ours: Value
    rival: str
    theirs: Value
    points: float
    note: str = ""  # which seeds the points are over, if not all


@dataclass(frozen=True)
class ScenarioDuels:
    """One scenario: the duel as measured here, and the paper's."""

    scenario: Scenario
    rivals: int  # others that have runs
    here: Duel
    paper: Duel


def duels(table: Table) -> list[ScenarioDuels]:
    """FedCC and its nearest rival, here and in the paper, in every scenario where both have a run."""
    finals = {(r.title, s): v for r in table.rows for s, c in r.cells.items() if (v := c.final)}
    printed = {(r.title, s): v for r in table.rows for s, c in r.cells.items() if (v := c.printed.get("final"))}
    result = []
    for lead in leads(table):
        s, by_paper = lead.scenario, lead.printed
        if "final" in lead.margins and by_paper:
            ours, margin = lead.margins["final"]
            here = Duel(ours, margin.rival, finals[margin.rival, s], margin.points, margin.note)
            theirs = printed[by_paper.rival, s]
            there = Duel(paper.TABLE1["fedcc", s], by_paper.rival, theirs, by_paper.points)
            result.append(ScenarioDuels(s, lead.rivals, here, there))
    return result
