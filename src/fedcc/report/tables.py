"""Tables as data, built from records; writers come after.

A cell holds runs that differ in their seed alone. Runs of another protocol (rounds, epochs, clients, ...) stand in a
table of their own, runs of a method with other settings in a table of variants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fedcc.data.registry import DATASETS
from fedcc.methods import METHODS
from fedcc.report import paper
from fedcc.report.cells import ACCURACIES, Accuracy, Cell, MethodRow, Table
from fedcc.report.paper import Scenario
from fedcc.report.records import RunRecord, usual_values
from fedcc.report.titles import slug, title_of
from fedcc.report.values import natural

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


def tables(runs: Sequence[RunRecord]) -> list[Table]:
    """All tables that these runs fill: the paper's protocol first, then others, each with its variants behind it."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[RunRecord]] = {}
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
        plain = [r for r in groups[key] if not r.changed_settings]
        varied = [r for r in groups[key] if r.changed_settings]
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


def budget_matched(run: RunRecord) -> bool:
    """FedAvg with as many local steps as FedCC has, otherwise by the paper's protocol: a row of Table I."""
    method, epochs = paper.BUDGET_MATCHED
    return run.data in paper.DATA and run.method == method and run.protocol == (("epochs", str(epochs)),)


def _table(
    place: str, changed: tuple[tuple[str, str], ...], runs: Sequence[RunRecord], reference: Sequence[RunRecord] = ()
) -> Table:
    variants = bool(runs[0].changed_settings)
    of_paper = place == "paper" and not changed and not variants
    with_paper = place == "paper" and not {n for n, _ in changed} & set(STATED)
    if variants:  # beside each variant its method as it comes, in the same scenarios
        wanted = {(r.method, r.scenario) for r in runs}
        runs = [r for r in reference if (r.method, r.scenario) in wanted and not budget_matched(r)] + list(runs)
    held: dict[tuple[str, str, str], dict[Scenario, list[RunRecord]]] = {}
    if of_paper:
        for method in paper.METHODS:
            held[method, _label(method), ""] = {}
    for run in runs:
        extra = ", ".join(f"{n}={v}" for n, v in run.changed_settings)
        if budget_matched(run):
            extra = f"E={run.experiment['epochs']} (budget-matched)"
        held.setdefault((run.method, run.label, extra), {}).setdefault(run.scenario, []).append(run)
    scenarios = _scenarios(runs, everything=of_paper)
    rows = [
        MethodRow(
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
        slug=slug("-".join(filter(None, words))),
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


def _scenarios(runs: Sequence[RunRecord], everything: bool) -> tuple[Scenario, ...]:
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


def _marked(rows: Sequence[MethodRow], scenarios: Sequence[Scenario]) -> list[MethodRow]:
    """Best and second best of each column among the methods that compete; what reads the same is a tie."""
    marks: dict[tuple[int, Scenario], dict[Accuracy, int]] = {}
    for s in scenarios:
        for accuracy in ACCURACIES:
            shown = {
                i: round(v.mean, 1) for i, r in enumerate(rows) if not r.bound and (v := r.cells[s].value(accuracy))
            }
            if len(shown) < 2:
                continue
            ranks = sorted(set(shown.values()), reverse=True)
            for i, mean in shown.items():
                if mean in ranks[:2]:
                    marks.setdefault((i, s), {})[accuracy] = ranks.index(mean) + 1
    return [
        replace(r, cells={s: replace(c, marks=marks.get((i, s), {})) for s, c in r.cells.items()})
        for i, r in enumerate(rows)
    ]


def _protocol(runs: Sequence[RunRecord]) -> str:
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
