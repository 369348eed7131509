"""Data of one's own in Python: arrays, data frames, torch and Hugging Face data sets, from the data to a student."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

import fedcc
from fedcc import Federation, View
from fedcc.data import load
from fedcc.errors import InputError
from fedcc.experiments.distil import distil
from fedcc.experiments.export import export
from fedcc.exported import Exported
from fedcc.inputs.tables import read_csv
from fedcc.nets import network

QUICK: dict[str, Any] = {"rounds": 2, "epochs": 5, "lr": 1e-2, "batch": 16, "device": "cpu"}
SPECIES = ("ant", "bee", "cat")


def animals(n: int = 180, seed: int = 0) -> dict[str, list[Any]]:
    """A table from which the species can be learned: a number, one with gaps, and a category."""
    rng = np.random.default_rng(seed)
    kind = np.arange(n) % 3
    size = (kind * 100 + rng.normal(0, 10, n)).tolist()
    legs = [None if i % 17 == 0 else float(6 if k < 2 else 4) for i, k in enumerate(kind)]
    colour = [("black", "yellow", "white")[k] if i % 13 else "grey" for i, k in enumerate(kind)]
    return {"size": size, "legs": legs, "colour": colour, "species": [SPECIES[k] for k in kind]}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, columns = tmp_path_factory.mktemp("table") / "animals.csv", animals()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def frame(columns: dict[str, list[Any]]) -> Any:
    import pandas

    return pandas.DataFrame(columns)


class Polarish:
    """A data frame that is not pandas'."""

    def __init__(self, columns: dict[str, list[Any]]):
        self.content, self.columns = columns, list(columns)
        self.shape = (len(next(iter(columns.values()))), len(columns))

    def __getitem__(self, name: str) -> Any:
        return np.array(self.content[name], object)

    def __len__(self) -> int:
        return self.shape[0]


class Items(TorchDataset[Any]):
    def __init__(self, x: Any, y: Any = None):
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i] if self.y is None else (self.x[i], self.y[i])


def hugging(columns: dict[str, list[Any]]) -> Any:
    import datasets

    return datasets.Dataset.from_dict(columns)


# ------------------------------------------------------------------------------------------- from data to a student


@pytest.mark.parametrize("kind", ["csv", "pandas", "other frame", "hugging face"])
def test_a_table_with_names_from_data_to_an_exported_student(kind: str, table: Path, tmp_path: Path) -> None:
    data: Any = {"csv": lambda: table, "pandas": lambda: frame(animals()), "other frame": lambda: Polarish(animals()),
                 "hugging face": lambda: hugging(animals())}[kind]()  # fmt: skip
    f = Federation.split(str(data) if kind == "csv" else data, "classes:1", 3, label="species", public=0.2)
    assert f.names == SPECIES
    assert f.public.shape == (6,)  # two numbers, four colours
    result = fedcc.run("fedcc", f, **QUICK)
    assert result.classes == SPECIES
    assert result.accuracy > 90
    new = animals(30, seed=1)
    truth = [SPECIES.index(name) for name in new["species"]]
    answers = result.predict(frame(new))
    assert float(np.mean(answers.numpy() == truth)) > 0.9
    if kind != "csv":
        return
    loaded = fedcc.load(result.save(tmp_path / "saved"))
    assert loaded.classes == SPECIES
    assert torch.equal(loaded.predict(read_csv(table)), result.predict(frame(animals())))
    student = distil(loaded, f.public, network("mlp", f.public.shape), epochs=10)
    assert float(np.mean(student.predict(frame(new)).numpy() == truth)) > 0.9
    export(student, tmp_path / "student.onnx")
    rows = list(Exported.open(tmp_path / "student.onnx").rows(table))
    assert [row["class"] for row in rows] == [SPECIES[i] for i in student.predict(read_csv(table)).tolist()]


def test_the_same_table_gives_the_same_federation_however_it_comes(table: Path) -> None:
    sources = (table, frame(animals()), Polarish(animals()), hugging(animals()))
    one, *others = (Federation.split(s, "iid", 3, label="species") for s in sources)
    for other in others:
        assert torch.equal(one.private[0].x, other.private[0].x)
        assert torch.equal(one.test["y"], other.test["y"])


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    data = load("digits")
    assert isinstance(data.train_x, np.ndarray)
    return torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)


