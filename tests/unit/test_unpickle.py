"""Pickles of plain values are read as Python would read them; whatever else a file holds is refused, unharmed."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcc.data import DataError, cifar, unpickle

ROWS = np.arange(12, dtype=np.uint8).reshape(3, 4)


def text(value: str) -> bytes:
    content = value.encode()
    return b"X" + len(content).to_bytes(4, "little") + content


def raw(value: bytes) -> bytes:
    return b"B" + len(value).to_bytes(4, "little") + value


# An array of one dtype with a field of objects, whose flags deny it: eight bytes become the address of an object, and
# an assignment to the field releases that object.
DTYPE = b"cnumpy\ndtype\n"
EMPTY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + raw(b"b") + b"\x87R"
FIELD = text("f") + b"\x85}" + text("f") + DTYPE + text("O8") + b"\x89\x88\x87RK\x00\x86s"
STATE = (
    DTYPE + text("V8") + b"\x89\x88\x87R(K\x03" + text("|") + b"N" + FIELD + b"K\x08K\x01K\x00tb\x89" + raw(b"A" * 8)
)
CRASH = b"\x80\x03" + EMPTY + b"(K\x01K\x01\x85" + STATE + b"tb" + text("f") + b"K\x01s."
HANG = b"\x80\x02})" + b"q\x00h\x00\x86" * 40 + b"Ns."  # a key of 2^40 tuples: to hash it takes hours

SCRIPT = """
import sys
from pathlib import Path
from fedcc.data import DataError, cifar
path = Path(sys.argv[1])
try:
    cifar.read_batch(path, cifar.Layout(**{**vars(cifar.LAYOUT10), "md5": {}}), 10)
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize("content", [CRASH, HANG], ids=["crash", "hang"])
def test_a_hostile_pickle_is_refused_in_a_process_that_lives(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data_batch_1").write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "data_batch_1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/data_batch_1: expected a pickle of arrays, found: ")


def test_upstreams_md5_is_checked_before_the_first_opcode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data_batch_1").write_bytes(HANG)
    monkeypatch.setattr(cifar, "unpickled", lambda *_: pytest.fail("read"))
    with pytest.raises(DataError, match="data_batch_1: truncated or altered: expected md5 c99c"):
        cifar.read_batch(tmp_path / "data_batch_1", cifar.LAYOUT10, 10)


def test_a_file_beyond_all_measure_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "test_batch").open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(DataError, match=r"test_batch: expected at most 536,870,912 bytes, found 1,099,511,627,776"):
        cifar.read_batch(tmp_path / "test_batch", cifar.LAYOUT10, 10)


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_are_read_as_python_reads_them(tmp_path: Path, protocol: int) -> None:
    shared = [1, 2]
    value = {
        b"data": ROWS,
        b"fortran": np.asfortranarray(ROWS),
        b"again": ROWS + 1,
        b"labels": [0, 255, 256, 65_536, -1, 2**63 - 1, True, None, 0.5],
        "text": ["a", "\u00e4", "\U0001f600", "", b"\x00\xff"],
        "shared": shared,
        "shared again": shared,
        "long": list(range(2500)),
    }
    content = pickle.dumps(value, protocol)
    for older in (content, content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")):
        if older != content and protocol > 3:
            continue  # the length is written before the text
        found = cifar.unpickled(tmp_path, older)
        expected = {k.encode() if isinstance(k, str) else k: v for k, v in value.items()}
        assert found.keys() == expected.keys()
        for key in (b"data", b"fortran", b"again"):
            assert found[key].dtype == np.uint8
            assert found[key].flags.writeable
            assert np.array_equal(found.pop(key), expected.pop(key))
        assert found == expected


def test_python_2_wrote_texts_and_arrays_as_byte_strings(tmp_path: Path) -> None:
    """A piece of upstream's own form: protocol 2, numpy's old name, dtype(u1, 0, 1)."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03(K\x01K\x02K\x03\x86"
        b"cnumpy\ndtype\nq\x04U\x02u1K\x00K\x01\x87Rq\x05(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x06\x00\x01\x02\xfd\xfe\xfftb"
    )
    found = cifar.unpickled(tmp_path, b"\x80\x02}q\x06(U\x04dataq\x07" + array + b"U\x06labels](K\x00K\x01eu.")
    assert found[b"data"].tolist() == [[0, 1, 2], [253, 254, 255]]
    assert found[b"labels"] == [0, 1]


def array_of(dtype: bytes, shape: bytes, data: bytes) -> bytes:
    return EMPTY + b"(K\x01" + shape + DTYPE + dtype + b"\x89\x88\x87R\x89" + raw(data) + b"tb"


KEPT = raw(b"x" * 1000) + b"q\x01"
ENCODE = b"c_codecs\nencode\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps({"a": np.zeros(2, np.float32)}), "float32"),
        (pickle.dumps({"a": np.zeros(2, object)}), "object"),
        (pickle.dumps({"a": np.zeros(2, "u1,u2")}), "an array of 'V3'"),
        (pickle.dumps({"a": {1, 2}}), "the opcode EMPTY_SET"),
        (pickle.dumps({"a": 1 << 70}), "a whole number of 71 bits"),
        (pickle.dumps({1: "a"}), "a key that is not a text"),
        (pickle.dumps({"a": Path("x")}), "the global pathlib"),
        (pickle.dumps({"\ud800": 1}), "surrogates not allowed"),
        (b"}K\x01K\x02K\x03e.", "without its mark"),
        (b"}(X\x01\x00\x00\x00au.", "a key that is not a text, or has no value"),
        (b"}K\x01a.", "items for something that takes none"),
        (b"]q\x00h\x00a.", "a list of something other than numbers and texts"),
        (pickle.dumps({"a": [[1]]}), "a list of something other than numbers and texts"),
        (pickle.dumps({"a": {"b": 1}}), "a value that is no number, text, list or whole array"),
        (pickle.dumps({"a": (1,)}), "a value that is no number, text, list or whole array"),
        (b"(" * 5 + b".", "an end in the middle of a value"),
        (b"K\x01K\x02.", "an end in the middle of a value"),
        (b"0.", "the opcode POP"),
        (b"h\x07.", "a reference to 7, which does not exist"),
        (b"\x85.", "an opcode without its value"),
        (b"cnumpy\nndarray\n.", "no dictionary"),
        (pickle.dumps([1]), "no dictionary but a value of the type list"),
        (b"]cnumpy\nndarray\na.", "a list of something other than numbers and texts"),
        (b"}" + text("a") + EMPTY + b"s.", "a value that is no number, text, list or whole array"),
        (b"cnumpy\ndtype\n)R.", "a call that makes no uint8 array"),
        (array_of(text("u1"), b"K\x09\x85", b"12345678"), r"shape \(9,\) with 8 bytes"),
        (array_of(text("u1"), b"K\x08J\xff\xff\xff\xffJ\xff\xff\xff\xff\x87", b"12345678"), "up to 8 whole numbers"),
        (array_of(text("u1"), b"(" + b"K\x01" * 99 + b"t", b"1"), "up to 8 whole numbers"),
        (b"](" + ENCODE + text("\u0394") + text("latin1") + b"\x86Re.", "bytes beyond 255"),
        (b"](" + KEPT + (EMPTY + b"(K\x01M\xe8\x03\x85" + DTYPE + text("u1") + b"\x89\x88\x87R\x89h\x01tb") * 9 + b"e.",
         "the same bytes many times over"),
        (b"](" + text("x" * 1000) + b"q\x01" + (ENCODE + b"h\x01" + text("latin1") + b"\x86R") * 9 + b"e.",
         "the same bytes many times over"),
        (b"cos\nsystem\n" + text("x") + b"\x85R.", "the global os.system"),
        (b"c" + b"a" * 10_000 + b"\nb\n.", "the global a{80},"),
        (b"", "pickle exhausted"),
        (b"\x80\x02}q", "not enough data"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=f"x: expected a pickle of arrays, found: .*{said}"):
        cifar.unpickled(tmp_path / "x", content)


def test_the_number_of_opcodes_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickle, "MAX_OPCODES", 1000)
    assert cifar.unpickled(tmp_path, pickle.dumps({"a": [None] * 900})) == {b"a": [None] * 900}
    with pytest.raises(DataError, match="more than 1,000 opcodes"):
        cifar.unpickled(tmp_path, pickle.dumps({"a": [None] * 1000}))


@pytest.mark.parametrize("names", [[b"\xff"] * 10, ["\ud800"] * 10, [1] * 10])
def test_class_names_are_texts(tmp_path: Path, names: list[Any]) -> None:
    path = tmp_path / "batches.meta"
    path.write_bytes(pickle.dumps({b"label_names": names}, 2))
    with pytest.raises(DataError, match=r"batches\.meta: expected class names in UTF-8"):
        cifar.read_names(path, cifar.Layout(**{**vars(cifar.LAYOUT10), "md5": {}}))
