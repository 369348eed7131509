"""A run that is stopped at any moment, even killed, goes on to the numbers that it would have had."""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import sys
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from fedcc.experiments.round_files import CHECKSUM_BYTES
from fedcc.experiments.store import RunFolder
from program import QUICK, Done, Running, call, wait_until

Capsys = pytest.CaptureFixture[str]
EACH = ("--checkpoint-every", 1)
WORDS = (
    "run",
    "fedcc",
    *QUICK,
    "--rounds",
    3,
    "--set",
    "majority_source=labels",
    "--participation",
    0.8,
    *EACH,
    "--out",
)


class Terminal(io.StringIO):
    """Somebody who types."""

    def isatty(self) -> bool:
        return True


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.safetensors"))


def rounds_of(folder: Path) -> list[int]:
    return [int(p.name.split("-")[1]) for p in checkpoints(folder)]


def numbers(folder: Path) -> Any:
    """All that a run says, but for times."""
    records = [
        {k: v for k, v in record.items() if k not in ("seconds", "sharing")} for record in RunFolder(folder).metrics()
    ]
    summary = json.loads((folder / "summary.json").read_text())
    summary.pop("seconds")
    summary.pop("sharing")
    summary.pop("commit")  # somebody may be editing
    size = summary.pop("checkpoint_bytes")
    assert size > 100_000
    models = json.loads((folder / "models.json").read_text())
    for sealed in (summary, models):  # times are part of what digests cover
        sealed.pop("sha256", None)
        sealed.pop("files", None)
    summary.pop("checkpoints", None)  # whether they were to be kept
    for record in models["rounds"]:
        record.pop("seconds")
        record.pop("sharing")
    models.pop("seconds")
    return records, summary, models, (folder / "models.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody stopped, with its last two checkpoints."""
    place = tmp_path_factory.mktemp("whole")
    done = Running(place, (*WORDS, "r", "--keep-checkpoints")).end(120)
    assert done.code == 0, done
    assert rounds_of(place / "r") == [2, 3]
    return place / "r"


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """The same folder as it was before its summary was written."""
    place = tmp_path / "r"
    place.mkdir()
    for path in whole.iterdir():
        if path.name not in ("summary.json", "models.json", "models.safetensors"):
            (place / path.name).write_bytes(path.read_bytes())
    return place


def ended(done: Done, folder: Path, whole: Path) -> None:
    """The run has ended as the other did, and has cleaned up."""
    assert done.code == 0, done
    assert numbers(folder) == numbers(whole)
    assert rounds_of(folder) == [3]  # from which it can be extended
    assert {p.name for p in {*folder.iterdir()} - {*checkpoints(folder)}} == {
        p.name for p in {*whole.iterdir()} - {*checkpoints(whole)}
    }


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
def test_a_run_that_was_stopped_goes_on(
    number: str, whole: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = Running(tmp_path, (*WORDS, "r")), tmp_path / "r"
    wait_until(lambda: folder.is_dir() and checkpoints(folder))
    os.kill(run.pid, getattr(signal, number))
    stopped = run.end()
    if number == "SIGTERM":
        stopped.failed("terminated", "see r", "resume with `fedcc resume r`", code=143)
    call(capsys, *WORDS, folder).refused("holds this run already (unfinished)", f"`fedcc resume {folder}`")
    call(capsys, *WORDS, folder, "--seed", 1).refused("holds another run (unfinished)", "choose another --out")
    monkeypatch.setattr(sys, "stdin", Terminal("no\n"))
    declined = call(capsys, *WORDS, folder)
    assert declined.code == 2
    assert "holds this run already (unfinished)" in declined.err
    last = rounds_of(folder)[-1]
    before = sum(sum(r["seconds"].values()) for r in RunFolder(folder).metrics()[:last])
    if number == "SIGTERM":  # at a terminal, `fedcc run` offers it
        monkeypatch.setattr(sys, "stdin", Terminal("yes\n"))
        done = call(capsys, *WORDS, folder)
        assert "holds this run, unfinished; resume it?" in done.err
    else:
        done = call(capsys, "resume", folder)
    assert f"resuming after round {last}, from a checkpoint of" in done.out
    assert f"round {last}/3" not in done.out
    ended(done, folder, whole)
    summary = RunFolder(folder).summary()
    assert summary is not None
    assert summary["seconds"] >= before + sum(sum(r["seconds"].values()) for r in RunFolder(folder).metrics()[last:])
    again = call(capsys, "resume", folder)
    assert (again.code, again.err) == (0, "")
    assert "holds a finished run" in again.out
    assert json.loads(call(capsys, "resume", folder, "--json").out) == summary


def test_after_the_last_round_only_the_summary_is_left_to_write(copy: Path, whole: Path, capsys: Capsys) -> None:
    done = call(capsys, "resume", copy)
    assert "resuming after round 3" in done.out
    ended(done, copy, whole)


def test_rounds_after_the_checkpoint_are_cut(copy: Path, whole: Path, capsys: Capsys) -> None:
    """With half a line and half a checkpoint of a process that was killed."""
    checkpoints(copy)[-1].unlink()
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "acc')
    (copy / ".checkpoint-000003-00.safetensors.0123.tmp").write_bytes(b"half")
    done = call(capsys, "resume", copy)
    assert "resuming after round 2" in done.out
    ended(done, copy, whole)


@pytest.mark.parametrize(
    ("method", "names"),
    [("fedavg", ["re-estimated"]), ("fedcc", ["trust=2", "trust=4", "mirror", "mirror,trust=4"])],
)
def test_readings_are_there_in_every_round(method: str, names: list[str], tmp_path: Path, capsys: Capsys) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "r"
    words = ("run", method, *QUICK, "--rounds", 3, *EACH, "--keep-checkpoints", "--out")
    for place in (whole, folder):
        assert call(capsys, *words, place).code == 0
    (folder / "summary.json").unlink()
    checkpoints(folder)[-1].unlink()
    done = call(capsys, "resume", folder)
    assert "resuming after round 2" in done.out
    ended(done, folder, whole)
    summary, rounds = RunFolder(folder).summary(), [r["readings"] for r in RunFolder(folder).metrics()]
    assert summary is not None
    last = [] if "mirror" in names else ["mirror"]  # FedCC has it in every round
    assert [list(r) for r in rounds] == [names, names, names + last]
    assert list(summary["accuracy"]["readings"]) == names + last
    for name in names:
        curve = [r[name] for r in rounds]
        best = {"best": max(curve), "best_round": 1 + curve.index(max(curve))}
        assert summary["accuracy"]["readings"][name] == {"final": curve[2], "rounds": curve, **best}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, alter, empty])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    damage: Any, copy: Path, whole: Path, capsys: Capsys
) -> None:
    damage(checkpoints(copy)[-1])
    done = call(capsys, "resume", copy)
    assert done.err.startswith(f"fedcc: warning: {copy / checkpoints(whole)[-1].name} ")
    assert "is not used: its content does not match its checksum" in done.err
    assert "resuming after round 2" in done.out
    ended(done, copy, whole)


