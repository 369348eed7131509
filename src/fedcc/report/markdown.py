"""Tables as Markdown: one table, a page of all, the block of a README."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from fedcc.methods import BEYOND
from fedcc.report import paper
from fedcc.report.cells import TESTS, Cell, MethodRow, Table
from fedcc.report.fairness import (
    LAST,
    Comparison,
    EqualCompute,
    compute_tables,
    paired_comparisons,
    reading_comparisons,
    span,
    strong_comparisons,
)
from fedcc.report.records import Records, RunRecord
from fedcc.report.standings import duels, filled, leads, nearest_rivals, standings
from fedcc.report.tables import client_table, reading_tables
from fedcc.report.titles import scenario_title, title_of
from fedcc.report.values import relative_link

BEGIN, END = "<!-- fedcc report: begin -->", "<!-- fedcc report: end -->"
MISSING = "–"
PICTURE = "docs/lead.svg"  # beside the README
PICTURE_TEXT = "FedCC and its best rival in each scenario, as measured here and in the paper"


def plain(text: str) -> str:
    """Text without Markdown's special meanings."""
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """Text as code in a cell."""
    text = " ".join(text.split()).replace("|", "\\|")
    return f"`{text}`" if "`" not in text else f"`` {text.replace('``', '` `')} ``"


def link(text: str, run: RunRecord, beside: Path) -> str:
    """A link to a run's record from a page in the folder ``beside``."""
    return f"[{text}]({relative_link(run.file, beside)})"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def marked(text: str, mark: int) -> str:
    """Bold for the best, underlined for the second best."""
    return {1: f"**{text}**", 2: f"<ins>{text}</ins>"}.get(mark, text)


def final_number(cell: Cell, beside: Path) -> str:
    """The number after the final round, marked, with links to the records, by seed if there are several."""
    text = str(cell.final or MISSING)
    one = len(cell.runs) == 1
    final = marked(link(text, cell.runs[0], beside) if one else text, cell.marks.get("final", 0))
    seeds = " ".join(link(str(r.seed), r, beside) for r in cell.runs)
    return final if one or not seeds else f"{final} <sup>{seeds}</sup>"


def best_number(cell: Cell) -> str:
    """The number in the best round, and which round that is."""
    return f"{cell.value('best')}" + (f" ({cell.runs[0].best_round})" if len(cell.runs) == 1 else "")


def comparison(table: Table, data: str, beside: Path) -> str:
    """One data set of a table: the final round, the paper's number if it can be compared, and footnotes."""
    scenarios = table.scenarios_of(data)
    head = ["method"]
    for _, skew in scenarios:
        head += [code(skew), *(["paper"] if table.with_paper else [])]
    rows, best, later = [], [], []
    for row in table.rows:
        line, cells = [plain(row.title)], [(s, row.cells[s]) for s in scenarios]
        for _, cell in cells:
            line += [final_number(cell, beside)]
            line += [str(cell.printed.get("final", MISSING))] if table.with_paper else []
        if not table.variants or any(cell.runs for _, cell in cells):
            rows.append(line)
        if any(cell.runs for _, cell in cells):
            best.append(f"{line[0]} {', '.join(best_number(cell) if cell.runs else MISSING for _, cell in cells)}")
        later += [f"{line[0]}, {code(s[1])}: {v}" for s, cell in cells if (v := cell.without_first_seed)]
    notes = {"Best rounds, column by column": best, "Without seed 0": later}
    return "\n".join([grid(head, rows), *(f"{name}: {'; '.join(found)}.\n" for name, found in notes.items() if found)])


def clients(table: Table, data: str) -> str:
    """One data set of Table II."""
    scenarios = table.scenarios_of(data)
    head = ["method", *(f"{code(skew)} {title}" for _, skew in scenarios for title in TESTS.values())]
    rows = [
        [plain(row.title), *(client_number(row.cells[s], test) for s in scenarios for test in TESTS)]
        for row in table.rows
        if any(row.cells[s].own(test) for s in scenarios for test in TESTS)
    ]
    return grid(head, rows)


def client_number(cell: Cell, test: str) -> str:
    text = MISSING
    if value := cell.own(test):
        spreads = {"clients": value.spread, "seeds": value.over_seeds}
        over = ", ".join(f"±{spread:.1f} {what}" for what, spread in spreads.items() if spread is not None)
        text = f"{value.mean:.1f}" + (f" <sub>{over}</sub>" if over else "")
    return text + (f"; paper {cell.printed[test]}" if test in cell.printed else "")


def section(table: Table, beside: Path) -> str:
    """A table with its title, in one part per data set."""
    parts = [f"## {plain(table.title)}\n", f"{protocol(table)}\n"]
    for data in table.data:
        if len(table.data) > 1:
            parts.append(f"### {plain(title_of(data))}\n")
        parts.append(comparison(table, data, beside) if table.has_runs(data) else "No runs yet.\n")
    return "\n".join(parts)


