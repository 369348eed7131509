"""Wrong calls and failing disks: one clear line, the right exit code, nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fedcc.experiments import store
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.store import RunFolder
from program import QUICK, Running, call

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call in a folder of its own, without data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDCC_DATA", raising=False)


# ----------------------------------------------------------------------------------------------------- wrong calls

NAMES = [
    (("run", "fedccc"), ("unknown method 'fedccc'", "did you mean 'fedcc'?")),
    (("run", "fedcx"), ("unknown method 'fedcx'", "did you mean 'fedcc'?")),
    (("methods", "fedagv"), ("unknown method 'fedagv'", "'fedavg'")),
    (("run", "fedcc", "--data", "cifr10"), ("unknown data set 'cifr10'", "'cifar10'")),
    (("run", "fedcc", "--data", "a" * 300), ("unknown data set 'aaa",)),  # a file cannot have such a name
    (("skew", "--data", "digts"), ("unknown data set 'digts'", "'digits'")),
    (("run", "fedcc", "--skew", "dirchlet:0.5"), ("unknown skew 'dirchlet:0.5'", "'dirichlet:ETA'")),
    (("run", "fedcc", "--models", "resnt8"), ("unknown network 'resnt8'", "'resnet8'")),
    (("run", "fedcc", "--models", "resnet8,resnet9"), ("6n + 2", "9")),
    (("run", "fedcc", "--models", ","), ("models must name at least one network", "','")),
    (("run", "fedcc", "--device", "cud"), ("unknown device 'cud'", "'cuda'")),
    (("run", "fedcc", "--device", "cuda:99"), ("'cuda:99' does not exist",)),
    (("run", "fedcc", "--device", "mps"), ("device must be auto, cpu or cuda", "'mps'")),
    (("run", "fedcc", "--precision", "fp23"), ("precision must be one of fp32, bf16, fp64", "'fp23'")),
    (("run", "fedcc", "--wire", "fp8"), ("wire must be one of fp32, fp16, int8, int8-stochastic", "'fp8'")),
    (("run", "fedcc", "--assignment", "third"), ("assignment must be one of alternate, halves", "'third'")),
    (("run", "fedcc", "--reset", "never"), ("reset must be one of phase, round", "'never'")),
    (("run", "fedcc", "--set", "lamb=1"), ("unknown setting of FedCC 'lamb'", "'lam'")),
    (("run", "local", "--set", "lam=1"), ("Local has no settings", "lam=1")),
    (("run", "fedcc", "--set", "lam"), ("name=value", "'lam'")),
    (("run", "fedcc", "--set", "lam=x"), ("lam must be a number", "'x'")),
    (("run", "fedcc", "--set", "refine_joint_batch=maybe"), ("true or false", "'maybe'")),
    (("run", "fedcc", "--set", "probe_kind=blak"), ("probe_kind must be one of", "'blak'", "black")),
    (("run", "fedmd", "--set", "digest_epochs=1.5"), ("digest_epochs must be a whole number", "'1.5'")),
    (("rum",), ("unknown command 'rum'", "'run'")),
    (("fedcx",), ("unknown command 'fedcx'", "did you mean `fedcc run fedcc`?", "Known commands: run, resume")),
    (("fedagv", "--rounds", "1"), ("unknown command 'fedagv'", "did you mean `fedcc run fedavg`?")),
    (("federaton",), ("unknown command 'federaton'", "did you mean 'federation'?")),
    (("data", "fecth"), ("unknown command 'fecth'", "'fetch'")),
    (("run", "fedcc", "--ronds", "3"), ("unknown option '--ronds'", "'--rounds'", "fedcc run --help")),
    (("run", "fedcc", "digits"), ("unexpected extra argument", "digits")),
    (("run", "fedcc", "--rounds"), ("--rounds", "requires an argument")),
    (("run", "fedcc", "--rounds", "few"), ("--rounds", "'few'")),
    (("run",), ("name a method", "fedcc, ssl, local", "--config")),
    (("data", "check"), ("Missing argument 'NAME'",)),
    (("skew", "--out", "who.jpg"), ("--out must end in .png, .pdf, .svg", "'who.jpg'")),
    (("run", "fedavg", "--models", "resnet8,resnet14"), ("FedAvg averages weights", "resnet8, resnet14")),
    (("run", "fedmd", "--set", "loss=l1"), ("average=probs needs loss=kl",)),
    (("run", "fedcc", "--augment"), ("digits has no augmentation to turn on",)),
    (("run", "fedcc", "--resize", "32"), ("resize is for images of your own and tiny-imagenet", "32")),
]

RANGES = [
    ("--rounds", "0", "rounds must be at least 1"),
    ("--rounds", "1000000", "rounds must be at most 100,000"),
    ("--epochs", "-1", "epochs must be at least 0"),
    ("--epochs", "1000000", "epochs must be at most 100,000"),
    ("--clients", "0", "clients must be at least 1"),
    ("--clients", "-3", "clients must be at least 1"),
    ("--batch", "0", "batch must be at least 1"),
    ("--batch", "1000000000000", "batch must be at most 65,536"),
    ("--threads", "0", "threads must be at least 1"),
    ("--threads", "99999999999", "threads must be at most 1,024"),
    ("--seed", "-1", "seed must be at least 0"),
    ("--seed", "99999999999999999999", "seed must be at most"),
    ("--lr", "-0.1", "lr must be at least 0"),
    ("--lr", "nan", "lr must be a finite number"),
    ("--lr", "inf", "lr must be a finite number"),
    ("--participation", "0", "participation must be above 0 and at most 1"),
    ("--participation", "1.5", "participation must be above 0 and at most 1"),
    ("--public", "0", "public must be above 0 and below 1"),
    ("--public", "1", "public must be above 0 and below 1"),
    ("--public", "nan", "public must be a finite number"),
    ("--public", "0.0001", "selects none of the"),
    ("--fraction", "0", "fraction must be above 0 and at most 1"),
    ("--fraction", "1.01", "fraction must be above 0 and at most 1"),
    ("--resize", "-1", "resize must be from 0 to 1024"),
    ("--set", "lam=-1", "lam must be at least 0"),
    ("--set", "lam=nan", "lam must be a finite number"),
    ("--set", "lam=inf", "lam must be a finite number"),
    ("--set", "delta=1.5", "delta must be from 0 to 1"),
    ("--set", "trust=-1", "trust must be at least 0"),
    ("--skew", "dirichlet:0", "must be a number > 0"),
    ("--skew", "dirichlet:x", "needs a number > 0"),
    ("--skew", "classes:0", "must be >= 1"),
    ("--skew", "classes:11", "cannot hold 11 of 10 classes"),
    ("--clients", "3", "1 x 3 = 3 places for 10 classes"),  # N K < C
    ("--clients", "100000", "100000 clients cannot share 1298 samples"),
    ("--clients", "1298", "class 0 has 127 samples for 130 holders; use fewer clients"),
]


@pytest.mark.parametrize(("words", "said"), NAMES, ids=[" ".join(words) for words, _ in NAMES])
def test_a_wrong_name_is_answered_with_the_nearest(
    words: tuple[str, ...], said: tuple[str, ...], tmp_path: Path, capsys: Capsys
) -> None:
    call(capsys, *words).refused(*said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("option", "value", "rule"), RANGES, ids=[f"{o} {v}" for o, v, _ in RANGES])
def test_a_value_out_of_range_is_named_with_its_rule(
    option: str, value: str, rule: str, tmp_path: Path, capsys: Capsys
) -> None:
    done = call(capsys, "run", "fedcc", f"{option}={value}")
    done.refused(rule, "" if "holders" in rule else value.partition("=")[2] or value.partition(":")[2] or value)
    assert list(tmp_path.iterdir()) == []


def test_the_other_commands_refuse_as_well(tmp_path: Path, capsys: Capsys) -> None:
    call(capsys, "skew", "--clients", 0).refused("clients must be >= 1", "0")
    call(capsys, "skew", "--public", 2).refused("below 1", "2.0")
    call(capsys, "skew", "--seed", -1).refused("seed must be >= 0", "-1")
    call(capsys, "skew", "--skew", "dirichlet:0.5", "--clients", 900).refused("10 x 900 = 9000 samples", "1298")
    call(capsys, "demo", "--jobs", 0).refused("jobs must be at least 1", "0")
    call(capsys, "demo", "--rounds", 0).refused("rounds must be at least 1", "0")
    call(capsys, "demo", "--clients", 3).refused("3 places for 10 classes")
    Path("file").write_text("mine")
    call(capsys, "demo", "--out", "file").refused("file is a file")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("method = [", "not valid TOML"),
        ("\x00\x01", "not valid TOML"),
        ("data = 'digits'", "names no method"),
        ("method = 3", "method must be a text, got 3"),
        ("method = 'fedccc'", "did you mean 'fedcc'?"),
        ("method = 'fedcc'\ndata = 5", "data must be a text, got 5"),
        ("method = 'fedcc'\nskew = 1.5", "skew must be a text, got 1.5"),
        ("method = 'fedcc'\ndevice = 0", "device must be a text, got 0"),
        ("method = 'fedcc'\nclients = 'ten'", "clients must be a whole number, got 'ten'"),
        ("method = 'fedcc'\nlr = true", "lr must be a number, got True"),
        ("method = 'fedcc'\nstratified = 1", "stratified must be true or false, got 1"),
        ("method = 'fedcc'\nround = 3", "did you mean 'rounds'?"),
        ("method = 'fedcc'\nsettings = 3", "settings must be a table"),
        ("method = 'fedcc'\nengine = 'warp'", "engine must be one of plain, fused, got 'warp'"),
        ("method = 'fedcc'\n[settings]\nlam = 'much'", "lam must be a number, got 'much'"),
        ("method = 'fedcc'\n[settings]\nlambda = 1", "did you mean 'lam'?"),
    ],
)
def test_a_nonsense_config(text: str, said: str, tmp_path: Path, capsys: Capsys) -> None:
    Path("e.toml").write_text(text)
    call(capsys, "run", "--config", "e.toml").refused("e.toml", said)
    assert [p.name for p in tmp_path.iterdir()] == ["e.toml"]


def test_a_config_that_cannot_be_read(tmp_path: Path, capsys: Capsys) -> None:
    call(capsys, "run", "--config", "no.toml").refused("no.toml does not exist")
    call(capsys, "run", "--config", tmp_path).refused(str(tmp_path), "Is a directory")
    Path("e.toml").write_bytes(b"method = '\xff'")
    call(capsys, "run", "--config", "e.toml").refused("e.toml is not valid TOML")
    call(capsys, "run", "--config", "no.json").refused("no.json cannot be read: No such file")
    Path("e.json").write_text('{"method": "fedcc"}')
    call(capsys, "run", "--config", "e.json").refused("e.json is not a record of a run")


# ------------------------------------------------------------------------------------------------------------ data


def test_a_data_folder_that_is_not_there(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (("run", "fedcc", "--data", "cifar10"), ("skew", "--data", "cifar10"), ("data", "list")):
        call(capsys, *words, "--data-dir", "gone").refused("gone: no such data folder", code=1)
    monkeypatch.setenv("FEDCC_DATA", "lost")
    for words in (("run", "fedcc", "--data", "cifar10"), ("data", "check", "cifar10"), ("data", "fetch", "cifar10")):
        call(capsys, *words).refused("FEDCC_DATA names lost: no such data folder", code=1)
    assert list(Path().iterdir()) == []


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """A folder that looks like CIFAR-10: the right form, and one altered byte in every file."""
    home = tmp_path / "data" / "cifar-10-batches-py"
    home.mkdir(parents=True)
    (home / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"c"] * 10}, 2))
    batch = pickle.dumps({b"data": np.zeros((10_000, 3072), np.uint8), b"labels": [i % 10 for i in range(10_000)]}, 2)
    (home / "test_batch").write_bytes(batch)
    for i in range(1, 6):
        os.link(home / "test_batch", home / f"data_batch_{i}")
    return home


def test_an_altered_and_a_truncated_file(cifar: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("run", "fedcc", "--data", "cifar10", "--data-dir", cifar.parent, "--out", "run")
    call(capsys, *words).refused("batches.meta: truncated or altered: expected md5", code=1)
    from fedcc.data import cifar as reader

    monkeypatch.setitem(reader.LAYOUT10.md5, "batches.meta", "")
    call(capsys, *words).refused("data_batch_1: truncated or altered: expected md5 c99c", code=1)
    whole = (cifar / "data_batch_1").read_bytes()
    (cifar / "data_batch_1").unlink()
    (cifar / "data_batch_1").write_bytes(whole[: len(whole) // 2])
    call(capsys, *words).refused("data_batch_1: truncated or altered: expected md5 c99c", code=1)
    (cifar / "data_batch_1").unlink()
    call(capsys, *words).refused("data_batch_1: missing, although", code=1)
    assert not Path("run").exists()


# ----------------------------------------------------------------------------------------------------- run folders


def held(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def named(files: dict[str, bytes]) -> set[str]:
    """Names of files, without the checksums in those of checkpoints."""
    return {name[:17] if name.startswith("checkpoint-") else name for name in files}


def test_an_output_folder_that_is_taken(capsys: Capsys) -> None:
    words = ("run", "local", *QUICK, "--epochs", 0, "--out")
    assert call(capsys, *words, "r").code == 0
    before = held(Path("r"))
    call(capsys, *words, "r").refused("r holds this run already (finished)", "--overwrite")
    call(capsys, *words, "r", "--seed", 1).refused("r holds another run (finished)", "--overwrite")
    call(capsys, *words, "r/metrics.jsonl").refused("r/metrics.jsonl is a file")
    call(capsys, *words, "r/metrics.jsonl/below").refused("r/metrics.jsonl is a file")
    for wrong in (("--clients", 3), ("--data", "cifar10", "--data-dir", "gone"), ("--set", "x=1")):
        assert call(capsys, *words, "r", "--overwrite", *wrong).code > 0
    assert held(Path("r")) == before  # a wrong call replaces nothing

    Path("r/summary.json").unlink()
    call(capsys, *words, "r").refused("r holds this run already (unfinished)", "`fedcc resume r`", "--overwrite")
    Path("r/experiment.toml").write_text("nonsense")
    call(capsys, *words, "r").refused("r holds another run (unfinished)")
    Path("r/notes.txt").write_text("mine")
    assert call(capsys, *words, "r", "--overwrite", "--seed", 1, "--no-save-models").code == 0
    after = held(Path("r"))
    assert named(after) == {*named(before), "notes.txt"} - {"models.json", "models.safetensors"}
    assert json.loads(after["summary.json"])["seed"] == 1
    assert after["notes.txt"] == b"mine"


def test_a_folder_with_other_files(capsys: Capsys) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("years of work")
    Path("mine/notes.tmp").write_text("more")
    for more in ((), ("--overwrite",)):
        call(capsys, "run", "local", *QUICK, "--out", "mine", *more).refused("mine holds other files (notes.tmp)")
    assert held(Path("mine")) == {"thesis.tex": b"years of work", "notes.tmp": b"more"}
    Path("odd").mkdir()
    Path("odd/summary.json").write_text("{}")  # a run whose experiment.toml was lost
    call(capsys, "run", "local", *QUICK, "--out", "odd").refused("odd holds other files (summary.json)")


def test_what_a_killed_begin_left_is_replaced(capsys: Capsys) -> None:
    Path("r").mkdir()
    Path("r/partition.npz").write_text("half")
    Path("r/.environment.json.0123456789abcdef.tmp").write_text("{")
    assert call(capsys, "run", "local", *QUICK, "--epochs", 0, "--out", "r").code == 0
    assert not list(Path("r").glob(".*"))


@contextmanager
def unprivileged() -> Iterator[None]:
    """Not root, whom no permission stops; whatever is imported must be imported before."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_folder(tmp_path: Path, capsys: Capsys) -> None:
    import fedcc.cli.demo  # noqa: F401

    for place in (tmp_path, *tmp_path.parents):  # others must be able to come here
        if not place.stat().st_mode & 0o001:
            place.chmod(place.stat().st_mode | 0o011)
    locked, run = tmp_path / "locked", ("run", "local", *QUICK, "--epochs", 0, "--out")
    locked.mkdir(mode=0o555)
    assert call(capsys, *run, tmp_path / "free").code == 0
    assert call(capsys, "skew").code == 0
    with unprivileged():
        for words in (run, ("demo", "--out")):
            call(capsys, *words, locked / "new" / "run").failed("locked", "Permission denied")
        call(capsys, "skew", "--out", locked / "skew.png").failed("skew.png: Permission denied")
    assert list(locked.iterdir()) == []


