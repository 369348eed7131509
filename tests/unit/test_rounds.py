"""The loop of rounds: what observers see, how they end a run, when it evaluates, and the learning rate of a round."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcc
from fedcc import FedAvg, FedCC, Federation, FinishedRound, Local, Observer, Pause, Result, Stop
from fedcc.core.model import Model
from fedcc.core.requests import Fit, Recipe
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.options import Output
from fedcc.experiments.rounds import Paused
from fedcc.experiments.run import execute, load_unfinished
from fedcc.experiments.store import RunFolder
from fedcc.federate import Snapshot
from fedcc.report.records import find_records
from tiny import Mlp, Tiny, blobs

QUICK: dict[str, Any] = {"epochs": 1, "batch": 64, "lr": 0.1, "device": "cpu"}


@cache
def federation(clients: int = 2) -> Federation:
    labels = torch.arange(20) % 2
    own = [(blobs(labels, 2, seed=k), labels) for k in range(clients)]
    return Federation.of(own, blobs(labels, 2, seed=8), (blobs(labels, 2, seed=9), labels), models=Mlp(norm=False))


class Diary(Observer):
    """All that an observer is told."""

    def __init__(self) -> None:
        self.fits: list[Fit] = []
        self.samples = 0
        self.rounds: list[FinishedRound] = []
        self.models: list[dict[str, Model]] = []  # the server's
        self.ends: list[Result | None] = []

    def fit_started(self, fit: Fit) -> None:
        self.fits.append(fit)

    def samples_trained(self, number: int) -> None:
        self.samples += number

    def round(self, done: FinishedRound) -> Stop | None:
        self.rounds.append(done)
        self.models.append(dict(done.snapshot().models))
        return None

    def end(self, result: Result | None) -> None:
        self.ends.append(result)


class After(Observer):
    """Asks for the end after a round."""

    def __init__(self, t: int, request: Stop):
        self.t, self.request = t, request

    def round(self, done: FinishedRound) -> Stop | None:
        return self.request if done.t >= self.t else None


# ------------------------------------------------------------------------------------------------------- observers


@pytest.mark.parametrize("engine", ["plain", "fused"])
def test_what_an_observer_sees(engine: str) -> None:
    diary = Diary()
    result = fedcc.run(FedAvg(), federation(), 2, engine=engine, observers=[diary], **QUICK)
    assert [done.record for done in diary.rounds] == result.rounds
    assert [(done.t, done.total, done.is_last) for done in diary.rounds] == [(1, 2, False), (2, 2, True)]
    assert [sorted(done.messages.ups) for done in diary.rounds] == [[0, 1], [0, 1]]
    assert all(models.keys() == {"global"} for models in diary.models)
    assert {fit.key.round for fit in diary.fits} == {1, 2}
    assert diary.samples == 2 * 2 * 64
    assert diary.ends == [result]
    assert result.stopped == ""


def test_a_run_continues_from_a_snapshot() -> None:
    whole = fedcc.run(FedCC(), federation(), 3, **QUICK)

    class Kept(Observer):
        def round(self, done: FinishedRound) -> Stop | None:
            self.snapshot = done.snapshot()
            return Stop("one is enough")

    kept = Kept()
    fedcc.run(FedCC(), federation(), 3, observers=[kept], **QUICK)
    rest = fedcc.run(FedCC(), federation(), 3, start=kept.snapshot, **QUICK)
    assert [r["round"] for r in rest.rounds] == [2, 3]
    for mine, theirs in zip(rest.rounds, whole.rounds[1:], strict=True):
        assert {**mine, "seconds": {}} == {**theirs, "seconds": {}}


def test_every_observer_is_told_of_the_end_whatever_another_one_raises() -> None:
    class Broken(Observer):
        def end(self, result: Result | None) -> None:
            raise OSError("the disk is full")

    first, last = Diary(), Diary()
    with pytest.raises(OSError, match="the disk is full"):
        fedcc.run(Local(), federation(), 1, observers=[first, Broken(), last], **QUICK)
    assert len(first.ends) == 1
    assert first.ends[0] is not None
    assert last.ends == [None]


def test_an_error_ends_the_run_without_a_result() -> None:
    class Broken(Observer):
        def round(self, done: FinishedRound) -> None:
            raise KeyboardInterrupt

    diary = Diary()
    with pytest.raises(KeyboardInterrupt):
        fedcc.run(Local(), federation(), 2, observers=[diary, Broken()], **QUICK)
    assert (len(diary.rounds), diary.ends) == (1, [None])


def test_the_callbacks_of_before_are_accepted_with_a_warning() -> None:
    class Monitor:
        fits = steps = 0

        def fitting(self, fit: Fit) -> None:
            self.fits += 1

        def trained(self, samples: int) -> None:
            self.steps += 1

    records: list[Any] = []
    snapshots: list[Snapshot] = []
    monitor, diary = Monitor(), Diary()
    with pytest.warns(DeprecationWarning, match=r"on_round=, monitor= and on_snapshot= are deprecated.*observers="):
        result = fedcc.run(
            Local(), federation(), 2, observers=[diary], on_round=records.append, monitor=monitor,
            on_snapshot=snapshots.append, **QUICK,
        )  # fmt: skip
    assert records == result.rounds
    assert [s.t for s in snapshots] == [1, 2]
    assert (monitor.fits, monitor.steps) == (len(diary.fits), 4)


# --------------------------------------------------------------------------------------------------- stop and pause


def test_a_stopped_result_is_valid_and_says_so(tmp_path: Path) -> None:
    diary, reason = Diary(), "nothing more to learn"
    stopped = fedcc.run(FedAvg(), federation(), 5, observers=[After(2, Stop(reason)), diary], **QUICK)
    assert [r["round"] for r in stopped.rounds] == [1, 2]
    assert (stopped.stopped, diary.ends) == (reason, [stopped])
    assert isinstance(diary.rounds[-1].request, Stop), "later observers see what was asked for"
    whole = fedcc.run(FedAvg(), federation(), 2, **QUICK)
    x = federation().test.x
    assert torch.equal(stopped.scores(x), whole.scores(x))
    loaded = fedcc.load(stopped.save(tmp_path), models=Mlp(norm=False))
    assert loaded.stopped == reason
    assert torch.equal(loaded.scores(x), whole.scores(x))


def test_in_the_last_round_there_is_nothing_to_stop() -> None:
    for request in (Stop("enough"), Pause("enough")):
        assert fedcc.run(Local(), federation(), 2, observers=[After(2, request)], **QUICK).stopped == ""


def digits(**options: Any) -> Experiment:
    common: dict[str, Any] = {"skew": "classes:5", "clients": 2, "models": "resnet8", "fraction": 0.05, "epochs": 0}
    return Experiment.resolve("fedavg", device="cpu", rounds=4, **common, **options)


def test_a_stopped_run_is_finished_marked_and_left_out_of_reports(tmp_path: Path) -> None:
    for name, observers in (("full", []), ("stopped", [After(2, Stop("no progress"))])):
        execute(digits(seed=len(observers)), tmp_path / name, observers=observers)
    full, stopped = (RunFolder(tmp_path / name).summary() for name in ("full", "stopped"))
    assert full is not None
    assert stopped is not None
    assert "stopped" not in full
    assert (stopped["stopped"], stopped["rounds"], len(stopped["accuracy"]["rounds"])) == ("no progress", 2, 2)
    assert [p.name[:17] for p in (tmp_path / "stopped").glob("checkpoint-*")] == ["checkpoint-000002"]
    found = find_records([tmp_path])
    assert [run.name for run in found.runs] == [f"{tmp_path.name}/full"]
    [(name, reason)] = found.problems
    assert name == f"{tmp_path.name}/stopped/summary.json"
    assert reason == "does not count: it was stopped after round 2 of 4 (no progress)"


def test_a_paused_run_has_a_checkpoint_and_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    experiment, diary = digits(), Diary()
    whole = execute(experiment, tmp_path / "whole")
    with pytest.raises(Paused, match="stopped after round 2 of 4: out of time"):
        execute(
            experiment,
            tmp_path / "r",
            observers=[After(2, Pause("out of time")), diary],
            output=Output(checkpoint=False),
        )
    assert diary.ends == [None]
    [checkpoint] = (tmp_path / "r").glob("checkpoint-*")
    assert checkpoint.name.startswith("checkpoint-000002-")
    _, federation, start, problems = load_unfinished(tmp_path / "r")
    assert problems == []
    result = execute(experiment, tmp_path / "r", federation, start=start)
    assert [r["round"] for r in result.rounds] == [1, 2, 3, 4]
    assert result.curve == whole.curve


# ------------------------------------------------------------------------------------------------------- evaluation


def test_the_last_round_is_always_evaluated() -> None:
    every = fedcc.run(FedAvg(), federation(), 5, **QUICK)
    some = fedcc.run(FedAvg(), federation(), 5, evaluate_every=2, **QUICK)
    assert [t for t, _ in some.curve] == [2, 4, 5]
    assert set(some.curve) <= set(every.curve)
    assert [bool(r["clients"]) for r in some.rounds] == [False, True, False, True, True]
    assert some.rounds[-1]["confusion"] == every.rounds[-1]["confusion"]
    assert [t for t, _ in fedcc.run(Local(), federation(), 2, evaluate_every=9, **QUICK).curve] == [2]
    with pytest.raises(ValueError, match="evaluate_every must be at least 1, got 0"):
        fedcc.run(Local(), federation(), 2, evaluate_every=0, **QUICK)


def test_without_readings() -> None:
    for method in (FedCC(), Local()):
        with_them, without = (fedcc.run(method, federation(), 1, readings=on, **QUICK) for on in (True, False))
        assert with_them.rounds[0]["readings"]
        assert without.rounds[0]["readings"] == {}
        assert without.curve == with_them.curve


# ---------------------------------------------------------------------------------------------------- learning rate


@pytest.mark.parametrize("engine", ["plain", "fused"])
def test_the_learning_rate_decays_by_the_round(engine: str) -> None:
    """With one client and one step of Adam a round, the weight that moves furthest moves by the learning rate."""
    diary, lr = Diary(), 0.08
    fedcc.run(FedAvg(), federation(1), 4, engine=engine, decay=0.5, observers=[diary], **QUICK | {"lr": lr})
    assert [fit.recipe.lr for fit in diary.fits] == [0.08, 0.04, 0.02, 0.01]
    states = [models["global"].state for models in diary.models]
    for t, (before, after) in enumerate(pairwise(states), start=2):
        furthest = max(float((after[n] - before[n]).abs().max()) for n in before)
        assert furthest == pytest.approx(lr * 0.5 ** (t - 1), rel=1e-3)


@pytest.mark.parametrize("engine", ["plain", "fused"])
def test_no_decay_and_a_constant_rate_are_the_default(engine: str) -> None:
    plain = fedcc.run(FedAvg(), federation(), 2, engine=engine, **QUICK)
    named = fedcc.run(FedAvg(), federation(), 2, engine=engine, decay=1.0, schedule="constant", **QUICK)
    other = fedcc.run(FedAvg(), federation(), 2, engine=engine, schedule="cosine", **QUICK | {"epochs": 2})
    states = [r.trained.server["global"].state for r in (plain, named, other)]
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0])
    assert not all(torch.equal(states[0][n], states[2][n]) for n in states[0])


def test_the_schedule_reaches_every_fit_but_a_method_keeps_its_own() -> None:
    diary = Diary()
    fedcc.run("feddf", federation(), 1, schedule="constant", observers=[diary], **QUICK)
    assert {fit.key.phase: fit.recipe.schedule for fit in diary.fits} == {"fit": "constant", "distill": "cosine"}
    diary = Diary()
    fedcc.run("fedcc", federation(), 1, schedule="cosine", observers=[diary], **QUICK)
    assert {fit.recipe.schedule for fit in diary.fits} == {"cosine"}


def test_a_role_knows_the_rate_of_its_round() -> None:
    """Wherever a client is, its round number and the recipe are all it needs."""
    client = Tiny(Local(), recipe=Recipe(lr=0.8, decay=0.5)).clients[0]
    rates = []
    for t in (1, 2, 4):
        client.begin(t)
        rates.append((client.recipe_with().lr, client.recipe_with(epochs=3).lr, client.recipe_with(lr=0.3).lr))
    assert rates == [(0.8, 0.8, 0.3), (0.4, 0.4, 0.3), (0.1, 0.1, 0.3)]
    with pytest.raises(ValueError, match="decay must be at least 0, got -1"):
        Recipe(decay=-1)
