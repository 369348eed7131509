"""What a sweep file means, how it is split, and what counts as done."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fedcc.experiments.experiment import Experiment
from fedcc.experiments.rounds import Pause
from fedcc.experiments.store import RunFolder
from fedcc.experiments.sweep import Deadline, Run, duration, planned, read, shard
from fedcc.methods import METHODS, PAPER
from program import call
from scripts import loaded

FILES = Path(__file__).parents[2] / "experiments"
SUMMARY = json.dumps({"accuracy": {"final": 50.0}, "experiment": {}})  # the least that a finished run has


def plan(text: str, **changes: Any) -> list[Run]:
    return planned(tomllib.loads(text), changes)


def places(text: str, **changes: Any) -> list[str]:
    return [run.folder.as_posix() for run in plan(text, **changes)]


# -------------------------------------------------------------------------------------------------------- the file


def test_the_shortest_file() -> None:
    assert places('methods = ["FedCC"]') == ["digits_classes-1/fedcc/seed0"]


def test_seeds_then_scenarios_then_methods_then_variants() -> None:
    text = """
        methods = ["fedavg", "local"]
        seeds = [4, 2]
        [[scenario]]
        data = "cifar10"
        skew = ["classes:2", "iid"]
        [[scenario]]
        [[variant]]
        method = "fedcc"
        name = "lam-0.5"
        settings = { lam = 0.5 }
    """
    names = ("fedavg", "local", "fedcc-lam-0.5")
    folders = ("cifar10_classes-2", "cifar10_iid", "digits_classes-1")
    assert places(text) == [f"{f}/{n}/seed{s}" for s in (4, 2) for f in folders for n in names]
    last = plan(text)[-1].experiment()
    assert (last.settings["lam"], last.training.seed, last.split.data) == (0.5, 2, "digits")


def test_the_closer_word_wins() -> None:
    text = """
        methods = ["fedavg"]
        rounds = 2
        epochs = 3
        fraction = 0.5
        scenario = [{ data = "digits", epochs = 4, batch = 16 }]
        variant = [{ method = "fedavg", name = "long", epochs = 85 }]
    """
    short, long = (run.experiment() for run in plan(text))
    assert {n: short.values()[n] for n in ("rounds", "epochs", "fraction", "batch")} == {
        "rounds": 2, "epochs": 4, "fraction": 0.5, "batch": 16
    }  # fmt: skip
    assert long == short.with_options(epochs=85)
    changed = [run.experiment() for run in plan(text, epochs=1, fraction=0.1)]
    assert [(e.training.rounds, e.training.epochs, e.split.fraction) for e in changed] == [(2, 1, 0.1)] * 2


def test_a_named_scenario_has_a_folder_of_its_own() -> None:
    text = 'methods = ["local"]\nscenario = [{ fraction = 0.5 }, { fraction = 0.1, name = "tenth" }]'
    assert places(text) == ["digits_classes-1/local/seed0", "digits_classes-1-tenth/local/seed0"]


WRONG = [
    ("method = ['fedcc']", "unknown key of a sweep 'method'; did you mean 'methods'?"),
    ("ronds = 1", "unknown key of a sweep 'ronds'; did you mean 'rounds'?"),
    ("seed = 1", "unknown key of a sweep 'seed'; did you mean 'seeds'?"),
    ("methods = ['fedccc']", "unknown method 'fedccc'; did you mean 'fedcc'?"),
    ("methods = 'fedcc'", "methods must be a list of strings, got 'fedcc'"),
    ("methods = ['fedcc']\nseeds = [true]", "seeds must be a list of integers, got [True]"),
    ("methods = ['fedcc']\nseeds = [-1]", "seed must be at least 0, got -1"),
    ("seeds = [1]", "name at least one method; known: fedavg"),
    ("methods = ['fedcc']\nscenario = 1", "scenario must be tables, [[scenario]], got 1"),
    ("methods = ['fedcc']\n[[scenario]]\nskw = 'iid'", "unknown key of a scenario 'skw'; did you mean 'skew'?"),
    ("methods = ['fedcc']\nskew = 'clases:1'", "fedcc (clases:1): unknown skew 'clases:1'"),
    ("methods = ['fedcc']\nrounds = 0", "fedcc: rounds must be at least 1, got 0"),
    ("methods = ['fedcc']\nrounds = '3'", "fedcc: rounds must be a whole number, got '3'"),
    ("[[variant]]\nname = 'a'", "a variant has a method and a name, got {'name': 'a'}"),
    ("[[variant]]\nmethod = 'fedcc'", "a variant has a method and a name"),
    (
        "[[variant]]\nmethod = 'fedcc'\nname = 'a'\nsetting = {}",
        "unknown key of a variant 'setting'; did you mean 'settings'?",
    ),
    (
        "[[variant]]\nmethod = 'fedcc'\nname = 'a'\nsettings = { lamb = 1 }",
        "fedcc (a): unknown setting of FedCC 'lamb'; did you mean 'lam'?",
    ),
    ("[[variant]]\nmethod = 'fedcc'\nname = '../a'", "a name is of letters, digits, '.', '_' and '-'"),
    (f"[[variant]]\nmethod = 'fedcc'\nname = '{'é' * 60}'", "a name must be at most 100 bytes long, got 'é"),
    (f"methods = ['fedcc']\n[[scenario]]\nname = '{'a' * 300}'", "a name must be at most 100 bytes long, got 'a"),
    ("methods = ['fedcc', 'FedCC']", "two runs would share the folder digits_classes-1/fedcc/seed0"),
    ("methods = ['fedcc']\nscenario = [{ fraction = 0.5 }, {}]", "two runs would share the folder"),
    ("methods = [", "is not valid TOML"),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_wrong_file_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read(path)
    assert str(error.value).startswith(str(path))
    assert said in str(error.value)


# ------------------------------------------------------------------------------------------------ the files there are


def test_table1_is_the_papers() -> None:
    runs = read(FILES / "table1.toml")
    plain = [run for run in runs if run.folder.parts[1] in METHODS]
    assert len(plain) == 16 * 12 * 3
    assert {run.method for run in plain} == {kind.__name__.lower() for kind in PAPER} - {"ssl", "local", "centralized"}
    assert {run.folder.parts[0] for run in runs} == {
        f"{data}_{skew}"
        for data, n in (("tiny-imagenet", (40, 20)), ("cifar100", (20, 10)), ("cifar10", (2, 1)))
        for skew in ("dirichlet-0.5", "dirichlet-0.05", *(f"classes-{c}" for c in n))
    }
    matched = [run for run in runs if run not in plain]
    assert {run.folder.parts[1] for run in matched} == {"fedavg-matched"}
    assert len(matched) == 36
    for run in runs:
        e = run.experiment()
        assert (e.training.rounds, e.training.epochs, e.split.clients, e.training.lr, e.training.batch) == (
            15,
            85 if run in matched else 20,
            10,
            1e-3,
            64,
        )
        assert e.split.models == ("resnet20" if e.build_method().family == "parameters" else "resnet14,resnet20")
        assert e.settings == Experiment.resolve(e.method).settings


def test_table2_shares_its_runs_with_table1() -> None:
    first = {run.folder: run for run in read(FILES / "table1.toml")}
    for run in read(FILES / "table2.toml"):
        if run.method != "ssl":
            assert run.experiment() == first[run.folder].experiment()


def test_the_smoke_test_has_every_method() -> None:
    runs = read(FILES / "smoke.toml")
    assert {run.method for run in runs} == set(METHODS)
    assert len(runs) == len(METHODS) * 2 * 2


@pytest.mark.parametrize("name", ["rivals", "digits"])
@pytest.mark.parametrize("method", ["scaffold", "moon", "fedntd", "fedproto"])
def test_what_is_tuned_for_sgd_runs_with_both_optimizers_beside_fedavg(name: str, method: str) -> None:
    """On the same data, at the same rate; FedAvg under Adam on CIFAR-10 is one of Table I's runs."""
    own = [run.experiment() for run in read(FILES / f"{name}.toml")]
    known = own + [run.experiment() for run in read(FILES / "seed0.toml")]
    trained = [e for e in own if e.method == method]
    assert {(e.training.optimizer, e.training.lr) for e in trained} == {("adam", 1e-3), ("sgd", 0.01)}
    averaged = Experiment.resolve("fedavg")
    for e in trained:
        one_network = e.split if e.build_method().one_network else replace(e.split, models=fedavgs_network(known, e))
        assert replace(e, method="fedavg", settings=averaged.settings, split=one_network) in known


