"""The numbers that the paper prints, as data: Table I and Table II, mean and spread in percent, as transcribed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

Scenario = tuple[str, str]  # data set and skew, as on the command line


class Value(NamedTuple):
    """A mean and its spread. Of ours, the sample standard deviation; the paper does not say what its spread is of."""

    mean: float
    spread: float | None = None
    over_seeds: float | None = None  # of the clients' own models, whose spread is over the clients

    @staticmethod
    def of(numbers: Iterable[float]) -> Value | None:
        values = list(numbers)
        spread = statistics.stdev(values) if len(values) > 1 else None
        return Value(statistics.fmean(values), spread) if values else None

    def __str__(self) -> str:
        return f"{self.mean:.1f}" + (f" ±{self.spread:.1f}" if self.spread is not None else "")


_SKEWS = {
    "tiny-imagenet": ("dirichlet:0.5", "dirichlet:0.05", "classes:40", "classes:20"),
    "cifar100": ("dirichlet:0.5", "dirichlet:0.05", "classes:20", "classes:10"),
    "cifar10": ("dirichlet:0.5", "dirichlet:0.05", "classes:2", "classes:1"),
}
SCENARIOS: tuple[Scenario, ...] = tuple((data, skew) for data, skews in _SKEWS.items() for skew in skews)
"""Table I's columns, in its order."""

_TABLE1 = """
fedavg    36.2±1.6 24.1±1.3 31.1±1.9 14.3±0.8 49.3±1.2 34.2±2.1 33.5±1.3 18.2±1.3 72.6±2.6 44.3±4.2 37.5±1.0 11.0±1.1
fedprox   35.0±3.0 26.4±1.0 28.4±0.5 13.1±2.0 48.9±0.9 29.3±0.7 30.6±1.8 16.1±0.6 70.1±2.3 47.2±2.0 41.0±1.3 10.6±0.4
fednova   34.9±1.1 25.7±0.6 27.2±1.3 14.1±1.0 47.8±1.7 33.7±1.7 37.9±1.5 20.9±1.1 75.3±1.1 42.5±0.7 35.2±0.8 10.0±0.0
fedrs     32.5±1.3 22.1±1.0 27.7±1.4 12.9±1.5 46.3±0.8 27.8±0.9 34.2±1.4 17.7±1.2 76.6±1.9 53.0±1.0 35.4±1.5 10.0±0.0
fedsam    35.5±0.8 30.3±1.1 29.4±1.2 14.1±0.9 48.7±1.3 33.7±1.3 35.3±1.7 16.5±0.8 74.6±0.6 43.8±1.6 32.8±1.3 10.0±0.0
fedlc     39.2±0.9 28.0±1.0 28.8±1.0 12.5±1.3 48.5±1.1 34.6±0.7 39.4±1.1 21.4±0.4 76.0±1.2 41.5±0.6 36.2±1.6 10.0±0.0
fedmr     34.8±0.9 24.7±0.5 29.2±0.8 15.1±1.3 50.1±1.2 34.6±0.9 38.6±1.5 21.8±1.0 76.2±0.9 57.8±1.0 38.4±0.9 11.7±0.2
fedconcat 28.3±2.5 18.7±3.9 22.3±2.3 9.9±1.2 40.3±2.4 21.2±1.7 20.6±0.4 14.7±1.7 61.3±1.0 34.0±2.1 28.5±1.2 12.7±0.7
fedvls    26.4±1.4 20.7±0.4 22.4±0.7 15.3±2.6 43.5±1.6 27.3±1.2 27.1±3.5 18.3±0.3 66.0±2.8 39.5±0.8 32.9±3.6 10.0±0.0
fedmd     30.1±1.7 24.8±1.5 30.2±0.8 23.1±1.6 36.4±0.7 28.1±0.7 34.9±1.2 26.4±1.6 69.0±0.7 34.2±2.6 54.5±1.0 10.7±0.9
feddf     26.8±2.0 16.9±2.7 20.7±0.6 10.3±2.8 33.6±1.2 22.1±0.8 27.6±3.1 14.1±1.1 63.9±1.9 39.9±3.7 50.8±1.4 11.7±1.0
lsr       26.2±0.9 16.7±1.1 23.8±1.2 10.2±0.6 31.8±1.6 21.3±0.8 27.8±1.4 16.5±0.3 58.6±1.0 31.4±0.7 27.2±1.4 10.0±0.0
fedet     23.8±3.8 18.5±2.0 21.3±0.8 11.6±1.0 27.2±0.9 22.3±1.7 28.0±1.1 22.1±0.8 62.1±2.0 38.4±2.7 51.2±0.6 10.0±0.0
fedhkt    27.7±1.0 21.3±0.9 26.9±1.7 14.6±0.4 34.4±1.9 25.6±0.5 31.8±3.6 21.3±0.9 67.6±1.4 44.9±0.9 49.1±0.4 11.1±1.2
fedct     25.9±0.5 17.7±1.3 21.2±0.7 9.9±2.6 33.2±0.4 21.8±1.6 26.7±0.8 12.2±2.3 65.0±1.2 29.7±1.7 24.1±0.2 10.0±0.0
fedcc     40.6±0.8 34.8±1.0 36.9±2.0 34.3±1.3 48.9±1.3 40.5±1.8 45.3±1.4 42.6±1.3 74.7±1.6 60.9±2.2 68.2±1.1 67.3±1.8
"""

_TABLE2 = """
local fedavg 37.9±2.2 60.0±2.7 57.4±3.1 72.3±4.9
local fedlc 36.1±1.4 60.5±4.4 56.9±5.1 72.2±6.0
local fedmr 36.7±2.2 60.2±5.1 56.7±4.7 70.6±5.3
local ssl 34.6±2.0 58.0±2.9 54.6±2.0 70.5±5.2
local fedcc 38.2±2.3 64.4±2.6 60.0±4.6 76.6±3.3
global fedavg 17.6±1.4 10.1±0.9 11.3±0.8 7.2±0.6
global fedlc 19.0±1.0 11.0±1.6 11.8±1.0 7.0±0.8
global fedmr 19.3±1.5 10.7±1.7 11.6±1.1 7.0±0.8
global ssl 15.4±1.1 10.2±1.3 11.4±0.9 7.3±0.5
global fedcc 71.1±0.3 74.7±1.2 71.1±2.4 77.9±3.8
"""


def _numbers(line: str) -> list[Value]:
    return [Value(*map(float, word.split("±"))) for word in line.split()]


TABLE1: dict[tuple[str, Scenario], Value] = {
    (method, scenario): number
    for method, line in (row.split(maxsplit=1) for row in _TABLE1.strip().splitlines())
    for scenario, number in zip(SCENARIOS, _numbers(line), strict=True)
}
"""Accuracy on the global test set, by method and scenario."""

TABLE2: dict[tuple[str, str, Scenario], Value] = {
    (test, method, ("cifar100", skew)): number
    for test, method, line in (row.split(maxsplit=2) for row in _TABLE2.strip().splitlines())
    for skew, number in zip(_SKEWS["cifar100"], _numbers(line), strict=True)
}
"""Accuracy of the clients' own models on CIFAR-100, by test data (`local`; `global`, where "unknown" counts as right
outside the client's majority classes), method and scenario."""

METHODS = tuple(dict.fromkeys(method for method, _ in TABLE1))
DATA = tuple(_SKEWS)
SEEDS = 3
BUDGET_MATCHED = ("fedavg", 85)  # FedCC trains about four times as many steps a round: FedAvg with as many
