"""Tables as data, built from records.

A cell holds runs that differ only in their seed. Runs of another protocol (rounds, epochs, clients, ...) have a table
of their own, and so have runs of methods with other settings: a table of variants. On the paper's data sets, methods
beyond the paper have a table of their own too, so that Table I stays the paper's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from fedcc.data.registry import DATASETS
from fedcc.experiments.options import DEFAULTS
from fedcc.methods import BEYOND, METHODS
from fedcc.report import paper
from fedcc.report.cells import ACCURACIES, TESTS, Accuracy, Cell, MethodRow, Table
from fedcc.report.paper import Scenario, Value
from fedcc.report.records import Changes, RunRecord
from fedcc.report.titles import slug, title_of
from fedcc.report.values import natural, position

STATED = (
    *("clients", "models", "rounds", "epochs", "public", "fraction", "optimizer", "lr", "batch", "participation"),
    "validation",
)
"""What the paper states of its protocol. If one of these differs, its numbers are not compared with ours."""

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
COMMON: dict[str, Callable[[Any], str]] = {  # what runs have in common, in words
    **{name: WORDS[name] for name in ("clients", "rounds", "epochs")},
    "lr": lambda v: f"Adam {v:g}",
    "batch": lambda v: f"batch {v}",
    "public": lambda v: f"{100 * v:g} % public",
    "augment": lambda v: {"none": "no augmentation", "standard": "crop and flip"}.get(v, v),
}
UNUSUAL = (
    *("momentum", "fraction", "participation", "stratified", "reset", "wire", "share", "answer_epsilon", "assignment"),
    "resize",
)
"""What else is named, if it is not the default."""

READINGS = {
    "BatchNorm statistics re-estimated": """\
Parameter-based methods, each global model evaluated twice: with BatchNorm's running statistics as they were averaged,
as in the table above, and with statistics re-estimated on the public images, without labels. Training is the same.
""",
    "Other readings": """\
The same trained models, read in other ways: what follows "read with" applies only when the test images are predicted.
Training and messages are the same; the first row shows the same runs unchanged.
""",
}
"""Titles of tables of readings, whose last word is part of their files' names, and what they show."""


def tables(runs: Sequence[RunRecord]) -> list[Table]:
    """All tables that these runs fill: the paper's protocol first, then others, each followed by its variants."""
    groups: dict[tuple[str, Changes], list[RunRecord]] = {}
    for run in runs:
        topic = "paper" if run.data in paper.DATA else run.data
        if topic == "paper" and METHODS.get(run.method) in BEYOND:
            topic = "beyond"
        groups.setdefault((topic, () if budget_matched(run) else run.protocol), []).append(run)

    def order(key: tuple[str, Changes]) -> tuple[Any, ...]:
        topic, changed = key
        return topic != "paper", topic != "beyond", natural(topic), len(changed), [(n, natural(v)) for n, v in changed]

    result: list[Table] = []
    for key in sorted(groups, key=order):
        plain = [r for r in groups[key] if not r.changed_settings]
        varied = [r for r in groups[key] if r.changed_settings]
        papers = groups.get(("paper", key[1]), ()) if key[0] == "beyond" else ()
        beside = [r for r in papers if not r.changed_settings]
        result += [_table(*key, plain, reference=beside)] if plain else []
        result += [_table(*key, varied, reference=plain)] if varied else []
    uses: Counter[str] = Counter()
    for i, table in enumerate(result):  # two protocols may have one slug, as it has no blanks and signs
        uses[table.slug] += 1
        if uses[table.slug] > 1:
            result[i] = replace(table, slug=f"{table.slug}.{uses[table.slug]}")
    return result


def budget_matched(run: RunRecord) -> bool:
    """FedAvg with as many local steps as FedCC has, otherwise by the paper's protocol: a row of Table I."""
    method, epochs = paper.BUDGET_MATCHED
    return run.data in paper.DATA and run.method == method and run.protocol == (("epochs", str(epochs)),)