def fedavgs_network(known: list[Experiment], of: Experiment) -> str:
    """What FedAvg has where this method's clients have different networks."""
    (models,) = {e.split.models for e in known if (e.method, e.split.data) == ("fedavg", of.split.data)}
    return models


def test_one_round_is_one_round() -> None:
    assert {run.experiment().training.rounds for run in read(FILES / "oneshot.toml")} == {1}


def test_every_ablation_differs_from_fedcc_in_something() -> None:
    runs = [run for run in read(FILES / "ablations.toml") if run.folder.parts[::2] == ("cifar10_classes-1", "seed0")]
    base, *others = [run.experiment() for run in runs]
    assert base == Experiment.resolve("fedcc", data="cifar10", skew="classes:1")
    assert base not in others
    assert all(a != b for n, a in enumerate(others) for b in others[:n])
    changed = {
        name for e in others if e.method == "fedcc" for name in e.settings if e.settings[name] != base.settings[name]
    }
    assert changed >= {"lam", "delta", "majority_threshold", "alpha_design", "trust", "refine_joint_batch"}
    assert any(e.method == "fedmd" for e in others)
    assert any(e.split.augment != base.split.augment for e in others)


def test_every_file_there_is_can_be_read() -> None:
    """And the documentation lists it with its number of runs."""
    listed = (FILES.parent / "docs/experiments.md").read_text()
    assert {p.stem for p in FILES.glob("*.toml")} >= {"table1", "table2", "smoke", "ablations", "oneshot"}
    for path in FILES.glob("*.toml"):
        assert f"| `experiments/{path.name}` | {len(read(path))} |" in listed