def protocol(table: Table) -> str:
    machines = sorted({f"{r.precision} on {r.device}" for r in table.runs if r.device})
    where = f" Computed in {plain(', '.join(machines))}." if machines else ""
    return f"{plain(table.protocol)}; seeds per cell: {table.seeds}.{where}"


HOW = """\
Accuracy on the global test set in percent, after the final round. Over several seeds: mean and sample standard
deviation; the small numbers are the seeds and lead to their records. **Bold** is the best method of a column,
<ins>underlined</ins> the second best; bounds and SSL do not compete. `–` is missing: not run yet, or not printed by
the paper. Runs that differ only in their seed share a cell; runs that follow one protocol share a table. Below each
table: best rounds, with the round in brackets, which are chosen by the test set and so flatter methods whose accuracy
swings; and, of three seeds or more, means without seed 0, as some defaults were chosen after looking at it.
"""

HOW_CLIENTS = """\
The clients' own models after their local training in the last round, mean over clients, then seeds, with both spreads.
"local": test data distributed like the client's private labels. "global": all test data, known classes only. "unknown
valid": all test data, where an answer "unknown" counts as right for a class outside the client's majority set, as its
probe names it. "(labels)": the same with the classes that the client holds as that set. The paper's global column
follows the rule, which a method without "unknown" cannot profit from: these columns and "global" measure different
things. The paper does not say which of the two sets it takes; its number stands beside the probe's.
"""


def page(records: Records, tables: Sequence[Table], beside: Path) -> str:
    """Everything on one page: tables, what is missing, and each run with its record and its command."""
    parts = [
        "# Results\n",
        "Written by `fedcc report` from the records of finished runs; edits made here are lost.\n",
        HOW,
    ]
    for table in tables:
        parts.append(section(table, beside))
        for readings in reading_tables(table):
            parts += [f"### {readings.title.removeprefix(f'{table.title}: ')}\n", readings.about]
            parts += [f"{plain(title_of(d))}:\n\n{comparison(readings, d, beside)}" for d in readings.data]
        if (table.of_paper or (table.beyond and not table.variants)) and (comparisons := lead_section(table)):
            parts += ["### Is FedCC ahead?\n", comparisons]
        if table.of_paper:
            parts.append(open_section(table))
    parts += filter(None, (compute_section(tables), paired_section(records)))
    own = [(t.title, c) for t in tables if (c := client_table(t))]
    if own:
        parts += ["## Clients' own models (the paper's Table II)\n", HOW_CLIENTS]
    for title, table2 in own:
        for data in table2.data:
            titles = dict.fromkeys((title, title_of(data)))  # a table of one data set may have its name
            parts += [f"### {plain(': '.join(titles))}\n", clients(table2, data)]
    parts.append("## Records\n")
    for table in tables:
        parts += [f"### {plain(table.title)}\n", record_list(table.new_rows, beside)]
    if records.problems:
        parts.append("## Left out\n")
        parts.append("\n".join(f"- {code(name)}: {plain(reason)}" for name, reason in records.problems) + "\n")
    return "\n".join(parts)


HOW_AHEAD = """\
FedCC against the nearest of the baselines that were run, after the final round. A margin is taken over the seeds that
both have, hence on the same data; "1 of 3 seeds": FedCC has three, the other method one of them.
"Re-estimated" is the margin to the parameter-based baselines only, whose final models use BatchNorm's statistics from
the public images.
"""


def lead_section(table: Table) -> str:
    """Whether FedCC leads, by scenario, and whether it does so in the paper."""
    head = ["scenario", "baselines run", "FedCC", "nearest baseline", "margin"]
    head += ["re-estimated: margin", "paper: margin"]
    rows, best, known = [], [], len(BEYOND) if table.beyond else len(paper.METHODS) - 1
    for lead in leads(table):
        scenario, (value, margin) = plain(scenario_title(lead.scenario)), lead.margins["final"]
        points = marked(f"{margin.points:+.1f}", int(margin.points >= 0))
        row = [scenario, f"{lead.rivals} of {known}", f"{value}", plain(margin.rival)]
        row.append(f"{points} ({margin.note})" if margin.note else points)
        value, margin = lead.margins["best"]
        note = ", ".join(filter(None, (plain(margin.rival), margin.note)))
        best.append(f"{scenario}: {value}, {margin.points:+.1f} ({note})")
        for other in (lead.reread, lead.printed):
            names = other and ", ".join(filter(None, (other.rival, other.note)))
            row.append(f"{other.points:+.1f} ({plain(names)})" if other and names else MISSING)
        rows.append(row)
    footnote = f"Each in its own best round: {'; '.join(best)}.\n"
    rivals = rivals_line(table) if table.of_paper else ""
    return "\n".join(filter(None, (HOW_AHEAD, grid(head, rows), footnote, rivals))) if rows else ""


