"""Label skew as a value: how samples are dealt to clients by their labels.

A skew is a small frozen value with a text form, so that it can be typed, stored and compared:

    dirichlet:0.05    dirichlet:0.05,balance    dirichlet:0.5,minimum=1
    classes:2         classes:2,assignment=niid_bench
    iid

NIID-Bench's names are understood as well: ``noniid-labeldir[:BETA]`` is ``dirichlet:BETA`` (0.5 by default),
``noniid-#label2`` is ``classes:2`` and ``homo`` is ``iid``. What it does differently stays an explicit option.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fedcc.core.naming import unknown

T = TypeVar("T")


@dataclass(frozen=True)
class Dirichlet:
    """Each class is cut among the clients in proportions drawn from Dir(eta); small eta is strong skew."""

    eta: float
    minimum: int = 10
    balance: bool = False  # stop giving to clients that already hold n/K samples, as NIID-Bench does

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eta) and self.eta > 0):
            raise ValueError(f"the eta of dirichlet:ETA must be a number > 0, got {self.eta}")
        if self.minimum < 1:
            raise ValueError(f"the minimum of a dirichlet skew must be >= 1 (no client is empty), got {self.minimum}")

    def __str__(self) -> str:
        minimum = "" if self.minimum == 10 else f",minimum={self.minimum}"
        return f"dirichlet:{repr(float(self.eta)).removesuffix('.0')}{minimum}{',balance' if self.balance else ''}"


@dataclass(frozen=True)
class Classes:
    """Every client holds exactly ``n`` classes.

    ``even`` gives every class floor(nK/C) or ceil(nK/C) holders. ``niid_bench`` gives client i the class i mod C and
    random others; it is refused where that leaves a class without a holder.
    """

    n: int
    assignment: Literal["even", "niid_bench"] = "even"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"the N of classes:N must be >= 1, got {self.n}")
        if self.assignment not in ("even", "niid_bench"):
            raise unknown("assignment", self.assignment, ["even", "niid_bench"])

    def __str__(self) -> str:
        return f"classes:{self.n}{'' if self.assignment == 'even' else f',assignment={self.assignment}'}"


@dataclass(frozen=True)
class Iid:
    """A random split into equal parts."""

    def __str__(self) -> str:
        return "iid"


Skew = Dirichlet | Classes | Iid

FORMS = ("dirichlet:ETA", "classes:N", "iid", "noniid-labeldir", "noniid-#labelN", "homo")


def parse(text: str) -> Skew:
    """The skew that a text names.

    >>> parse("dirichlet:0.05"), str(parse("noniid-#label2"))
    (Dirichlet(eta=0.05, minimum=10, balance=False), 'classes:2')
    """
    head, *options = (part.strip() for part in text.strip().lower().split(","))
    kind, colon, value = head.partition(":")
    if label := re.fullmatch(r"noniid-#label(\d+)", head):
        kind, colon, value = "classes", ":", label[1]
    elif kind == "noniid-labeldir":
        kind, colon, value = "dirichlet", ":", value if colon else "0.5"
    elif head == "homo":
        kind = "iid"

    if kind == "dirichlet":
        eta = _number(text, value, float, "dirichlet:ETA needs a number > 0 for ETA")
        return Dirichlet(eta, **_options(text, options, {"minimum": int, "balance": _switch}))
    if kind == "classes":
        n = _number(text, value, int, "classes:N needs a whole number >= 1 for N")
        return Classes(n, **_options(text, options, {"assignment": str}))
    if kind == "iid" and colon:
        raise ValueError(f"iid takes no number, got '{text}'")
    if kind == "iid":
        return Iid(**_options(text, options, {}))
    raise unknown("skew", text, FORMS)


def _number(text: str, value: str, cast: Callable[[str], T], rule: str) -> T:
    try:
        return cast(value)
    except ValueError:
        raise ValueError(f"{rule}, got '{text}'") from None


def _switch(value: str) -> bool:
    if value not in ("", "true", "false"):
        raise ValueError(value)
    return value != "false"


def _options(text: str, options: Sequence[str], casts: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in options:
        name, _, value = (part.strip() for part in option.partition("="))
        if name not in casts:
            raise unknown(f"option in skew '{text}':", name, casts)
        if name in values:
            raise ValueError(f"option '{name}' is given twice in '{text}'")
        values[name] = _number(text, value, casts[name], f"'{value}' is not a valid value for the option '{name}'")
    return values