def test_without_a_good_checkpoint_it_starts_anew(copy: Path, whole: Path, capsys: Capsys) -> None:
    for path in checkpoints(copy):
        truncate(path)
    done = call(capsys, "resume", copy)
    assert done.err.count("warning") == 2
    assert "starting again" in done.out
    ended(done, copy, whole)


def shorten(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))


def change(path: Path) -> None:
    """Another accuracy, in a line that stays valid."""
    path.write_text(re.sub(r'"accuracy": [\d.]+', '"accuracy": 99.5', path.read_text(), count=1))


@pytest.mark.parametrize("damage", [shorten, change, empty, alter, Path.unlink])
def test_metrics_are_rewritten_from_the_checkpoint(damage: Any, copy: Path, whole: Path, capsys: Capsys) -> None:
    damage(copy / "metrics.jsonl")
    done = call(capsys, "resume", copy)
    expected = f"{copy / 'metrics.jsonl'} does not match what the run wrote and is rewritten from checkpoint-000003"
    assert expected in done.err
    assert "resuming after round 3" in done.out
    ended(done, copy, whole)
    assert (copy / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def older(folder: Path) -> None:
    """The folder as an older version would have left it: no digests, no records in checkpoints."""
    size = (folder / "metrics.jsonl").stat().st_size
    last = len((folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)[-1])
    for path, offset in zip(checkpoints(folder), (size - last, size), strict=True):
        altered(path, lambda about, offset=offset: about.pop("records", None) and about.update(offset=offset))
    about = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({k: about[k] for k in about if k not in ("sha256", "files")}))


