"""Images and tables of the user's own: what is read, how it is encoded, and what is refused."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcc.data import own
from fedcc.data.own import read_path
from fedcc.errors import InputError, LeftOut
from fedcc.inputs import read_inputs
from fedcc.inputs.images import DarkImages, Form, common_form, decode, decode_all, list_parts
from fedcc.inputs.tables import Encoding, Table, numbered_labels, read_csv


def picture(path: Path, mode: str = "L", size: tuple[int, int] = (8, 8), colour: object = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)  # type: ignore[arg-type]
    return path


# --------------------------------------------------------------------------------------------------------------- images


def test_sub_folders_are_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b/1.png", "a/2.png", "a/1.gif", ".hidden/3.png"):
        picture(tmp_path / name)
    train = list_parts(tmp_path)["train"]
    assert [path.relative_to(tmp_path).as_posix() for path in train.paths] == ["a/1.gif", "a/2.png", "b/1.png"]
    assert train.names == ["a", "a", "b"]


def test_train_test_and_public_are_parts(tmp_path: Path) -> None:
    for name in ("train/a/1.png", "train/b/1.png", "test/a/2.png", "public/3.png", "public/more/4.png"):
        picture(tmp_path / name)
    parts = list_parts(tmp_path)
    assert {part: len(listing.paths) for part, listing in parts.items()} == {"train": 2, "test": 1, "public": 2}


@pytest.mark.parametrize("content", [[], ["a/notes.txt"]])
def test_a_folder_without_classes_or_images_is_refused(tmp_path: Path, content: list[str]) -> None:
    for name in content:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("")
    with (
        pytest.raises(InputError, match="found none; delete" if content else "found none"),
        pytest.warns() if content else nullcontext(),
    ):
        list_parts(tmp_path)


def test_small_squares_of_one_size_stay_and_others_take_the_median(tmp_path: Path) -> None:
    small = [picture(tmp_path / f"{i}.png", size=(20, 20)) for i in range(2)]
    assert common_form(small) == Form(20, 1)
    assert common_form([*small, picture(tmp_path / "x.png", size=(30, 24))]) == Form(20, 1)
    large = [picture(tmp_path / f"large{i}.png", size=(200, 100 + i)) for i in range(2)]
    assert common_form(large) == Form(32, 1)
    assert common_form([picture(tmp_path / "square.png", size=(64, 64))]) == Form(64, 1)
    assert common_form([picture(tmp_path / "tiny.png", size=(3, 3))]) == Form(8, 1)
    assert common_form([*small, picture(tmp_path / "c.png", "RGB", (20, 20), (1, 2, 3))]) == Form(20, 3)
    assert common_form(small, resize=12) == Form(12, 1)


@pytest.mark.parametrize(
    ("mode", "colour", "pixel"),
    [
        ("L", 100, (100, 100, 100)),
        ("1", 1, (255, 255, 255)),
        ("RGB", (10, 20, 30), (10, 20, 30)),
        ("RGBA", (10, 20, 30, 255), (10, 20, 30)),
        ("RGBA", (10, 20, 30, 0), (255, 255, 255)),  # transparent: white
        ("LA", (100, 255), (100, 100, 100)),
        ("P", 0, (0, 0, 0)),
        ("I;16", 25_600, (100, 100, 100)),
    ],
)
def test_every_mode_becomes_three_channels(
    tmp_path: Path, mode: str, colour: object, pixel: tuple[int, int, int]
) -> None:
    image = decode(picture(tmp_path / "x.png", mode, (9, 7), colour), Form(8, 3))
    assert image.shape == (3, 8, 8)
    assert tuple(image[:, 3, 3].tolist()) == pixel


def test_12_bits_in_files_of_16_are_named_once(tmp_path: Path) -> None:
    for name in ("train/a/1.png", "train/b/2.png", "test/a/3.png", "test/b/4.png", "public/5.png"):
        picture(tmp_path / name, "I;16", colour=4_000)
    picture(tmp_path / "train/b/bright.png", colour=255)  # of 8 bits
    picture(tmp_path / "public/5.png", "I;16", colour=4_095)
    with pytest.warns(DarkImages) as caught:
        dataset = own.read(str(tmp_path))
    assert [str(w.message) for w in caught] == [
        f"{tmp_path}/train/a/1.png and 4 others: no value is above 4,095 of 65,535, and of 16 bits the upper 8 are "
        "kept, so they become nearly black, 0 to 15 of 255; multiply the values by 16"
    ]
    assert [int(np.asarray(x).max()) for x in (dataset.train_x, dataset.test_x, dataset.public_x)] == [255, 15, 15]
    with pytest.warns(DarkImages, match=r"public/5\.png: no value is above 4,095"):
        read_inputs(tmp_path / "public/5.png", (1, 8, 8), "uint8", None)


def test_a_path_is_read_once_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("imgs/a/1.png", "imgs/a/2.png", "imgs/b/1.png", "imgs/b/2.png"):
        picture(tmp_path / name)
    read: list[str] = []
    monkeypatch.setattr(own, "read_path", lambda source, *rest: read.append(source) or read_path(source, *rest))
    monkeypatch.chdir(tmp_path)
    assert own.describe("./imgs").train == own.describe(str(tmp_path / "imgs")).train
    assert read == [str(tmp_path / "imgs")]


@pytest.mark.parametrize("values", [(4_000, 8_192), (0, 0)])
def test_dark_images_beside_brighter_ones_and_black_ones_are_not_named(tmp_path: Path, values: tuple[int, int]) -> None:
    paths = [picture(tmp_path / f"{i}.png", "I;16", colour=value) for i, value in enumerate(values)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode_all(paths, Form(8, 1)).max(axis=(1, 2, 3)).tolist() == [value // 256 for value in values]


def test_damaged_and_huge_images_are_refused_by_name(tmp_path: Path) -> None:
    path = picture(tmp_path / "x.png", size=(64, 64))
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(InputError, match=r"x\.png: expected an image"):
        decode(path, Form(8, 1))
    bomb = picture(tmp_path / "bomb.png", "1", (9_000, 9_000), 0)
    with pytest.raises(InputError, match="at most 64,000,000 pixels, found 9000 x 9000"):
        common_form([bomb])


# --------------------------------------------------------------------------------------------------------------- tables


def test_numbers_are_scaled_and_categories_become_inputs() -> None:
    public = Table.of({"age": ["1", "3", ""], "colour": ["red", "blue", "red"]})
    encoding = Encoding.fit(public)
    assert encoding.width == 3
    table = Table.of({"colour": ["blue", "green", None], "age": [5, None, 2], "extra": [1, 2, 3]})
    expected = [[3, 1, 0], [0, 0, 0], [0, 0, 0]]  # age: mean 2, std 1; colour: blue, red
    np.testing.assert_allclose(encoding.encode(table), expected, atol=1e-6)
    assert Encoding.of(encoding.values()) == encoding


def test_a_text_in_a_column_of_numbers_is_refused() -> None:
    encoding = Encoding.fit(Table.of({"age": [1.0, 2.0]}))
    with pytest.raises(InputError, match="column 'age' holds numbers, found 'old'"):
        encoding.encode(Table.of({"age": ["1", "old"]}))
    with pytest.raises(InputError, match="no column 'age'; it has 'size'"):
        encoding.encode(Table.of({"size": [1]}))


def test_a_constant_column_is_not_divided_by_zero() -> None:
    encoding = Encoding.fit(Table.of({"a": [4.0, 4.0]}))
    assert encoding.encode(Table.of({"a": [4.0, 5.0]})).tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2,3\n", "line 2: expected 2 columns, found 3"),
        ("a,a\n1,2\n", "column names must be different"),
        ("a,b\n", "at least one row"),
        ('a,b\n"1,2\n', "expected a table"),
    ],
)
def test_tables_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        read_csv(path)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators_and_quotes(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f'\ufeffa{separator}"b c"\n1{separator}"x{separator}y"\n', encoding="utf-8")
    table = read_csv(path)
    assert list(table.columns) == ["a", "b c"]
    assert table.columns["b c"].tolist() == [f"x{separator}y"]


@pytest.mark.parametrize(
    ("labels", "numbers", "names"),
    [
        (["b", "a", "b"], [1, 0, 1], ("a", "b")),
        ([True, False], [1, 0], ("False", "True")),
        ([10, 9, 10], [1, 0, 1], ("9", "10")),
        ([3.0, 1.0], [1, 0], ("1", "3")),
    ],
)
def test_labels_of_any_kind(labels: list[object], numbers: list[int], names: tuple[str, ...]) -> None:
    y, classes = numbered_labels(labels)  # type: ignore[arg-type]
    assert (y.tolist(), classes) == (numbers, names)


def test_missing_labels_are_refused() -> None:
    with pytest.raises(InputError, match="1 samples have no label"):
        numbered_labels([1.0, float("nan")])


def test_how_numbers_are_written_counts_where_they_are_categories(tmp_path: Path) -> None:
    """A row's inputs must not depend on the other rows of its file."""
    encoding = Encoding.fit(Table.of({"zip": ["1234567", "007", "x9", "2.50"]}))
    (tmp_path / "mixed.csv").write_text("zip\n007\n1234567\n2.50\nx9\n")
    (tmp_path / "digits.csv").write_text("zip\n007\n1234567\n2.50\n")
    mixed, digits = (read_csv(tmp_path / f"{name}.csv") for name in ("mixed", "digits"))
    assert digits.columns["zip"].dtype == float
    assert encoding.encode(mixed).sum(1).tolist() == [1, 1, 1, 1]
    assert (encoding.encode(digits) == encoding.encode(mixed)[:3]).all()
    assert (encoding.encode(digits[1:]) == encoding.encode(mixed)[1:3]).all()
    assert encoding.encode(Table.of({"zip": np.array([1234567, 7])})).sum(1).tolist() == [1, 0]
    assert encoding.encode(Table.of({"zip": [None, 1234567]})).sum(1).tolist() == [0, 1]
    assert digits.without("zip").texts == {}