def _table(topic: str, changed: Changes, runs: Sequence[RunRecord], reference: Sequence[RunRecord] = ()) -> Table:
    variants = bool(runs[0].changed_settings)
    of_paper = topic == "paper" and not changed and not variants
    with_paper = topic == "paper" and not {n for n, _ in changed} & set(STATED)
    if topic == "beyond" and not variants:  # beside them the paper's methods, in the same scenarios
        present = {r.scenario for r in runs}
        runs = [r for r in reference if r.scenario in present] + list(runs)
    if variants:  # beside each variant the method with its defaults, in the same scenarios
        compared = {(r.method, r.scenario) for r in runs}
        runs = [r for r in reference if (r.method, r.scenario) in compared and not budget_matched(r)] + list(runs)
    by_row: dict[tuple[str, str, str], dict[Scenario, list[RunRecord]]] = {}
    for method in paper.METHODS if of_paper else ():
        by_row[method, METHODS[method]().label, ""] = {}
    for run in runs:
        extra = ", ".join(f"{n}={v}" for n, v in run.changed_settings)
        if budget_matched(run):
            extra = f"E={run.experiment['epochs']} (budget-matched)"
        by_row.setdefault((run.method, run.label, extra), {}).setdefault(run.scenario, []).append(run)
    scenarios = _scenarios(runs, everything=of_paper)

    def row(method: str, label: str, extra: str) -> MethodRow:
        cells = {}
        for s in scenarios:
            own = sorted(by_row[method, label, extra].get(s, ()), key=lambda r: r.seed)
            cells[s] = Cell(tuple(own), _printed(method, s) if with_paper and not extra else {})
        return MethodRow(method, label, extra, cells)

    def order(key: tuple[str, str, str]) -> tuple[Any, ...]:
        method, label, extra = key
        return position(method, list(METHODS)), label, bool(extra), natural(extra)

    rows = [row(*key) for key in sorted(by_row, key=order)]
    differs = ", ".join(WORDS[n](v) if n in WORDS else f"{n}={v}" for n, v in changed)
    name = {"paper": "Table I", "beyond": "Beyond the paper"}.get(topic) or title_of(topic)
    words = ("table1" if topic == "paper" else topic, differs, "variants" if variants else "")
    return Table(
        topic=topic,
        changed=changed,
        slug=slug("-".join(filter(None, words))),
        title=name + (f": {differs}" if differs else "") + (", variants" if variants else ""),
        protocol=_protocol(runs),
        scenarios=scenarios,
        rows=tuple(rows if variants else _marked(rows, scenarios)),
        of_paper=of_paper,
        with_paper=with_paper and not variants,
        variants=variants,
    )


def _printed(method: str, scenario: Scenario) -> dict[str, Value]:
    """The paper's numbers; its Table II counts "unknown" as right outside the majority set in its global column."""
    tests = {"local": "local", "valid": "global"}
    values = {"final": paper.TABLE1.get((method, scenario))}
    values |= {test: paper.TABLE2.get((column, method, scenario)) for test, column in tests.items()}
    return {name: value for name, value in values.items() if value}


def _scenarios(runs: Sequence[RunRecord], everything: bool) -> tuple[Scenario, ...]:
    """Columns: data sets with more runs first, then in the paper's order; ``everything``: also those without runs."""
    present = {r.scenario for r in runs}
    first = [s for s in paper.SCENARIOS if everything or s in present]
    known = [*paper.DATA, *DATASETS]
    rest = sorted(present - set(first), key=lambda s: (position(s[0], known), natural(s[0]), natural(s[1])))
    numbers = Counter(r.data for r in runs)
    return tuple(sorted((*first, *rest), key=lambda s: (-numbers[s[0]], position(s[0], known))))


