"""Run what has no record yet, file after file in the order of what the runs are worth, within one limit of time.

    python experiments/backlog.py RECORDS MINUTES [FILE.toml ...] [-- OPTIONS OF fedcc sweep]
    python experiments/backlog.py results 25 -- --jobs 3 --device cuda
    python experiments/backlog.py results 0        # list what is missing

The folder of runs (``--out``) keeps unfinished runs: the same command continues them from their checkpoints. Copy the
``summary.json`` of a finished run to RECORDS under the name that this script expects (``RECORDS/NAME.json``).
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from fedcc.experiments.sweep import Run, read

HERE = Path(__file__).parent
ORDER = (
    "seed0",
    "rivals",
    "augmentations",
    "strong",
    "strong-rivals",
    "parts",
    "seeds",
    "tiny64",
    "compute",
    "baselines",
)
"""The files; ``augmentations`` chooses what ``strong`` means, so it comes first."""


def record_name(run: Run) -> str:
    """The file of a run's record: scenario, method, variant and seed."""
    scenario, variant, seed = run.folder.parts
    return "_".join([scenario, *variant.split("-", 1), seed]) + ".json"


def missing(file: Path, records: Path) -> list[Run]:
    """The runs of a file that have no record, in the file's order."""
    return [run for run in read(file) if not (records / record_name(run)).exists()]


def main(records: Path, minutes: float, files: list[Path], options: list[str]) -> int:
    end, failed = time.monotonic() + 60 * minutes, 0
    for file in files:
        runs = missing(file, records)
        print(f"{file.name}: {len(runs)} of {len(read(file))} runs have no record", flush=True)
        left = end - time.monotonic()
        if not minutes:
            print("".join(f"  {run.folder}  ->  {record_name(run)}\n" for run in runs), end="")
        elif runs and left >= 1:  # without a run, `fedcc sweep` would take all of the file's
            only = [part for run in runs for part in ("--only", run.folder.as_posix())]
            command = [sys.executable, "-m", "fedcc", "sweep", str(file), "--time-limit", f"{left:.0f}s"]
            failed |= subprocess.run([*command, *only, *options], check=False).returncode
    return failed


def arguments(given: list[str]) -> tuple[Path, float, list[Path], list[str]]:
    """The folder of records, the minutes, the files and the options of ``fedcc sweep``; wrong ones end the program."""
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="the folder of records")
    parser.add_argument("minutes", type=float, help="the limit of time; 0 lists what is missing")
    parser.add_argument("files", type=Path, nargs="*", help="sweep files; all by default, in the order of their worth")
    found = parser.parse_args(given[:cut])
    if not found.records.is_dir():
        parser.error(f"{found.records} is not a folder")
    if not 0 <= found.minutes < float("inf"):
        parser.error(f"minutes must be 0 or more, got {found.minutes}")
    for file in found.files:
        if not file.is_file():
            parser.error(f"{file} does not exist")
    return found.records, found.minutes, found.files or [HERE / f"{name}.toml" for name in ORDER], given[cut + 1 :]


if __name__ == "__main__":
    sys.exit(main(*arguments(sys.argv[1:])))