def test_bools_are_categories_wherever_they_come_from() -> None:
    encoding = Encoding.fit(Table.of({"on": ["True", "False"]}))
    for values in ([True, False], np.array([True, False]), ["True", "False"]):
        assert encoding.encode(Table.of({"on": values})).tolist() == [[0, 1], [1, 0]]


def test_numbers_that_float32_cannot_hold_are_refused() -> None:
    encoding = Encoding.fit(Table.of({"a": [1.0, 2.0]}))
    with pytest.raises(InputError, match="column 'a' has numbers too large for float32, as 1e\\+300"):
        encoding.encode(Table.of({"a": [1.0, 1e300]}))


def test_arrays_in_another_layout_are_predicted_as_they_were_trained(tmp_path: Path) -> None:
    x = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    np.savez(tmp_path / "hwc.npz", x=x.transpose(0, 2, 3, 1))
    assert (read_inputs(tmp_path / "hwc.npz", (3, 4, 4), "uint8", None)[1] == x).all()
    np.savez(tmp_path / "hw.npz", x=x[:, 0])
    assert (read_inputs(tmp_path / "hw.npz", (1, 4, 4), "uint8", None)[1] == x[:, :1]).all()


@pytest.mark.parametrize(("array", "dtype", "reason"), [
    (np.array([[1.0, np.nan]]), "float32", "inputs must be finite"),
    (np.array([[1.0, 1e300]]), "float32", "inputs must be finite"),
    (np.array([[1, -1]]), "int64", "tokens must not be negative, found -1"),
    (np.zeros((0, 2)), "float32", r"expected at least one input, found an array of shape \(0, 2\)"),
    (np.array(5.0), "float32", "expected at least one input"),
    (np.array([{}], object), "float32", "expected an .npz of plain arrays"),
])  # fmt: skip
def test_arrays_that_cannot_be_predicted(array: Any, dtype: str, reason: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=array)
    with pytest.raises(InputError, match=reason):
        read_inputs(tmp_path / "x.npz", (2,), dtype, None)