def test_files_for_one_folder_of_runs_agree() -> None:
    """Their runs lie side by side: one folder never stands for two experiments."""
    first: dict[Path, Experiment] = {}
    for name in ("table1", *loaded("experiments/backlog.py").ORDER):
        for run in read(FILES / f"{name}.toml"):
            assert run.experiment() == first.setdefault(run.folder, run.experiment())


def backlog(*arguments: object) -> str:
    command = [sys.executable, str(FILES / "backlog.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_backlog_is_what_has_no_record(tmp_path: Path) -> None:
    recorded = {
        "cifar10_classes-2/fedavg-64-rounds/seed0": "cifar10_classes-2_fedavg_64-rounds_seed0.json",
        "cifar10_classes-2/local/seed0": "cifar10_classes-2_local_seed0.json",
    }
    for name in recorded.values():
        (tmp_path / name).touch()
    first, *lines = backlog(tmp_path, 0, FILES / "compute.toml").splitlines()
    assert first == "compute.toml: 5 of 7 runs have no record"
    runs = [run.folder.as_posix() for run in read(FILES / "compute.toml")]
    assert [line.split()[0] for line in lines] == [folder for folder in runs if folder not in recorded]
    assert lines[0].split()[-1] == "cifar10_classes-2_centralized_seed0.json"
    table1 = {path.name for path in (FILES.parent / "results").glob("cifar*_seed0.json")}
    assert table1 & {line.split()[-1] for line in backlog(tmp_path, 0, FILES / "seed0.toml").splitlines()[1:]}


def test_a_record_without_confusion_is_made_again(tmp_path: Path) -> None:
    for skew, record in (("classes-1", {}), ("classes-2", {"confusion": [], "known": {}})):
        (tmp_path / f"cifar10_{skew}_fedcc_seed0.json").write_text(json.dumps(record))
    first, *lines = backlog(tmp_path, 0, FILES / "again.toml").splitlines()
    assert first == "again.toml: 7 of 8 runs have no record"
    assert lines[0].split()[0] == "cifar10_classes-1/fedcc/seed0"


def test_strong_runs_wait_until_it_is_decided_what_strong_is(tmp_path: Path) -> None:
    """A file of which all runs wait begins no sweep."""
    waits = "wait until augmentations.toml has all records and the choice is made"
    assert backlog(tmp_path, 1, FILES / "strong.toml") == f"strong.toml: 8 of 8 runs have no record; 8 {waits}\n"
    assert backlog(tmp_path, 0, FILES / "seeds.toml").startswith(f"seeds.toml: 16 of 16 runs have no record; 4 {waits}")
    for run in read(FILES / "augmentations.toml"):
        scenario, variant, seed = run.folder.parts
        (tmp_path / f"{'_'.join([scenario, *variant.split('-', 1), seed])}.json").touch()
    assert backlog(tmp_path, 0, FILES / "strong.toml").startswith("strong.toml: 8 of 8 runs have no record\n")


@pytest.mark.slow
def test_the_backlog_runs_what_is_missing_within_its_time_and_continues(tmp_path: Path) -> None:
    """A file whose runs all have records is left out: a sweep without ``--only`` would run it."""
    common = 'data = "digits"\nskew = "classes:3"\nrounds = 2\nepochs = 1\nfraction = 0.2\n'
    (tmp_path / "done.toml").write_text(f'methods = ["local"]\n{common}')
    (tmp_path / "open.toml").write_text(f'methods = ["fedavg", "fedmd", "fedcc"]\n{common}')
    records = tmp_path / "records"
    records.mkdir()
    for name in ("local", "fedmd"):
        (records / f"digits_classes-3_{name}_seed0.json").touch()
    files, out = (tmp_path / "done.toml", tmp_path / "open.toml"), tmp_path / "runs"
    short = backlog(records, 1 / 30, *files, "--", "--out", out)
    assert "done.toml: 0 of 1 runs" in short
    whole = backlog(records, 10, *files, "--", "--out", out, "--jobs", 2)
    assert "open.toml: 2 of 3 runs have no record" in whole
    finished = sorted(path.parent.parent.name for path in out.rglob("summary.json"))
    assert finished == ["fedavg", "fedcc"]


# ----------------------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_shards_are_a_partition_that_stays(n: int) -> None:
    runs = read(FILES / "table1.toml")
    parts = [shard(runs, f"{i}/{n}") for i in range(1, n + 1)]
    assert sorted((run.folder for part in parts for run in part), key=str) == sorted((r.folder for r in runs), key=str)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts == [shard(list(runs), f"{i}/{n}") for i in range(1, n + 1)]
    for part in parts:
        assert [runs.index(run) for run in part] == sorted(runs.index(run) for run in part)
        assert len({run.method for run in part}) > 10  # no machine gets the long methods alone


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2"])
def test_a_wrong_shard(text: str) -> None:
    with pytest.raises(ValueError, match="--shard is i/n with i from 1 to n"):
        shard([], text)


@pytest.mark.parametrize("text", ["", "m", "5x", "-3", "1m1", "0"])
def test_a_wrong_time(text: str) -> None:
    with pytest.raises(ValueError, match="a time is given as"):
        duration(text)


def test_late_is_when_another_round_would_not_fit() -> None:
    import time

    now = time.time()
    for deadline, spent, late in ((None, 1000, False), (now + 100, 90, False), (now + 100, 110, True)):
        observer = Deadline(deadline)
        observer.last = now - spent
        assert isinstance(observer.round(cast("Any", None)), Pause) == late


# ----------------------------------------------------------------------------------------------------- what is done

SHORT = """
    methods = ["fedcc"]
    rounds = 2
"""


def begun(root: Path, run: Run, **changes: Any) -> Path:
    """Its folder, as if it had begun."""
    place = root / run.folder
    RunFolder(place).begin(run.experiment().with_options(**changes), None)
    return place


def test_states(tmp_path: Path) -> None:
    (run,) = plan(SHORT)
    assert run.state(tmp_path) == ("missing", "")
    place = begun(tmp_path, run)
    assert run.state(tmp_path) == ("unfinished", "")
    (place / "summary.json").write_text(SUMMARY)
    assert run.state(tmp_path) == ("finished", "")


def finished(place: Path) -> None:
    folder = RunFolder(place)
    folder.restore(Experiment.read(place / "experiment.toml"), None, [])
    folder.finish({"format": 1, "seed": 0, "accuracy": {"final": 50.0}, "experiment": {}}, [], [])


def test_a_damaged_summary_blocks(tmp_path: Path) -> None:
    (run,) = plan(SHORT)
    place = begun(tmp_path, run)
    finished(place)
    assert run.state(tmp_path) == ("finished", "")
    summary = (place / "summary.json").read_text()
    (place / "summary.json").write_text(summary.replace('"seed": 0', '"seed": 1'))
    assert run.state(tmp_path)[0] == "blocked"
    assert f"{place / 'summary.json'} is damaged" in run.state(tmp_path)[1]
    (place / "summary.json").write_text(summary)
    (place / "metrics.jsonl").write_text('{"round": 1}\n')
    assert f"{place / 'metrics.jsonl'} is damaged" in run.state(tmp_path)[1]


def test_a_sweep_tidies_what_a_killed_run_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = plan(SHORT)
    place = begun(tmp_path / "runs", run)
    finished(place)
    expected = {p.name for p in place.iterdir()}
    for name in (".lock", "checkpoint-000002-0123456789abcdef.safetensors", ".models.json.0123456789abcdef.tmp"):
        (place / name).write_text("")
    (tmp_path / "s.toml").write_text(SHORT)
    done = call(capsys, "sweep", tmp_path / "s.toml", "--out", tmp_path / "runs", "--dry-run", "--json")
    assert [row["state"] for row in json.loads(done.out)] == ["finished"]
    assert (place / ".lock").exists()  # which only looks
    assert call(capsys, "sweep", tmp_path / "s.toml", "--out", tmp_path / "runs").code == 0
    assert {p.name for p in place.iterdir()} == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rounds": 3}, "rounds is 3 there, 2 here"),
        ({"epochs": 1}, "epochs is 1 there, 5 here"),
        ({"settings": {"lam": 0.9}}, "lam is 0.9 there, 0.2 here"),
        ({"lr": 0.01}, "lr is 0.01 there, 0.001 here"),
    ],
)
@pytest.mark.parametrize("finished", [False, True])
def test_another_experiment_blocks(changes: Any, said: str, finished: bool, tmp_path: Path) -> None:
    (run,) = plan(SHORT)
    place = begun(tmp_path, run, **changes)
    if finished:
        (place / "summary.json").write_text(SUMMARY)
    state, reason = run.state(tmp_path)
    assert state == "blocked"
    assert f"{place} holds another run ({said})" in reason


