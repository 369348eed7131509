"""Comparisons that a table of accuracies does not make: paired by seed, and at equal compute."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from fedcc.core.options import options_of
from fedcc.experiments.options import Split
from fedcc.methods import METHODS
from fedcc.report.cells import Cell, MethodRow, Table
from fedcc.report.paper import Scenario, Value
from fedcc.report.records import Changes, RunRecord
from fedcc.report.tables import WORDS
from fedcc.report.values import position

LAST = 3  # rounds whose mean is compared beside the final one
LENGTH = ("rounds", "epochs")  # the protocol's options that decide how long a run trains
DATA_OPTIONS = options_of(Split).keys() - {"models", "assignment", "augment"}
OTHERWISE = {
    "fedconcat": "one network per cluster, joined",
    "fens": "all clients' networks and an aggregator",
    "local": "each client's own network",
    "ssl": "each client's own network",
}
"""What predicts, of methods whose answer does not follow from whether clients upload their models at the end."""

Kind = tuple[str, Changes, Changes]  # method, its changed settings, its changed protocol
RunsOfKind = dict[Scenario, dict[int, RunRecord]]  # by scenario and seed


@dataclass(frozen=True)
class Difference:
    """One kind of run minus another in one scenario, seed by seed; ``last`` compares the means of the last rounds."""

    seeds: int
    final: Value
    last: Value | None


@dataclass(frozen=True)
class Comparison:
    """One kind of run minus another, both in words, by scenario."""

    kind: str
    reference: str
    differences: Mapping[Scenario, Difference]


def paired_comparisons(runs: Sequence[RunRecord]) -> list[Comparison]:
    """Every kind of run minus FedCC, minus its method's defaults and minus the usual protocol, if two seeds are shared.

    A kind is a method with settings and a protocol. A reference has the same data, split and seeds.
    """
    kinds, found = _by_kind(runs), []
    for kind in kinds:
        method, settings, protocol = kind
        references: list[Kind] = [("fedcc", (), protocol), (method, (), protocol), (method, settings, ())]
        for reference in dict.fromkeys(references):
            if reference != kind and _data(reference[2]) == _data(protocol):
                found.append(_compared(kinds, kind, reference))
    return [comparison for comparison in found if comparison.differences]


def strong_comparisons(runs: Sequence[RunRecord]) -> list[Comparison]:
    """Every kind of run with the strong augmentation minus the same with the usual one, even of a single seed."""
    kinds, strong = _by_kind(runs), ("augment", "strong")
    found = [
        _compared(kinds, kind, (*kind[:2], tuple(change for change in kind[2] if change != strong)), least=1)
        for kind in kinds
        if strong in kind[2]
    ]
    return [comparison for comparison in found if comparison.differences]


def reading_comparisons(runs: Sequence[RunRecord]) -> list[Comparison]:
    """Other readings of the same models minus their own predictions, of methods with their defaults and two seeds."""
    kinds = _by_kind([run for run in runs if not run.changed_settings])
    read: dict[Kind, RunsOfKind] = {}
    for (method, _, protocol), runs_of_kind in kinds.items():
        for scenario, by_seed in runs_of_kind.items():
            for seed, run in by_seed.items():
                for name, reading in run.readings.items():
                    kind = method, ((f"read with {name}", ""),), protocol
                    read.setdefault(kind, {}).setdefault(scenario, {})[seed] = replace(run, **vars(reading))
    found = [_compared(kinds | read, kind, (kind[0], (), kind[2])) for kind in read]
    return [comparison for comparison in found if comparison.differences]


def _by_kind(runs: Sequence[RunRecord]) -> dict[Kind, RunsOfKind]:
    kinds: dict[Kind, RunsOfKind] = {}
    for run in runs:
        kind = run.method, run.changed_settings, run.protocol
        kinds.setdefault(kind, {}).setdefault(run.scenario, {})[run.seed] = run
    return kinds


def _compared(kinds: Mapping[Kind, RunsOfKind], kind: Kind, reference: Kind, least: int = 2) -> Comparison:
    """One kind minus another by scenario, where at least so many seeds are shared."""
    runs, others = kinds[kind], kinds.get(reference, {})
    differences = {s: d for s, by_seed in runs.items() if (d := _difference(by_seed, others.get(s, {}), least))}
    return Comparison(_title(kind, runs), _title(reference, others), differences)


def _data(protocol: Changes) -> Changes:
    """What decides which samples are private, public and tested on."""
    return tuple((name, value) for name, value in protocol if name in DATA_OPTIONS)


def _difference(by_seed: Mapping[int, RunRecord], reference: Mapping[int, RunRecord], least: int) -> Difference | None:
    shared = [(run, reference[seed]) for seed, run in sorted(by_seed.items()) if seed in reference]
    shared = [(run, other) for run, other in shared if not _differ(run.fingerprints, other.fingerprints)]
    if len(shared) < least:
        return None
    final = Value.of(run.final - other.final for run, other in shared)
    ends = [(_end(run), _end(other)) for run, other in shared]
    last = Value.of(a - b for a, b in ends if a is not None and b is not None) if None not in sum(ends, ()) else None
    assert final is not None
    return Difference(len(shared), final, last)


def _differ(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether two runs had other data or another partition, as far as both recorded it."""
    return any(a and b and a != b for a, b in zip(one, other, strict=True))


