"""Data sets by name, from files in their upstream layouts, and what is said when a file is not what it should be."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import os
import pickle
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedcc.core.naming import unknown
from fedcc.core.samples import View
from fedcc.data import DATASETS, DataError, cifar, fashion, find_dataset, load, tiny
from fedcc.data.fetch import check, data_folder

# -------------------------------------------------------------------------------------------------------- the registry


def test_the_registry_is_in_order_and_complete():
    assert list(DATASETS) == ["digits", "fashion-mnist", "cifar10", "cifar100", "tiny-imagenet"]
    for description in DATASETS.values():
        assert description.embedded or description.remotes
        for remote in description.remotes:
            assert len(remote.md5) == 32
            assert all(url.startswith("http") and url.endswith(remote.file) for url in remote.urls)


@pytest.mark.parametrize(
    ("name", "found"),
    [("CIFAR-10", "cifar10"), ("cifar_100", "cifar100"), ("Tiny", "tiny-imagenet"), ("tiny imagenet", "tiny-imagenet")],
)
def test_aliases_and_case(name, found):
    assert find_dataset(name).name == found


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError) as error:
        load("cifr10")
    assert str(error.value).startswith(
        "unknown data set 'cifr10'; did you mean 'cifar10'? Known: digits, fashion-mnist"
    )
    assert str(unknown("method", "§§§", ["FedCC"])) == "unknown method '§§§'. Known: FedCC"


def test_importing_the_data_package_imports_no_heavy_library():
    heavy = ["requests", "PIL", "sklearn", "platformdirs", "filelock"]
    code = (
        "import sys, fedcc.core.samples; before = set(sys.modules); import fedcc.data, fedcc.data.skew;"
        f"print([m for m in {heavy} if m in set(sys.modules) - before])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# --------------------------------------------------------------------------------------------------------- data folder


def test_the_data_folder_is_the_argument_then_the_variable_then_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCC_DATA", str(tmp_path))
    assert data_folder(None) == tmp_path
    (tmp_path / "own").mkdir()
    assert data_folder(tmp_path / "own") == tmp_path / "own"
    monkeypatch.delenv("FEDCC_DATA")
    assert data_folder(None).name == "fedcc"
    monkeypatch.setenv("FEDCC_DATA", str(tmp_path / "typo"))
    with pytest.raises(DataError, match=r"FEDCC_DATA names .*typo"):
        data_folder(None)
    with pytest.raises(DataError, match="nowhere"):
        load("digits", tmp_path / "nowhere")


def test_what_is_absent_says_how_to_fetch_it(tmp_path):
    with pytest.raises(DataError, match="fedcc data fetch cifar10"):
        load("cifar10", tmp_path, download=False)


# -------------------------------------------------------------------------------------------------------------- digits


def test_digits():
    d = load("digits")
    assert d.train_x.shape == (1442, 1, 8, 8) == (find_dataset("digits").train, *find_dataset("digits").shape)
    assert d.test_x.shape == (355, 1, 8, 8)
    assert d.train_x.max() == 16
    assert d.view == View(scale=1 / 16)
    share = np.bincount(d.test_y) / (np.bincount(d.train_y) + np.bincount(d.test_y))
    assert (abs(share - 0.2) < 0.01).all()
    assert d.defaults.skew == "classes:1"
    assert d.sha256 == "81b6198e150394d965d188efe7b588463585b6cb68e4ac89be2dcbdc1c30fb4d"
    together = np.concatenate([d.train_x, d.test_x]).reshape(1797, -1)
    from sklearn.datasets import load_digits

    assert sorted(map(bytes, together)) == sorted(map(bytes, load_digits().data.astype(np.uint8)))
    assert all(line.ok for line in check("digits"))


def test_digits_without_their_file_come_from_scikit_learn(monkeypatch, tmp_path):
    """Another version may keep them elsewhere, or in another form."""
    expected, spec = load("digits"), importlib.util.find_spec("sklearn")
    (tmp_path / "datasets" / "data").mkdir(parents=True)
    spec.origin = str(tmp_path / "__init__.py")
    monkeypatch.setattr("fedcc.data.digits.find_spec", lambda _: spec)
    for content in (None, b"no archive", gzip.compress(b"one,two"), gzip.compress(b"0.0," * 64 + b"3\n")):
        if content is not None:
            (tmp_path / "datasets" / "data" / "digits.csv.gz").write_bytes(content)
        assert load("digits").sha256 == expected.sha256


def test_the_fingerprint_sees_one_changed_pixel():
    d = load("digits")
    x = d.train_x.copy()
    x[0, 0, 0, 0] += 1
    assert replace(d, train_x=x).sha256 != d.sha256


# --------------------------------------------------------------------------------------------------------------- CIFAR

SMALL = replace(cifar.LAYOUT10, rows=(20, 10), md5={})


def python2_pickle(value: object) -> bytes:
    """As upstream's files: protocol 2, and numpy under its old name."""
    return pickle.dumps(value, protocol=2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


@pytest.fixture
def small_cifar(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for file in (*SMALL.train, SMALL.test):
        n = SMALL.rows[file == SMALL.test]
        batch = {b"data": rng.integers(0, 256, (n, 3072), dtype=np.uint8), b"labels": [i % 10 for i in range(n)]}
        (tmp_path / file).write_bytes(python2_pickle(batch))
    (tmp_path / "batches.meta").write_bytes(python2_pickle({b"label_names": [b"class%d" % i for i in range(10)]}))
    return tmp_path


def rewrite(path: Path, **changes: object) -> None:
    stored = pickle.loads(path.read_bytes(), encoding="bytes")
    path.write_bytes(python2_pickle(stored | {key.encode(): value for key, value in changes.items()}))


def read_small(folder: Path) -> object:
    return cifar.read_layout(folder, SMALL, "cifar10", cifar.VIEW10)


def test_cifar_reads_planes_and_labels_in_file_order(small_cifar):
    d = cifar.read_layout(small_cifar, SMALL, "cifar10", cifar.VIEW10)
    assert d.train_x.shape == (100, 3, 32, 32)
    assert d.classes[3] == "class3"
    second = pickle.loads((small_cifar / "data_batch_2").read_bytes(), encoding="bytes")[b"data"]
    assert np.array_equal(d.train_x[20:40].reshape(20, -1), second)
    assert d.train_y[:12].tolist() == [*range(10), 0, 1]


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(small_cifar, monkeypatch):
    monkeypatch.chdir(small_cifar)
    rewrite(small_cifar / "data_batch_3", data=Evil())
    with pytest.raises(DataError, match=r"data_batch_3.*posix\.system.*refused"):
        read_small(small_cifar)
    assert not (small_cifar / "evil").exists()


@pytest.mark.parametrize("name", ["builtins.eval", "numpy.load", "numpy.core.multiarray.frombuffer", "_codecs.lookup"])
def test_other_globals_are_refused_by_name(tmp_path, name):
    module, _, attribute = name.rpartition(".")
    content = b"c" + module.encode() + b"\n" + attribute.encode() + b"\n."
    with pytest.raises(DataError, match=f"global {name}"):
        cifar.unpickled(tmp_path / "x", content)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": np.zeros((20, 3071), np.uint8)}, ["uint8 (20, 3072)", "(20, 3071)"]),
        ({"data": np.zeros((20, 3072), np.float32)}, ["uint8", "float32"]),
        ({"data": [1, 2]}, ["uint8", "list"]),
        ({"labels": [0] * 19}, ["20 whole numbers", "19 entries"]),
        ({"labels": [0] * 19 + [10]}, ["0 .. 9", "0 .. 10"]),
        ({"labels": [0] * 19 + [-1]}, ["0 .. 9", "-1 .. 0"]),
        ({"labels": ["a"] * 20}, ["20 whole numbers"]),
    ],
)
def test_cifar_says_what_it_expected_and_found(small_cifar, changes, words):
    rewrite(small_cifar / "data_batch_2", **changes)
    with pytest.raises(DataError) as error:
        read_small(small_cifar)
    for word in ("data_batch_2", *words):
        assert word in str(error.value)