# ------------------------------------------------------------------------------------------------------- full disks


def test_a_disk_that_is_full_from_the_start(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> dict[str, object]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store, "environment", full)
    call(capsys, "run", "local", *QUICK, "--out", "a/b/run").failed("the disk is full", "a/b/run")
    assert list(Path().iterdir()) == []


def test_a_disk_that_fills_up_in_mid_run(tmp_path: Path) -> None:
    """A limit on the size of files makes writing fail for real, in the middle of a line."""
    words = ("run", "local", *QUICK, "--fraction", 0.05, "--rounds", 9, "--epochs", 0, "--out", "r", "--overwrite")
    words = (*words, "--no-checkpoint")
    assert Running(tmp_path, (*words, "--no-save-models")).end().code == 0
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "r").iterdir()}
    limit = sizes.pop("metrics.jsonl") - 100
    assert limit > max(size for name, size in sizes.items() if name != "summary.json")
    Running(tmp_path, words, largest=limit).end().failed("metrics.jsonl: File too large", "see r")
    left = (tmp_path / "r" / "metrics.jsonl").read_bytes()
    assert left.endswith(b"\n")
    assert [json.loads(line)["round"] for line in left.splitlines()] == list(range(1, 9))
    assert not (tmp_path / "r" / "summary.json").exists()
    assert not list((tmp_path / "r").glob(".*"))
    Experiment.read(tmp_path / "r" / "experiment.toml")


