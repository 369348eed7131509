"""All methods on digits: a compact record of the runs of digits.toml, and the table of docs/methods.md from it.

fedcc sweep experiments/digits.toml --out runs/digits
python experiments/digits_table.py runs/digits OUT.json
python experiments/digits_table.py --table OUT.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from fedcc.experiments.sweep import read
from fedcc.methods import make
from fedcc.report.paper import Value

FILE = Path(__file__).with_name("digits.toml")
KEPT = ("data", "skew", "seed", "seconds", "commit")


def collected(folder: Path) -> dict[str, Any]:
    """What each finished run of the file ended with."""
    rows, versions = [], {}
    for run in read(FILE):
        path = folder / run.folder / "summary.json"
        if path.exists():
            record = json.loads(path.read_text())
            versions = record["versions"]
            readings = {name: r["final"] for name, r in record["accuracy"].get("readings", {}).items()}
            rows.append(
                {"method": run.method, "optimizer": record["experiment"]["optimizer"], "lr": record["experiment"]["lr"]}
                | {name: record[name] for name in KEPT}
                | {"rounds": record["accuracy"]["rounds"][:3], "final": record["accuracy"]["final"]}
                | {"readings": readings, "images": sum(record["images"]["trained"].values())}
                | {"bytes": record["bytes"]["up"] + record["bytes"]["down"] + record["bytes"]["models"]}
            )
    return {"command": "fedcc sweep experiments/digits.toml --out runs/digits", "versions": versions, "rows": rows}


def table(record: dict[str, Any]) -> str:
    """Mean and sample standard deviation of the final accuracies over the seeds; those under SGD below."""
    rows = record["rows"]
    skews = list(dict.fromkeys(row["skew"] for row in rows))
    lines = [["method", *(f"`{skew}`" for skew in skews)], ["---"] * (1 + len(skews))]
    for method, optimizer in sorted(
        {(r["method"], r["optimizer"]) for r in rows}, key=lambda k: (k[1], order(rows, k))
    ):
        own = [r for r in rows if (r["method"], r["optimizer"]) == (method, optimizer)]
        cells = []
        for skew in skews:
            values = [r["final"] for r in own if r["skew"] == skew]
            few = f" ({len(values)} seeds)" if 0 < len(values) < 3 else ""
            cells.append(f"{Value.of(values)}{few}" if values else "–")
        lines.append([make(method).label + (", SGD 0.01" if optimizer == "sgd" else ""), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def order(rows: list[dict[str, Any]], key: tuple[str, str]) -> int:
    """Where the file has the method."""
    return next(i for i, row in enumerate(rows) if (row["method"], row["optimizer"]) == key)


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        print(table(json.loads(Path(sys.argv[2]).read_text())))
    else:
        found = collected(Path(sys.argv[1]))
        Path(sys.argv[2]).write_text(json.dumps(found, separators=(",", ":")) + "\n")
        print(f"{len(found['rows'])} of {len(read(FILE))} runs")
