"""Every command: what it prints, and for which reader."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

import fedcc
from fedcc.cli import app
from fedcc.cli.run import read_config
from fedcc.core.digests import write_json
from fedcc.core.model import Outputs
from fedcc.core.options import options_of
from fedcc.core.requests import Predict
from fedcc.data.dataset import Dataset
from fedcc.engine import Plain
from fedcc.experiments.experiment import Experiment
from fedcc.signals import Interrupted
from program import QUICK, Running, call

Capsys = pytest.CaptureFixture[str]
COMMANDS = {
    "run": (
        "--config --data --skew --clients --models --assignment --rounds --epochs --participation --seed --set --lr "
        "--batch --reset --public --stratified --fraction --augment --validation --resize --label --test --wire "
        "--client-accuracy --schedule --decay --evaluate-every --readings --optimizer --momentum --share "
        "--answer-epsilon --device --engine --deterministic "
        "--precision --threads --out --data-dir --overwrite --save-models "
        "--checkpoint --checkpoint-every --keep --keep-checkpoints --track --json"
    ),
    "resume": (
        "--rounds --code --data-dir --save-models --checkpoint --checkpoint-every --keep --keep-checkpoints --track "
        "--json"
    ),
    "sweep": (
        "--out --jobs --dry-run --shard --only --time-limit --with --on --address --device --precision --engine "
        "--deterministic --threads --data-dir --save-models --checkpoint --checkpoint-every --keep --keep-checkpoints "
        "--track --json"
    ),
    "analyse": "--samples --variance --client --public-index --code --device --data-dir --json",
    "report": "--out --readme --markdown --title --figures",
    "federation init": (
        "--client --method --set --host --port --quorum --deadline --grace --patience --strikes --data --public-file "
        "--test-file --class --simulate-sites --skew --models --assignment --rounds --epochs --seed --lr --schedule "
        "--decay --batch --reset --public --stratified --fraction --augment --validation --resize --label --test "
        "--wire --evaluate-every --readings --device --engine --precision --threads --data-dir "
        "--make-keys --optimizer --momentum --share --answer-epsilon"
    ),
    "federation join": "--folder",
    "federation add": "--fingerprint --model",
    "federation revoke": "",
    "federation renew": "--ca",
    "federation rotate": "--another --client --fingerprint",
    "federation upgrade": "",
    "federation server": "--bind --metrics --log-format",
    "federation client": "--data --model --server --device --threads --network --label --share-model --log-format",
    "federation audit": "--json",
    "federation run": "--overwrite --log-format",
    "federation status": "--json",
    "federation predict": "--out",
    "federation demo": "--out --method --rounds --epochs --fraction --seed",
    "predict": "--abstain --explain --out --code",
    "distil": "--model --public --epochs --mixes --sharpness --seed --out --data-dir --code --json",
    "export": "--code",
    "demo": "--out --rounds --epochs --clients --seed --jobs --json",
    "methods": "--json",
    "bench": (
        "--device --clients --steps --model --shape --tokens --images --all --batch --augment --threads --out --json"
    ),
    "skew": "--data --skew --clients --seed --public --resize --label --test --out --data-dir --json",
    "data list": "--data-dir --json",
    "data fetch": "--data-dir",
    "data check": "--data-dir --json",
}


# ------------------------------------------------------------------------------------------------------------ run


def test_a_run_speaks_in_plain_lines_without_a_terminal(tmp_path: Path, capsys: Capsys) -> None:
    done = call(capsys, "run", "fedcc", *QUICK, "--rounds", 2, "--out", tmp_path / "[run]")
    first, public, *rounds, last = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert public == "29 public samples, used without labels; they should look like the clients' own"
    assert first == "FedCC on digits, classes:1, 10 clients (resnet8), T=2, E=1, seed 0, cpu fp32 plain"
    for number, line in enumerate(rounds, start=1):
        assert re.match(rf"round {number}/2  accuracy +[\d.]+ %  [\d.]+ s  [\d,]+ samples/s", line), line
    assert re.search(r"about \d+:\d\d left$", rounds[0])
    assert len(rounds) == 2
    assert "left" not in rounds[1]
    assert re.match(r"FedCC: final [\d.]+ %, best [\d.]+ % in round \d, [\d.]+ s, ", last)
    assert re.search(r"/\[run\] \(checkpoint: \d\.\d MB\)$", last), last  # no markup
    assert "\x1b" not in done.out


def on_a_terminal(folder: Path, *words: object) -> tuple[int, str]:
    """The exit code of a program on a terminal of 80 columns, and what it wrote there, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    terminal = {"TERM": "xterm", "COLUMNS": "80"}
    run = Running(folder, words, terminal=os.ttyname(theirs), environment=terminal)
    run.process.join(0)
    text = ""
    os.set_blocking(ours, False)
    while run.process.is_alive() or _readable(ours):
        try:
            text += os.read(ours, 1 << 16).decode()
        except BlockingIOError:
            run.process.join(0.05)
    os.close(ours)
    os.close(theirs)
    return run.end().code, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_terminal_shows_the_state_now(tmp_path: Path) -> None:
    name = "a-run-whose-folder-has-a-long-name"
    code, plain = on_a_terminal(tmp_path, "run", "fedcc", *QUICK, "--rounds", 2, "--out", name)
    assert code == 0, plain
    assert plain.startswith("starting\r"), "before torch is imported"
    words = r"+[━╸╺ ]+ (sync|fit|refine), client \d +"
    assert re.search(rf"round 1/2 {words}[\d,]+ samples/s +\d:\d\d", plain), plain
    assert re.search(rf"round 2/2 {words}accuracy [\d.]+ % +\d:\d\d, \d:\d\d left", plain), plain
    assert re.search(r"[\r\n]round 2/2  accuracy +[\d.]+ %", plain), plain
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", plain)]
    assert all(len(line) <= 80 for line in lines), plain
    assert re.search(rf"^FedCC: final .* {name} \(checkpoint: [\d.]+ MB\)$", " ".join(lines[-3:]).strip()), lines


