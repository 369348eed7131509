"""Mutation testing of the methods: every change in ``mutants.txt`` must make a test fail. ``make mutants`` runs it.

Each mutant is one small change of the source: a sign, a dropped term, a swapped weight. The script copies ``src`` to a
private folder, makes the change, runs the tests of that file until the first failure, and says killed or alive. Tests
run in forked processes of a parent that has imported torch and pytest, but not fedcc.

In ``mutants.txt`` a line ``[method]`` or ``[method] file`` starts a group; ``# what breaks``, ``- old text`` and
``+ new text`` (several lines each, if need be) make a mutant; ``= reason`` says why one changes nothing that a test
could see. The old text must occur exactly once in its file.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src"
TABLE = TESTS / "mutants.txt"
LIMIT = 180  # seconds for one mutant; a mutant that never ends is a dead one

SHARED = ["unit/test_core.py", "unit/test_fedcc_equations.py", "property/test_fedcc.py", "unit/test_engine.py"]
GROUPS = ["unit/test_feddf.py", "unit/test_fedet.py", "unit/test_fedhkt.py"]
RELEVANT: dict[str, list[str]] = {
    "losses.py": [*SHARED, "unit/test_fedprox.py", "unit/test_fedvls.py", "unit/test_fedlc.py"],
    "gradients.py": ["unit/test_fedsam.py", "unit/test_engine.py"],
    "clustering.py": ["unit/test_clustering.py", "unit/test_fedconcat.py", "unit/test_fedhkt.py"],
    "core/step.py": ["unit/test_core.py", "unit/test_fedsam.py", "unit/test_engine.py"],
    "core/method.py": ["unit/test_readings.py", "unit/test_core.py"],
    "core/model.py": ["unit/test_core.py", "unit/test_fedconcat.py"],
    "engine/adam.py": ["unit/test_fedconcat.py", "unit/test_engine.py"],
    "engine/plain.py": ["unit/test_engine.py"],
    "nets/network.py": ["unit/test_fedconcat.py", "unit/test_engine.py"],
    "methods/abstention.py": [*SHARED[:3], "unit/test_fedcc_options.py", "unit/test_readings.py"],
    "methods/bounds.py": ["unit/test_baselines.py", "unit/test_ssl.py"],
    "methods/clusters.py": ["unit/test_fedhkt.py"],
    "methods/clusterwise.py": ["unit/test_fedconcat.py"],
    "methods/fedavg.py": ["unit/test_baselines.py", "property/test_averaging.py"],
    "methods/fedcc.py": [
        "unit/test_fedcc_equations.py",
        "unit/test_fedcc_options.py",
        "unit/test_readings.py",
        "property/test_fedcc.py",
    ],
    "methods/fedmd.py": ["unit/test_baselines.py", "unit/test_lsr.py"],
    "methods/fednova.py": ["unit/test_fednova.py", "property/test_normalised_averaging.py"],
    "methods/fedct.py": ["unit/test_fedct.py", "property/test_distillation.py"],
    "methods/groups.py": GROUPS,
}
"""Tests of a source file, most telling first; by default ``unit/test_NAME.py``."""

EVERY = ["unit/test_reductions.py", "contract/test_methods.py"]
"""Tests of all methods, by name: run on what those let through."""

SEVERAL = {
    "losses": "fedavg or fedmd or feddf or fedcc",
    "gradients": "fedsam or feddf",
    "averaging": "feddf or fedet or fedhkt",
    "clustering": "fedconcat or fedhkt",
}
"""The methods that are tried for a group that is no method."""


@dataclass(frozen=True)
class Mutant:
    """One change of the source: in a file under ``src/fedcc``, an old text and a new one, and what that breaks."""

    method: str
    number: int
    file: str
    old: str
    new: str
    breaks: str
    equivalent: str = ""  # why no test can tell

    @property
    def name(self) -> str:
        return f"{self.method}/{self.number}"

    def occurs(self) -> int:
        """How often the old text is there: once, or the table is stale."""
        return (SOURCE / "fedcc" / self.file).read_text().count(self.old)

    def tests(self) -> list[str]:
        own = [f"unit/test_{name}.py" for name in (self.method, Path(self.file).stem)]
        names = dict.fromkeys([own[0], *RELEVANT.get(self.file, own[1:])])
        return [str(TESTS / name) for name in names if (TESTS / name).exists()]

    def contract(self) -> list[str]:
        """More tests, for what those have let through."""
        names = SEVERAL.get(self.method, self.method)
        return [*(str(TESTS / name) for name in EVERY), "-k", names]


def table(text: str | None = None) -> list[Mutant]:
    """All mutants.

    >>> [found] = table("[fedavg]\\n# no sum\\n- .sum(0)\\n+ .mean(0)\\n")
    >>> found.name, found.file, found.old, found.new
    ('fedavg/1', 'methods/fedavg.py', '.sum(0)', '.mean(0)')
    """
    mutants: list[Mutant] = []
    method = file = ""
    entry: dict[str, list[str]] = {}

    def finish() -> None:
        if entry:
            old, new = "\n".join(entry.get("-", [])), "\n".join(entry.get("+", []))
            if not old or old == new:
                raise ValueError(f"a mutant of {method} changes nothing: {' '.join(entry['#'])}")
            number = 1 + sum(m.method == method for m in mutants)
            reason = " ".join(entry.get("=", []))
            mutants.append(Mutant(method, number, file, old, new, " ".join(entry["#"]), reason))
        entry.clear()

    for line in (TABLE.read_text() if text is None else text).splitlines():
        if head := re.fullmatch(r"\[(\w+)\]\s*(\S*)", line):
            finish()
            method = head[1]
            file = head[2] or f"methods/{method}.py"
        elif line.startswith("# "):
            finish()
            entry["#"] = [line[2:]]
        elif line[:1] in ("-", "+", "="):
            entry[line[0]] = [*entry.get(line[0], []), line[2:]]
        elif line.strip():
            raise ValueError(f"not a line of a table of mutants: {line!r}")
    finish()
    return mutants


def child(tree: Path, runs: Sequence[Sequence[str]], log: Path) -> None:
    """In a forked process: the tests on the source in this folder. Ends the process: 0 passed, 1 failed, 2 broken."""
    status = 2
    try:
        os.setsid()
        signal.alarm(LIMIT)
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(TESTS.parent)
        sys.path[:0] = [str(tree), str(TESTS)]
        os.environ["COLUMNS"] = "250"
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
        import pytest

        status = 0
        for arguments in runs:
            place = ["-c", str(TESTS.parent / "pyproject.toml"), f"--basetemp={tree.parent / f'{tree.name}-temp'}"]
            quick = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--tb=line", "--no-header"]
            found = int(pytest.main([*place, *quick, "--hypothesis-profile=mutants", *arguments]))
            if found not in (0, 5):  # 5: no test has such a name
                status = 1 if found == 1 else 2
                break
        import fedcc

        own = {"fedcc", "conftest", "__main__", *(path.stem for path in TESTS.rglob("*.py"))}
        theirs = [name for name in sys.modules if name.partition(".")[0] not in own]
        log.with_suffix(".modules").write_text("\n".join(theirs))
        if not Path(fedcc.__file__).is_relative_to(tree):
            print("ERROR another fedcc was tested:", fedcc.__file__)
            status = 2
    finally:
        sys.stdout.flush()
        os._exit(status)


class Pool:
    """Forked processes, so many at a time."""

    def __init__(self, jobs: int):
        self.jobs, self.running = jobs, dict[int, tuple[int, Path, Path]]()

    def start(self, ticket: int, tree: Path, runs: Sequence[Sequence[str]]) -> None:
        log = tree.parent / f"{tree.name}.log"
        sys.stdout.flush()
        if (process := os.fork()) == 0:
            child(tree, runs, log)
        self.running[process] = (ticket, tree, log)

    def finished(self) -> tuple[int, str, str]:
        """Waits for one: its ticket, how it ended (passed, failed, broken) and the test that failed."""
        process, status = os.wait()
        ticket, tree, log = self.running.pop(process)
        text = log.read_text(errors="replace")
        shutil.rmtree(tree, ignore_errors=True)
        shutil.rmtree(tree.parent / f"{tree.name}-temp", ignore_errors=True)
        if os.WIFSIGNALED(status):
            late = os.WTERMSIG(status) == signal.SIGALRM
            return ticket, "failed" if late else "broken", "it never ends" if late else text[-2000:]
        end = {0: "passed", 1: "failed"}.get(os.waitstatus_to_exitcode(status), "broken")
        found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.*)$", text, re.MULTILINE)
        return ticket, end, text[-2000:] if end == "broken" else found[1] if found else ""


def copied(root: Path, name: str, change: Mutant | None = None) -> Path:
    """The source in a folder of its own, with a change. Times are kept, so that compiled files stay valid."""
    tree = root / name
    shutil.copytree(root / "source" if (root / "source").exists() else SOURCE, tree)
    if change is not None:
        path = tree / "fedcc" / change.file
        text = path.read_text()
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            stale.unlink()
        path.write_text(text.replace(change.old, change.new))
    return tree


def import_all(names: Iterable[str]) -> None:
    """Import in the parent what the tests have imported, fedcc and themselves apart: forked processes inherit it."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def unmutated(pool: Pool, root: Path, mutants: list[Mutant]) -> bool:
    """Whether the tests pass on the source as it is: else every mutant would look dead."""
    files = list(dict.fromkeys(name for m in mutants for name in m.tests()))
    contracts = list(dict.fromkeys(tuple(m.contract()) for m in mutants))
    shares = [[files[i :: pool.jobs], *contracts[i :: pool.jobs]] for i in range(pool.jobs)]
    for i, runs in enumerate(share for share in shares if any(share)):
        pool.start(i, copied(root, f"as-it-is-{i}"), [run for run in runs if run])
    ends = [pool.finished() for _ in range(len(pool.running))]
    import_all(dict.fromkeys(name for found in root.glob("*.modules") for name in found.read_text().splitlines()))
    for _, end, test in ends:
        if end != "passed":
            print(f"the tests fail without any mutant: {test}")
    return all(end == "passed" for _, end, _ in ends)


