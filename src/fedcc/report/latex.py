r"""Tables for a paper: booktabs, to be read with ``\input``; ``report.tex`` shows them all and compiles by itself."""

from __future__ import annotations

from collections.abc import Sequence

from fedcc.report.cells import Accuracy, Table
from fedcc.report.client_tables import TESTS, ClientTable
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
    """Any text, so that it stands for itself; what the usual fonts lack becomes a question mark."""
    plain = "".join(SPECIAL.get(c, c) for c in " ".join(value.split()))
    return "".join(c if 32 <= ord(c) < 0x180 else "?" for c in plain)


def document(names: Sequence[str]) -> str:
    return DOCUMENT % "\n\\clearpage\n".join(rf"\input{{{name}}}" for name in names)


def comparison(table: Table, accuracy: Accuracy = "final", with_paper: bool = False) -> str:
    """Methods by scenarios; bold the best, underlined the second best; the paper's numbers below ours if asked for."""
    lines = []
    for row in table.rows:
        cells = []
        for s in table.scenarios:
            cell = row.cells[s]
            value = cell.value(accuracy)
            shown = "--"
            if value is not None:
                spread = f"_{{\\pm{value.spread:.1f}}}" if value.spread is not None else ""
                mark = {1: r"\mathbf", 2: r"\underline"}.get(cell.marks.get(accuracy, 0))
                shown = f"${mark}{{{value.mean:.1f}}}{spread}$" if mark else f"${value.mean:.1f}{spread}$"
            cells.append(shown)
        lines.append(" & ".join([text(row.title), *cells]) + r" \\")
        if with_paper and any(row.cells[s].printed for s in table.scenarios):
            theirs = [
                f"${p.mean:.1f}_{{\\pm{p.spread:.1f}}}$" if (p := row.cells[s].printed) else "--"
                for s in table.scenarios
            ]
            lines.append(" & ".join([r"\quad\emph{paper}", *theirs]) + r" \\")
    caption = f"{table.title}. Accuracy (\\%) in the {accuracy} round; {text(table.protocol)}; seeds: {table.seeds}."
    return _table(table, [1] * len(table.scenarios), lines, caption, table.slug)


def clients(table: ClientTable) -> str:
    """Table II: spread over clients as an index, over seeds in brackets."""
    lines = []
    for row, cells in table.rows:
        shown = []
        for s in table.scenarios:
            for test in TESTS:
                v = cells[s, test].value
                if v is None:
                    shown.append("--")
                    continue
                index = f"_{{\\pm{v.over_clients:.1f}}}" if v.over_clients is not None else ""
                seeds = f"\\;(\\pm{v.over_seeds:.1f})" if v.over_seeds is not None else ""
                shown.append(f"${v.mean:.1f}{index}{seeds}$")
        lines.append(" & ".join([text(row.title), *shown]) + r" \\")
    caption = (
        f"{table.title}. Clients' own models (\\%); index: spread over clients, in brackets: over seeds; "
        "unknown valid: an answer ``unknown'' counts as right outside the client's majority classes; "
        "(labels): outside the classes that it holds."
    )
    under = " & ".join(["", *(t for _ in table.scenarios for t in TESTS.values())]) + r" \\"
    return _table(table, [len(TESTS)] * len(table.scenarios), lines, caption, table.slug, under)


def _table(
    table: Table | ClientTable, widths: Sequence[int], lines: Sequence[str], caption: str, label: str, under: str = ""
) -> str:
    head, rules, column = [""], [], 2
    for data in table.data:
        width = sum(w for s, w in zip(table.scenarios, widths, strict=True) if s[0] == data)
        head.append(rf"\multicolumn{{{width}}}{{c}}{{{text(title_of(data))}}}")
        rules.append(rf"\cmidrule(lr){{{column}-{column + width - 1}}}")
        column += width
    skews = [
        rf"\multicolumn{{{w}}}{{c}}{{{text(skew_title(s))}}}" for (_, s), w in zip(table.scenarios, widths, strict=True)
    ]
    return "\n".join(
        [
            r"\begin{table*}",
            r"\centering\small",
            rf"\caption{{{caption}}}",
            rf"\label{{tab:{label}}}",
            r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{l{'c' * sum(widths)}}}",
            r"\toprule",
            " & ".join(head) + r" \\",
            " ".join(rules),
            " & ".join(["Method", *skews]) + r" \\",
            *([under] if under else []),
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table*}",
            "",
        ]
    )
