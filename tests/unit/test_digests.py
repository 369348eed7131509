"""JSON files that hold their own digest and those of files beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedcc.core.digests import DamagedFile, check_digest, check_files, file_digest, read_json, write_json

CONTENT: dict[str, Any] = {"b": [1, 2.5, None], "a": {"ä": True, "n": -0.0}, "empty": ""}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    sealed = write_json(tmp_path / "a.json", CONTENT)
    assert read_json(tmp_path / "a.json") == sealed == CONTENT | {"sha256": sealed["sha256"]}
    assert write_json(tmp_path / "b.json", sealed) == sealed  # a digest does not cover itself


def test_names_layout_and_order_do_not_matter(tmp_path: Path) -> None:
    sealed = write_json(tmp_path / "a.json", CONTENT)
    other = tmp_path / "elsewhere.json"
    other.write_text(json.dumps(dict(reversed(sealed.items())), ensure_ascii=False))
    assert read_json(other) == sealed


@pytest.mark.parametrize(
    "change",
    [{"b": [1, 2.5, 0]}, {"b": [1, 2.50001, None]}, {"a": {"ä": 1, "n": -0.0}}, {"more": 0}, {"sha256": None},
     {"sha256": "0" * 64}],
)  # fmt: skip
def test_a_changed_value_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(write_json(path, CONTENT) | change))
    with pytest.raises(DamagedFile, match=r"a\.json is damaged: its content does not match its sha256"):
        read_json(path)


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1}{"a": 1}', b"\xff\xfe", b"\x00" * 20, b"[" * 100_000])
def test_what_is_not_json_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=r"a\.json is damaged: it is not valid JSON"):
        read_json(path)


@pytest.mark.parametrize("content", ["[]", "null", "3"])
def test_what_is_no_object_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DamagedFile, match=r"a\.json is damaged: it must hold a JSON object"):
        read_json(path)


def test_older_files_have_no_digest(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(CONTENT))
    assert read_json(path) == CONTENT
    assert not check_digest(path, CONTENT)
    assert check_digest(path, write_json(path, CONTENT))
    with pytest.raises(DamagedFile, match="its sha256 is missing"):  # one that had digests of others had its own
        check_digest(path, {"files": {}})


def test_files_beside_it(tmp_path: Path) -> None:
    path, beside = tmp_path / "a.json", tmp_path / "data"
    beside.write_bytes(b"abc")
    content = {"files": {"data": file_digest(beside)}}
    check_files(path, content)
    check_files(path, {})
    beside.write_bytes(b"abd")
    with pytest.raises(DamagedFile, match=r"data is damaged: it is not the file whose sha256 is in a\.json"):
        check_files(path, content)
    beside.unlink()
    check_files(path, content)
    for odd in ({"../data": ""}, {"a/b": ""}, [], 3):
        with pytest.raises(DamagedFile, match="'files' must hold digests by file name"):
            check_files(path, {"files": odd})