def test_truncated_missing_and_foreign_cifar_files(small_cifar):
    path = small_cifar / "test_batch"
    whole = path.read_bytes()
    for content in (whole[:-1000], whole[:10], b"", b"not a pickle", python2_pickle([1]), python2_pickle({})):
        path.write_bytes(content)
        with pytest.raises(DataError, match="test_batch: expected"):
            read_small(small_cifar)
    path.unlink()
    with pytest.raises(DataError, match="test_batch: cannot be read"):
        read_small(small_cifar)


def test_one_flipped_bit_is_noticed(small_cifar):
    path = small_cifar / "data_batch_1"
    content = bytearray(path.read_bytes())
    layout = replace(SMALL, md5={"data_batch_1": hashlib.md5(content).hexdigest()})
    cifar.read_layout(small_cifar, layout, "cifar10", cifar.VIEW10)
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_1: truncated or altered: expected md5 .* found"):
        cifar.read_layout(small_cifar, layout, "cifar10", cifar.VIEW10)


def test_check_names_each_file(tmp_path):
    data = tmp_path
    assert [line.found for line in check("cifar10", data)] == ["not there"] * 7
    (data / "cifar-10-batches-py").mkdir()
    (data / "cifar-10-batches-py" / "test_batch").write_bytes(b"x")
    lines = {line.file: line for line in check("cifar10", data)}
    assert lines["cifar-10-batches-py/test_batch"].found == hashlib.md5(b"x").hexdigest()
    assert not any(line.ok for line in lines.values())


