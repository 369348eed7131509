"""Run what has no record yet, file after file in the order of what the runs are worth, within one limit of time.

    python experiments/backlog.py RECORDS MINUTES [FILE.toml ...] [-- OPTIONS OF fedcc sweep]
    python experiments/backlog.py results 25 -- --jobs 3 --device cuda
    python experiments/backlog.py results 0        # list what is missing

The folder of runs (``--out``) keeps unfinished runs: the same command continues them from their checkpoints. Copy the
``summary.json`` of a finished run to RECORDS under the name that this script expects (``RECORDS/NAME.json``).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fedcc.experiments.sweep import Run, read

HERE = Path(__file__).parent
ORDER = (
    "seed0",
    "again",
    "augmentations",
    "strong",
    "strong-rivals",
    "parts",
    "seeds",
    "rivals",
    "tiny64",
    "compute",
    "baselines",
)
WHOLE = {"again": ("confusion", "known")}  # files whose runs are missing where a record lacks one of these parts
CHOICE = HERE / "augmentations.toml"  # its records decide what `--augment strong` is


def record_name(run: Run) -> str:
    """The file of a run's record: scenario, method, variant and seed."""
    scenario, variant, seed = run.folder.parts
    return "_".join([scenario, *variant.split("-", 1), seed]) + ".json"


def missing(file: Path, records: Path) -> list[Run]:
    """The runs of a file that have no record, in the file's order."""
    parts = WHOLE.get(file.stem, ())
    return [run for run in read(file) if not has_record(records / record_name(run), parts)]


def has_record(path: Path, parts: Sequence[str]) -> bool:
    """Whether there is a record, and it has these parts."""
    return path.exists() and (not parts or set(parts) <= json.loads(path.read_text()).keys())


def waiting(runs: Sequence[Run], records: Path) -> list[Run]:
    """Those by ``--augment strong``, while it is not decided what that is."""
    undecided = missing(CHOICE, records)
    return [run for run in runs if undecided and run.experiment().split.augment == "strong"]


def main(records: Path, minutes: float, files: list[Path], options: list[str]) -> int:
    end, failed = time.monotonic() + 60 * minutes, 0
    for file in files:
        runs = missing(file, records)
        later = waiting(runs, records)
        note = f"; {len(later)} wait until {CHOICE.name} has all records and the choice is made" if later else ""
        print(f"{file.name}: {len(runs)} of {len(read(file))} runs have no record{note}", flush=True)
        left = end - time.monotonic()
        if not minutes:
            print("".join(f"  {run.folder}  ->  {record_name(run)}\n" for run in runs), end="")
        elif len(runs) > len(later) and left >= 1:  # without a run, `fedcc sweep` would take all of the file's
            only = [part for run in runs if run not in later for part in ("--only", run.folder.as_posix())]
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
