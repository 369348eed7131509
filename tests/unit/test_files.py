"""Files written whole are on the disk before they replace others."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from fedcc.core.files import open_whole


def test_a_file_is_on_the_disk_before_it_replaces_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(number: int) -> None:
        what = Path(f"/proc/self/fd/{number}").readlink()
        calls.append("sync folder" if what == tmp_path else f"sync {what.read_bytes().decode()}")
        sync(number)

    def replaced(self: Path, target: Path) -> Path:
        calls.append(f"replace {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    with open_whole(tmp_path / "a") as file:
        file.write(b"content")
    assert calls == ["sync content", "replace a", "sync folder"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EACCES])
def test_systems_that_cannot_flush_a_folder(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(path: Any, *_: Any) -> int:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", unable)
        with open_whole(tmp_path / "a") as file:
            file.write(b"content")
    assert (tmp_path / "a").read_bytes() == b"content"


def test_a_disk_that_fails_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error") as error, open_whole(tmp_path / "a") as file:
        file.write(b"content")
    assert error.value.filename == str(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_told_of_the_target(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as error, open_whole(tmp_path / "file" / "a"):
        pass
    assert error.value.filename == str(tmp_path / "file" / "a")
