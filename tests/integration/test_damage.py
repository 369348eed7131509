"""Files of run folders, damaged in many ways: a command refuses them, repairs them, or gives the same numbers."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcc
from fedcc.data import load
from program import Done, call

Capsys = pytest.CaptureFixture[str]
WORDS = (
    "run", "fedcc", "--skew", "classes:4", "--clients", 3, "--models", "resnet8", "--fraction", 0.1, "--rounds", 2,
    "--epochs", 1, "--device", "cpu", "--checkpoint-every", 1, "--keep-checkpoints",
)  # fmt: skip
DESCRIPTION = ("experiment.toml", "environment.json", "partition.npz", "metrics.jsonl")
CHECKPOINTS = ("checkpoint-000001", "checkpoint-000002")
RESULTS = ("summary.json", "models.json", "models.safetensors", "analysis.json", "tracking.json")
IMAGES = load("digits").test_x


# ------------------------------------------------------------------------------------------------------------- damages

Damage = Callable[[bytes, bytes], bytes | None]  # of a file, and of the same file of another run; None: deleted


def truncated(content: bytes, _: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


def emptied(_: bytes, __: bytes) -> bytes:
    return b""


def doubled(content: bytes, _: bytes) -> bytes:
    return content + content


def flipped(seed: int) -> Damage:
    """One bit of one byte, at the same places in every run of the tests."""

    def damage(content: bytes, _: bytes) -> bytes:
        draw = random.Random(seed)
        place, bit = draw.randrange(len(content)), 1 << draw.randrange(8)
        return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]

    return damage


def digit(content: bytes, _: bytes) -> bytes:
    """Another digit in the middle of the first number with a point, or else of the first number: still valid."""
    found = (
        re.search(rb"[:=,] ?\d+\.(\d)", content) or re.search(rb"[:= ](\d)", content) or re.search(rb"(\d)", content)
    )
    assert found is not None
    place = found.start(1)
    return content[:place] + (b"1" if content[place : place + 1] != b"1" else b"2") + content[place + 1 :]


def line(content: bytes, _: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join(lines[: len(lines) // 2] + lines[len(lines) // 2 + 1 :])


def key(content: bytes, _: bytes) -> bytes:
    """Without the last key of a JSON object or a TOML table; other files lose some bytes."""
    try:
        table = json.loads(content)
        table.popitem()
        return json.dumps(table).encode()
    except ValueError:
        pass
    lines = content.splitlines(keepends=True)
    if lines and lines[0].startswith(b"{"):
        record = json.loads(lines[0])
        record.pop("accuracy")
        return b"".join([json.dumps(record).encode() + b"\n", *lines[1:]])
    return content[: len(content) // 2] + content[len(content) // 2 + 7 :]


def replaced(_: bytes, other: bytes) -> bytes:
    return other


def zeros(content: bytes, _: bytes) -> bytes:
    return bytes(len(content))


def deleted(_: bytes, __: bytes) -> None:
    return None


def foreign(content: bytes, _: bytes) -> bytes:
    """Not UTF-8, in the middle."""
    return content[: len(content) // 2] + b"\xff\xfe" + content[len(content) // 2 :]


DAMAGES: dict[str, Damage] = {
    "truncated": truncated, "emptied": emptied, "doubled": doubled, "flipped 1": flipped(1), "flipped 2": flipped(2),
    "flipped 3": flipped(3), "digit": digit, "line": line, "key": key, "replaced": replaced, "zeros": zeros,
    "deleted": deleted, "foreign": foreign,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------- whole folders


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run, the same unfinished, and another finished one of another seed."""
    from unittest import mock

    from fedcc.cli import main
    from fedcc.core.digests import write_json

    root = tmp_path_factory.mktemp("runs")
    places = {name: root / name for name in ("finished", "unfinished", "other")}
    for name, seed in (("finished", 0), ("other", 1)):
        for words in ((*WORDS, "--seed", seed, "--out", places[name]), ("analyse", places[name], *FEW)):
            with mock.patch("sys.argv", ["fedcc", *map(str, words)]), pytest.raises(SystemExit) as end:
                main()
            assert end.value.code == 0
        write_json(places[name] / "tracking.json", {"wandb": {"run": f"run{seed}", "step": 2}})
    shutil.copytree(places["finished"], places["unfinished"])
    for name in ("summary.json", "models.json", "models.safetensors", "analysis.json"):
        (places["unfinished"] / name).unlink()
    return places


FEW = ("--samples", 20, "--device", "cpu")


def contents(place: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in place.iterdir()}


