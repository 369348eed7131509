"""Count the images of runs whose records lack ``images``: the run's requests once more, answered without training.

    python experiments/count_images.py [RECORD.json ...]          add ``images`` to records (those in results/)
    python experiments/count_images.py --check [RECORD.json ...]  compare with the ``images`` that runs counted

How many images a run trains on follows from its method, options and split, and the number of public samples; with few
exceptions (``refusal``) not from what networks learn. So the run's round loop runs on blank inputs, with an engine that
knows only shapes and steps, and counts as a run does. Records from before ``counts`` need the data set, which is split
once more. A record is left as it is unless the bytes of all messages are the recorded ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedcc.core.method import AnyMethod
from fedcc.core.requests import Request
from fedcc.core.samples import Samples, View
from fedcc.data import DATASETS, describe
from fedcc.engine import Plain
from fedcc.experiments.environment import commit
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.record import images
from fedcc.experiments.rounds import Simulation
from fedcc.federate import federate
from fedcc.federation import Federation, several
from fedcc.flower.dry_run import ShapeEngine
from fedcc.methods import METHODS, FedDF, FedHKT, SelectiveFD
from fedcc.report.records import RunRecord, find_records

RESULTS = Path(__file__).parents[1] / "results"


class NotCounted(Exception):
    """Why the images of a run cannot be counted afterwards."""


class Shapes(Plain):
    """An engine that trains nothing."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.shapes = ShapeEngine()

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        return self.shapes.serve(requests)


def refusal(method: AnyMethod) -> str:
    """Why a method's counts, or the bytes that show that they are right, depend on what networks learn; or nothing."""
    if isinstance(method, FedHKT):
        return "its server trains on the public samples whose targets are sure or agree with its own model"
    if isinstance(method, FedDF) and method.early_stop != "none":
        return f"early_stop={method.early_stop} ends the server's training when it no longer helps"
    if isinstance(method, SelectiveFD):
        return "its clients answer for the public samples that look like their own, so its bytes cannot be compared"
    return ""


def counted(run: RunRecord, content: Mapping[str, Any]) -> dict[str, Any]:
    """A run's ``images``, as its record would have them. ``content`` is what the record's file holds."""
    if run.method not in METHODS or run.data not in DATASETS:
        raise NotCounted("its method or its data set is not of this package")
    options = {name: value for name, value in run.experiment.items() if name != "method"}
    experiment = Experiment.of(run.method, run.settings, options)
    method = experiment.build_method()
    if reason := refusal(method):
        raise NotCounted(reason)
    federation = blank(experiment, run, content["public"]) if run.counts else split_again(experiment, run)
    simulation = Simulation(method, federation, experiment.training, experiment.measurement, Shapes())
    loop = federate(method, simulation.server, simulation.cohort, experiment.training.rounds, simulation.executor)
    rounds = [simulation.details(done) | {"bytes": done.bytes_up + done.bytes_down} for done in loop]
    sent = [record["bytes"] for record in rounds]
    if run.traffic.total != sum(sent) or (run.traffic.rounds and list(run.traffic.rounds) != sent):
        raise NotCounted(f"today's {run.method} sends {sum(sent):,} bytes in this run, the record has others")
    found: dict[str, Any] = images(rounds)["images"]
    return found


def blank(experiment: Experiment, run: RunRecord, public: int) -> Federation:
    """The run's federation with blank images, all of which are one byte in memory."""
    split, zero, view = experiment.split, torch.zeros((), dtype=torch.uint8), View(scale=1 / 255)
    shape = describe(split.data, resize=split.resize or None).shape

    def samples(counts: Sequence[int]) -> Samples:
        y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        return Samples({"x": zero.expand(len(y), *shape), "y": y}, view)

    return Federation(
        private=tuple(map(samples, run.counts)),
        public=samples([public]).only("x"),
        test=samples([0]),
        classes=len(run.counts[0]),
        models=several(split.models),
        assignment=split.assignment,
    )


def split_again(experiment: Experiment, run: RunRecord) -> Federation:
    """The run's federation, from the data set; refused if data or split are not the run's."""
    federation = experiment.federation()
    if not all(run.fingerprints) or tuple(federation.digests.values()) != run.fingerprints:
        raise NotCounted("it has no counts, and the data or the split of today have other fingerprints")
    return federation


def read(paths: Sequence[Path]) -> Iterator[tuple[RunRecord, dict[str, Any]]]:
    """The records at these paths, checked, and what their files hold; prints what is wrong with others."""
    found = find_records(paths)
    for name, reason in found.problems:
        print(f"{name}: {reason}", flush=True)
    for run in found.runs:
        yield run, json.loads(run.file.read_text())


def check(paths: Sequence[Path]) -> int:
    """Compare with what runs counted themselves, by phase and by round; prints what differs, and the sums by method."""
    equal, wrong = Counter[str](), Counter[str]()
    for run, content in read(paths):
        recorded = content.get("images", {})
        if not recorded or "counted" in recorded:
            continue
        try:
            found = counted(run, content)
        except NotCounted as reason:
            print(f"{run.name}: not counted: {reason}", flush=True)
            continue
        (equal if found == recorded else wrong)[run.method] += 1
        if found != recorded:
            print(f"{run.name}: counted {found}, the run {recorded}", flush=True)
    for name in sorted(equal | wrong):
        print(f"{name}: {equal[name]} equal, {wrong[name]} different")
    print(f"{equal.total()} records equal, {wrong.total()} different")
    return int(bool(wrong))


def fill(paths: Sequence[Path]) -> int:
    """Add ``images`` to the records that lack them; prints which were left as they are, and why."""
    command, filled, left = f"experiments/count_images.py at commit {commit()}", 0, 0
    for run, content in read(paths):
        if "images" in content:
            continue
        try:
            if run.has_digest:  # of a version whose runs count, unless clients at their sites do the training
                raise NotCounted("it is of a federation across machines, whose clients may have failed")
            found = counted(run, content)
        except NotCounted as reason:
            print(f"{run.name}: not counted: {reason}", flush=True)
            left += 1
            continue
        parts = list(content.items())
        place = list(content).index("bytes")
        parts.insert(place, ("images", {**found, "counted": f"afterwards, by {command}"}))
        run.file.write_text(json.dumps(dict(parts), indent=1) + "\n")
        filled += 1
    print(f"{filled} records filled, {left} left as they are")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="*", default=[RESULTS], help="records, or folders of them")
    parser.add_argument("--check", action="store_true", help="compare with the images that records have")
    given = parser.parse_args()
    sys.exit((check if given.check else fill)(given.records))