def test_a_torch_data_set_is_split_or_dealt_by_the_caller() -> None:
    x, y = digits()
    keep = y < 3
    x, y = x[keep], y[keep]
    split = Federation.split(TensorDataset(x, y), "iid", 2, models="resnet8", view=View(scale=1 / 16))
    arrays = Federation.split((x, y), "iid", 2, models="resnet8", view=View(scale=1 / 16))
    assert torch.equal(split.private[1].x, arrays.private[1].x)
    assert split.private[0].x.dtype == torch.uint8
    result = fedcc.run("fedavg", split, rounds=1, epochs=2, device="cpu")
    assert result.accuracy > 50
    assert torch.equal(result.predict(TensorDataset(x[:9])), result.predict(x[:9]))
    names = ["zero", "one", "two"]
    clients = [Items(x[k::2].float() / 16, [names[c] for c in y[k::2]]) for k in range(2)]
    own = Federation.of(clients, Items(x[:20].float() / 16), Items(x[:30].float() / 16, [names[c] for c in y[:30]]))
    assert own.names == ("one", "two", "zero")
    assert own.models == ("resnet8",)
    assert fedcc.run("fedcc", own, rounds=1, epochs=1, device="cpu").classes == own.names


def test_images_of_pillow_and_of_hugging_face(tmp_path: Path) -> None:
    import datasets

    x, y = digits()
    pictures = [Image.fromarray(image[0].numpy() * 15) for image in x[:90]]
    f = Federation.split(Items(pictures, y[:90].tolist()), "iid", 2)
    assert f.public.shape == (1, 8, 8)
    features = datasets.Features({"image": datasets.Image(), "digit": datasets.ClassLabel(names=list("abcdefghij"))})
    data = datasets.Dataset.from_dict({"image": pictures, "digit": y[:90].tolist()}, features=features)
    other = Federation.split(data, "iid", 2)
    assert other.names == tuple("abcdefghij")
    assert torch.equal(f.private[0].x, other.private[0].x)
    datasets.DatasetDict({"train": data, "test": data.select(range(20))}).save_to_disk(tmp_path / "saved")
    stored = Federation.split(tmp_path / "saved", "iid", 2)
    assert len(stored.test) == 20
    assert torch.equal(stored.test.x[:5], torch.stack([x[i] * 15 for i in range(5)]))


def test_frames_of_clients_are_encoded_by_the_public_one() -> None:
    clients = [frame(animals(60, seed)) for seed in range(3)]
    public = frame(animals(40, 3)).drop(columns=["species"])
    public.loc[public["colour"] == "grey", "colour"] = "black"
    f = Federation.of(clients, public, frame(animals(60, 4)), label="species")
    assert f.encoding is not None
    assert f.encoding.columns[0].mean == pytest.approx(public["size"].mean())
    assert f.encoding.columns[2].categories == ("black", "white", "yellow")
    grey = [i for i, c in enumerate(clients[0]["colour"]) if c == "grey"]
    assert not f.private[0].x[grey][:, 2:].any()  # a category that no public sample has
    gaps = [i for i, v in enumerate(clients[0]["legs"]) if v != v]
    assert gaps
    assert not f.private[0].x[gaps][:, 1].any()  # a missing number is the mean
    assert fedcc.run("fedcc", f, **QUICK).accuracy > 80


def test_numbers_are_scaled_by_the_public_samples_and_predicted_as_they_come() -> None:
    columns = animals()
    x = np.stack([columns["size"], np.arange(180) % 3 * 1e-3], 1)
    f = Federation.split((x, columns["species"]), "classes:1", 3)
    public = f.public.x.numpy()
    np.testing.assert_allclose(f.public.view.mean, public.mean(0), rtol=1e-5)
    result = fedcc.run("fedcc", f, **QUICK)
    answers = [result.classes[i] for i in result.predict(x).tolist()]
    assert np.mean(np.array(answers) == columns["species"]) > 0.9


# ------------------------------------------------------------------------------------------------------------ labels