def test_a_long_error_is_broken_between_words_on_a_terminal(tmp_path: Path) -> None:
    words = ("run", "fedcx")
    code, plain = on_a_terminal(tmp_path, *words)
    assert code == 2
    lines = plain.removeprefix("starting\r").split("\r\n")
    assert len(lines) > 2, lines
    assert all(len(line) <= 80 for line in lines), lines
    assert " ".join(lines).strip() == Running(tmp_path, words).end().err.strip()


def _readable(descriptor: int) -> bool:
    import select

    return bool(select.select([descriptor], [], [], 0)[0])


def test_json_is_one_document_on_stdout_and_progress_goes_to_stderr(tmp_path: Path, capsys: Capsys) -> None:
    done = call(capsys, "run", "FedMD", *QUICK, "--json", "--out", tmp_path / "r")
    assert done.code == 0
    assert json.loads(done.out) == json.loads((tmp_path / "r" / "summary.json").read_text())
    assert "round 1/1" in done.err


def test_settings_options_and_defaults_reach_the_experiment(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--set", "lam=0.5", "--set", "refine_joint_batch=false", "--set", "delta=0")
    options = ("--skew", "noniid-#label2", "--batch", 32, "--seed", 3, "--participation", 0.5, "--wire", "fp16")
    switches = ("--no-client-accuracy", "--no-save-models", "--stratified")
    done = call(capsys, "run", "fedcc", *QUICK, *words, *options, *switches, "--json")
    assert done.code == 0, done
    found = json.loads(done.out)
    settings, experiment = found["settings"], found["experiment"]
    assert (settings["lam"], settings["refine_joint_batch"], settings["delta"]) == (0.5, False, 0.0)
    assert (experiment["skew"], experiment["batch"], experiment["wire"]) == ("classes:2", 32, "fp16")
    assert experiment["stratified"] is True
    place = tmp_path / "runs" / "digits_classes-2" / "fedcc" / "seed3"
    (line,) = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert line["clients"] == {}
    assert len(line["present"]) == 5
    assert not (place / "models.json").exists()


def test_a_config_runs_again_and_options_change_it(tmp_path: Path, capsys: Capsys) -> None:
    first = call(capsys, "run", "ssl", *QUICK, "--set", "lam=0.7", "--seed", 4, "--json", "--out", tmp_path / "a")
    config = tmp_path / "a" / "experiment.toml"
    again = call(capsys, "run", "--config", config, "--json", "--out", tmp_path / "b")
    assert json.loads(again.out)["experiment"] == json.loads(first.out)["experiment"]
    assert json.loads(again.out)["accuracy"] == json.loads(first.out)["accuracy"]
    changed = ("--seed", 5, "--epochs", 0, "--set", "threshold=0.9")
    other = call(capsys, "run", "--config", config, *changed, "--json", "--out", tmp_path / "c")
    experiment = json.loads(other.out)["experiment"]
    assert (experiment["seed"], experiment["epochs"], experiment["fraction"]) == (5, 0, 0.2)
    assert (experiment["settings"]["lam"], experiment["settings"]["threshold"]) == (0.7, 0.9)
    switched = call(capsys, "run", "local", "--config", config, "--epochs", 0, "--json", "--out", tmp_path / "d")
    assert json.loads(switched.out)["method"] == "Local"  # ssl's settings are not local's


def test_a_record_is_repeated_on_another_machine(tmp_path: Path, capsys: Capsys) -> None:
    first = call(
        capsys, "run", "fedmd", *QUICK, "--set", "digest_epochs=2", "--seed", 4, "--json", "--out", tmp_path / "a"
    )
    record = json.loads(first.out)
    elsewhere = record["experiment"] | {"augment": False, "device": "cuda", "engine": "fused"}
    older = record | {"experiment": elsewhere, "command": "fedcc", "engine": "fused"}
    write_json(tmp_path / "older.json", older)
    again = call(capsys, "run", "--config", tmp_path / "older.json", "--json", "--out", tmp_path / "b")
    assert (again.code, "are not those of" in again.err) == (0, False), again.err
    write_json(tmp_path / "older.json", older | {"data_sha256": "0" * 64})
    other = call(capsys, "run", "--config", tmp_path / "older.json", "--json", "--out", tmp_path / "c")
    assert "the data of digits are not those of" in other.err
    own = elsewhere | {"models": "somebody:net"}
    write_json(tmp_path / "older.json", older | {"experiment": own, "models": "somebody:net"})
    call(capsys, "run", "--config", tmp_path / "older.json", "--out", tmp_path / "d").refused("somebody:net")
    write_json(tmp_path / "older.json", older | {"experiment": elsewhere | {"round": 3}})
    call(capsys, "run", "--config", tmp_path / "older.json", "--out", tmp_path / "d").refused("did you mean 'rounds'?")
    assert json.loads(again.out)["experiment"] == record["experiment"]
    assert json.loads(again.out)["accuracy"] == record["accuracy"]


def test_every_record_of_results_names_a_run_that_can_be_repeated() -> None:
    for file in sorted((Path(__file__).parents[2] / "results").glob("*.json")):
        method, options, settings, _ = read_config(file)
        Experiment.resolve(method, settings=settings, **options)


# ------------------------------------------------------------------------------------------- methods, data, skew


def test_methods_lists_every_method_and_explains_one(capsys: Capsys) -> None:
    listing = call(capsys, "methods")
    assert listing.code == 0
    for name, kind in fedcc.METHODS.items():
        assert re.search(rf"^{name} +{kind.__name__}\b", listing.out, re.M)
    assert listing.out.index("centralized") < listing.out.index("beyond the paper") < listing.out.index("dsfl")
    one = call(capsys, "methods", "FedCC")
    for word in ("lam", "0.2", "Eq. (4)", "majority_threshold", "0 to 1", "probe, labels", "true, false"):
        assert word in one.out
    everything = json.loads(call(capsys, "methods", "--json").out)
    assert list(everything) == list(fedcc.METHODS)
    about = json.loads(call(capsys, "methods", "fedcc", "--json").out)
    assert about == everything["fedcc"]
    assert {s["name"] for s in about["settings"]} >= {"lam", "delta", "probe_kind"}
    assert all(s["meaning"] and s["source"] for m in everything.values() for s in m["settings"])
    assert "no settings of its own" in call(capsys, "methods", "local").out


def test_data_list_and_check(tmp_path: Path, capsys: Capsys) -> None:
    rows = json.loads(call(capsys, "data", "list", "--data-dir", tmp_path, "--json").out)
    assert {r["name"]: r["here"] for r in rows} == {
        "digits": True, "fashion-mnist": False, "cifar10": False, "cifar100": False, "tiny-imagenet": False,
    }  # fmt: skip
    listing = call(capsys, "data", "list", "--data-dir", tmp_path)
    assert re.search(r"^cifar10 +CIFAR-10 +50,000 +10,000 +10 +3x32x32 +no", listing.out, re.M)
    assert f"data folder: {tmp_path}" in listing.out
    good = call(capsys, "data", "check", "digits")
    assert good.code == 0
    assert "ok" in good.out
    bad = call(capsys, "data", "check", "cifar-10", "--data-dir", tmp_path)
    bad.failed("cifar-10: 7 of 7 files")
    assert bad.out.count("not there") == 7
    listed = call(capsys, "data", "check", "cifar10", "--data-dir", tmp_path, "--json")
    assert [row["ok"] for row in json.loads(listed.out)] == [False] * 7
    assert listed.code == 1


def test_data_fetch(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    import requests

    from fedcc.data import fetch

    def offline(url: str, **_: object) -> None:
        raise requests.ConnectionError(f"no network to {url}")

    monkeypatch.setattr(requests, "get", offline)
    monkeypatch.setattr(fetch, "PAUSE", 0.0)
    assert "nothing to fetch" in call(capsys, "data", "fetch", "digits").out
    call(capsys, "data", "fetch", "cifar10", "--data-dir", tmp_path).refused("download failed", "no network", code=1)
    call(capsys, "data", "fetch", "cifr10").refused("unknown data set 'cifr10'", "'cifar10'")
    left = [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")]
    assert left == []
    out = tmp_path / "run"
    call(capsys, "run", "fedcc", "--data", "cifar10", "--data-dir", tmp_path, "--out", out).refused(
        "no network", code=1
    )
    assert not out.exists()


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG\r\n"), ("pdf", b"%PDF-"), ("svg", b"<?xml")])
def test_skew_prints_the_table_and_writes_the_picture(
    ending: str, magic: bytes, tmp_path: Path, capsys: Capsys
) -> None:
    picture = tmp_path / "new" / f"who.{ending}"
    done = call(capsys, "skew", "--skew", "dirichlet:0.3", "--clients", 5, "--seed", 2, "--out", picture)
    assert done.code == 0
    header, _, *rows, last = done.out.splitlines()
    assert header.startswith("digits, dirichlet:0.3, 5 clients, seed 2; 144 public samples")
    table = [[int(n.replace(".", "0")) for n in row.split()] for row in rows]
    assert [row[0] for row in table] == list(range(5))
    assert all(sum(row[1:-1]) == row[-1] for row in table)
    assert sum(row[-1] for row in table) == 1442 - 144
    assert last == f"picture: {picture}"
    assert picture.read_bytes().startswith(magic)
    assert [p.name for p in picture.parent.iterdir()] == [picture.name]


def test_bench_compares_engines_in_one_table(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    predicted: list[int] = []

    class Observed(Plain):
        def predict(self, request: Predict) -> Outputs:
            predicted.append(len(request.samples))
            return super().predict(request)

    monkeypatch.setattr("fedcc.experiments.bench.Plain", Observed)
    options = ("--device", "cpu", "--model", "resnet8", "--steps", 1, "--batch", 4, "--clients", "1,2", "--images", 70)
    found = json.loads(call(capsys, "bench", *options, "--json").out)
    rows = found["rows"]
    assert found["settings"] == {
        "model": "resnet8", "shape": [3, 32, 32], "tokens": 0, "images": 70, "batch": 4, "steps": 1,
        "augment": "standard", "precision": "fp32",
    }  # fmt: skip
    assert set(predicted) == {70}
    assert {"torch", "commit", "gpu"} <= set(found["machine"])
    assert {row["phase"] for row in rows} == {"fit", "refine", "predict"}
    for phase in ("fit", "refine", "predict"):
        plain, *others = [row for row in rows if row["phase"] == phase]
        assert (plain["engine"], plain["ratio"]) == ("plain fp32", None)
        assert all(row["ratio"] == pytest.approx(plain["ms"] / row["ms"]) for row in others)
        assert [row["clients"] for row in others if row["engine"] == "fused fp32"] == [1, 2]


OWN_NETWORKS = """
from torch import nn

class Words(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 4), nn.Linear(4, outputs)

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))

def grey(outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))

class Moody(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum().item() > 9 else 2 * x)

def numbers(outputs):
    return Moody(5, outputs)
"""


@pytest.mark.parametrize(
    ("name", "options", "way"),
    [
        ("Words", ("--shape", "7", "--tokens", 50), "vmap"),
        ("grey", ("--shape", "1,8,8"), "stacked"),
        ("numbers", ("--shape", "5"), "plain (stacked networks do not compute"),
    ],
)
def test_bench_measures_a_network_of_ones_own(
    name: str, options: tuple[object, ...], way: str, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, small grey images and numbers; one by vmap, one stacked, one that can only train alone."""
    (tmp_path / "benchnets.py").write_text(OWN_NETWORKS)
    monkeypatch.syspath_prepend(tmp_path)
    common = ("bench", "--device", "cpu", "--steps", 1, "--batch", 4, "--clients", "2", "--images", 30)
    done = call(capsys, *common, "--model", f"benchnets:{name}", *options, "--json")
    assert done.code == 0, done.err
    ways = {row["engine"]: row["way"] for row in json.loads(done.out)["rows"]}
    assert ways["plain fp32"] == "plain"
    assert ways["fused fp32"].startswith(way)


def test_bench_compares_networks_in_one_table(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of the networks: one by surgery, two by vmap, of which one on tokens, and a frozen one."""
    from fedcc.experiments import bench_networks

    networks = {own.name: own for own in bench_networks.BENCH_NETWORKS}
    names = ("MLP", "CNN with dropout", "LSTM on tokens", "frozen resnet20, head")
    monkeypatch.setattr(bench_networks, "BENCH_NETWORKS", [networks[name] for name in names])
    quick = bench_networks.BenchRun("fedavg", "classes:2", clients=5, epochs=1, model="mlp4", images=200)
    monkeypatch.setattr(bench_networks, "BENCH_RUNS", [quick])
    options = ("--all", "--device", "cpu", "--steps", 1, "--batch", 2, "--out", tmp_path / "bench.json")
    shown = call(capsys, "bench", *options).out
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["settings"] == {"model": "all", "batch": 2, "steps": 1, "augment": "standard", "precision": "fp32"}
    assert found["machine"]["arguments"] is not None
    ways = {row["network"]: row["way"] for row in found["rows"]}
    assert ways == dict(zip(names, ("stacked", "vmap", "vmap", "stacked"), strict=True))
    for row in found["rows"]:
        assert row["network"] in shown
        assert row["clients"] == 2
        assert row["ratio"] == pytest.approx(min(row["plain"], row["plain_bf16"]) / row["fused"])
        assert row["share"] > 0
    assert str(quick) in shown
    assert [(own["run"]["clients"], own["reason"], own["round"] > 0) for own in found["runs"]] == [(5, "", True)]
    mlp = found["rows"][0]["gflop"]  # two per weight and sample, three times; nothing for the inputs' gradient
    inputs, hidden = 3 * 32 * 32 * 128, 128 * 128 + 128 * 11
    assert mlp == pytest.approx(2 * 2 * (2 * inputs + 3 * hidden) / 1e9)


def test_bench_keeps_the_rows_before_one_that_fails_and_goes_on(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first network cannot be built, the second is measured, at the third the user presses Ctrl-C."""
    from fedcc.experiments import bench_networks

    def broken(outputs: int) -> NoReturn:
        raise RuntimeError(f"no layers\nfor {outputs} outputs")

    def stops(_: int) -> NoReturn:
        raise Interrupted(signal.SIGINT)

    mlp = next(own for own in bench_networks.BENCH_NETWORKS if own.name == "MLP")
    networks = [replace(mlp, name="broken", factory=broken), mlp, replace(mlp, name="endless", factory=stops)]
    options = ("bench", "--all", "--device", "cpu", "--steps", 1, "--batch", 2, "--out", tmp_path / "bench.json")
    monkeypatch.setattr(bench_networks, "BENCH_NETWORKS", networks[:2])
    monkeypatch.setattr(bench_networks, "BENCH_RUNS", ())
    shown = call(capsys, *options)
    assert shown.code == 0
    assert "RuntimeError: no layers" in shown.out
    monkeypatch.setattr(bench_networks, "BENCH_NETWORKS", networks)
    stopped = call(capsys, *options)
    assert stopped.code == 130
    assert f"the rows until then are in {tmp_path / 'bench.json'}" in stopped.err
    failed, measured = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert failed == {"network": "broken", "clients": 2, "reason": "RuntimeError: no layers"}
    assert measured["network"] == "MLP"


@pytest.mark.parametrize(
    "wrong",
    [
        ("--clients", "1,x"),
        ("--steps", 0),
        ("--clients", "0"),
        ("--all", "--clients", "1,2"),
        ("--all", "--model", "mlp"),
        ("--all", "--shape", "1,28,28"),
        ("--images", 0),
        ("--shape", "3,32,wide"),
        ("--shape", "3,0,32"),
        ("--model", "mlp", "--shape", "16", "--augment", "strong"),
    ],
)
def test_bench_refuses(wrong: tuple[str, object], capsys: Capsys) -> None:
    done = call(capsys, "bench", "--device", "cpu", *wrong)
    assert done.code == 2
    assert done.err.startswith("fedcc: ")


def test_bench_looks_first_whether_its_record_can_be_written(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "file").touch()
    done = call(capsys, "bench", "--device", "cpu", "--out", tmp_path / "file" / "bench.json")
    assert (done.code, done.out) == (1, "")
    assert "rows" not in done.err


def test_skew_as_json(tmp_path: Path, capsys: Capsys) -> None:
    found = json.loads(call(capsys, "skew", "--clients", 10, "--out", tmp_path / "s.svg", "--json").out)
    assert (found["skew"], found["public"], found["picture"]) == ("classes:1", 144, str(tmp_path / "s.svg"))
    assert [sum(n > 0 for n in row) for row in found["counts"]] == [1] * 10


def test_skew_of_many_classes_and_clients(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    import fedcc.data

    digits = fedcc.data.load("digits")
    y = np.arange(6000) % 100
    many = Dataset(
        "cifar100", tuple(map(str, range(100))), np.zeros((6000, 3, 8, 8), np.uint8), y,
        np.zeros((100, 3, 8, 8), np.uint8), np.arange(100), digits.view, digits.defaults,
    )  # fmt: skip
    monkeypatch.setattr("fedcc.federation.load", lambda *_, **__: many)
    picture = tmp_path / "many.png"
    done = call(capsys, "skew", "--data", "cifar100", "--skew", "classes:20", "--clients", 60, "--out", picture)
    assert done.code == 0
    assert re.search(r"^59 +\d+ +20 +\d+ \(\d+\), ", done.out, re.M)
    assert max(map(len, done.out.splitlines())) <= max(120, len(f"picture: {picture}"))
    assert picture.stat().st_size > 5000


# --------------------------------------------------------------------------------------------- version, help, pipes


def test_version_and_help(capsys: Capsys) -> None:
    assert call(capsys, "--version").out == f"{fedcc.__version__}\n"
    top = call(capsys, "--help")
    assert top.code == 0
    for command in ("run", "demo", "methods", "skew", "data"):
        assert re.search(rf"^  {command} ", top.out, re.M)
    bare = call(capsys)
    assert bare.code == 2
    assert "Commands:" in bare.err


def test_a_shell_completes_commands_and_options() -> None:
    def completed(words: str) -> list[str]:
        asked = {"_FEDCC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        program = [sys.executable, "-m", "fedcc"]
        return subprocess.run(program, env=os.environ | asked, capture_output=True, text=True).stdout.split()

    assert completed("fedcc re") == ["resume", "report"]
    assert completed("fedcc run --sk") == ["--skew"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option(command: str, capsys: Capsys) -> None:
    done = call(capsys, *command.split(), "--help")
    assert done.code == 0
    assert f"Usage: fedcc {command} " in done.out
    named = set(re.findall(r"(?<![\w-])--(?!no-)[a-z-]+", done.out)) - {"--help"}
    assert named == set(COMMANDS[command].split())
    assert "\\" not in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def sentences(command: Any) -> Iterator[tuple[str, str]]:
    """Every help of a command and of those below it."""
    yield command.name, command.help
    for parameter in command.params:
        yield f"{command.name} {parameter.name}", getattr(parameter, "meaning", None) or parameter.help
    for below in getattr(command, "commands", {}).values():
        yield from sentences(below)


def test_help_is_whole_sentences() -> None:
    import typer

    texts = list(sentences(typer.main.get_command(app)))
    assert len(texts) > 250
    wrong = [(where, t) for where, t in texts if not re.fullmatch(r"['A-Z].*\.(  \[default: [^]]+\])?", t or "", re.S)]
    assert wrong == []


def test_help_explains_arguments_once(capsys: Capsys) -> None:
    done = call(capsys, "export", "--help")
    assert re.search(
        r"^Arguments:\n  RUN +The folder of a finished run, .*\n  FILE +The file to write: ", done.out, re.M
    )
    assert done.out.count("RUN ") == 2  # in the usage, too


def test_methods_are_whole_at_80_columns(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    text = re.sub(r"\x1b\[[\d;]*m", "", call(capsys, "methods").out)
    assert max(map(len, text.splitlines())) <= 80
    for kind in fedcc.METHODS.values():
        for o in options_of(kind).values():
            assert re.search(rf"\b{o.name}={re.escape(str(o.default))}(,|\s)", text), o.name


def test_the_commands_are_all_tested() -> None:
    import click
    import typer

    top = typer.main.get_command(app)
    assert isinstance(top, click.Group)
    names = {
        f"{name} {sub}".strip()
        for name, command in top.commands.items()
        for sub in (command.commands if isinstance(command, click.Group) else [""])
    }
    assert names == set(COMMANDS)


def test_python_dash_m_and_a_reader_that_leaves(tmp_path: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m fedcc methods fedcc | head -1", shell=True, capture_output=True, text=True, cwd=tmp_path,
        check=False,
    )  # fmt: skip
    assert done.stdout.startswith("FedCC: ")
    assert done.stderr == ""


def test_the_program_is_installed() -> None:
    assert shutil.which("fedcc", path=str(Path(sys.executable).parent))