def test_models_that_do_not_fit_leave_the_rounds_and_no_summary(tmp_path: Path) -> None:
    words = ("run", "local", *QUICK, "--epochs", 0, "--out", "r")
    Running(tmp_path, (*words, "--no-checkpoint"), largest=50_000).end().failed(
        "models.safetensors: File too large", "see r"
    )
    folder = RunFolder(tmp_path / "r")
    assert len(folder.metrics()) == 1
    assert {p.name for p in folder.path.iterdir()} == {
        "experiment.toml", "environment.json", "partition.npz", "metrics.jsonl",
    }  # fmt: skip


def test_a_line_is_there_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system writes half a line and then has no room."""
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n')
    folder, write = RunFolder(tmp_path), os.write
    rooms = iter([6])

    def scarce(file: int, line: bytes) -> int:
        room = next(rooms, 0)
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, line[:room])

    monkeypatch.setattr(os, "write", scarce)
    with pytest.raises(OSError, match="No space left"):
        folder.add({"round": 2})
    monkeypatch.undo()
    assert folder.metrics() == [{"round": 1}]
    folder.add({"round": 2})
    assert folder.metrics() == [{"round": 1}, {"round": 2}]


# ---------------------------------------------------------------------------------------------------------- failures


def test_a_loss_that_is_not_finite_names_its_place(capsys: Capsys) -> None:
    done = call(capsys, "run", "fedcc", *QUICK, "--epochs", 2, "--lr", "1e30", "--out", "r")
    done.failed("the loss is not finite", "at step 2 of ", "lr 1e+30", "client 0, round 1, 'fit'", "see r")
    assert RunFolder(Path("r")).metrics() == []
    call(capsys, "run", "fedcc", *QUICK, "--epochs", 2, "--lr", "1e30", "--out", "r").refused(
        "this run already (unfinished)"
    )


@pytest.mark.parametrize("method", ["fedavg", "fedct"])
def test_weights_that_the_last_step_ruins_are_no_result(capsys: Capsys, method: str) -> None:
    split = "--data", "digits", "--skew", "classes:4", "--clients", 3, "--rounds", 1, "--epochs", 1
    huge = "--models", "resnet8", "--fraction", 0.2, "--batch", 512, "--lr", "1e38", "--out", "r"
    done = call(capsys, "run", method, *split, *huge)
    done.failed("the weights are not finite", "after step 1 of 1 with lr 1e+38", "client 0, round 1, 'fit'", "see r")
    assert RunFolder(Path("r")).metrics() == []
    assert not Path("r/summary.json").exists()


def test_a_bug_is_called_one_and_can_be_traced(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcc.experiments import run

    monkeypatch.setattr(run, "check_method", None)
    done = call(capsys, "run", "local", *QUICK)
    assert done.code == 1
    bug = "fedcc: TypeError: 'NoneType' object is not callable (this should not happen; FEDCC_DEBUG=1 shows where)"
    assert done.err == f"{bug}\n"
    monkeypatch.setenv("FEDCC_DEBUG", "1")
    assert "Traceback" in call(capsys, "run", "local", *QUICK).err