def test_another_machine_is_no_other_experiment_unless_it_is_asked_for(tmp_path: Path) -> None:
    (run,), (asked,) = plan(SHORT), plan(SHORT, threads=1, precision="fp32")
    place = begun(tmp_path, run)
    toml = place / "experiment.toml"
    text = toml.read_text().replace('device = "cpu"', 'device = "cuda"').replace("threads = 1", "threads = 4")
    toml.write_text(text.replace('"fp32"\nthreads', '"bf16"\nthreads').replace('"plain"', '"fused"'))
    (place / "summary.json").write_text(SUMMARY)
    assert 'device = "cuda"\nprecision = "bf16"\nthreads = 4\nengine = "fused"' in toml.read_text()
    assert run.state(tmp_path) == ("finished", "")
    assert "(precision is bf16 there, fp32 here)" in asked.state(tmp_path)[1]


def test_an_older_folder_without_a_newer_setting_is_the_same(tmp_path: Path) -> None:
    (run,) = plan(SHORT)
    place = begun(tmp_path, run)
    toml = place / "experiment.toml"
    toml.write_text(toml.read_text().replace("trust = 1.0\n", ""))
    assert run.state(tmp_path) == ("unfinished", "")


def test_a_folder_of_an_earlier_algorithm_is_another_run(tmp_path: Path) -> None:
    (run,) = plan(SHORT.replace("fedcc", "fedconcat"))
    place = begun(tmp_path, run)
    assert run.state(tmp_path) == ("unfinished", "")
    toml = place / "experiment.toml"
    toml.write_text(toml.read_text().replace("classifier_lr = 0.01\n", "").replace("version = 2\n", ""))
    (place / "summary.json").write_text(SUMMARY)
    state, reason = run.state(tmp_path)
    assert state == "blocked"
    assert "another run (version 1 of FedConcat is another algorithm than version 2)" in reason