@pytest.mark.parametrize(
    ("labels", "names", "predicted"),
    [
        (["no", "yes"], ("no", "yes"), {0, 1}),
        ([False, True], ("False", "True"), {0, 1}),
        ([7, 12], ("7", "12"), {7, 12}),
        ([-1, 1], ("-1", "1"), {0, 1}),
    ],
)
def test_labels_of_any_kind(labels: list[Any], names: tuple[str, ...], predicted: set[int]) -> None:
    x = np.repeat([[-1.0, 0.0], [1.0, 0.0]], 30, 0) + np.random.default_rng(0).normal(0, 0.1, (60, 2))
    y = np.repeat(labels, 30)
    for f in (Federation.split((x, y), "iid", 2), Federation.of([(x, y), (x, y)], x, (x, y))):
        result = fedcc.run("fedcc", f, **QUICK)
        assert result.classes == names
        assert set(result.predict(x).tolist()) == predicted
        assert result.accuracy > 90


# ------------------------------------------------------------------------------------------ without public and test


def test_public_and_test_are_optional() -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 3)).astype("f4"), np.arange(40) % 2
    bare = Federation.of([(x, y), (x, y)])
    split = Federation.split((x, y), "iid", 2, public=0, test=None)
    for f in (bare, split):
        assert (len(f.public), len(f.test)) == (0, 0)
        result = fedcc.run("fedavg", f, rounds=1, epochs=1, device="cpu")
        assert result.predict(x).shape == (40,)
        assert result.rounds[0]["accuracy"] is None
        assert result.rounds[0]["readings"] == {}
        with pytest.raises(ValueError, match="no accuracy: no round was evaluated, or there were no test samples"):
            _ = result.accuracy
        assert "not evaluated" in repr(result)
    for method in ("fedcc", "fedmd", "ssl"):
        with pytest.raises(ValueError, match="needs public samples, and the federation has none"):
            fedcc.run(method, bare, rounds=1, device="cpu")
    fedcc.run("local", bare, rounds=1, epochs=1, device="cpu")
    with pytest.raises(InputError, match="tables are scaled and encoded by their public samples"):
        Federation.split(frame(animals()), "iid", 2, label="species", public=0)


def test_test_and_public_may_be_data_of_their_own(table: Path) -> None:
    f = Federation.split(table, "iid", 2, label="species", test=table, public=frame(animals(50, 1)))
    assert (len(f.test), len(f.public), sum(map(len, f.private))) == (180, 50, 180)
    assert f.hidden is None


# -------------------------------------------------------------------------------------------------------- bad input