def rivals_line(table: Table) -> str:
    """The three baselines with the highest means."""
    ranking = nearest_rivals(table)
    if ranking is None:
        return ""
    names = ", ".join(f"{plain(label)} {mean:.1f}" for label, mean in ranking.means)
    where = f"the {len(ranking.scenarios)} of {ranking.of} scenarios in which all {len(paper.METHODS) - 1} have run"
    return f"The nearest rivals, by the mean final accuracy with seed 0 over {where}: {names}.\n"


HOW_COMPUTE = """\
What each method costs, and what FedCC has for as much: its accuracy after the last evaluated round (in brackets) up to
which it trained on no more images than the method did in all. **Bold** is the higher of the two. One `–`: with some
seed, FedCC's first evaluated round costs more. Two: no shared seed with a run whose images are known.
"Images" went forward and backward, in millions, at all clients and the server, whatever their networks; those of FedSAM
do so twice a step, and count twice. "MB" go up and down in all, with the models that clients send at the end for
prediction. Both are the least and the most of the method's scenarios. "Public" says who needs public images. All are
means over the seeds that both have. A method with other settings, rounds or epochs is compared with FedCC as it comes.
"""
AFTERWARDS = """\
† In some of the runs images were counted afterwards: from the method, its options and the split, without training
(`experiments/count_images.py`).
"""


def compute_section(tables: Sequence[Table]) -> str:
    """Costs of the methods, and FedCC at equal compute, by data set; empty without such runs."""
    parts, afterwards = [], False
    for found in compute_tables(tables):
        head = ["method", "images", "MB", "predicts with", "public"]
        for _, skew in found.scenarios:
            head += [f"{code(skew)} final", "FedCC (rounds)"]
        lines = [
            [*_price(list(costs.values())), *(part for s in found.scenarios for part in _equal_compute(costs.get(s)))]
            for costs in found.rows
        ]
        afterwards |= any(cost.afterwards for costs in found.rows for cost in costs.values())
        titles = dict.fromkeys((found.table.title, title_of(found.data)))
        parts += [f"### {plain(': '.join(titles))}\n", grid(head, lines)]
    about = [HOW_COMPUTE, *([AFTERWARDS] if afterwards else [])]
    return "\n".join(["## At equal compute\n", *about, *parts]) if parts else ""


def _price(costs: Sequence[EqualCompute]) -> list[str]:
    """What a method costs, the least and the most over the scenarios, and what it needs."""
    one, images = costs[0], [cost.images / 1e6 for cost in costs]
    sent = [cost.sent / 1e6 for cost in costs if cost.sent is not None]
    return [
        plain(one.row.title),
        span(images, 1 if max(images) >= 1 else 3) + (" †" if any(cost.afterwards for cost in costs) else ""),
        span(sent, 1) if len(sent) == len(costs) else MISSING,
        one.predictor,
        MISSING if one.needs_public is None else "yes" if one.needs_public else "no",
    ]


def _equal_compute(cost: EqualCompute | None) -> list[str]:
    """A method's accuracy in a scenario and FedCC's for as much, the higher one marked."""
    if cost is None:
        return [MISSING, MISSING]
    seeds = f" ({cost.seeds} seeds)" if cost.seeds > 1 else ""
    final, fedcc = f"{cost.final:.1f}", cost.fedcc
    if fedcc is None:
        return [final + seeds, MISSING]
    ours = marked(f"{fedcc:.1f}", int(fedcc > cost.final))
    return [marked(final, int(cost.final > fedcc)) + seeds, f"{ours} ({cost.rounds})"]


HOW_PAIRED = f"""\
The first minus the second, seed by seed, after the final round and, after the slash, by the mean of the last {LAST}
rounds: mean and sample standard deviation of the differences, and the number of seeds. Both have the same private,
public and test samples. Only where two seeds or more are shared.
"""


HOW_READ = """\
Other readings of the same models minus their own prediction, as above.
"""
HOW_STRONG = """\
Runs with `--augment strong` minus the same runs with the data set's own augmentation, as above, even of a single seed.
"""


def paired_section(records: Records) -> str:
    """Differences paired by seed: to FedCC, to a method's defaults, to the usual protocol; empty without seeds."""
    sections = (
        ("Differences, paired by seed", HOW_PAIRED, paired_comparisons(records.runs)),
        ("Other readings, paired by seed", HOW_READ, reading_comparisons(records.runs)),
        ("Strong augmentation minus standard", HOW_STRONG, strong_comparisons(records.runs)),
    )
    return "\n".join(f"## {title}\n\n{about}\n{differences(found)}" for title, about, found in sections if found)