def test_an_older_folder_of_a_method_with_another_default_is_another_run(tmp_path: Path) -> None:
    (run,) = plan(SHORT.replace("fedcc", "fednova"))
    place = begun(tmp_path, run)
    assert run.state(tmp_path) == ("unfinished", "")
    toml = place / "experiment.toml"
    toml.write_text(toml.read_text().replace('statistics = "normalised"\n', "").replace("version = 2\n", ""))
    assert "another run (statistics is average there, normalised here)" in run.state(tmp_path)[1]


def test_other_files_block(tmp_path: Path) -> None:
    (run,) = plan(SHORT)
    place = tmp_path / run.folder
    place.mkdir(parents=True)
    (place / ".lock").touch()  # of a process that was killed
    assert run.state(tmp_path)[0] == "missing"
    (place / "thesis.tex").touch()
    assert run.state(tmp_path) == ("blocked", f"{place} holds other files (thesis.tex); choose another --out")
    (place / "thesis.tex").unlink()
    (place / "experiment.toml").write_text("nonsense")
    assert "is not valid TOML" in run.state(tmp_path)[1]


def test_records_name_no_variant() -> None:
    """A variant's name is its folder's alone: what decides numbers stands in the experiment."""
    text = SHORT + "variant = [{ method = 'fedcc', name = 'same' }]"
    one, two = plan(text)
    assert one.experiment() == two.experiment()
    assert one.folder != two.folder
    assert "same" not in json.dumps(two.experiment().toml())
