"""What it costs to share labels or noisy labels instead of predictions: the table of docs/privacy.md.

    python experiments/share_price.py OUT.json [SECONDS]
    python experiments/share_price.py --table OUT.json

Digits with the demo's settings (10 clients, T=3, E=5). Each row of OUT.json is one run. Runs that OUT.json already has
are not repeated, so that the study can be interrupted; SECONDS ends it early. ``--table`` prints the table. Noise comes
from the operating system: another run with ``share=noisy`` gives other numbers.
"""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fedcc
from fedcc.flower.ledger import DELTA, Ledger

SKEWS = ("classes:1", "classes:3", "dirichlet:0.5")
PREDICTIONS, LABELS, NOISY = ("predictions", None), ("labels", None), [("noisy", 8.0), ("noisy", 4.0), ("noisy", 2.0)]
STUDY = [
    *(("fedcc", skew, form, 0) for form in (PREDICTIONS, LABELS, *NOISY) for skew in SKEWS),
    *(("fedmd", skew, form, 0) for form in (PREDICTIONS, LABELS, NOISY[1]) for skew in SKEWS),
    *(("fedct", "dirichlet:0.5", form, 0) for form in (PREDICTIONS, NOISY[1])),
    *(("lsr", "dirichlet:0.5", form, 0) for form in (PREDICTIONS, LABELS, NOISY[1])),
    *(("fedcc", skew, LABELS, seed) for skew in SKEWS[:2] for seed in (1, 2)),
]


def measure(method: str, skew: str, share: str, epsilon: float | None, seed: int) -> dict[str, Any]:
    """One run: its accuracy, what a client uploads in a round, and how many answers it gives in all."""
    federation = fedcc.Federation.named("digits", skew=skew, seed=seed)
    options: dict[str, Any] = {"share": share, "answer_epsilon": epsilon, "seed": seed, "evaluate_every": 3}
    result = fedcc.run(method, federation, client_accuracy=False, readings=False, device="cpu", threads=1, **options)
    clients, outputs = len(federation.private), result.method.outputs(federation.classes)
    return {
        "method": method,
        "skew": skew,
        "share": share,
        "answer_epsilon": epsilon,
        "seed": seed,
        "accuracy": result.curve[-1][1],
        "upload_bytes": result.rounds[0]["bytes"]["up"] // clients,
        "answers": len(federation.public) * len(result.rounds) + len(federation.test),
        "columns": outputs,
        "seconds": round(result.seconds, 1),
    }


def main(path: Path, seconds: float) -> None:
    record = json.loads(path.read_text()) if path.exists() else {"rows": []}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    done = {tuple(row[n] for n in ("method", "skew", "share", "answer_epsilon", "seed")) for row in record["rows"]}
    end = time.monotonic() + seconds
    for method, skew, (share, epsilon), seed in STUDY:
        if (method, skew, share, epsilon, seed) in done:
            continue
        if time.monotonic() > end:
            return
        row = measure(method, skew, share, epsilon, seed) | {"commit": commit.stdout.strip()}
        print(row, flush=True)
        record["rows"].append(row)
        path.write_text(json.dumps(record, indent=1) + "\n")


def table(path: Path) -> str:
    """The accuracies in percent, seeds in order, and the record-level epsilon of a site that takes part once."""
    rows = json.loads(path.read_text())["rows"]
    head = ["", "`share`", *(f"`{skew}`" for skew in SKEWS), "bytes", "record-level epsilon"]
    lines = [head, ["---"] * len(head)]
    for method, share, epsilon in dict.fromkeys((r["method"], r["share"], r["answer_epsilon"]) for r in rows):
        own = [r for r in rows if (r["method"], r["share"], r["answer_epsilon"]) == (method, share, epsilon)]
        cells = [
            ", ".join(f"{r['accuracy']:.1f}" for r in sorted(own, key=lambda r: r["seed"]) if r["skew"] == skew)
            for skew in SKEWS
        ]
        noisy = {(epsilon, own[0]["columns"]): own[0]["answers"]} if epsilon else {}
        record = Ledger(noisy).record_epsilon() if noisy else math.inf
        name = fedcc.make(method).name
        form = f"{share}, {epsilon:g} per answer" if epsilon else share
        lines.append([name, form, *cells, f"{own[0]['upload_bytes']:,}", f"{record:,.0f}" if noisy else "infinite"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\ndelta {DELTA:g}"


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        print(table(Path(sys.argv[2])))
    else:
        main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else math.inf)
