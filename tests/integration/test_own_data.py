"""Data of one's own on the command line: from files to predictions, and one line for whatever is wrong."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import fedcc
from fedcc.data import load
from program import call

Capsys = pytest.CaptureFixture[str]
SMALL = ("--clients", "3", "--skew", "classes:2", "--rounds", "2", "--epochs", "3", "--device", "cpu")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits 0 to 5 as PNG, JPEG and GIF in three sizes."""
    folder, digits = tmp_path_factory.mktemp("imgs"), load_digits()
    for i, (image, y) in enumerate(zip(digits.images, digits.target, strict=True)):
        if y < 6:
            (folder / f"digit {y}").mkdir(exist_ok=True)
            picture = Image.fromarray((image * 15.9).astype(np.uint8)).resize([(8, 8), (16, 16), (20, 24)][i % 3])
            picture.save(folder / f"digit {y}" / f"{i}.{('png', 'jpg', 'gif')[i % 3]}")
    return folder


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    digits = load_digits()
    path = tmp_path_factory.mktemp("table") / "digits.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"p{i}" for i in range(64)), "parity", "name"])
        for image, y in zip(digits.images[:600], digits.target[:600], strict=True):
            writer.writerow([*image.ravel(), "odd" if y % 2 else "", f"digit {y}"])
    return path


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_table_from_file_to_predictions(table: Path, tmp_path: Path, capsys: Capsys) -> None:
    run = tmp_path / "run"
    done = call(capsys, "run", "fedcc", "--data", table, "--label", "name", *SMALL, "--clients", 5, "--out", run)
    assert done.code == 0, done.err
    result = fedcc.load(run)
    assert result.classes == tuple(f"digit {y}" for y in range(10))
    done = call(capsys, "predict", run, table, "--explain")
    assert done.code == 0, done.err
    answers = rows(done.out)
    truth = rows(table.read_text())
    right = sum(a["class"] == t["name"] for a, t in zip(answers, truth, strict=True))
    assert right / len(truth) > 0.6
    assert answers[0]["who knew"].startswith("client ")
    unknown = rows(call(capsys, "predict", run, table, "--abstain", 1).out)
    assert {row["class"] for row in unknown} == {"unknown"}


