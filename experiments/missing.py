"""Print, as options of ``fedcc sweep``, which runs of a file have no record: ``missing.py FILE RECORDS``."""

import sys
from pathlib import Path

from fedcc.experiments.sweep import read

path, records = map(Path, sys.argv[1:])
for run in read(path):
    scenario, variant, seed = run.folder.parts
    if not (records / f"{'_'.join([scenario, *variant.split('-', 1), seed])}.json").exists():
        print("--only", run.folder.as_posix())