# ------------------------------------------------------------------------------------------------------- Fashion-MNIST


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def small_fashion(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for part, n in (("train", 30), ("t10k", 10)):
        images = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        labels = (np.arange(n) % 10).astype(np.uint8)
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return tmp_path


def test_fashion_reads_packed_and_unpacked_files(small_fashion):
    packed = fashion.read(small_fashion, (30, 10), {})
    assert packed.train_x.shape == (30, 1, 28, 28)
    assert packed.test_y.tolist() == list(range(10))
    assert not packed.view.augments
    for path in list(small_fashion.glob("*.gz")):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert fashion.read(small_fashion, (30, 10), {}).sha256 == packed.sha256


@pytest.fixture
def digests(small_fashion: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of the content of the small files, as if they were upstream's."""
    found = {p.name: hashlib.sha256(gzip.decompress(p.read_bytes())).hexdigest() for p in small_fashion.iterdir()}
    for name, digest in found.items():
        monkeypatch.setitem(fashion.SHA256, name, digest)
        monkeypatch.setitem(fashion.MD5, name, hashlib.md5((small_fashion / name).read_bytes()).hexdigest())
    return found


def test_fashion_is_compared_by_its_content_however_it_is_packed(small_fashion, digests, recwarn):
    """Debian's package has the same images, compressed anew."""
    home = small_fashion / "fashion-mnist"
    home.mkdir()
    for name in digests:
        content = gzip.decompress((small_fashion / name).read_bytes())
        (home / name).write_bytes(gzip.compress(content, compresslevel=1, mtime=0))
    assert all(line.ok for line in check("fashion", small_fashion))
    first = fashion.read(home, (30, 10), digests)
    unpacked = home / "train-images-idx3-ubyte"
    unpacked.write_bytes(gzip.decompress((home / "train-images-idx3-ubyte.gz").read_bytes()))
    (home / "train-images-idx3-ubyte.gz").unlink()
    first_line = check("fashion", small_fashion)[0]
    assert (first_line.file, first_line.ok) == ("fashion-mnist/train-images-idx3-ubyte", True)
    assert fashion.read(home, (30, 10), digests).sha256 == first.sha256
    torch.from_numpy(first.test_x)
    torch.from_numpy(first.train_x)
    assert not [w for w in recwarn if "not writable" in str(w.message)]
    content = bytearray(unpacked.read_bytes())
    content[-1] ^= 1
    unpacked.write_bytes(content)
    assert [line.ok for line in check("fashion", small_fashion)] == [False, True, True, True]
    with pytest.raises(DataError, match="train-images-idx3-ubyte: truncated or altered: expected sha256"):
        fashion.read(home, (30, 10), digests)


def test_fashion_arrays_can_be_written_to(small_fashion):
    """Torch warns of arrays that cannot."""
    d = fashion.read(small_fashion, (30, 10), {})
    assert d.train_x.flags.writeable
    assert d.test_x.flags.writeable


def test_a_gzip_file_that_never_ends_is_refused(small_fashion, monkeypatch):
    monkeypatch.setattr(fashion, "MAX_BYTES", 30_000)
    path = small_fashion / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(bytes(30_001)))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: expected at most 30,000 bytes, found more"):
        fashion.read(small_fashion, (30, 10), {})


@pytest.mark.usefixtures("digests")
def test_check_says_what_is_wrong_with_a_fashion_file(small_fashion):
    (small_fashion / "train-images-idx3-ubyte.gz").write_bytes(b"<html>")
    (small_fashion / "train-labels-idx1-ubyte.gz").unlink()
    (small_fashion / "fashion-mnist").symlink_to(small_fashion)
    lines = check("fashion", small_fashion)
    assert lines[0].found.startswith("expected a whole gzip file")
    assert lines[1].found == "not there"
    assert [line.ok for line in lines] == [False, False, True, True]


def test_fashion_in_torchvisions_place(tmp_path):
    (tmp_path / "FashionMNIST" / "raw").mkdir(parents=True)
    assert find_dataset("fashion").locate(tmp_path) == tmp_path / "FashionMNIST" / "raw"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(idx(np.zeros((30, 28, 27), np.uint8))), ["(30, 28, 28)", "(30, 28, 27)"]),
        (gzip.compress(idx(np.zeros(30, np.uint8))), ["rank 3", "00 00 08 01"]),
        (gzip.compress(idx(np.zeros((30, 28, 28), np.uint8))[:-5]), ["23520 bytes", "23515"]),
        (gzip.compress(idx(np.zeros((30, 28, 28), np.uint8)))[:-5], ["whole gzip"]),
        (b"<html>", ["whole gzip"]),
        (b"", ["rank 3"]),
    ],
    ids=["shape", "rank", "short", "cut", "html", "empty"],
)
def test_fashion_says_what_it_expected_and_found(small_fashion, content, words):
    (small_fashion / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(DataError) as error:
        fashion.read(small_fashion, (30, 10), {})
    for word in ("train-images-idx3-ubyte.gz", *words):
        assert word in str(error.value)


def test_fashion_labels_out_of_range_and_altered_files(small_fashion):
    with pytest.raises(DataError, match="truncated or altered: expected sha256"):
        fashion.read(small_fashion, (30, 10))
    path = small_fashion / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx(np.arange(1, 11, dtype=np.uint8))))
    with pytest.raises(DataError, match=r"t10k-labels.*0 \.\. 9, found 1 \.\. 10"):
        fashion.read(small_fashion, (30, 10), {})


