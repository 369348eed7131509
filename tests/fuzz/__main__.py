"""``make fuzz``: the command line."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

from fuzz.archives import Tar, Zip
from fuzz.commands import PublicPort, SiteMessages
from fuzz.federations import Download, Folders, Names, SiteData, Upload
from fuzz.harness import Finding, Tally, Target, fuzz, planned, save, table
from fuzz.pickles import Cifar
from fuzz.records import Analysis, Record
from fuzz.runs import CheckpointFiles, Models, RunFolders, quicken
from fuzz.site_files import Keys, SiteFiles
from fuzz.texts import Config, Options, Settings, SweepFile

TARGETS: tuple[type[Target], ...] = (
    Config, SweepFile, Settings, Options, Record, Analysis, RunFolders, CheckpointFiles, Models, Cifar, Tar, Zip,
    Folders, Names, SiteData, Upload, Download, PublicPort, SiteMessages, SiteFiles, Keys,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=4000, help="in all (FUZZ=)")
    parser.add_argument("--seed", type=int, default=0, help="of all inputs (SEED=)")
    parser.add_argument("--target", action="append", help="these targets only (TARGET=)")
    parser.add_argument("--index", type=int, action="append", help="this input of the target only (INDEX=)")
    parser.add_argument("--jobs", type=int, default=2, help="workers")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="folder for what is found")
    given = parser.parse_args()
    names = [t.name for t in TARGETS]
    for name in given.target or []:
        if name not in names:
            parser.error(f"unknown target {name!r}; known: {', '.join(names)}")
    if given.index and len(given.target or []) != 1:
        parser.error("an index belongs to one target: name it")
    torch.set_num_threads(1)
    shared = Path("/dev/shm")
    room = Path(tempfile.mkdtemp(prefix="fedcc-fuzz-", dir=shared if shared.is_dir() else None))
    try:
        return run(given, room)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def run(given: argparse.Namespace, room: Path) -> int:
    begun = time.monotonic()
    quicken()
    targets = [kind() for kind in TARGETS if not given.target or kind.name in given.target]
    for target in targets:
        place = room / "examples" / target.name
        place.mkdir(parents=True)
        target.prepare(place)
    by_name = {target.name: target for target in targets}
    plan = {targets[0]: given.index} if given.index else planned(targets, given.inputs)
    total = len(given.index) if given.index else sum(planned(targets, given.inputs).values())
    done: dict[str, int] = {}
    terminal = sys.stderr.isatty()
    start = "\r" if terminal else ""

    def progress(name: str, tally: Tally) -> None:
        done[name] = tally.inputs
        if terminal:
            seconds = time.monotonic() - begun
            print(
                f"\r{sum(done.values()):,} of {total:,} inputs, {seconds:.0f} s  ", end="", file=sys.stderr, flush=True
            )

    def found(finding: Finding) -> None:
        place = save(finding, by_name[finding.target], given.seed, given.findings)
        print(f"{start}{finding.target}: {finding.what} ({finding.where}): {place}", flush=True)

    tallies = fuzz(plan, given.seed, room, jobs=given.jobs, progress=progress, found=found)
    return report(given, tallies, time.monotonic() - begun)


def report(given: argparse.Namespace, tallies: dict[str, Tally], seconds: float) -> int:
    rows = table(tallies)
    print(f"\n{'target':<12}{'inputs':>10}{'accepted':>10}{'refused':>10}{'seconds':>9}{'per s':>8}{'findings':>10}")
    for r in rows:
        print(f"{r['target']:<12}{r['inputs']:>10,}{r['accepted']:>10,}{r['refused']:>10,}{r['seconds']:>9}{r['rate']:>8,}"
              f"{r['findings']:>10}")  # fmt: skip
    findings = [f for tally in tallies.values() for f in tally.findings.values()]
    print(f"{sum(r['inputs'] for r in rows):,} inputs, {seconds:.0f} s, {len(findings)} findings")
    for f in sorted(findings, key=lambda f: (f.target, -f.count)):
        print(f"  {f.count:>6} x {f.target}: {f.what} ({f.where}); "
              f"make fuzz TARGET={f.target} SEED={given.seed} INDEX={f.indices[0]}")  # fmt: skip
        if given.index:
            print(f.details)
    if given.json:
        listed = [
            {"target": f.target, "what": f.what, "where": f.where, "count": f.count, "indices": f.indices}
            for f in findings
        ]
        given.json.write_text(
            json.dumps({"seed": given.seed, "seconds": seconds, "targets": rows, "findings": listed}, indent=1)
        )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
