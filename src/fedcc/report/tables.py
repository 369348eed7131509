"""Tables as data: cells with mean, spread and the runs behind them. Pure functions of records; writers come after.

A cell holds runs that differ in their seed alone. Runs of another protocol (rounds, epochs, clients, ...) stand in a
table of their own, runs of a method with other settings in a table of variants.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from fedcc.data.registry import DATASETS
from fedcc.methods import METHODS
from fedcc.report import paper
from fedcc.report.paper import Printed, Scenario
from fedcc.report.records import Run, natural, usual_values

View = Literal["final", "best"]
VIEWS: tuple[View, ...] = ("final", "best")
STATED = ("clients", "models", "rounds", "epochs", "public", "fraction", "lr", "batch", "participation", "validation")
"""What the paper states of its protocol. Where one of these differs, its numbers are not put beside ours."""

AUGMENTATIONS = {"none": "no crop and flip", "standard": "with crop and flip", "strong": "strong augmentation"}
WORDS: dict[str, Callable[[str], str]] = {  # a value of the protocol in words; others as name=value
    "rounds": lambda v: f"T={v}",
    "epochs": lambda v: f"E={v}",
    "clients": lambda v: f"{v} clients",
    "fraction": lambda v: f"{float(v):.3g} of the training set",
    "participation": lambda v: f"{float(v):.3g} of the clients a round",
    "public": lambda v: f"public share {v}",
    "augment": lambda v: AUGMENTATIONS.get(v, f"augmented by {v}"),
    "validation": lambda v: f"on {100 * float(v):g} % of the private samples, held out",
    "models": lambda v: v.replace(",", ", "),
}


@dataclass(frozen=True)
class Value:
    """The mean of some numbers, and the sample standard deviation where there are two or more."""

    mean: float
    spread: float | None
    n: int

    @staticmethod
    def of(numbers: Iterable[float]) -> Value | None:
        found = list(numbers)
        if not found:
            return None
        return Value(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))

    def __str__(self) -> str:
        return f"{self.mean:.1f}" + (f" ±{self.spread:.1f}" if self.spread is not None else "")


@dataclass(frozen=True)
class Cell:
    """One method in one scenario: the runs, one a seed, and the paper's number. Without runs it is missing."""

    runs: tuple[Run, ...] = ()
    printed: Printed | None = None
    marks: Mapping[View, int] = field(default_factory=dict)  # 1 the best of its column, 2 the second best

    @cached_property
    def final(self) -> Value | None:
        return Value.of(r.final for r in self.runs)

    @cached_property
    def best(self) -> Value | None:
        return Value.of(r.best for r in self.runs)

    def value(self, view: View) -> Value | None:
        return self.final if view == "final" else self.best

    @property
    def best_rounds(self) -> str:
        return ", ".join(str(r.best_round) for r in self.runs)

    def by_seed(self, view: View) -> dict[int, float]:
        return {r.seed: r.final if view == "final" else r.best for r in self.runs}

    def reread(self, name: str) -> dict[int, float]:
        """By seed, the final accuracy by another reading of the same models, of the runs that recorded it."""
        return {r.seed: r.readings[name].final for r in self.runs if name in r.readings}


@dataclass(frozen=True)
class Row:
    """A method, or a variant of one, over the scenarios."""

    method: str
    label: str
    extra: str  # what sets it apart from the method as it comes
    cells: Mapping[Scenario, Cell]

    @property
    def title(self) -> str:
        return f"{self.label}, {self.extra}" if self.extra else self.label

    @property
    def name(self) -> tuple[str, str]:
        """The label in two: the method, and what must stand beside it in smaller type."""
        name, _, note = self.label.partition(" (")
        return name, ", ".join(filter(None, (note.rstrip(")"), self.extra)))

    @property
    def bound(self) -> bool:
        """Shares nothing or everything: no competitor, so it gets no mark."""
        kind = METHODS.get(self.method)
        return kind is not None and kind.family == "bound"


@dataclass(frozen=True)
class Table:
    """Methods by scenarios, all of one protocol."""

    slug: str  # names its files and its place on a page
    title: str
    protocol: str  # in words
    scenarios: tuple[Scenario, ...]
    rows: tuple[Row, ...]
    of_paper: bool  # the paper's protocol on the paper's data sets: Table I
    with_paper: bool  # the paper's numbers may stand beside these
    variants: bool = False

    @property
    def runs(self) -> list[Run]:
        return [r for row in self.rows for cell in row.cells.values() for r in cell.runs]

    @property
    def data(self) -> list[str]:
        return list(dict.fromkeys(d for d, _ in self.scenarios))

    def of(self, data: str) -> tuple[Scenario, ...]:
        return tuple(s for s in self.scenarios if s[0] == data)

    def ran(self, data: str) -> bool:
        return any(row.cells[s].runs for row in self.rows for s in self.of(data))

    @property
    def seeds(self) -> str:
        """How many seeds its cells have: ``1``, or ``1 to 3``."""
        numbers = {len(c.runs) for row in self.rows for c in row.cells.values() if c.runs}
        return str(min(numbers)) if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"