# ------------------------------------------------------------------------------------------------------- Tiny ImageNet


@pytest.fixture
def small_tiny(tmp_path: Path) -> Path:
    """Two classes, three and two images; one is greyscale, as a few upstream are."""
    rng = np.random.default_rng(0)
    (tmp_path / "wnids.txt").write_text("n2\nn1\n")
    (tmp_path / "words.txt").write_text("n1\tgoldfish, Carassius\nn2\tbullfrog\n")
    for wnid, n in (("n2", 3), ("n1", 2)):
        (tmp_path / "train" / wnid / "images").mkdir(parents=True)
        for i in range(n):
            colour = Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
            image = colour.convert("L") if (wnid, i) == ("n2", 1) else colour
            image.save(tmp_path / "train" / wnid / "images" / f"{wnid}_{i}.JPEG")
    (tmp_path / "val" / "images").mkdir(parents=True)
    colour.save(tmp_path / "val" / "images" / "val_0.JPEG")
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn1\t0\t3\t63\t63\n")
    return tmp_path


def test_tiny_reads_in_the_order_of_wnids(small_tiny):
    d = tiny.read(small_tiny)
    assert d.train_x.shape == (5, 3, 64, 64)
    assert d.train_y.tolist() == [0, 0, 0, 1, 1]
    assert d.test_y.tolist() == [1]
    assert d.classes == ("bullfrog", "goldfish")
    grey = d.train_x[1]
    assert np.array_equal(grey[0], grey[2])
    scaled = d.train_x / 255
    assert d.view.mean == pytest.approx(scaled.mean(axis=(0, 2, 3)))
    assert d.view.std == pytest.approx(scaled.std(axis=(0, 2, 3)))
    assert d.view.pad == 4
    assert d.view.flip


def test_tiny_is_decoded_once_and_again_when_an_image_changes(small_tiny, monkeypatch):
    first = tiny.read(small_tiny)
    assert [p.name for p in small_tiny.glob("*.npz")] == ["fedcc-64.npz"]
    monkeypatch.setattr(tiny, "_decoded", lambda *_, **__: 1 / 0)
    again = tiny.read(small_tiny)
    assert again.sha256 == first.sha256
    assert again.view == first.view
    monkeypatch.undo()
    image = small_tiny / "train" / "n1" / "images" / "n1_0.JPEG"
    Image.new("RGB", (64, 64), "red").save(image)
    assert tiny.read(small_tiny).sha256 != first.sha256


def test_tiny_survives_a_damaged_cache_and_a_folder_it_may_not_write(small_tiny, monkeypatch):
    first = tiny.read(small_tiny)
    cache = small_tiny / "fedcc-64.npz"
    cache.write_bytes(cache.read_bytes()[:2000])
    assert tiny.read(small_tiny).sha256 == first.sha256
    cache.unlink()

    def no_writing(path):
        raise PermissionError(13, "read-only", str(path))

    monkeypatch.setattr(tiny, "open_whole", no_writing)
    assert tiny.read(small_tiny).sha256 == first.sha256
    assert not cache.exists()