def test_a_folder_of_an_older_version_goes_on_with_a_note(copy: Path, whole: Path, capsys: Capsys) -> None:
    older(copy)
    done = call(capsys, "resume", copy)
    assert "environment.json was written by an older version, without a digest" in done.err
    assert "was written by an older version, without its records" in done.err
    assert "resuming after round 3" in done.out
    ended(done, copy, whole)


def test_older_checkpoints_need_their_metrics(copy: Path, whole: Path, capsys: Capsys) -> None:
    older(copy)
    shorten(copy / "metrics.jsonl")
    done = call(capsys, "resume", copy)
    assert "metrics.jsonl lacks some of its 3 rounds" in done.err
    assert "resuming after round 2" in done.out
    ended(done, copy, whole)


@pytest.mark.parametrize("name", ["experiment.toml", "partition.npz", "environment.json"])
def test_an_altered_description_is_refused(name: str, copy: Path, capsys: Capsys) -> None:
    path = copy / name
    if name == "partition.npz":
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    else:
        path.write_text(path.read_text().replace("0", "1", 1))
    before = {p.name: p.read_bytes() for p in copy.iterdir()}
    call(capsys, "resume", copy).refused(f"{path} is damaged")
    for checkpoint in checkpoints(copy):  # nor does it start anew
        checkpoint.unlink()
    call(capsys, "resume", copy).refused(f"{path} is damaged")
    after = {p.name: p.read_bytes() for p in copy.iterdir()}
    assert after == {n: b for n, b in before.items() if not n.startswith("checkpoint")}


@pytest.mark.parametrize("name", ["partition.npz", "environment.json"])
def test_a_lost_description_is_written_anew(name: str, copy: Path, whole: Path, capsys: Capsys) -> None:
    (copy / name).unlink()
    done = call(capsys, "resume", copy)
    assert f"{copy / name} is missing and is written again" in done.err
    ended(done, copy, whole)
    assert (copy / "partition.npz").read_bytes() == (whole / "partition.npz").read_bytes()
    assert RunFolder(copy).summary() is not None


