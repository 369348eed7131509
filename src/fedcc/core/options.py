"""Options declared once, as fields of a frozen dataclass: type, default, meaning and range. Imports no torch."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fedcc.core.naming import shortened, unknown

T = TypeVar("T")
LARGEST = 2**63 - 1  # the largest whole number: what 64 bits hold
REQUIRED: Any = MISSING  # an option without a default of its own: the data set or the machine provides it

Assignment = Literal["alternate", "halves"]
Engine = Literal["plain", "fused"]
Optimizer = Literal["adam", "sgd"]
Precision = Literal["fp32", "bf16", "fp64"]
Reset = Literal["phase", "round"]
Schedule = Literal["constant", "cosine"]
Share = Literal["predictions", "labels", "noisy"]
Wire = Literal["fp32", "fp16", "int8", "int8-stochastic"]


def option(
    default: T, meaning: str, source: str = "", *, images: bool = False, agreed: bool = False, **limits: float
) -> T:
    """A field with its meaning, the place its default comes from, and its limits (see :func:`check_value`).

    ``images``: must keep its default where inputs are not images. ``agreed``: all sites of a federation have the same
    value.

    >>> @dataclass(frozen=True)
    ... class Settings:
    ...     mu: float = option(0.01, "pull towards the received weights", low=0)
    >>> options_of(Settings)["mu"].allowed
    'number >= 0'
    >>> check_options(Settings(mu=-1))
    Traceback (most recent call last):
    ValueError: mu must be at least 0, got -1
    """
    marks = {"images": images, "agreed": agreed}
    return field(default=default, metadata={"meaning": meaning, "source": source, "limits": limits} | marks)


@dataclass(frozen=True)
class Option:
    """One declared option."""

    name: str
    hint: Any
    default: Any  # MISSING if there is none
    marks: Mapping[str, Any]

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types it may have, except None."""
        return tuple(kind for kind in _kinds(self.hint) if kind is not type(None))

    @property
    def optional(self) -> bool:
        return type(None) in _kinds(self.hint)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a choice; none for other options."""
        return next((get_args(kind) for kind in self.kinds if get_origin(kind) is Literal), ())

    @property
    def allowed(self) -> str:
        """What it may be, in words."""
        words: dict[Any, str] = {int: "whole number", float: "number", str: "text", bool: "true, false"}
        text = ", ".join(map(str, self.choices)) or " or ".join(words.get(k, str(k)) for k in self.kinds)
        limits = self.marks.get("limits", {})
        low, high = limits.get("low"), limits.get("high")
        if low is not None:
            text += f" >= {low:g}" if high is None else f" {low:g} to {high:g}"
        return text + (" or none" if self.optional else "")

    def parse(self, text: str) -> Any:
        """A text as typed on a command line, in the option's own type."""
        if self.optional and text.lower() in ("none", ""):
            return None
        if bool in self.kinds:
            if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
                raise ValueError(f"{self.name} must be true or false, got {shortened(text)}")
            return text.lower() in ("true", "yes", "1")
        for kind, words in ((int, "a whole number"), (float, "a number")):
            if kind in self.kinds:
                try:
                    return kind(text)
                except ValueError:
                    raise ValueError(f"{self.name} must be {words}, got {shortened(text)}") from None
        return text

    def check(self, value: Any) -> None:
        """Refuse a value of the wrong type or out of range."""
        check_value(self.name, value, self.hint, **self.marks.get("limits", {}))


def options_of(declaration: Any) -> dict[str, Option]:
    """The options that a dataclass, or an instance of one, declares, by name."""
    kind = declaration if isinstance(declaration, type) else type(declaration)
    hints = get_type_hints(kind)
    return {f.name: Option(f.name, hints[f.name], f.default, f.metadata) for f in fields(kind)}


def check_options(instance: Any) -> None:
    """Check every option of a frozen dataclass; whole numbers given for numbers become floats, also in records."""
    for name, declared in options_of(instance).items():
        value = getattr(instance, name)
        declared.check(value)
        if isinstance(value, int) and float in declared.kinds:
            object.__setattr__(instance, name, float(value))


def check_names(kind: str, values: Iterable[str], known: Collection[str]) -> None:
    """Refuse a name that is not declared, with the nearest one that is."""
    for name in values:
        if name not in known:
            raise unknown(kind, name, known)


def setting_text(value: Any) -> str:
    """A value as it is typed after ``name=``."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_value(
    name: str,
    value: Any,
    hint: Any,
    low: float | None = None,
    high: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> None:
    """Refuse a value of the wrong type or out of range, naming the value and the rule.

    ``low`` and ``high`` are allowed, ``above`` and ``below`` are not; ``most`` catches typos that would fill the
    memory.
    """

    def refuse(rule: str) -> None:
        raise ValueError(f"{name} must be {rule}, got {shortened(value)}")

    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            refuse("a list")
        for entry in value:
            check_value(name, entry, get_args(hint)[0], low, high, above=above, below=below, most=most)
        return
    kinds = _kinds(hint)
    if value is None and type(None) in kinds:
        return
    for kind in kinds:
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                refuse(f"one of {', '.join(map(str, get_args(kind)))}")
            return
    if kinds == (str,) and not isinstance(value, str):
        refuse("a text")
    if bool in kinds and not isinstance(value, bool):
        refuse("true or false")
    if not isinstance(value, int | float) or isinstance(value, bool):
        if float in kinds or kinds[0] is int:
            refuse("a whole number" if kinds[0] is int else "a number")
        return
    if kinds[0] is int and not isinstance(value, int):
        refuse("a whole number")
    if float in kinds and not _finite(value):
        refuse("a finite number")
    if most is not None and value > most:
        refuse(f"at most {most:,}")
    if float not in kinds and abs(value) > LARGEST:
        refuse(f"at most {LARGEST:,}" if value > 0 else f"at least {-LARGEST:,}")
    inside = (
        (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
        and (below is None or value < below)
    )
    if not inside and low is not None and high is not None:
        refuse(f"from {low:g} to {high:g}")
    if not inside:
        limits = {"above": above, "at least": low, "below": below, "at most": high}
        refuse(" and ".join(f"{words} {limit:g}" for words, limit in limits.items() if limit is not None))


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _finite(value: float) -> bool:
    """Whether a number is finite as a float; integers beyond 10^308 are not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