def test_tiny_at_32(small_tiny):
    d, whole = tiny.read(small_tiny, resize=32), tiny.read(small_tiny)
    assert d.train_x.shape == (5, 3, 32, 32)
    blocks = whole.train_x.reshape(5, 3, 32, 2, 32, 2).mean(axis=(3, 5))
    assert np.abs(blocks - d.train_x).max() <= 1  # rows and columns are rounded one after the other
    with pytest.raises(ValueError, match="32 or left at 64, got 48"):
        tiny.read(small_tiny, resize=48)


def test_tiny_names_the_file_at_fault(small_tiny):
    image = small_tiny / "train" / "n1" / "images" / "n1_1.JPEG"
    whole = image.read_bytes()
    image.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"n1_1\.JPEG: expected a JPEG"):
        tiny.read(small_tiny)
    Image.new("RGB", (64, 63)).save(image)
    with pytest.raises(DataError, match=r"n1_1\.JPEG: expected 64x64 pixels, found 64x63"):
        tiny.read(small_tiny)
    image.write_bytes(whole)
    annotations = small_tiny / "val" / "val_annotations.txt"
    annotations.write_text("val_0.JPEG\tn1\nval_1.JPEG\tn1\n")
    with pytest.raises(DataError, match=r"val_1\.JPEG: listed"):
        tiny.read(small_tiny)
    for bad in ("val_0.JPEG\tn9\n", "../val_0.JPEG\tn1\n", "val_0.JPEG\n"):
        annotations.write_text(bad)
        with pytest.raises(DataError, match="line 1"):
            tiny.read(small_tiny)
    (small_tiny / "wnids.txt").write_text("n1\nn3\n")
    with pytest.raises(DataError, match=r"n3.*expected a folder"):
        tiny.read(small_tiny)


def test_check_counts_what_tiny_holds(small_tiny, tmp_path):
    lines = tiny.file_checks(small_tiny)
    assert [line.found for line in lines] == ["2 classes", "5 images", "1 images"]
    assert not any(line.ok for line in lines)
    assert not tiny.file_checks(tmp_path / "nowhere")[0].ok


# ----------------------------------------------------------------------------------------------------------- real data


def real(name: str) -> Path:
    folder = Path(os.environ.get("FEDCC_DATA", "/nonexistent"))
    if find_dataset(name).missing(folder):
        pytest.skip(f"FEDCC_DATA holds no {name}")
    return folder


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "per_class", "image", "labels", "everything"),
    [
        ("cifar10", (5000, 1000), "36ad5f687573b851", "cec8a24a1e92aa2e", "20ec2e2fcc4d2042"),
        ("cifar100", (500, 100), "db4ebf32b5e4211c", "4dad7d09c7c97d33", "7aa2560ea3dd37c2"),
    ],
)
def test_real_cifar(name, per_class, image, labels, everything):
    folder = real(name)
    assert all(line.ok for line in check(name, folder))
    d = load(name, folder, download=False)
    assert set(np.bincount(d.train_y)) == {per_class[0]}
    assert set(np.bincount(d.test_y)) == {per_class[1]}
    assert (d.train_x.shape, d.test_x.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert hashlib.sha256(d.train_x[12_345].tobytes()).hexdigest()[:16] == image
    assert hashlib.sha256(d.test_y.astype(np.uint8).tobytes()).hexdigest()[:16] == labels
    assert d.sha256.startswith(everything)
    mean = (d.train_x / np.float32(255)).mean(axis=(0, 2, 3))
    assert d.view.mean == pytest.approx(mean, abs=2e-4)


@pytest.mark.realdata
def test_real_fashion():
    """Upstream's files, or those of Debian's package dataset-fashion-mnist."""
    folder = real("fashion-mnist")
    assert all(line.ok for line in check("fashion-mnist", folder))
    d = load("fashion-mnist", folder, download=False)
    assert set(np.bincount(d.train_y)) == {6000}
    assert set(np.bincount(d.test_y)) == {1000}
    assert d.view.mean == pytest.approx((d.train_x / np.float32(255)).mean(axis=(0, 2, 3)), abs=2e-4)
    assert d.view.std == pytest.approx((d.train_x / np.float32(255)).std(axis=(0, 2, 3)), abs=2e-4)


@pytest.mark.realdata
def test_real_tiny_sample():
    folder = real("tiny-imagenet")
    d = load("tiny-imagenet", folder, download=False)
    assert d.shape == (3, 64, 64)
    assert len(np.unique(d.train_y)) == len(d.classes)
    assert np.array_equal(np.unique(d.test_y), np.unique(d.train_y))
    first, _ = tiny.listing(folder / "tiny-imagenet-200").train[0]
    with Image.open(first) as stored:
        assert np.array_equal(d.train_x[0], np.asarray(stored.convert("RGB")).transpose(2, 0, 1))