def title_of(data: str) -> str:
    return DATASETS[data].title if data in DATASETS else data


def skew_title(skew: str) -> str:
    """The skew as the paper writes it.

    >>> skew_title("dirichlet:0.05"), skew_title("classes:2"), skew_title("iid")
    ('Dir(0.05)', 'N = 2', 'iid')
    """
    kind, _, value = skew.partition(":")
    return {"dirichlet": f"Dir({value})", "classes": f"N = {value}"}.get(kind, skew) if value else skew


def scenario_title(scenario: Scenario) -> str:
    return f"{title_of(scenario[0])}, {skew_title(scenario[1])}"


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "table"


# ----------------------------------------------------------------------------------------------------------- building


def tables(runs: Sequence[Run]) -> list[Table]:
    """All tables that these runs fill: the paper's protocol first, then others, each with its variants behind it."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[Run]] = {}
    for run in runs:
        changed = run.protocol
        if budget_matched(run):
            changed = ()
        place = "paper" if run.data in paper.DATA else run.data
        groups.setdefault((place, changed), []).append(run)

    def order(key: tuple[str, tuple[tuple[str, str], ...]]) -> tuple[Any, ...]:
        place, changed = key
        return place != "paper", natural(place), len(changed), [(n, natural(v)) for n, v in changed]

    made: list[Table] = []
    for key in sorted(groups, key=order):
        plain = [r for r in groups[key] if not r.changed]
        varied = [r for r in groups[key] if r.changed]
        if plain:
            made.append(_table(*key, plain))
        if varied:
            made.append(_table(*key, varied, reference=plain))
    taken: dict[str, int] = {}
    for i, table in enumerate(made):  # two protocols may read the same once blanks and signs are gone
        taken[table.slug] = taken.get(table.slug, 0) + 1
        if taken[table.slug] > 1:
            made[i] = replace(table, slug=f"{table.slug}.{taken[table.slug]}")
    return made


def budget_matched(run: Run) -> bool:
    """FedAvg with as many local steps as FedCC has, otherwise by the paper's protocol: a row of Table I."""
    method, epochs = paper.BUDGET_MATCHED
    return run.data in paper.DATA and run.method == method and run.protocol == (("epochs", str(epochs)),)


def _table(
    place: str, changed: tuple[tuple[str, str], ...], runs: Sequence[Run], reference: Sequence[Run] = ()
) -> Table:
    variants = bool(runs[0].changed)
    of_paper = place == "paper" and not changed and not variants
    with_paper = place == "paper" and not {n for n, _ in changed} & set(STATED)
    if variants:  # beside each variant its method as it comes, in the same scenarios
        wanted = {(r.method, r.scenario) for r in runs}
        runs = [r for r in reference if (r.method, r.scenario) in wanted and not budget_matched(r)] + list(runs)
    held: dict[tuple[str, str, str], dict[Scenario, list[Run]]] = {}
    if of_paper:
        for method in paper.METHODS:
            held[method, _label(method), ""] = {}
    for run in runs:
        extra = ", ".join(f"{n}={v}" for n, v in run.changed)
        if budget_matched(run):
            extra = f"E={run.experiment['epochs']} (budget-matched)"
        held.setdefault((run.method, run.label, extra), {}).setdefault(run.scenario, []).append(run)
    scenarios = _scenarios(runs, everything=of_paper)
    rows = [
        Row(
            method,
            label,
            extra,
            {
                s: Cell(
                    tuple(sorted(cells.get(s, ()), key=lambda r: r.seed)),
                    paper.TABLE1.get((method, s)) if with_paper and not extra else None,
                )
                for s in scenarios
            },
        )
        for (method, label, extra), cells in sorted(held.items(), key=lambda item: _row_order(*item[0]))
    ]
    if not variants:
        rows = _marked(rows, scenarios)
    differs = ", ".join(WORDS[n](v) if n in WORDS else f"{n}={v}" for n, v in changed)
    name = "Table I" if place == "paper" else title_of(place)
    words = ("table1" if place == "paper" else place, differs, "variants" if variants else "")
    return Table(
        slug="-".join(slug(word) for word in words if word),
        title=name + (f": {differs}" if differs else "") + (", variants" if variants else ""),
        protocol=_protocol(runs),
        scenarios=scenarios,
        rows=tuple(rows),
        of_paper=of_paper,
        with_paper=with_paper and not variants,
        variants=variants,
    )