def test_an_archive_that_was_cut_off(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((50, 4)), y=np.arange(50) % 2)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:300])
    with pytest.raises(InputError, match=r"cut\.npz: expected an \.npz of plain arrays"):
        read_inputs(tmp_path / "cut.npz", (4,), "float32", None)
    with pytest.raises(InputError, match=r"cut\.npz: expected an \.npz of plain arrays"):
        own.read(str(tmp_path / "cut.npz"))


def test_images_that_are_in_no_class_are_named(tmp_path: Path) -> None:
    for name in ("a/1.png", "a/more/2.png", "b/1.png", "loose.png"):
        picture(tmp_path / name)
    with pytest.warns(LeftOut) as caught:
        assert len(list_parts(tmp_path)["train"].paths) == 2
    assert [str(w.message).partition(": ")[2] for w in caught] == [
        "1 images are left out, as loose.png: they are in no class's folder",
        "1 folders are left out, as more: a class's images lie in its own folder",
    ]


def test_images_at_any_depth_are_predicted(tmp_path: Path) -> None:
    for name in ("1.png", "a/2.png", "a/b/c/3.png"):
        picture(tmp_path / name)
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    names, x = read_inputs(tmp_path, (1, 8, 8), "uint8", None)
    assert [n for n in names if "loop" not in n] == ["1.png", "a/2.png", "a/b/c/3.png"]
    assert len(names) == 4, "a link to a folder is followed once"
    assert len(x) == 4


@pytest.mark.parametrize(("mode", "value"), [("F", 0.7), ("I", 200)])
def test_images_of_32_bits_are_refused(mode: str, value: float, tmp_path: Path) -> None:
    path = picture(tmp_path / "1.tif", mode, colour=value)
    with pytest.raises(InputError) as error:
        decode(path, Form(8, 1))
    assert str(error.value) == f"{path}: an image may have 8 or 16 bits per value, found 32"