def test_images_become_a_data_set_with_a_test_set_of_each_class(images: Path) -> None:
    data = load(str(images), resize=8)
    assert data.classes == tuple(f"digit {y}" for y in range(6))
    assert data.train_x.shape[1:] == (1, 8, 8)
    assert np.bincount(data.test_y).min() > 30
    assert len(data.train_y) + len(data.test_y) == sum(1 for p in images.rglob("*") if p.is_file())
    again = load(str(images), resize=8)
    assert data.sha256 == again.sha256


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "nowhere/x"), "nowhere/x: no such file or folder"),
        (("--data", "t.csv"), "name the column of its labels with --label or label=; it has 'a', 'y'"),
        (("--data", "./t.csv", "--label", "z"), "no column 'z'; it has 'a', 'y'"),
        (("--data", "./once.csv", "--label", "y"), "class 'k' has one sample"),
        (("--data", "./t.xyz"), "data is a folder of images or a file"),
        (("--data", "empty"), "unknown data set 'empty'; for your own data give its path, as ./empty"),
        (("--data", "./empty"), "expected a sub-folder of images per class, found none"),
        (("--data", "nomodule:load"), "nomodule:load: module nomodule cannot be imported"),
        (("--data", "math:pi"), "math:pi"),
        (("--data", "math:pi", "--label", "y"), "label=y is for files; math:pi is a function"),
        (("--data", "math:pi", "--resize", "8"), "resize=8 is for files; math:pi is a function"),
        (("--data", "digits", "--models", "math:nothing"), "math:nothing: module math has no nothing"),
        (("--data", "digits", "--label", "y"), "label names a column of a table"),
        (("--data", "digits", "--resize", "16"), "resize is for images of your own"),
        (("--data", "./bad.npz"), "expected an .npz of plain arrays"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("t.csv").write_text("a,y\n1,k\n2,k\n")
    Path("once.csv").write_text("a,y\n1,k\n2,l\n3,l\n")
    Path("t.xyz").write_text("")
    Path("bad.npz").write_text("no archive")
    call(capsys, "run", "fedcc", *words, "--out", "run").refused(message)
    assert not Path("run").exists()


def test_the_skew_of_a_table(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("a,y\n" + "".join(f"{i},{'kl'[i % 2]}\n" for i in range(100)))
    words = ("skew", "--data", "./t.csv", "--skew", "iid", "--clients", 2, "--public", 0.2, "--json", "--resize", 0)
    call(capsys, *words).refused("name the column of its labels with --label")
    call(capsys, *words, "--label", "y", "--test", 2).refused("test must be", "below 1, got 2.0")
    done = call(capsys, *words, "--label", "y", "--test", 0.5)
    assert json.loads(done.out)["public"] == 10, done  # of 50 that are no test samples


def test_code_is_imported_only_if_the_user_names_it(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_nets.py").write_text(
        "from torch import nn\n\n\ndef tiny(outputs):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))\n"
    )
    words = ("--data", "digits", "--fraction", 0.3, "--clients", 3, "--skew", "iid", "--rounds", 1, "--epochs", 1)
    done = call(capsys, "run", "fedavg", *words, "--models", "my_nets:tiny", "--out", "run")
    assert done.code == 0, done.err
    monkeypatch.setattr("fedcc.code._allowed", set())
    call(capsys, "predict", "run", "x.npz").refused("my_nets:tiny is code of yours", "--code my_nets:tiny")
    np.savez("x.npz", x=load_digits().images[:5].astype(np.uint8)[:, None])
    done = call(capsys, "predict", "run", "x.npz", "--code", "my_nets:tiny")
    assert len(rows(done.out)) == 5


# ----------------------------------------------------------------------------------------------- Hugging Face folders


def saved_digits(folder: Path) -> Path:
    import datasets

    digits = load_digits()
    features = datasets.Features({"pixels": datasets.List(datasets.Value("float32")),
                                  "digit": datasets.ClassLabel(names=[f"digit {y}" for y in range(10)])})  # fmt: skip
    columns = {"pixels": digits.data.tolist(), "digit": digits.target.tolist()}
    data = datasets.Dataset.from_dict(columns, features=features).train_test_split(0.3, seed=0)
    data.save_to_disk(folder)
    return folder


def test_a_hugging_face_folder_from_file_to_predictions(tmp_path: Path, capsys: Capsys) -> None:
    folder, run = saved_digits(tmp_path / "saved"), tmp_path / "run"
    done = call(capsys, "run", "fedcc", "--data", folder, *SMALL, "--clients", 5, "--out", run)
    assert done.code == 0, done.err
    result = fedcc.load(run)
    assert result.classes == tuple(f"digit {y}" for y in range(10))
    assert len(fedcc.Federation.split(folder).test) == 540
    answers = result.predict(load_digits().data.astype("f4"))
    assert float(np.mean(answers.numpy() == load_digits().target)) > 0.6


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("dataset_dict.json", b"{", "expected a Hugging Face data set, found: JSONDecodeError"),
        ("dataset_dict.json", b'{"splits": ["test"]}', "expected a part train, found 'test'"),
        ("train/state.json", b"{}", "expected a Hugging Face data set, found: KeyError"),
        ("train/state.json", None, "expected a Hugging Face data set, found: FileNotFoundError"),
        ("train/dataset_info.json", b'{"features": {"pixels": {"_type": "os.system"}}}', "found: ValueError Feature"),
        ("train/data-00000-of-00001.arrow", b"no arrow file", "expected a Hugging Face data set, found: Arrow"),
        ("train/data-00000-of-00001.arrow", None, "expected a Hugging Face data set, found: FileNotFoundError"),
    ],
)  # fmt: skip
def test_damaged_hugging_face_folders_are_refused(
    file: str, content: bytes | None, message: str, tmp_path: Path, capsys: Capsys
) -> None:
    folder = saved_digits(tmp_path / "saved")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    call(capsys, "run", "fedcc", "--data", folder, "--out", tmp_path / "run").refused(message)
    assert not (tmp_path / "run").exists()


def test_a_cut_arrow_file_is_refused(tmp_path: Path, capsys: Capsys) -> None:
    folder = saved_digits(tmp_path / "saved")
    path = folder / "train" / "data-00000-of-00001.arrow"
    content = path.read_bytes()
    for cut in (len(content) // 2, 200):
        path.write_bytes(content[:cut])
        call(capsys, "run", "fedcc", "--data", folder, "--out", tmp_path / "run").refused("saved")


def test_datasets_is_an_extra(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_digits(tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "datasets", None)
    call(capsys, "run", "fedcc", "--data", folder).refused(
        "need datasets: pip install '.[huggingface]' in fedcc's checkout"
    )