def run(mutants: list[Mutant], jobs: int, root: Path) -> dict[str, tuple[str, str]]:
    """How each mutant ended, and by which test."""
    pool, ends, begun = Pool(jobs), dict[str, tuple[str, str]](), time.monotonic()
    waiting = list(enumerate(mutants))
    while waiting or pool.running:
        while waiting and len(pool.running) < jobs:
            i, mutant = waiting.pop(0)
            pool.start(i, copied(root, f"mutant-{i}", mutant), [mutant.tests(), mutant.contract()])
        i, end, test = pool.finished()
        mutant = mutants[i]
        ends[mutant.name] = (end, test)
        word = {"failed": "killed", "passed": "equivalent" if mutant.equivalent else "ALIVE", "broken": "BROKEN"}[end]
        left = (time.monotonic() - begun) / len(ends) * (len(mutants) - len(ends))
        print(f"{len(ends):4}/{len(mutants)} {word:10} {mutant.name:15} {mutant.breaks}  <- {test}  {left:.0f} s left")
    return ends


def report(mutants: list[Mutant], ends: dict[str, tuple[str, str]]) -> int:
    """The table; 1 if a mutant is alive that is not equivalent, or dead that is."""
    groups = list(dict.fromkeys(m.method for m in mutants))
    total = Counter(m.method for m in mutants)
    killed = Counter(m.method for m in mutants if ends[m.name][0] == "failed")
    alike = Counter(m.method for m in mutants if m.equivalent)
    print(f"\n{'method':<12} | mutants | killed | equivalent")
    for name in groups:
        print(f"{name:<12} | {total[name]:7} | {killed[name]:6} | {alike[name]:10}")
    print(f"{'all':<12} | {total.total():7} | {killed.total():6} | {alike.total():10}")
    for m in mutants:
        if m.equivalent and ends[m.name][0] == "passed":
            print(f"equivalent: {m.name} ({m.breaks}): {m.equivalent}")
    wrong = [m for m in mutants if (ends[m.name][0] != "failed") != bool(m.equivalent) or ends[m.name][0] == "broken"]
    for m in wrong:
        end = {"passed": "alive", "failed": "listed as equivalent, yet killed", "broken": "broken"}[ends[m.name][0]]
        print(f"{end}: {m.name} in {m.file}: {m.breaks}\n- {m.old}\n+ {m.new}\n{ends[m.name][1]}")
    return int(bool(wrong))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Change the source a little; some test must fail.")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", action="append", default=[], help="a group (fedavg) or one mutant (fedavg/3)")
    options = parser.parse_args(arguments)

    mutants = [m for m in table() if not options.only or m.method in options.only or m.name in options.only]
    stale = [m for m in mutants if m.occurs() != 1]
    for m in stale:
        print(f"stale: the old text of {m.name} occurs {m.occurs()} times in {m.file}: {m.old}")
    if stale or not mutants:
        print("no mutant has such a name" if not mutants else f"{len(stale)} mutants are stale")
        return 1

    os.environ["OMP_NUM_THREADS"] = "1"
    import hypothesis
    import hypothesis.extra.numpy
    import numpy as np
    import pytest
    import sklearn.cluster
    import torch

    del np, pytest, sklearn
    torch.set_num_threads(1)
    hypothesis.settings.register_profile("mutants", derandomize=True, max_examples=25, deadline=None, database=None)
    assert "fedcc" not in sys.modules
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder)
        shutil.copytree(SOURCE, root / "source", ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(root / "source", quiet=1)
        if not unmutated(Pool(options.jobs), root, mutants):
            return 1
        print(f"without any mutant the tests pass ({time.monotonic() - begun:.0f} s)")
        status = report(mutants, run(mutants, options.jobs, root))
    print(f"{time.monotonic() - begun:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
