"""The data folder, and downloads into it: resumed, checked, unpacked whole.

A download goes to ``FILE.part``, which an interrupted transfer leaves and the next one continues. Only a file with
upstream's checksum gets its own name; an archive is unpacked beside its destination and then renamed. So a file with
its final name is complete, and processes that start together wait for the one that downloads.
"""

import errno
import gzip
import os
import shutil
import stat
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PureWindowsPath
from typing import IO, Any, TypeVar, cast

from fedcc.core.digests import file_digest
from fedcc.data.dataset import DataError, Description, FileCheck, RemoteFile, readable
from fedcc.data.registry import find_dataset

ATTEMPTS = 5  # at one address, each continuing the last one
PAUSE = 1.0  # seconds before the second attempt; twice as long before each one after
TIMEOUT = 30.0  # seconds without a byte
MAX_UNPACKED = 1 << 31  # bytes of an archive's files; Tiny ImageNet has 250 million
MAX_MEMBERS = 200_000  # files and folders of an archive; Tiny ImageNet has 120,000
BLOCK = 1 << 14  # bytes; a transfer that breaks loses less than one
PIECE = 1 << 20  # bytes of an archive that are read at once
Member = TypeVar("Member", tarfile.TarInfo, zipfile.ZipInfo)
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM)  # no fault of an archive


def data_folder(explicit: Path | str | None = None) -> Path:
    """The folder of the data sets: the argument, else $FEDCC_DATA, else the user's cache folder.

    A named folder must exist: a typo should not start a download into a new one.
    """
    for origin, name in (("", explicit), ("FEDCC_DATA names ", os.environ.get("FEDCC_DATA"))):
        if name:
            folder = Path(name).expanduser()
            if not folder.is_dir():
                raise DataError(f"{origin}{folder}: no such data folder; create it or name another")
            return folder
    from platformdirs import user_cache_path

    return user_cache_path("fedcc")


def ensure(description: Description, root: Path, download: bool = True) -> Path:
    """The data set's own folder below ``root``, fetched when files are missing."""
    missing = description.missing(root)
    if missing and not download:
        raise DataError(
            f"{missing[0]}: not found, and downloading is off; fetch {description.title} with `fedcc data fetch"
            f" {description.name}`, or set FEDCC_DATA to the folder that contains {description.folders[0]}"
        )
    return _fetch_into(root, description) if missing else description.locate(root)


def fetch(dataset: str | Description, folder: Path | str | None = None) -> Path:
    """Download what is missing of a data set into the data folder; its own folder there."""
    description = find_dataset(dataset) if isinstance(dataset, str) else dataset
    root = data_folder(folder)
    return root if description.embedded else _fetch_into(root, description)


def _fetch_into(root: Path, description: Description) -> Path:
    from filelock import FileLock

    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".fedcc-{description.name}.lock"):
            if missing := description.missing(root):  # again: another process may have fetched it meanwhile
                _fetch_missing(description, root, missing)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(f"{root}: no room left on this disk; free some or choose another data folder") from error
        raise DataError(f"{root}: cannot be written ({error.strerror or error})") from error
    return description.locate(root)


def _fetch_missing(description: Description, root: Path, missing: list[Path]) -> None:
    home = description.locate(root)
    for remote in description.remotes:
        if not remote.file.endswith((".tar.gz", ".zip")):
            if home / remote.file in missing:
                _download(remote, home)
        elif home.exists():
            raise DataError(f"{missing[0]}: missing, although {home} exists; move that folder away and fetch again")
        else:
            archive = _download(remote, root)
            _unpack(archive, root, home.name)
            archive.unlink()


def check(dataset: str | Description, folder: Path | str | None = None) -> list[FileCheck]:
    """Each upstream file of a data set: what it should be and what is found."""
    description = find_dataset(dataset) if isinstance(dataset, str) else dataset
    home = Path() if description.embedded else description.locate(data_folder(folder))
    if description.file_checks is not None:
        return description.file_checks(home)
    lines = []
    for file, expected in description.files.items():
        path = readable(home / file)
        try:
            found = description.digest(path) if path.is_file() else "not there"
        except DataError as error:
            found = str(error).removeprefix(f"{path}: ")
        except OSError as error:
            found = f"cannot be read ({error.strerror or error})"
        lines.append(FileCheck(f"{home.name}/{path.name}", expected, found, found == expected))
    return lines


# -------------------------------------------------------------------------------------------------------- downloading


def _download(remote: RemoteFile, folder: Path) -> Path:
    """The file in ``folder``, from the first address that gives it with the right checksum."""
    import requests

    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / remote.file, folder / f"{remote.file}.part"
    if path.is_file() and file_digest(path, "md5") == remote.md5:
        return path
    failures = []
    for url in remote.urls:
        try:
            _transfer(url, part)
        except requests.RequestException as error:
            failures.append(f"{url}: {error}")
            continue
        if (found := file_digest(part, "md5")) == remote.md5:
            return part.replace(path)
        part.unlink()
        failures.append(f"{url}: wrong checksum: expected md5 {remote.md5}, found {found}")
    raise DataError(f"{path}: download failed: " + "; ".join(failures))