def test_a_run_that_another_process_has_just_finished_stays(
    copy: Path, whole: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one ends between this one's look at the folder and its lock, while trackers are made ready."""
    import fedcc.experiments.tracking

    def meanwhile(*_: Any) -> tuple[str, ...]:
        for path in checkpoints(copy):
            path.unlink()
        for path in whole.iterdir():
            if not path.name.startswith("checkpoint"):
                (copy / path.name).write_bytes(path.read_bytes())
        return ()

    monkeypatch.setattr(fedcc.experiments.tracking, "check_trackers", meanwhile)
    done = call(capsys, "resume", copy)
    assert (done.code, done.err) == (0, "")
    assert "holds a finished run; there is nothing to do" in done.out
    files = {p.name: p.read_bytes() for p in whole.iterdir() if not p.name.startswith("checkpoint")}
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == files


@pytest.mark.parametrize("keep", [False, True])
def test_a_run_that_was_killed_after_its_summary_is_tidied(keep: bool, copy: Path, capsys: Capsys) -> None:
    from fedcc.experiments.checkpoint import Checkpoints

    words = ("resume", copy, *(("--keep-checkpoints",) if keep else ()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "remove", lambda *_, **__: None)
        assert call(capsys, *words).code == 0
    expected = {p.name for p in copy.iterdir()}
    assert rounds_of(copy) == [2, 3]
    (copy / ".lock").write_text("1 on a machine\n")
    (copy / ".summary.json.0123456789abcdef.tmp").write_text("{")
    before = (copy / "summary.json").read_bytes()
    done = call(capsys, "resume", copy)
    assert (done.code, done.err) == (0, "")
    assert "holds a finished run" in done.out
    left = {name for name in expected if keep or not name.startswith("checkpoint-000002")}
    assert {p.name for p in copy.iterdir()} == left
    assert (copy / "summary.json").read_bytes() == before


def test_a_checkpoint_of_another_experiment_is_refused(copy: Path, capsys: Capsys) -> None:
    older(copy)  # whose experiment.toml has no digest
    toml = copy / "experiment.toml"
    toml.write_text(toml.read_text().replace("seed = 0", "seed = 1"))
    before = {p.name: p.read_bytes() for p in copy.iterdir()}
    call(capsys, "resume", copy).refused("is a checkpoint of another experiment (seed is 0, here 1)")
    toml.write_text(toml.read_text().replace("seed = 1", "seed = 0").replace("lam = ", "lam = 1"))
    call(capsys, "resume", copy).refused("is a checkpoint of another experiment (lam is ")
    toml.write_bytes(before["experiment.toml"])
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == before | {"experiment.toml": before["experiment.toml"]}


def test_options_that_do_not_fit_together_are_refused_with_the_files_name(copy: Path, capsys: Capsys) -> None:
    older(copy)  # whose experiment.toml has no digest
    toml = copy / "experiment.toml"
    toml.write_text(re.sub(r"(?m)^skew = .*", 'skew = "classes:40"', toml.read_text()))
    call(capsys, "resume", copy).refused(f"{toml}: classes:40: a client cannot hold 40 of 10 classes")


def without(path: Path, setting: str) -> None:
    """The checkpoint as it would have been before its method had this setting."""
    altered(path, lambda about: about["experiment"]["settings"].pop(setting))


def altered(path: Path, change: Any) -> None:
    """A checkpoint with other metadata, valid in itself."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + length])
    about = json.loads(head["__metadata__"]["about"])
    change(about)
    head["__metadata__"]["about"] = json.dumps(about)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    made = len(text).to_bytes(8, "little") + text + content[8 + length :]
    digest = blake2b(made, digest_size=CHECKSUM_BYTES).hexdigest()
    path.unlink()
    path.with_name(f"{path.name.rpartition('-')[0]}-{digest}.safetensors").write_bytes(made)


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about.clear(),
        lambda about: about.update(format=1, experiment=[]),
        lambda about: about.update(records="eJw="),
        lambda about: about.update(records=""),
        lambda about: about.update(seconds="1"),
    ],
    ids=["empty", "experiment", "cut", "no-records", "seconds"],
)
def test_a_checkpoint_that_nobody_can_read_is_refused_by_its_name(change: Any, copy: Path, capsys: Capsys) -> None:
    altered(checkpoints(copy)[-1], change)
    before = {p.name: p.read_bytes() for p in copy.iterdir()}
    call(capsys, "resume", copy).refused(checkpoints(copy)[-1].name)
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == before


def test_a_checkpoint_from_before_an_option_goes_on_with_its_default(copy: Path, whole: Path, capsys: Capsys) -> None:
    older(copy)
    toml = copy / "experiment.toml"
    toml.write_text(toml.read_text().replace("trust = 1.0\n", ""))
    for path in checkpoints(copy):
        without(path, "trust")
    done = call(capsys, "resume", copy)
    assert "resuming after round 3" in done.out
    ended(done, copy, whole)


def test_wrong_calls(tmp_path: Path, capsys: Capsys) -> None:
    call(capsys, "resume", tmp_path / "gone").refused("gone holds no run")
    call(capsys, "resume", tmp_path).refused("holds no run")
    call(capsys, *WORDS, tmp_path / "r", "--checkpoint-every", 0).refused(
        "--checkpoint-every must be at least 1, got 0"
    )
    assert not (tmp_path / "r").exists()


def test_rarer_checkpoints_or_none(tmp_path: Path, capsys: Capsys) -> None:
    words = ("run", "local", *QUICK, "--epochs", 0, "--rounds", 5, "--keep-checkpoints", "--out", tmp_path / "r")
    for more, expected in ((EACH, [4, 5]), (("--checkpoint-every", 2), [4, 5]), (("--no-checkpoint",), [])):
        assert call(capsys, *words, *more, "--overwrite").code == 0
        assert rounds_of(tmp_path / "r") == expected
        sizes = [p.stat().st_size for p in checkpoints(tmp_path / "r")]
        summary = RunFolder(tmp_path / "r").summary()
        assert summary is not None
        assert summary["checkpoint_bytes"] == (sizes[-1] if sizes else 0)
    assert call(capsys, *words, *EACH, "--overwrite").code == 0
    (tmp_path / "r" / "summary.json").unlink()
    assert call(capsys, "resume", tmp_path / "r").code == 0
    assert rounds_of(tmp_path / "r") == [5]
    assert call(capsys, *words[:-3], *words[-2:], "--no-keep", "--overwrite").code == 0
    assert rounds_of(tmp_path / "r") == []


def test_unless_told_how_often_it_takes_a_twentieth_of_the_time_at_most(copy: Path) -> None:
    from fedcc.experiments.checkpoint import Checkpoints
    from fedcc.experiments.experiment import Experiment

    experiment = Experiment.read(copy / "experiment.toml")
    written = Checkpoints(copy, experiment, experiment.federation())
    assert written.affordable()
    now = time.perf_counter()
    written.cost, written.last_time = 10.0, now - 190
    assert not written.affordable()
    written.last_time = now - 210
    assert written.affordable()


# --------------------------------------------------------------------------------------------------- kill -9, often

KILLS = 20
LONG = ("run", "fedcc", *QUICK, "--rounds", 4, *EACH, "--out")


@pytest.mark.slow
def test_kill_at_random_moments(tmp_path: Path) -> None:
    """Every other kill comes within 20 ms behind a change in the folder, to meet the writes themselves."""
    assert Running(tmp_path, ("--version",)).end(120).code == 0  # what processes begin with is imported now
    begun = time.monotonic()
    assert Running(tmp_path, (*LONG, "whole")).end(120).code == 0
    duration, whole = time.monotonic() - begun, tmp_path / "whole"
    kills = finished = 0
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    met: list[str] = []
    while True:
        name = f"run{finished}"
        folder = tmp_path / name
        if (folder / "experiment.toml").exists():
            run = Running(tmp_path, ("resume", name, *EACH))
        else:  # before its first file there is no run yet
            run = Running(tmp_path, (*LONG, name))
        if kills < KILLS:
            if kills % 2:
                before = seen(folder)
                wait_until(lambda r=run, f=folder, b=before: not r.process.is_alive() or seen(f) != b)
                time.sleep(draw.uniform(0, 0.02))
            else:
                run.process.join(draw.uniform(0, 0.8 * duration))
            if run.process.is_alive():
                os.kill(run.pid, signal.SIGKILL)
        done = run.end(120)
        if done.code == -signal.SIGKILL:  # and not ended just before it
            kills += 1
            met.append(f"{name}: {rounds_of(folder) if folder.is_dir() else 'nothing'}")
            continue
        assert done.code == 0, (seed, met, done)
        assert numbers(folder) == numbers(whole), (seed, met)
        assert rounds_of(folder) == rounds_of(whole) == [4]  # the last one stays, under a name that is drawn
        kept = {p.name for p in checkpoints(folder)}
        assert {p.name for p in folder.iterdir()} - kept <= {p.name for p in whole.iterdir()}
        finished += 1
        if kills == KILLS:
            break
    print(f"seed {seed}: {finished} runs in {time.monotonic() - begun:.0f} s", *met, sep="\n")


def seen(folder: Path) -> dict[str, int]:
    try:
        return {p.name: p.stat().st_size for p in folder.iterdir()}
    except FileNotFoundError:
        return {}