def _label(method: str) -> str:
    kind = METHODS[method]
    return f"{kind.__name__} ({kind.note})" if kind.note else kind.__name__


def _row_order(method: str, label: str, extra: str) -> tuple[Any, ...]:
    known = list(METHODS)
    return known.index(method) if method in known else len(known), label, bool(extra), natural(extra)


def _scenarios(runs: Sequence[Run], everything: bool) -> tuple[Scenario, ...]:
    """The paper's columns in its order, then others by name; the paper's table has all of its columns.

    Data sets with more runs come first, so that a page begins with what can be compared.
    """
    present = {r.scenario for r in runs}
    first = [s for s in paper.SCENARIOS if everything or s in present]
    data = [*paper.DATA, *DATASETS]
    rest = sorted(
        present - set(first),
        key=lambda s: (data.index(s[0]) if s[0] in data else len(data), natural(s[0]), natural(s[1])),
    )
    ran = Counter(r.data for r in runs)
    return tuple(sorted((*first, *rest), key=lambda s: (-ran[s[0]], data.index(s[0]) if s[0] in data else len(data))))


def _marked(rows: Sequence[Row], scenarios: Sequence[Scenario]) -> list[Row]:
    """Best and second best of each column among the methods that compete; what reads the same is a tie."""
    marks: dict[tuple[int, Scenario], dict[View, int]] = {}
    for s in scenarios:
        for view in VIEWS:
            shown = {i: round(v.mean, 1) for i, r in enumerate(rows) if not r.bound and (v := r.cells[s].value(view))}
            if len(shown) < 2:
                continue
            ranks = sorted(set(shown.values()), reverse=True)
            for i, mean in shown.items():
                if mean in ranks[:2]:
                    marks.setdefault((i, s), {})[view] = ranks.index(mean) + 1
    return [
        replace(r, cells={s: replace(c, marks=marks.get((i, s), {})) for s, c in r.cells.items()})
        for i, r in enumerate(rows)
    ]


def _protocol(runs: Sequence[Run]) -> str:
    """What all these runs have in common, in words; what differs between methods is left out."""
    first, *rest = [r for r in runs if not budget_matched(r)] or runs
    common = {n: v for n, v in first.experiment.items() if all(r.experiment.get(n) == v for r in rest)}
    usual = usual_values("", "", "")
    said = [f"{common['clients']} clients"] if "clients" in common else []
    said += [f"T={common['rounds']}"] if "rounds" in common else []
    said += [f"E={common['epochs']}"] if "epochs" in common else []
    said += [f"Adam {common['lr']:g}"] if isinstance(common.get("lr"), float | int) else []
    said += [f"batch {common['batch']}"] if "batch" in common else []
    said += [f"{100 * common['public']:g} % public"] if isinstance(common.get("public"), float | int) else []
    if "augment" in common:
        said.append({"none": "no augmentation", "standard": "crop and flip"}.get(common["augment"], common["augment"]))
    for name in ("fraction", "participation", "stratified", "reset", "wire", "assignment", "resize"):
        if name in common and common[name] != usual[name]:
            said.append(f"{name} {common[name]}")
    return ", ".join(said)


@dataclass(frozen=True)
class Readings:
    """A table of methods, each as it is and with its models read in other ways."""

    table: Table
    title: str  # below the table that it belongs to
    about: str


RE_ESTIMATED = """\
Parameter-based methods, each global model evaluated twice: with BatchNorm's running statistics as they were averaged,
as in the table above, and with statistics re-estimated on the public images, without labels. Training is the same.
"""

OTHERWISE = """\
The same trained models, read in other ways: what follows "read with" is set for the prediction of the test images
alone. Training and what clients and server send are the same; the first row has the same runs as they are.
"""


def readings(table: Table) -> list[Readings]:
    """The methods of a table that have readings, first averaged models, then the others; variants have the former."""
    found = []
    for again in (True, False) if not table.variants else (True,):
        rows = [new for row in table.rows for new in _read(row, again)]
        title = "BatchNorm statistics re-estimated" if again else "Other readings"
        if rows:
            made = replace(
                table,
                slug=f"{table.slug}-{'re-estimated' if again else 'readings'}",
                title=f"{table.title}: {title}",
                scenarios=tuple(s for s in table.scenarios if any(row.cells[s].runs for row in rows)),
                rows=tuple(rows),
                of_paper=False,
                with_paper=False,
            )
            found.append(Readings(made, title, RE_ESTIMATED if again else OTHERWISE))
    return found