def numbers(place: Path) -> Any:
    """All that a run says, but for times, what depends on them, and other runs on the machine."""
    records = [json.loads(text) for text in (place / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((place / "summary.json").read_text())
    for name in ("sha256", "files", "seconds", "sharing", "checkpoints", "checkpoint_bytes", "commit"):
        summary.pop(name)
    return (
        [r | {"seconds": None, "sharing": None} for r in records],
        summary,
        (place / "models.safetensors").read_bytes(),
    )


def named(place: Path, name: str) -> Path:
    """A file by the beginning of its name."""
    return next(p for p in place.iterdir() if p.name.startswith(name))


def said(done: Done, name: str) -> None:
    """The command names the file."""
    assert name in done.err, done
    assert "Traceback" not in done.err
    assert "should not happen" not in done.err, done


def refused(done: Done, name: str) -> None:
    assert done.code in (1, 2), done
    said(done, name)
    assert done.err.splitlines()[-1].startswith("fedcc: "), done


def scores(place: Path) -> torch.Tensor:
    return fedcc.load(place).scores(IMAGES[:50])


def loaded(place: Path, name: str, expected: torch.Tensor) -> bool:
    """Whether the models give the same scores, or the file is refused by its name."""
    try:
        return torch.equal(scores(place), expected)
    except (ValueError, FileNotFoundError) as error:
        return name in str(error)


def shown(capsys: Capsys, place: Path, out: Path) -> tuple[Done, bytes]:
    """What the report says of one run: its page, without the path that leads to it."""
    out.unlink(missing_ok=True)
    done = call(capsys, "report", place, "--markdown", out)
    return done, out.read_bytes() if out.exists() else b""


@pytest.fixture(scope="module")
def expected(runs: dict[str, Path]) -> dict[str, Any]:
    """What commands say of the finished run, undamaged."""
    return {
        "scores": scores(runs["finished"]),
        "analysis": json.loads((runs["finished"] / "analysis.json").read_text()),
    }


def damaged(kind: str, name: str, damage: Damage, runs: dict[str, Path], tmp_path: Path) -> tuple[Path, Path] | None:
    """A copy of a folder with one damaged file; None where the damage changes nothing."""
    place = tmp_path / "r"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(runs[kind], place)
    path = named(place, name)
    before = path.read_bytes()
    content = damage(before, named(runs["other"], name).read_bytes())
    if content == before:
        return None
    path.unlink() if content is None else path.write_bytes(content)
    return place, path


# --------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DESCRIPTION, *CHECKPOINTS, *RESULTS])
def test_a_finished_run(
    name: str, runs: dict[str, Path], expected: dict[str, Any], tmp_path: Path, capsys: Capsys
) -> None:
    out = tmp_path / "page.md"
    shutil.copytree(runs["finished"], tmp_path / "r")
    undamaged, page = shown(capsys, tmp_path / "r", out)
    assert undamaged.err == ""
    checked = 0
    for kind, damage in DAMAGES.items():
        if (made := damaged("finished", name, damage, runs, tmp_path)) is None:
            continue
        checked += 1
        place, path = made
        file, before = path.name, contents(place)

        done, found = shown(capsys, place, out)
        assert contents(place) == before, (kind, "the report changes nothing")
        if found != page or done.err:
            said(done, file)
        assert found == page or name in ("summary.json", "analysis.json") or not found, (kind, done)

        assert loaded(place, file, expected["scores"]), kind

        done = call(capsys, "analyse", place, *FEW)
        if done.code:
            refused(done, file)
        else:
            analysis = json.loads((place / "analysis.json").read_text())
            for volatile in ("command", "commit", "sha256"):
                analysis[volatile] = expected["analysis"][volatile]
            assert analysis == expected["analysis"], kind
        for entry, content in before.items():
            if entry == "analysis.json":
                (place / entry).write_bytes(content)
            assert (place / entry).read_bytes() == content, (kind, "analyse changes nothing else")
        if "analysis.json" not in before:
            (place / "analysis.json").unlink(missing_ok=True)

        done = call(capsys, "resume", place)
        if done.code:
            refused(done, file)
            assert contents(place) == before, kind
        elif "there is nothing to do" in done.out:
            assert contents(place) == before, kind  # it reads none of them but to check them
        else:
            assert file == "summary.json"
            assert numbers(place) == numbers(runs["finished"]), kind
    assert checked >= 10


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DESCRIPTION, *CHECKPOINTS, "tracking.json"])
def test_an_unfinished_run(name: str, runs: dict[str, Path], tmp_path: Path, capsys: Capsys) -> None:
    checked = 0
    for kind, damage in DAMAGES.items():
        if (made := damaged("unfinished", name, damage, runs, tmp_path)) is None:
            continue
        checked += 1
        place, path = made
        file, before = path.name, contents(place)
        for words in (("report", place, "--markdown", tmp_path / "page.md"), ("analyse", place)):
            done = call(capsys, *words)
            assert done.code == 2, (kind, done)  # nothing to show yet, whatever the file says
            assert "finished" in done.err or "holds no run" in done.err, (kind, done)
        with pytest.raises(FileNotFoundError, match=r"models\.json is missing"):
            fedcc.load(place)
        assert contents(place) == before, kind

        done = call(capsys, "resume", place, "--checkpoint-every", 1)
        if done.code:
            refused(done, file)
            assert contents(place) == before, kind
            continue
        assert numbers(place) == numbers(runs["finished"]), kind
        if name == "checkpoint-000002" and kind == "deleted":
            assert "going on after round 1" in done.out
        elif (name, kind) == ("metrics.jsonl", "doubled"):  # lines after a checkpoint are always cut
            assert path.read_bytes() == (runs["finished"] / name).read_bytes()
        elif name not in ("checkpoint-000001", "tracking.json"):  # which it does not read
            said(done, file)
    assert checked >= 10
