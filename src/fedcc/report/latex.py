r"""Tables for a paper with booktabs, for ``\input``; ``report.tex`` compiles by itself and shows them all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from fedcc.report.cells import TESTS, Table
from fedcc.report.paper import Value
from fedcc.report.titles import skew_title, title_of

SPECIAL = {
    "\\": r"\textbackslash{}",
    **{c: "\\" + c for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "–": "--",
}

DOCUMENT = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\usepackage[a4paper,landscape,margin=1cm]{geometry}
\usepackage{booktabs}
\usepackage{graphicx}
\begin{document}
%s
\end{document}
"""


def text(value: str) -> str:
    """Text without LaTeX's special meanings; characters that the usual fonts lack become question marks."""
    plain = "".join(SPECIAL.get(c, c) for c in " ".join(value.split()))
    return "".join(c if 32 <= ord(c) < 0x180 else "?" for c in plain)


def document(names: Sequence[str]) -> str:
    return DOCUMENT % "\n\\clearpage\n".join(rf"\input{{{name}}}" for name in names)


def comparison(table: Table, with_paper: bool = False) -> str:
    """Methods by scenarios; bold the best, underlined the second best; on request the paper's numbers below ours."""
    lines = []
    for row in table.rows:
        cells = [row.cells[s] for s in table.scenarios]
        lines.append([text(row.title), *(_number(c.final, c.marks.get("final", 0)) for c in cells)])
        if with_paper and any("final" in c.printed for c in cells):
            lines.append([r"\quad\emph{paper}", *(_number(c.printed.get("final")) for c in cells)])
    caption = f"{table.title}. Accuracy (\\%) in the final round; {text(table.protocol)}; seeds: {table.seeds}."
    return _table(table, 1, lines, caption)


def _number(value: Value | None, mark: int = 0) -> str:
    if value is None:
        return "--"
    command = {1: r"\mathbf", 2: r"\underline"}.get(mark)
    mean = f"{command}{{{value.mean:.1f}}}" if command else f"{value.mean:.1f}"
    spread = f"_{{\\pm{value.spread:.1f}}}" if value.spread is not None else ""
    seeds = f"\\;(\\pm{value.over_seeds:.1f})" if value.over_seeds is not None else ""
    return f"${mean}{spread}{seeds}$"


def clients(table: Table) -> str:
    """Table II: spread over clients as an index, over seeds in brackets."""
    lines = [
        [text(row.title), *(_number(row.cells[s].own(test)) for s, test in product(table.scenarios, TESTS))]
        for row in table.rows
    ]
    caption = (
        f"{table.title}. Clients' own models (\\%); index: spread over clients, in brackets: over seeds; "
        "unknown valid: an answer ``unknown'' counts as right outside the client's majority classes; "
        "(labels): outside the classes that it holds."
    )
    return _table(table, len(TESTS), lines, caption, under=["", *[*TESTS.values()] * len(table.scenarios)])


def _table(table: Table, width: int, lines: Sequence[Sequence[str]], caption: str, under: Sequence[str] = ()) -> str:
    """A table whose scenarios have ``width`` columns each."""
    head, rules, column = [""], [], 2
    for data in table.data:
        span = width * len(table.scenarios_of(data))
        head.append(rf"\multicolumn{{{span}}}{{c}}{{{text(title_of(data))}}}")
        rules.append(rf"\cmidrule(lr){{{column}-{column + span - 1}}}")
        column += span
    skews = [rf"\multicolumn{{{width}}}{{c}}{{{text(skew_title(skew))}}}" for _, skew in table.scenarios]
    return "\n".join(
        [
            r"\begin{table*}",
            r"\centering\small",
            rf"\caption{{{caption}}}",
            rf"\label{{tab:{table.slug}}}",
            r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{l{'c' * width * len(table.scenarios)}}}",
            r"\toprule",
            _line(head),
            " ".join(rules),
            _line(["Method", *skews]),
            *([_line(under)] if under else []),
            r"\midrule",
            *map(_line, lines),
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table*}",
            "",
        ]
    )


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