def _read(row: Row, again: bool) -> list[Row]:
    """A row's runs that have such readings, as they are and by each of these."""
    every = [r for cell in row.cells.values() for r in cell.runs]
    names = [n for n in dict.fromkeys(n for r in every for n in r.readings) if (n == "re-estimated") is again]

    def made(word: str, read: Callable[[Run], Run | None]) -> Row:
        """A cell is empty where one of its runs lacks this reading: all rows are of the same runs."""
        cells = {}
        for scenario, cell in row.cells.items():
            found = [read(r) for r in cell.runs if any(n in r.readings for n in names)]
            cells[scenario] = Cell(tuple(r for r in found if r) if all(found) else ())
        return replace(row, extra=", ".join(filter(None, (row.extra, word))), cells=cells)

    def by(name: str) -> Callable[[Run], Run | None]:
        return lambda r: replace(r, **vars(r.readings[name])) if name in r.readings else None

    own = made("averaged" if again else "", lambda r: r)
    return [own, *(made(n if again else f"read with {n}", by(n)) for n in names)] if names else []


# ------------------------------------------------------------------------------------------------------------ Table II

TESTS = {
    "local": "local",
    "global": "global",
    "valid": "unknown valid",
}
"""Table II's columns: test data like the client's own; all test data; the same where "unknown" counts as right for
classes outside the client's majority set."""


@dataclass(frozen=True)
class ClientValue:
    """Clients' own models: the mean over clients and seeds, with the two spreads apart."""

    mean: float
    over_clients: float | None  # standard deviation over the clients of a run, averaged over seeds
    over_seeds: float | None  # of the runs' means
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.1f}"


@dataclass(frozen=True)
class ClientCell:
    """One method in one scenario and one test; ``plain`` beside ``valid`` tells what the rule adds."""

    value: ClientValue | None
    runs: tuple[Run, ...] = ()
    printed: Printed | None = None


@dataclass(frozen=True)
class ClientTable:
    """Table II: the clients' own models, for the scenarios and methods of a table."""

    of: Table
    scenarios: tuple[Scenario, ...]
    rows: tuple[tuple[Row, Mapping[tuple[Scenario, str], ClientCell]], ...]

    @property
    def slug(self) -> str:
        return (
            self.of.slug.replace("table1", "table2") if self.of.slug.startswith("table1") else f"{self.of.slug}-clients"
        )

    @property
    def title(self) -> str:
        return (
            self.of.title.replace("Table I", "Table II", 1)
            if self.of.title.startswith("Table I")
            else f"{self.of.title}: clients' own models"
        )

    @property
    def data(self) -> list[str]:
        return list(dict.fromkeys(d for d, _ in self.scenarios))


def client_table(table: Table) -> ClientTable | None:
    """The clients' own models after their last local training; None where no run says."""
    rows = []
    for row in table.rows:
        kind = METHODS.get(row.method)
        if kind is not None and not kind.trains_clients:
            continue  # `centralized`: the clients' networks are never trained
        cells = {(s, test): _client_cell(row, s, test, table.with_paper) for s in table.scenarios for test in TESTS}
        if any(c.value for c in cells.values()):
            rows.append((row, cells))
    scenarios = tuple(s for s in table.scenarios if any(cells[s, t].value for _, cells in rows for t in TESTS))
    return ClientTable(table, scenarios, tuple(rows)) if rows else None


def _client_cell(row: Row, scenario: Scenario, test: str, with_paper: bool) -> ClientCell:
    runs = tuple(r for r in row.cells[scenario].runs if _accuracies(r, test))
    each = [_accuracies(r, test) for r in runs]
    value = None
    if each:
        over = [statistics.stdev(v) for v in each if len(v) > 1]
        means = Value.of(statistics.fmean(v) for v in each)
        assert means is not None
        value = ClientValue(means.mean, statistics.fmean(over) if over else None, means.spread, len(each))
    printed = None
    if with_paper and not row.extra and test != "global":  # the paper's global column is the one with the rule
        printed = paper.TABLE2.get(("local" if test == "local" else "global", row.method, scenario))
    return ClientCell(value, runs, printed)