def _marked(rows: Sequence[MethodRow], scenarios: Sequence[Scenario]) -> list[MethodRow]:
    """Best and second best of each column among the methods that compete; equal numbers, as shown, are a tie."""
    marks: dict[tuple[int, Scenario], dict[Accuracy, int]] = {}
    for s, accuracy in product(scenarios, ACCURACIES):
        values = {i: row.cells[s].value(accuracy) for i, row in enumerate(rows) if not row.bound}
        rounded_means = {i: round(value.mean, 1) for i, value in values.items() if value}
        ranks = sorted(set(rounded_means.values()), reverse=True)[:2]
        for i, mean in rounded_means.items():
            if len(rounded_means) > 1 and mean in ranks:
                marks.setdefault((i, s), {})[accuracy] = ranks.index(mean) + 1
    return [
        replace(row, cells={s: replace(cell, marks=marks.get((i, s), {})) for s, cell in row.cells.items()})
        for i, row in enumerate(rows)
    ]


def _protocol(runs: Sequence[RunRecord]) -> str:
    """What all these runs have in common, in words; what differs between methods is left out."""
    first, *rest = [r for r in runs if not budget_matched(r)] or runs
    common = {n: v for n, v in first.experiment.items() if all(r.experiment.get(n) == v for r in rest)}
    names = [n for n in COMMON if n in common] + [n for n in UNUSUAL if n in common and common[n] != DEFAULTS[n]]
    words = COMMON | ({"lr": lambda v: f"SGD {v:g}"} if common.get("optimizer") == "sgd" else {})
    return ", ".join(words[n](common[n]) if n in words else f"{n} {common[n]}" for n in names)


def client_table(table: Table) -> Table | None:
    """Table II: the clients' own models of the same runs; None for variants, or if no run has them."""

    def tested(row: MethodRow, scenario: Scenario) -> bool:
        return any(row.cells[scenario].own(test) for test in TESTS)

    trained = [r for r in table.rows if r.method not in METHODS or METHODS[r.method].trains_clients]
    rows = tuple(r for r in trained if any(tested(r, s) for s in table.scenarios))
    if table.variants or not rows:
        return None
    name, title = f"{table.slug}-clients", f"{table.title}: clients' own models"
    if table.data[0] in paper.DATA and not table.beyond:
        name, title = table.slug.replace("table1", "table2"), table.title.replace("Table I", "Table II", 1)
    scenarios = tuple(s for s in table.scenarios if any(tested(r, s) for r in rows))
    return replace(table, slug=name, title=title, scenarios=scenarios, rows=rows)


def reading_tables(table: Table) -> list[Table]:
    """The methods of a table that have readings: first averaged models, then others, but not of variants."""
    result = []
    for title, about in READINGS.items():
        kind = title.split()[-1]
        if kind == "readings" and table.variants:
            continue
        if rows := tuple(reading for row in table.rows for reading in _reading_rows(row, kind == "re-estimated")):
            readings = replace(table, slug=f"{table.slug}-{kind}", title=f"{table.title}: {title}", about=about)
            scenarios = tuple(s for s in table.scenarios if any(row.cells[s].runs for row in rows))
            result.append(replace(readings, scenarios=scenarios, rows=rows, of_paper=False, with_paper=False))
    return result


def _reading_rows(row: MethodRow, again: bool) -> Iterator[MethodRow]:
    """A row's runs that have such readings: their own prediction, then each reading."""
    names = dict.fromkeys(name for cell in row.cells.values() for run in cell.runs for name in run.readings)
    selected = [name for name in names if (name == "re-estimated") is again]
    for name in ["", *selected] if selected else []:
        extra = name or "averaged" if again else name and f"read with {name}"
        cells = {}
        for s, cell in row.cells.items():
            runs = [run for run in cell.runs if any(n in run.readings for n in selected)]
            if name and not all(name in run.readings for run in runs):  # all rows are of the same runs
                runs = []
            cells[s] = Cell(tuple(replace(run, **vars(run.readings[name])) if name else run for run in runs))
        yield replace(row, extra=", ".join(filter(None, (row.extra, extra))), cells=cells)