def _end(run: RunRecord) -> float | None:
    """The mean accuracy of the last rounds; None where they were not all evaluated."""
    last = run.curve[-LAST:]
    return statistics.fmean(v for v in last if v is not None) if len(last) == LAST and None not in last else None


def _title(kind: Kind, runs: RunsOfKind) -> str:
    label = next((run.label for by_seed in runs.values() for run in by_seed.values()), kind[0])
    return ", ".join([label, *(f"{n}={v}" if v else n for n, v in (*kind[1], *kind[2]))])


@dataclass(frozen=True)
class EqualCompute:
    """A method's costs and accuracy in one scenario, and FedCC's after no more images; means over shared seeds."""

    row: MethodRow
    seeds: int
    images: float  # of forward and backward passes, by all clients and the server
    sent: float | None  # bytes up and down, models for prediction included
    final: float
    fedcc: float | None  # after rounds that cost no more; None: with some seed, its first evaluated one costs more
    rounds: str  # FedCC's rounds
    afterwards: bool  # whether images were counted after the runs

    @property
    def predictor(self) -> str:
        """Whose networks predict."""
        kind = METHODS.get(self.row.method)
        usual = "–" if kind is None else "all clients' networks" if kind.uploads_models else "one network"
        return OTHERWISE.get(self.row.method, usual)

    @property
    def needs_public(self) -> bool | None:
        kind = METHODS.get(self.row.method)
        return kind().needs_public if kind else None


def _equal(row: MethodRow, runs: Sequence[tuple[RunRecord, RunRecord]]) -> EqualCompute:
    def mean(value: Callable[[RunRecord], float]) -> float:
        return statistics.fmean(value(run) for run, _ in runs)

    reached = [_after(fedcc, sum(run.work.trained)) for run, fedcc in runs]
    known = [accuracy for _, accuracy in reached if accuracy is not None]
    sent = [run.traffic.total + run.traffic.models for run, _ in runs if run.traffic.total is not None]
    return EqualCompute(
        row,
        len(runs),
        mean(lambda run: sum(run.work.trained)),
        statistics.fmean(sent) if len(sent) == len(runs) else None,
        mean(lambda run: run.final),
        statistics.fmean(known) if len(known) == len(runs) else None,
        span([t for t, _ in reached]),
        any(run.work.afterwards for run, _ in runs),
    )


def _after(fedcc: RunRecord, images: int) -> tuple[int, float | None]:
    """The last evaluated round of a run that ends within this many images, and the accuracy after it; 0 if none."""
    affordable = bisect_right(list(accumulate(fedcc.work.trained)), images)
    evaluated = [(t, accuracy) for t, accuracy in enumerate(fedcc.curve[:affordable], 1) if accuracy is not None]
    return evaluated[-1] if evaluated else (0, None)


def span(numbers: Sequence[float], digits: int = 0) -> str:
    """The least and the most of these numbers; one of them if they look the same."""
    return " to ".join(dict.fromkeys(f"{end:.{digits}f}" for end in (min(numbers), max(numbers))))


@dataclass(frozen=True)
class ComputeTable:
    """What methods cost on one data set, each with FedCC's accuracy after as many images."""

    table: Table  # FedCC's
    data: str
    scenarios: tuple[Scenario, ...]
    rows: Sequence[Mapping[Scenario, EqualCompute]]


def compute_tables(tables: Sequence[Table]) -> Iterator[ComputeTable]:
    """Where FedCC and another method counted the images of shared seeds, by FedCC's protocol and data set.

    Other settings, rounds or epochs are compared with FedCC as it comes, unless FedCC has the same rounds and epochs.
    """
    usual = {(t.topic, t.changed): (t, row) for t in tables if not t.variants for row in t.rows if _is_fedcc(row)}
    rows = {key: [row] for key, (_, row) in usual.items()}
    for table in tables:
        same_length = tuple((name, value) for name, value in table.changed if name not in LENGTH)
        key = next((k for k in ((table.topic, table.changed), (table.topic, same_length)) if k in usual), None)
        if key is not None:
            length = [WORDS[name](value) for name, value in table.changed if (name, value) not in key[1]]
            others = [row for row in table.new_rows if row.method != "fedcc"]
            rows[key] += [replace(row, extra=", ".join(filter(None, (row.extra, *length)))) for row in others]
    for key, (table, fedcc) in usual.items():
        ordered = sorted(rows[key], key=lambda row: position(row.method, list(METHODS)))
        for data in table.data:
            found = [
                {s: cost for s in table.scenarios_of(data) if (cost := _equal_compute(row, fedcc, s))}
                for row in ordered
            ]
            scenarios = tuple(s for s in table.scenarios_of(data) if sum(s in costs for costs in found) > 1)
            if shown := list(filter(None, ({s: c[s] for s in scenarios if s in c} for c in found))):
                yield ComputeTable(table, data, scenarios, shown)


def _is_fedcc(row: MethodRow) -> bool:
    return row.method == "fedcc" and not row.extra


def _equal_compute(row: MethodRow, fedcc: MethodRow, scenario: Scenario) -> EqualCompute | None:
    """A row beside FedCC, if both counted the images of shared seeds."""
    reference, by_seed = (
        {run.seed: run for run in each.cells.get(scenario, Cell()).runs if run.work.trained} for each in (fedcc, row)
    )
    shared = sorted(reference.keys() & by_seed.keys())
    return _equal(row, [(by_seed[seed], reference[seed]) for seed in shared]) if shared else None