def _accuracies(run: Run, test: str) -> list[float]:
    """The clients' accuracies; a method without "unknown" has the same with the rule and without."""
    found = run.tests.get(test)
    if found is None and test == "valid" and run.method != "fedcc":
        found = run.tests.get("global")
    return list(found.values()) if found else []


# ------------------------------------------------------------------------------------------------------- what is open


@dataclass(frozen=True)
class Standing:
    """How far one scenario of the paper's table is."""

    scenario: Scenario
    missing: tuple[str, ...]  # labels of the methods without a run
    fewer: tuple[
        tuple[str, int], ...
    ]  # labels of those with fewer seeds than the paper's three, and how many they have
    below: tuple[tuple[str, float], ...]  # labels of those below the paper's number, and by how much


def standing(table: Table) -> list[Standing]:
    """What the paper's table lacks."""
    found = []
    rows = [r for r in table.rows if r.method in paper.METHODS and not r.extra]
    for s in table.scenarios:
        cells = [(r.label, r.cells[s]) for r in rows]
        found.append(
            Standing(
                s,
                tuple(label for label, c in cells if not c.runs),
                tuple((label, len(c.runs)) for label, c in cells if 0 < len(c.runs) < paper.SEEDS),
                tuple(
                    (label, c.final.mean - c.printed.mean)
                    for label, c in cells
                    if c.final and c.printed and c.final.mean < c.printed.mean
                ),
            )
        )
    return found


def filled(table: Table) -> int:
    """How many of the paper's cells have a run."""
    rows = [r for r in table.rows if not r.extra]
    return sum((r.method, s) in paper.TABLE1 and bool(c.runs) for r in rows for s, c in r.cells.items())


@dataclass(frozen=True)
class Margin:
    """By how much a method is ahead of the nearest other; below 0 it is behind."""

    rival: str
    points: float
    seeds: int  # that both have, and that it was taken over; 0: between the means of different ones
    of: int  # seeds of the method itself

    @staticmethod
    def between(ours: Mapping[int, float], rival: str, theirs: Mapping[int, float]) -> Margin:
        """Over the seeds that both have, hence on the same data."""
        if shared := sorted(ours.keys() & theirs.keys()):
            points = statistics.fmean(ours[seed] - theirs[seed] for seed in shared)
        else:
            points = statistics.fmean(ours.values()) - statistics.fmean(theirs.values())
        return Margin(rival, points, len(shared), len(ours))

    @staticmethod
    def least(ours: Mapping[int, float], rivals: Mapping[str, Mapping[int, float]]) -> Margin | None:
        """To the nearest of those that have a run."""
        margins = [Margin.between(ours, rival, theirs) for rival, theirs in rivals.items() if theirs]
        return min(margins, key=lambda margin: margin.points, default=None)

    @property
    def note(self) -> str:
        """What it was taken over, where that is not all that the method has."""
        if self.seeds == self.of:
            return ""
        return f"{self.seeds} of {self.of} seeds" if self.seeds else "other seeds"


@dataclass(frozen=True)
class Lead:
    """One method against the nearest of the others in one scenario."""

    scenario: Scenario
    rivals: int  # how many others have runs
    views: Mapping[View, tuple[Value, Margin]]  # its own value, and by how much it is ahead
    reread: Margin | None  # of its final value, to others with re-estimated BatchNorm statistics
    printed: tuple[str, float] | None  # the best other and the margin by the paper's numbers


def leads(table: Table, method: str = "fedcc") -> list[Lead]:
    """The method against its competitors, in every scenario where it has one."""
    found = []
    others = [r for r in table.rows if not r.bound and r.method != method]
    own = [r for r in table.rows if r.method == method and not r.extra]
    for s in table.scenarios:
        cell = next((r.cells[s] for r in own if r.cells[s].runs), None)
        if cell is None:
            continue
        views: dict[View, tuple[Value, Margin]] = {}
        for view in VIEWS:
            shown = {r.title: r.cells[s].by_seed(view) for r in others}
            if (value := cell.value(view)) and (nearest := Margin.least(cell.by_seed(view), shown)):
                views[view] = value, nearest
        if not views:
            continue
        reread = Margin.least(cell.by_seed("final"), {r.title: r.cells[s].reread("re-estimated") for r in others})
        said = {r.title: p.mean for r in others if (p := r.cells[s].printed)}
        ours = next((p.mean for r in own if (p := r.cells[s].printed)), None)
        top = max(said, key=lambda title: said[title]) if said else ""
        printed = (top, ours - said[top]) if said and ours is not None else None
        found.append(Lead(s, len({r.method for r in others if r.cells[s].runs}), views, reread, printed))
    return found
