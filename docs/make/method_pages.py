"""A page per method, from its code, the records and docs/deviations.md."""

from __future__ import annotations

import dataclasses
import re
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcc.cli.methods import about
from fedcc.core.method import Method
from fedcc.methods import METHODS
from fedcc.report.cells import Table
from fedcc.report.markdown import best_number, code, final_number, grid, plain
from fedcc.report.records import find_records
from fedcc.report.tables import tables
from fedcc.report.titles import scenario_title
from links import moved

ROOT = Path(__file__).parents[2]


def pages() -> dict[str, str]:
    """The pages of all registered methods, by path on the site."""
    content = tables(find_records([ROOT / "results"]).runs)
    return {f"methods/{name}.md": page(name, kind, content) for name, kind in METHODS.items()}


def page(name: str, kind: type[Any], content: Sequence[Table]) -> str:
    facts = about(kind)
    title = f"{facts['method']} ({facts['note']})" if facts["note"] else facts["method"]
    idea = (sys.modules[kind.__module__].__doc__ or "").strip()
    parts = [f"# {title}\n", facts["summary"] + "\n"]
    parts += [f"Family: {facts['family']}. Source: {facts['source']}. Run it with `fedcc run {name}`.\n"]
    parts += ["## Idea\n", text(idea) + "\n", "## Messages\n", messages(kind), "## Settings\n", settings(facts)]
    parts += ["## Our numbers\n", numbers(name, content), "## Deviations and choices\n"]
    choices = (deviations(facts["method"]) or "None are listed.\n").replace("](#", "](deviations.md#")
    parts += [moved(choices, "docs/deviations.md", f"methods/{name}.md")]
    parts += [f"What all methods share is in [deviations](../deviations.md). The code: `{kind.__module__}`.\n"]
    return "\n".join(parts)


def text(docstring: str) -> str:
    """A docstring as Markdown: symbols such as [K, N] and `<-` are no markup."""
    escaped = re.sub(r"(?<!`)([\[\]<>*_])(?!`)", r"\\\1", docstring.replace("``", "`"))
    return escaped.replace("docs/deviations.md", "[deviations](../deviations.md)")


def messages(kind: type[Any]) -> str:
    """What a client sends and receives in a round, by the method's types."""
    up, down = message_types(kind)
    rows = [["a client sends", *described(up)], ["a client receives", *described(down)]]
    if kind.uploads_models:
        rows.append(["once, at the end", "its network, for predictions", ""])
    return grid(["", "message", "fields"], rows)


def message_types(kind: type[Any]) -> tuple[Any, Any]:
    """The two types that a method's base names: ``Method[Up, Down]``."""
    for base in kind.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            if typing.get_origin(generic) is Method:
                up, down = typing.get_args(generic)
                return up, down
    raise TypeError(f"{kind.__name__} does not say which messages it has")


def described(message: Any) -> tuple[str, str]:
    if message in (None, type(None)):
        return "nothing", ""
    if not isinstance(message, type):
        return " or ".join(described(m)[0] for m in typing.get_args(message)) or code(str(message)), ""
    summary = (message.__doc__ or "").strip().splitlines()[0]
    names = [f.name for f in dataclasses.fields(message)] if dataclasses.is_dataclass(message) else []
    return f"{code(message.__name__)}: {text(summary)}", ", ".join(map(code, names))


def settings(facts: dict[str, Any]) -> str:
    if not facts["settings"]:
        return "It has none of its own.\n"
    head = ["setting", "default", "allowed", "meaning", "source"]
    values = [
        [code(f["name"]), code(str(f["default"])), *(plain(str(f[k])) for k in head[2:])] for f in facts["settings"]
    ]
    return grid(head, values)


def numbers(name: str, content: Sequence[Table]) -> str:
    """Accuracy by table and scenario, with links to the records."""
    rows = []
    for table in content:
        for row in table.rows:
            if row.method != name or (row.extra and not table.variants):
                continue
            for scenario, cell in row.cells.items():
                if cell.runs:
                    printed = str(cell.printed["final"]) if "final" in cell.printed else "not in the paper"
                    final = moved(final_number(cell, ROOT), "methods.md", f"methods/{name}.md")
                    what = plain(row.extra) or "as it is"
                    where = plain(scenario_title(scenario)), plain(table.title), what
                    rows.append([*where, final, best_number(cell), printed])
    if not rows:
        return "It has not been run with the paper's protocol yet.\n"
    how = "Accuracy on the global test set in percent, after the final round and in the best one; "
    how += "[results](../results.md) has the protocols.\n"
    return f"{how}\n{grid(['scenario', 'table', 'variant', 'final', 'best (round)', 'paper'], rows)}"


def deviations(name: str) -> str:
    """A method's section of docs/deviations.md, up to the next heading of its level; empty if it has none."""
    text = (ROOT / "docs" / "deviations.md").read_text()
    heading = re.search(rf"^(##+) {re.escape(name)}$", text, re.MULTILINE)
    if heading is None:
        return ""
    rest = text[heading.end() :]
    end = re.search(rf"^#{{2,{len(heading[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start() if end else None].strip() + "\n"
