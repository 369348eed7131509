"""Options of commands: those of a run, generated from their declarations, and those that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcc.core.options import REQUIRED, Option, options_of
from fedcc.experiments.options import OPTIONS, Group, Output

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Code = Annotated[
    list[str] | None, typer.Option("--code", help="Import code of yours that the run uses, module:name; repeatable.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting of the method, name=value; repeatable.")
]
DECLARED = OPTIONS | options_of(Output)


def run_options(*names: str | type[Group]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options of a run by name, or those of a group; it receives those that are given as ``options``."""
    declared: dict[str, Option] = {}
    for name in names:
        declared |= {name: DECLARED[name]} if isinstance(name, str) else options_of(name)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(**words: Any) -> None:
            values = {name: words.pop(name, None) for name in declared}
            command(**words, options={name: value for name, value in values.items() if value is not None})

        own = inspect.signature(command, eval_str=True)
        parameters = [p for p in own.parameters.values() if p.name != "options"]
        parameters += map(_parameter, declared.values())
        call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return decorate


def take(group: type[Group], options: dict[str, Any]) -> dict[str, Any]:
    """Remove a group's values from the options; returns them."""
    return {name: options.pop(name) for name in options_of(group) if name in options}


def _parameter(option: Option) -> inspect.Parameter:
    flag, meaning = "--" + option.name.replace("_", "-"), option.marks["meaning"]
    if bool in option.kinds:
        flag = f"{flag}/--no-{flag[2:]}"
        meaning += f"  [default: {'on' if option.default else 'off'}]"
    elif option.default is REQUIRED and "default" not in meaning:
        meaning += "  [default: the data set's]"
    elif option.default not in (REQUIRED, None, (), ""):
        meaning += f"  [default: {option.default}]"
    kind = next((kind for kind in (bool, int, float, Path) if kind in option.kinds), str)
    hint: Any = list[str] if isinstance(option.default, tuple) else kind
    annotation = Annotated[hint | None, typer.Option(flag, help=meaning)]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