def _transfer(url: str, part: Path) -> None:
    """Request what ``part`` lacks, several times if need be."""
    import requests

    for attempt in range(ATTEMPTS):
        try:
            _request(url, part)
            return
        except requests.RequestException as error:
            answer = error.response
            refused = answer is not None and 400 <= answer.status_code < 500 and answer.status_code != 429
            if refused or attempt == ATTEMPTS - 1:
                raise
            time.sleep(PAUSE * 2**attempt)


def _request(url: str, part: Path) -> None:
    """One request for what ``part`` lacks."""
    import requests
    from tqdm import tqdm

    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"}  # positions in a compressed stream would mean nothing
    if have:
        headers["Range"] = f"bytes={have}-"
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
        if answer.status_code == requests.codes.requested_range_not_satisfiable:
            if answer.headers.get("Content-Range", "").rpartition("/")[2] == str(have):
                return  # it was complete already
            part.unlink()  # longer than the file upstream: not a part of it
            raise requests.ConnectionError(f"{part.name} does not belong to the file; starting again", response=None)
        answer.raise_for_status()
        resumed = answer.status_code == requests.codes.partial_content
        have = have if resumed else 0
        total = have + int(answer.headers["Content-Length"]) if "Content-Length" in answer.headers else None
        options: Any = {"initial": have, "total": total, "unit": "B", "unit_scale": True, "leave": False}
        bar = tqdm(desc=part.stem, disable=not sys.stderr.isatty(), **options)
        with part.open("ab" if resumed else "wb") as file, bar:
            for block in answer.iter_content(BLOCK):
                file.write(block)
                bar.update(len(block))
    if total is not None and (size := part.stat().st_size) < total:
        raise requests.ConnectionError(f"the transfer ended after {size} of {total} bytes")


# ---------------------------------------------------------------------------------------------------------- unpacking


def _unpack(archive: Path, root: Path, name: str) -> None:
    """Unpack an archive that holds the folder ``name`` so that ``root / name`` appears whole or not at all."""
    staging = root / f".{name}.unpacking"
    shutil.rmtree(staging, ignore_errors=True)  # left by a process that was killed; the lock is ours
    staging.mkdir()
    try:
        (_unzip if archive.suffix == ".zip" else _untar)(archive, staging)
        if not (staging / name).is_dir():
            found = sorted(path.name for path in staging.iterdir())[:5]
            raise DataError(f"{archive}: expected the folder {name}/ in it, found {found}")
        (staging / name).rename(root / name)
    except DataError:
        raise
    except Exception as error:  # a damaged archive may raise nearly anything
        if isinstance(error, OSError) and error.errno in DISK:
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{archive}: cannot be unpacked: {reason[:200]}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _untar(archive: Path, staging: Path) -> None:
    with gzip.open(archive) as content, tarfile.open(fileobj=cast(IO[bytes], _Piecewise(content)), mode="r:") as packed:

        def members() -> Iterator[tarfile.TarInfo]:
            for member in _checked(archive, packed, lambda member: (member.name, member.size)):
                if not (member.isreg() or member.isdir()) or member.issparse():
                    raise DataError(f"{archive}: cannot be unpacked: {member.name!r} is neither a file nor a folder")
                yield member

        packed.extractall(staging, members(), filter="data")


def _unzip(archive: Path, staging: Path) -> None:
    with zipfile.ZipFile(archive) as packed:
        for member in _checked(archive, packed.infolist(), lambda member: (member.filename, member.file_size)):
            plain = stat.S_IFMT(member.external_attr >> 16) in (0, stat.S_IFREG, stat.S_IFDIR)
            if not plain or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise DataError(f"{archive}: cannot be unpacked: {member.filename!r} is not a stored or deflated file")
        packed.extractall(staging)


def _checked(
    archive: Path, members: Iterable[Member], name_and_size: Callable[[Member], tuple[str, int]]
) -> Iterator[Member]:
    """The members of an archive; what would fill the disk or be written outside the folder is refused."""
    total = 0
    for number, member in enumerate(members, start=1):
        name, size = name_and_size(member)
        total += size
        if size < 0 or total > MAX_UNPACKED or number > MAX_MEMBERS:
            raise DataError(f"{archive}: refused: over {MAX_UNPACKED:,} bytes or {MAX_MEMBERS:,} files when unpacked")
        windows = PureWindowsPath(name)  # also knows '/'
        if windows.drive or windows.root or ".." in windows.parts:  # zipfile would silently rename it
            raise DataError(f"{archive}: refused the member {name!r}, which lies outside the folder")
        yield member


class _Piecewise:
    """A compressed tar file that is read in pieces, as a header that claims gigabytes would fill the memory."""

    def __init__(self, content: gzip.GzipFile):
        self.seek, self.tell, self.content = content.seek, content.tell, content

    def read(self, size: int) -> bytes:
        if not 0 <= size <= PIECE:
            raise tarfile.ReadError(f"a header claims {size:,} bytes")
        return self.content.read(size)