GOOD = np.zeros((12, 4), "f4"), ["a", "b", "c"] * 4
NAN = np.where(np.eye(12, 4) > 0, np.nan, 0.0)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (lambda: (NAN, GOOD[1]), {}, "own data, train: inputs must be finite"),
        (lambda: (GOOD[0], GOOD[1][:-1]), {}, "train has 12 inputs and 11 labels"),
        (lambda: (GOOD[0][:0], []), {}, "train has no samples"),
        (lambda: (GOOD[0], [0.5] * 12), {}, "labels must be integers, bools or strings, found 0.5"),
        (lambda: (GOOD[0], [*GOOD[1][:-1], None]), {}, "1 samples have no label"),
        (lambda: (GOOD[0], np.zeros((12, 2), int)), {}, r"one value per sample, found an array of shape \(12, 2\)"),
        (lambda: (np.zeros(12), GOOD[1]), {}, r"found float64 of shape \(12,\)"),
        (lambda: ([[1.0], [1.0, 2.0]], [0, 1]), {}, "expected an array"),
        (lambda: 3, {}, "must be a pair .inputs, labels., a data frame.*got int"),
        (lambda: GOOD, {"label": "y"}, "label names a column of a table"),
        (lambda: GOOD, {"test": (GOOD[0], ["z"] * 12)}, "the test set has class 'z', which no training sample has"),
        (lambda: GOOD, {"test": (GOOD[0][:, :2], GOOD[1])}, r"test_x must be like train_x, float32 of shape \(4,\)"),
        (lambda: GOOD, {"test": 1.5}, "test must be at least 0 and below 1, got 1.5"),
        (lambda: GOOD, {"public": -1}, "public must be at least 0 and below 1, got -1"),
        (lambda: GOOD, {"public": frame(animals())}, "public_x must be an array like train_x, got Table"),
        (lambda: (GOOD[0], ["a"] * 11 + ["b"]), {}, "class 'b' has one sample; a class needs two"),
        (lambda: frame(animals()), {}, "own data is a data frame: name the column .* label=; it has 'size'"),
        (lambda: frame(animals()), {"label": "kind"}, "own data has no column 'kind'; it has 'size'"),
        (lambda: frame(animals()).iloc[:0], {"label": "species"}, "own data has no rows"),
        (lambda: frame(animals() | {"species": [None] * 180}), {"label": "species"}, "180 samples have no label"),
        (lambda: frame(animals() | {"size": [float("inf")] * 180}), {"label": "species"}, "'size' has infinite values"),
        (lambda: frame(animals() | {"size": [[1]] * 180}), {"label": "species"}, "numbers or texts, found list"),
        (lambda: Items([]), {}, "own data has no items"),
        (lambda: Items(GOOD[0]), {}, "items must be pairs .input, label., got inputs alone"),
        (lambda: Items([{"x": 1}]), {}, "items must be .input, label. or inputs, got dict as item 0"),
        (lambda: Items([np.zeros(2), np.zeros(3)], [0, 1]), {}, r"item 0 is float64 of shape \(2,\), item 1"),
        (Endless, {}, "needs a length and items by index"),
        (lambda: hugging(animals()), {}, "name the column of the labels with label; none of its columns 'size'"),
        (lambda: hugging(animals()), {"label": "kind"}, "has no column 'kind'; it has 'size'"),
        (lambda: hugging({"x": [[1.0, 2.0], [1.0]], "y": [0, 1]}), {"label": "y"}, "lists in 'x' must have one length"),
        (lambda: hugging({"x": [[1.0]] * 2, "z": [1, 2], "y": [0, 1]}), {"label": "y"}, "keep what you need"),
        (lambda: load("digits"), {"public": GOOD[0]}, "digits has test and public samples of its own; pass shares"),
        (lambda: "digits", {"test": GOOD}, "digits has test and public samples of its own; pass shares"),
        (lambda: Path("nowhere.csv"), {"label": "y"}, "no such file or folder"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(data: Callable[[], Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        Federation.split(data(), "iid", 2, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"clients": [frame, GOOD]}, "client 0 is a table, so client 1 must be one too"),
        ({"test": lambda c: frame(c | {"species": ["dog"] * 60})}, "no client holds class dog, so nobody can learn it"),
        ({"public": lambda c: frame({"size": c["size"]})}, ""),
        ({"test": lambda c: frame({"species": c["species"], "size": c["size"]})}, "the test set: .* no column 'legs'"),
        ({"public": None}, "tables are scaled and encoded by their public samples, and there are none"),
        ({"clients": [lambda c: frame(c | {"size": ["big"] * 60})]}, "client 0: column 'size' holds numbers, found"),
    ],
)  # fmt: skip
def test_frames_that_do_not_fit_together(parts: dict[str, Any], words: str) -> None:
    made: dict[str, Any] = {"clients": [frame], "public": frame, "test": frame} | parts
    build = {name: [part(animals(60)) if callable(part) else part for part in made[name]] if name == "clients"
             else made[name] and made[name](animals(60)) for name in made}  # fmt: skip
    if not words:  # fewer public columns are fewer inputs
        assert Federation.of(**build, label="species").public.shape == (1,)
        return
    with pytest.raises(ValueError, match=words):
        Federation.of(**build, label="species")


# ------------------------------------------------------------------------------------------------------------- repr


def test_what_a_federation_and_a_result_print_fits_on_a_screen() -> None:
    f = Federation.named("digits", skew="classes:2", clients=5)
    result = fedcc.run("fedavg", f, rounds=1, epochs=0, device="cpu")
    long = Federation.of([(np.eye(300, 5), np.arange(300))], np.eye(3, 5), models="mlp")
    for thing in (f, result, long, f.public, load("digits")):
        lines = repr(thing).splitlines()
        assert len(lines) <= 8
        assert max(map(len, lines)) <= 120
    assert "clients: 5, with" in repr(f)
    assert "resnet8" in repr(result)
    assert repr(f.test) == "Samples(355 x uint8 [1, 8, 8], y)"
