"""Draw a cell of Table I that has a record, to be run again: what it has, and the command that makes it again.

    python experiments/draw_cell.py [SEED]

The draw goes through all 192 cells in an order that follows from the seed, and takes the first one with a record of
the paper's protocol: it stays the same until a cell before it gets a record. The default seed is in the repository, so
everybody draws the same cell.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from fedcc.report import paper
from fedcc.report.records import RunRecord, find_records
from fedcc.report.titles import scenario_title

RESULTS = Path(__file__).parents[1] / "results"
SEED = 20


def drawn(runs: Sequence[RunRecord], seed: int) -> RunRecord:
    """The run of the cell that the seed draws; of a cell with several seeds the first."""
    found = {(r.method, r.scenario): r for r in runs[::-1] if not r.protocol and not r.changed_settings}
    cells = list(paper.TABLE1)
    random.Random(seed).shuffle(cells)
    return next(found[cell] for cell in cells if cell in found)


if __name__ == "__main__":
    run = drawn(find_records([RESULTS]).runs, int(sys.argv[1]) if len(sys.argv) > 1 else SEED)
    print(f"{run.label}, {scenario_title(run.scenario)}, seed {run.seed}: {run.final:.2f} % ({run.device})")
    print(f"fedcc run --config results/{run.file.name} --out runs/again")
