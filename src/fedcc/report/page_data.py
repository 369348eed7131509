"""What the page draws, as data: runs, scenarios, and FedCC's lead. Only values that have passed a check are in it."""

from __future__ import annotations

import base64
import gzip
import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from fedcc.core.options import setting_text
from fedcc.report.cells import TESTS, MethodRow, Rows, Table
from fedcc.report.paper import Scenario
from fedcc.report.records import RunRecord
from fedcc.report.standings import Lead, leads
from fedcc.report.style import PALETTE, look
from fedcc.report.titles import scenario_title
from fedcc.report.values import natural, printable, relative_link

FILES = ("summary.json", "analysis.json", "metrics.jsonl", "experiment.toml", "environment.json", "partition.npz")
LOGGED = {"majority": "majority classes |C_J|", "alpha": "mean alpha", "unknown": "mean unknown probability"}
MOST_CLIENTS = 100  # lines in one picture
MOST_CLASSES = 100  # rows of a confusion matrix
Group = tuple[Table, MethodRow, Scenario]


def packed(data: bytes) -> str:
    """Compressed, as text that may stand in a page; the same bytes give the same text."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def as_json(data: Any) -> bytes:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()


def run_groups(tables: Sequence[Table]) -> tuple[list[Group], dict[str, str]]:
    """The cells with runs, and the address of each run's cell by its name; other tables repeat cells, or parts."""
    groups: list[Group] = []
    addresses: dict[str, str] = {}
    for table in tables:
        for row in table.rows:
            for scenario, cell in row.cells.items():
                if cell.runs and cell.runs[0].name not in addresses:
                    groups.append((table, row, scenario))
                    addresses |= {run.name: f"runs-{len(groups)}" for run in cell.runs}
    return groups, addresses