def differences(comparisons: Sequence[Comparison]) -> str:
    scenarios = list(dict.fromkeys(s for comparison in comparisons for s in comparison.differences))
    lines = []
    for comparison in comparisons:
        cells = []
        for difference in map(comparison.differences.get, scenarios):
            if difference is None:
                cells.append(MISSING)
                continue
            values = [difference.final, *([difference.last] if difference.last else [])]
            texts = [f"{v.mean:+.1f}" + (f" ±{v.spread:.1f}" if v.spread is not None else "") for v in values]
            cells.append(f"{' / '.join(texts)} ({difference.seeds})")
        lines.append([plain(comparison.kind), plain(comparison.reference), *cells])
    return grid(["runs", "minus", *(plain(scenario_title(s)) for s in scenarios)], lines)


def open_section(table: Table) -> str:
    """What the paper's table lacks, by scenario."""
    lines = ["### What is missing\n"]
    for s in standings(table):
        notes = []
        if s.missing:
            everything = len(s.missing) == len(paper.METHODS)
            notes.append("no run yet" if everything else f"missing: {plain(', '.join(s.missing))}")
        if s.fewer:
            few = ", ".join(f"{label} ({n})" for label, n in s.fewer)
            notes.append(f"fewer than {paper.SEEDS} seeds: {plain(few)}")
        if s.below:
            less = ", ".join(f"{label} ({by:.1f})" for label, by in s.below)
            notes.append(f"below the paper: {plain(less)}")
        lines.append(f"- {plain(scenario_title(s.scenario))}: {'; '.join(notes) or 'complete'}")
    return "\n".join(lines) + "\n"


def record_list(rows: Sequence[MethodRow], beside: Path) -> str:
    head = ["method", "data", "skew", "seed", "final", "best (round)", "seconds", "record", "command"]
    lines = [
        [
            plain(row.title),
            plain(title_of(r.data)),
            code(r.skew),
            str(r.seed),
            f"{r.final:.2f}",
            f"{r.best:.2f} ({r.best_round})",
            f"{r.seconds:.0f}" if r.seconds is not None else MISSING,
            link(plain(r.name.rpartition("/")[2] if not r.in_folder else r.name), r, beside),
            code(r.command),
        ]
        for row in rows
        for cell in row.cells.values()
        for r in cell.runs
    ]
    return grid(head, lines)


def readme_block(tables: Sequence[Table], picture: str = PICTURE) -> str:
    """FedCC against the best of the others in each scenario of the paper's table: a picture and a table."""
    table = next((t for t in tables if t.of_paper), None)
    if table is None or not (found := duels(table)):
        return "Nothing has been run with the paper's protocol yet.\n"
    text = (
        "Accuracy on the global test set after the last round, in percent. "
        f"{protocol(table)} {filled(table)} of the {len(paper.TABLE1)} cells of the paper's Table I have been run; "
        '"rivals" is how many other methods have a run in the scenario. A margin uses only the seeds that both methods '
        "have, before rounding, so it may differ from the difference of two columns. N = 2: two classes per client "
        "(`classes:2` on the command line). Dir(0.05): "
        "each class is distributed unevenly, by a Dirichlet distribution (`dirichlet:0.05`); with Dir(0.5) every "
        "client has most classes. The paper does not say whether it augments images."
    )
    head = ["scenario", "rivals", "FedCC", "FedAvg", "best rival", "margin", "paper: FedCC", "best rival", "margin"]
    averaged = next((row.cells for row in table.rows if row.title == "FedAvg"), {})
    rows = []
    for duel in found:
        row = [plain(scenario_title(duel.scenario)), f"{duel.rivals}"]
        for side in (duel.here, duel.paper):
            points = marked(f"{side.points:+.1f}", int(side.points >= 0))
            points += f" ({side.note})" if side.note else ""
            row += [f"{side.ours}", f"{side.theirs} ({plain(side.rival)})", points]
        fedavg = averaged[duel.scenario].value("final") if duel.scenario in averaged else None
        rows.append([*row[:3], str(fedavg or MISSING), *row[3:]])
    lines = textwrap.wrap(text, 119, break_long_words=False, break_on_hyphens=False)
    return f"![{PICTURE_TEXT}]({picture})\n\n" + "\n".join(lines) + "\n\n" + grid(head, rows)


def replace_block(text: str, block: str, name: str) -> str:
    """A page with the block between its two markers replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(
            f"{name} must have one line '{BEGIN}' and below it one '{END}'; the table is written between them"
        )
    return text[: text.index(BEGIN) + len(BEGIN)] + "\n" + block + text[text.index(END) :]
