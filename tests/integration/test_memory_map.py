"""Memory maps are not copied: batches are read from the file, and the numbers are those of arrays in memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedcc
from fedcc import Dataset, Federation, View
from fedcc.core.maps import MappedTensor
from fedcc.inputs.maps import MappedRows, is_mapped
from program import call

Capsys = pytest.CaptureFixture[str]
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (300, 3, 8, 8)).astype(np.uint8)
LABELS = np.arange(300) % 3
IMAGES[np.arange(300), LABELS] //= 8


def mapped(path: Path, array: Any) -> Any:
    np.save(path, array)
    return np.load(path, mmap_mode="r")


def linear(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, outputs))


@pytest.fixture
def images(tmp_path: Path) -> Any:
    return mapped(tmp_path / "x.npy", IMAGES)


# ---------------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x[torch.tensor([[3, 1], [2, 9]])],
        lambda x: x[torch.arange(300) % 2 == 0],
        lambda x: x[[1, 2]],
        lambda x: x[2:7:2],
        lambda x: x[-3:],
        lambda x: x[:0],
        lambda x: x[-1],
        lambda x: x[4],
        lambda x: x[5, 0, 1],
        lambda x: x[:, 0],
        lambda x: x.flip(-1)[2:4],
        lambda x: x.flip(0),
        lambda x: x[2:5].float() * 2,
        lambda x: torch.cat([x, x]),
        lambda x: torch.cat(x.tensor_split(7)),
        lambda x: x.detach().clone(),
        lambda x: x.max(),
        lambda x: torch.zeros(300, 3, 8, 8, dtype=torch.uint8).copy_(x),
        lambda x: torch.from_numpy(x.numpy()),
    ],
)
def test_a_mapped_tensor_is_the_tensor(use: Any, images: Any) -> None:
    expected, found = use(torch.from_numpy(IMAGES)), use(MappedTensor(MappedRows.of(images)))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found + 0, expected + 0)


def test_slices_and_mirror_images_stay_in_the_file(images: Any) -> None:
    x = MappedTensor(MappedRows.of(images))
    assert all(isinstance(part, MappedTensor) for part in (x[3:9], x.flip(-1), x.to("cpu"), *x.tensor_split(3)))
    assert not any(isinstance(part, MappedTensor) for part in (x[torch.tensor([1])], x.float()))


def test_a_view_of_a_map_is_a_map_and_a_copy_is_none(images: Any) -> None:
    views, copies = (images, images[5:], images.transpose(0, 2, 3, 1), np.asarray(images)), (images[[1]], images + 1)
    assert all(map(is_mapped, views))
    assert not any(map(is_mapped, copies))


# ------------------------------------------------------------------------------------------------------ federations


@pytest.mark.parametrize("method", ["fedavg", "fedcc"])
def test_results_are_those_of_arrays(method: str, images: Any) -> None:
    results = []
    for x in (images, IMAGES):
        f = Federation.split((x, LABELS), "iid", 3, linear, validation=0.1)
        assert isinstance(f.private[0].x, MappedTensor) == isinstance(f.test.x, MappedTensor) == is_mapped(x)
        results.append(fedcc.run(method, f, rounds=2, epochs=2, batch=16, device="cpu"))
    one, other = results
    assert torch.equal(one.scores(IMAGES), other.scores(IMAGES))
    assert [r["accuracy"] for r in one.rounds] == [r["accuracy"] for r in other.rounds]
    assert one.rounds[-1]["readings"] == other.rounds[-1]["readings"]
    assert one.accuracy > 60


def test_evaluation_in_parts_is_evaluation(images: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    f = Federation.split((images, LABELS), "iid", 3, "resnet8")
    whole = fedcc.run("fedavg", f, rounds=1, epochs=1, device="cpu")
    monkeypatch.setattr("fedcc.core.samples.CHUNK", 7 * 4 * 192)
    assert [len(part) for part in f.test.chunks()] == [7] * 8 + [4]
    parts = fedcc.run("fedavg", f, rounds=1, epochs=1, device="cpu")
    assert {**parts.rounds[0], "seconds": {}} == {**whole.rounds[0], "seconds": {}}


@pytest.mark.parametrize("method", ["fedcc", "fedavg", "local"])
def test_a_map_is_predicted_in_parts(method: str, images: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = fedcc.run(method, Federation.split((IMAGES, LABELS), "iid", 3, linear), rounds=1, epochs=1, device="cpu")
    monkeypatch.setattr("fedcc.core.samples.CHUNK", 70 * 4 * 192)
    torch.testing.assert_close(result.scores(images), result.scores(IMAGES))
    one, other = (vars(result.answer(x)) for x in (images, IMAGES))
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name])
    if method == "fedcc":
        torch.testing.assert_close(result.explain(images).votes, result.explain(IMAGES).votes)
        torch.testing.assert_close(result.explain(images).trust, result.explain(IMAGES).trust)


def test_forms_of_maps(tmp_path: Path) -> None:
    numbers = mapped(tmp_path / "a.npy", RNG.normal(5, 2, (90, 4)))  # float64
    f = Federation.split((numbers, LABELS[:90]), "iid", 2)
    assert f.private[0].x.dtype == torch.float32
    np.testing.assert_allclose(f.public.view.mean, f.public.x.numpy().mean(0), rtol=1e-6)
    tokens = mapped(tmp_path / "b.npy", RNG.integers(0, 50, (90, 6)).astype(np.int32))
    f = Federation.split((tokens, LABELS[:90]), "iid", 2)
    assert f.private[0].x.dtype == torch.int64
    last = mapped(tmp_path / "c.npy", IMAGES.transpose(0, 2, 3, 1))  # [N, H, W, channels]
    f = Federation.split((last, LABELS), "iid", 2, test=0, public=0)
    assert torch.equal(f.private[0].x[:3], torch.from_numpy(IMAGES[f.partition.clients[0][:3]]))  # type: ignore[union-attr]
    own = Federation.of([(last.transpose(0, 3, 1, 2), LABELS)], models=linear)
    assert isinstance(own.private[0].x, MappedTensor)
    with pytest.raises(ValueError, match="a memory map holds floats, integers or bools, found complex128"):
        Federation.of([(mapped(tmp_path / "d.npy", np.ones((4, 2), complex)), [0, 1, 0, 1])], models="mlp")


def test_the_fingerprint_of_a_large_map_covers_some_rows(images: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    view = View(scale=1 / 255)
    whole = Dataset.of((IMAGES, LABELS), view=view).sha256
    assert Dataset.of((images, LABELS), view=view).sha256 == whole
    monkeypatch.setattr("fedcc.inputs.maps.HASHED_WHOLE", 1000)
    sampled = Dataset.of((images, LABELS), view=view).sha256
    assert sampled != whole
    assert Dataset.of((images, LABELS), view=view).sha256 == sampled


# -------------------------------------------------------------------------------------------------- command line


def test_a_folder_of_npy_files_is_mapped(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("maps").mkdir()
    np.save("maps/x.npy", IMAGES)
    call(capsys, "run", "fedavg", "--data", "./maps").refused(
        "expected x_train and y_train (or x and y), found x_train"
    )
    np.save("maps/y.npy", LABELS)
    assert isinstance(Federation.split("maps").private[0].x, MappedTensor)
    words = ("run", "fedavg", "--data", "./maps", "--device", "cpu", "--clients", 2, "--rounds", 1, "--epochs", 1)
    done = call(capsys, *words, "--skew", "iid", "--out", "run")
    assert done.code == 0, done.err
    np.save("maps/y.npy", np.array([{}] * 300))
    call(capsys, *words, "--out", "other").refused("y.npy: expected a plain array, found: Array can't be memory-mapped")
    Path("maps/y.npy").write_bytes(b"\x93NUMPY")
    call(capsys, *words, "--out", "other").refused("y.npy: expected a plain array")
    assert not Path("other").exists()


@pytest.mark.slow
def test_a_sparse_map_of_8_gb_stays_on_disk(tmp_path: Path) -> None:
    number = (8 << 30) // (3 * 64 * 64)
    (tmp_path / "maps").mkdir()
    np.lib.format.open_memmap(tmp_path / "maps" / "x.npy", "w+", np.uint8, (number, 3, 64, 64))
    np.save(tmp_path / "maps" / "y.npy", np.arange(number) % 10)
    assert (tmp_path / "maps" / "x.npy").stat().st_blocks * 512 < 1 << 20
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\n\n\ndef linear(outputs):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, outputs))\n"
    )
    words = ("run", "fedavg", "--data", "./maps", "--models", "my_nets:linear", "--fraction", "0.01", "--rounds", "1",
             "--epochs", "1", "--clients", "10", "--skew", "iid", "--device", "cpu", "--no-client-accuracy",
             "--no-readings", "--out", "run")  # fmt: skip
    source = Path(fedcc.__file__).resolve().parents[1]
    run = subprocess.Popen([sys.executable, "-m", "fedcc", *words], cwd=tmp_path,
                           env={**os.environ, "PYTHONPATH": str(source)})  # fmt: skip
    peak = 0
    while run.poll() is None:
        status = Path(f"/proc/{run.pid}/status").read_text()
        if anonymous := re.search(r"RssAnon:\s+(\d+) kB", status):
            peak = max(peak, int(anonymous[1]) * 1024)
        if peak > 4e9:
            run.kill()
        time.sleep(0.02)
    assert run.returncode == 0
    assert 1e8 < peak < 1.5e9