def archive(groups: Sequence[Group]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The records as an uncompressed tar file, and where each lies in it: its first byte and its size, by name."""
    buffer, places = io.BytesIO(), {}
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for run in (run for _, row, s in groups for run in row.cells[s].runs):
            try:
                content = _embedded(run)
            except (OSError, ValueError):  # removed or changed since it was read
                continue
            folder = "records/" + run.name.removesuffix(".json").replace("..", "_").lstrip("/")
            member = tarfile.TarInfo(f"{folder}/summary.json" if run.in_folder else f"{folder}.json")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
            padded = -(-len(content) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            places[run.name] = (buffer.tell() - padded, len(content))
    return buffer.getvalue(), places


def _embedded(run: RunRecord) -> bytes:
    """The record as its file has it; a matrix of more classes than the page shows is left out, and so are digests."""
    if len(run.confusion) <= MOST_CLASSES:
        return run.file.read_bytes()
    record = json.loads(run.file.read_bytes())
    return as_json({name: value for name, value in record.items() if name not in ("confusion", "sha256", "files")})


def page_data(
    tables: Sequence[Table], groups: Sequence[Group], places: Mapping[str, tuple[int, int]], out: Path
) -> dict[str, Any]:
    """All that the page's script reads."""
    runs: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    for i, (table, row, scenario) in enumerate(groups, start=1):
        for run in row.cells[scenario].runs:
            numbers[run.name] = len(runs)
            title = f"{row.title}, {scenario_title(scenario)}, seed {run.seed}"
            runs.append(
                {"group": f"runs-{i}", "title": title, "table": table.title, "place": places.get(run.name)}
                | _run(run, out)
            )
    scenes = [s for t in tables for s in _scenes(t, numbers)]
    first = max(reversed(scenes), key=lambda s: s["weight"], default=None)  # of equals the paper's hardest
    methods = dict.fromkeys(row.method for t in tables for row in t.rows)
    return {
        "looks": {m: {"colour": look(m).colour, "strokes": look(m).strokes, "width": look(m).width} for m in methods},
        "palette": PALETTE,
        "logged": LOGGED,
        "tests": TESTS,
        "runs": runs,
        "scenes": scenes,
        "first": first["id"] if first else None,
        "leads": [_lead(t, lead) for t, lead in shown_leads(tables)],
    }


def shown_leads(tables: Sequence[Table], most: int = 16) -> list[tuple[Table, Lead]]:
    """FedCC's lead by scenario, for the picture at the top: of all tables, or of the first if they are many."""
    by_table = [[(t, lead) for lead in leads(t)] for t in tables if not t.variants]
    everything = [pair for pairs in by_table for pair in pairs]
    return everything if len(everything) <= most else next(filter(None, by_table))


def _lead(table: Table, lead: Lead) -> dict[str, Any]:
    title = scenario_title(lead.scenario)
    place = table.title.removeprefix(title.partition(",")[0]).lstrip(": ")  # a data set is named once
    margins = {
        accuracy: {
            "value": round(value.mean, 4),
            "rival": margin.rival,
            "points": round(margin.points, 4),
            "note": margin.note,
        }
        for accuracy, (value, margin) in lead.margins.items()
    }
    return {
        "data": lead.scenario[0],
        "scene": f"{table.slug}/{'/'.join(lead.scenario)}",
        "title": title if table.of_paper or not place else f"{title} ({place})",
        "rivals": lead.rivals,
        "margins": margins,
        "printed": lead.printed and {"rival": lead.printed.rival, "points": round(lead.printed.points, 4)},
    }


def _run(run: RunRecord, out: Path) -> dict[str, Any]:
    """One run: its curves, how it was made, and its files as names and links relative to the page."""
    files = [run.file.with_name(name) for name in FILES] if run.in_folder else [run.file]
    if run.analysis_file is not None and run.analysis_file not in files:
        files.insert(1, run.analysis_file)
    total = [] if run.traffic.total is None else [run.traffic.total]
    settings = {n: setting_text(v) for n, v in run.experiment.items() if n != "settings"}
    settings |= {f"{run.method}.{n}": setting_text(v) for n, v in run.settings.items()}
    machine = {"device": run.device, "precision": run.precision, "engine": run.engine, "commit": run.commit}
    last = {name: values[-1] for name, values in run.metrics.items() if values and values[-1] is not None}
    return {
        "name": run.name,
        "method": run.method,
        "seed": run.seed,
        "final": run.final,
        "best": run.best,
        "bestRound": run.best_round,
        "asked": run.requested_rounds,
        "curve": _rounded(run.curve),
        "targets": _rounded(run.targets) if any(v is not None for v in run.targets) else [],
        "sent": list(accumulate(run.traffic.rounds)) or total,
        "images": list(accumulate(run.work.trained)),
        "predicted": sum(run.work.predicted),
        "afterwards": run.work.afterwards,
        "seconds": run.seconds,
        "settings": settings,
        "machine": {name: value for name, value in machine.items() if value},
        "versions": run.versions,
        "metrics": last,
        "command": run.command,
        "warnings": run.warnings,
        "uploads": _last_uploads(run),
        "files": [(printable(f.name), relative_link(f, out)) for f in files if f.is_file()],
    }


def _last_uploads(run: RunRecord) -> dict[str, dict[str, float | None]]:
    """What each client's last upload says, by name and client."""
    clients = sorted({c for series in run.uploads.values() for c in series}, key=natural)[:MOST_CLIENTS]
    return {
        name: {c: next((round(v, 4) for v in reversed(series.get(c, ())) if v is not None), None) for c in clients}
        for name, series in run.uploads.items()
    }


def _scenes(table: Table, numbers: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """The data of the figures of each scenario that has runs."""
    for s in table.scenarios:
        if rows := sorted(table.rows_with_runs(s), key=lambda pair: pair[0].method != "fedcc"):
            runs = [run for _, own in rows for run in own]
            by_seed = {run.seed: run.counts for run in reversed(runs) if run.counts}  # of a seed's runs the first
            yield {
                "id": f"{table.slug}/{s[0]}/{s[1]}",
                "data": s[0],
                "table": table.title,
                "title": scenario_title(s),
                "weight": (any(r.analysis for r in runs), not table.variants, len(runs)),
                "rows": [
                    {
                        "method": row.method,
                        "label": row.title,
                        "variant": bool(row.extra),
                        "runs": [numbers[r.name] for r in own],
                    }
                    for row, own in rows
                ],
                "partitions": [{"seed": seed, "counts": by_seed[seed]} for seed in sorted(by_seed)],
                "logs": list(_logs(rows)),
                "confusions": list(_confusions(rows, numbers)),
                "clients": list(_clients(rows)),
                "known": list(_known(rows)),
                "analyses": list(_analyses(rows)),
            }


def _rounded(values: Iterable[float | None], digits: int = 2) -> list[float | None]:
    return [None if v is None else round(v, digits) for v in values]


def _logs(rows: Rows) -> Iterator[dict[str, Any]]:
    for row, runs in rows:
        if run := next((r for r in runs if set(LOGGED) & set(r.log)), None):
            series = {}
            for name in [name for name in LOGGED if name in run.log]:
                clients = sorted(run.log[name], key=natural)[:MOST_CLIENTS]
                series[name] = {client: _rounded(run.log[name][client], 4) for client in clients}
            yield {"label": row.title, "seed": run.seed, "series": series}


def _class_names(run: RunRecord, number: int) -> list[str]:
    return list(map(str, run.class_names if len(run.class_names) == number else range(number)))


def _confusions(rows: Rows, numbers: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Accuracy by class of the first seed that has it; the matrix itself is in the run's record."""
    for row, runs in rows:
        if run := next((r for r in runs if 1 < len(r.confusion) <= MOST_CLASSES), None):
            shares = [(row[c], sum(row)) for c, row in enumerate(run.confusion)]
            yield {
                "label": row.title,
                "method": row.method,
                "seed": run.seed,
                "run": numbers[run.name],
                "names": _class_names(run, len(run.confusion)),
                "right": [round(100 * right / total, 2) if total else None for right, total in shares],
            }


def _clients(rows: Rows) -> Iterator[dict[str, Any]]:
    """Accuracies of the clients' own models, by test and client, of the first seed that has them."""
    for row, runs in rows:
        if run := next((r for r in runs if r.tests), None):
            tests = {
                test: {client: round(run.tests[test][client], 2) for client in _first_clients(run.tests[test])}
                for test in TESTS
                if test in run.tests
            }
            yield {"label": row.title, "method": row.method, "seed": run.seed, "tests": tests}


def _first_clients(values: Mapping[str, Any]) -> list[str]:
    return sorted(values, key=natural)[:MOST_CLIENTS]


def _known(rows: Rows) -> Iterator[dict[str, Any]]:
    """The mean of 1 - p(unknown) by client and label, of the first seed that has it."""
    for row, runs in rows:
        if run := next((r for r in runs if r.known), None):
            clients = _first_clients(run.known)
            table = [_rounded(run.known[client], 3) for client in clients]
            yield {
                "label": row.title,
                "seed": run.seed,
                "clients": clients,
                "names": _class_names(run, len(table[0])),
                "rows": table,
            }


def _analyses(rows: Rows) -> Iterator[dict[str, Any]]:
    """Of the first run that has one; a page with every seed's would be too large."""
    for row, runs in rows:
        for seed, analysis in [(r.seed, dict(r.analysis)) for r in runs if r.analysis][:1]:
            if embeddings := analysis.get("embeddings"):
                analysis["embeddings"] = {**embeddings, "panels": [_small(panel) for panel in embeddings["panels"]]}
            yield {"label": row.title, "method": row.method, "seed": seed, **analysis}


def _small(panel: Mapping[str, Any]) -> dict[str, Any]:
    """A panel with points on a grid of a thousand steps: as fine as a screen, in a third of the bytes."""
    points = np.array(panel["points"], float)
    points -= points.min(0)
    x, y = np.rint(999 * points / (points.max() or 1.0)).astype(int).T.tolist()
    return {**{k: v for k, v in panel.items() if k != "points"}, "x": x, "y": y}
