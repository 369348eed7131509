"""Files of rounds: the latest content of a round counts, damage is detected, obsolete rounds are removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcc.core.digests import DamagedFile
from fedcc.experiments.round_files import RoundFiles


def last_two(rounds: list[int]) -> list[int]:
    return rounds[:-2]


def test_only_the_last_rounds_stay(tmp_path: Path) -> None:
    files = RoundFiles(tmp_path, "round")
    for t in (1, 2, 10):
        files.write(t, b"%d" % t, last_two)
    assert list(files.paths()) == [2, 10]
    assert [files.read(path) for path in files.paths().values()] == [b"2", b"10"]


def test_a_round_that_is_repeated_replaces_the_first(tmp_path: Path) -> None:
    """Whatever their checksums are, by which the names are sorted."""
    files = RoundFiles(tmp_path, "round")
    for content in (b"a", b"b", b"c", b"d", b"a"):
        files.write(1, content, last_two)
        assert [files.read(path) for path in tmp_path.iterdir()] == [content]


def test_damage_and_other_files(tmp_path: Path) -> None:
    files = RoundFiles(tmp_path, "round")
    files.write(1, b"content", last_two)
    (path,) = files.paths().values()
    path.write_bytes(b"contend")
    (tmp_path / "rounds.jsonl").touch()
    assert list(files.paths()) == [1]
    with pytest.raises(DamagedFile, match="does not match its checksum"):
        files.read(path)
    files.remove([1])
    assert not files.paths()
