"""What `fedcc report` reads: records of runs, and analyses beside them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import synthetic
from fedcc.report.records import find_records
from fedcc.report.tables import tables
from fuzz.harness import Case, Target, Wrong
from fuzz.mutate import RAW_JSON, mutated_bytes, mutated_tree, to_json


class Record(Target):
    """A ``summary.json``: never more than a problem with its reason, which leaves other records as they are."""

    name, file = "records", "summary.json"

    def prepare(self, folder: Path) -> None:
        given: tuple[tuple[str, dict[str, Any]], ...] = (
            ("fedcc", {"data": "digits"}),
            ("fedavg", {"data": "cifar10", "rounds": 3}),
            ("local", {"data": "digits", "seed": 3}),
        )
        self.records = [synthetic.record(method, **how) for method, how in given]
        self.trees: list[Any] = self.records
        self.texts = [to_json(tree) for tree in self.trees]

    def begin(self, folder: Path) -> None:
        synthetic.write(synthetic.record("fedmd", data="digits", seed=1), folder / "good")

    def make(self, rng: random.Random) -> Case:
        n = rng.randrange(len(self.trees))
        if rng.random() < 0.25:
            return {self.file: mutated_bytes(rng, self.texts[n], self.texts)}
        return {self.file: to_json(mutated_tree(rng, self.trees[n], RAW_JSON, self.trees))}

    def check(self, case: Case, folder: Path) -> bool:
        place = folder / "odd"
        place.mkdir(exist_ok=True)
        for name, content in case.items():
            assert content is not None
            (place / name).write_bytes(content)
        found = find_records([folder])
        names = [run.name for run in found.runs]
        if f"{folder.name}/good" not in names:
            raise Wrong("the other record is gone")
        problems = [reason for name, reason in found.problems if name.startswith(f"{folder.name}/odd")]
        if any("\n" in reason or not reason for reason in problems):
            raise Wrong("a problem that is not one line")
        taken = f"{folder.name}/odd" in names
        if not taken and not problems:
            raise Wrong("left out without a word")
        made = tables(found.runs)
        json.dumps(str(made)).encode()
        return taken


class Analysis(Record):
    """An ``analysis.json`` beside a good record."""

    name, file = "analysis", "analysis.json"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.trees = [synthetic.analysis(record, samples=20) for record in self.records[:2]]
        self.texts = [to_json(tree) for tree in self.trees]

    def begin(self, folder: Path) -> None:
        super().begin(folder)
        synthetic.write(self.records[0], folder / "odd")

    def check(self, case: Case, folder: Path) -> bool:
        if not super().check(case, folder):
            raise Wrong("an odd analysis takes the record with it")
        return True
