"""Downloads from a server of our own: whole, resumed, refused, two at once; and archives that reach out."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedcc.data import DataError, Description, find_dataset, load
from fedcc.data import fetch as fetching
from fedcc.data.dataset import RemoteFile
from fedcc.data.fetch import ATTEMPTS, BLOCK, check, fetch


class Server(ThreadingHTTPServer):
    """Serves ``files`` with ranges; ``breaks`` transfers end after as many bytes as each entry says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.breaks: list[int] = []
        self.ranges: list[str | None] = []
        self.honours_ranges = True

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        content = self.server.files.get(self.path[1:])
        if content is None:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.honours_ranges else 0
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        sent = content[start:]
        if self.server.breaks:
            sent = sent[: self.server.breaks.pop(0)]
            self.close_connection = True
        self.wfile.write(sent)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(fetching, "PAUSE", 0.0)


def tar_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zip_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return buffer.getvalue()


BATCHES = {f"cifar-10-batches-py/{name}": os.urandom(40_000) for name in find_dataset("cifar10").files}


def served(server: Server, content: bytes, file: str = "cifar-10-python.tar.gz", name: str = "cifar10") -> Description:
    """The data set as it is, but from our server."""
    server.files[file] = content
    remote = RemoteFile(file, (server.url(file),), hashlib.md5(content).hexdigest())
    return replace(find_dataset(name), remotes=(remote,))


def visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def test_fetched_unpacked_and_nothing_left_over(server, tmp_path):
    home = fetch(served(server, tar_of(BATCHES)), tmp_path)
    assert home == tmp_path / "cifar-10-batches-py"
    assert {f"{home.name}/{p.name}": p.read_bytes() for p in home.iterdir()} == BATCHES
    assert visible(tmp_path) == ["cifar-10-batches-py"]
    assert not (tmp_path / ".cifar-10-batches-py.unpacking").exists()


def test_what_is_there_is_not_fetched_again(server, tmp_path):
    description = served(server, tar_of(BATCHES))
    fetch(description, tmp_path)
    fetch(description, tmp_path)
    assert len(server.ranges) == 1


def test_a_broken_transfer_goes_on_where_it_ended(server, tmp_path):
    server.breaks = [6 * BLOCK, 3 * BLOCK]
    fetch(served(server, tar_of(BATCHES)), tmp_path)
    assert server.ranges == [None, f"bytes={6 * BLOCK}-", f"bytes={9 * BLOCK}-"]


def test_a_later_process_goes_on_too(server, tmp_path):
    description = served(server, tar_of(BATCHES))
    server.breaks = [BLOCK] * ATTEMPTS
    with pytest.raises(DataError, match=r"cifar-10-python\.tar\.gz: download failed"):
        fetch(description, tmp_path)
    assert visible(tmp_path) == ["cifar-10-python.tar.gz.part"]
    server.ranges.clear()
    fetch(description, tmp_path)
    assert server.ranges == [f"bytes={BLOCK * ATTEMPTS}-"]
    assert visible(tmp_path) == ["cifar-10-batches-py"]


def test_a_server_without_ranges_sends_it_all_again(server, tmp_path):
    server.breaks, server.honours_ranges = [1000], False
    home = fetch(served(server, tar_of(BATCHES)), tmp_path)
    assert (home / "test_batch").read_bytes() == BATCHES["cifar-10-batches-py/test_batch"]


@pytest.mark.parametrize("surplus", [b"", b"more"])
def test_a_part_that_is_complete_or_too_long(server, tmp_path, surplus):
    content = tar_of(BATCHES)
    (tmp_path / "cifar-10-python.tar.gz.part").write_bytes(content + surplus)
    fetch(served(server, content), tmp_path)
    assert visible(tmp_path) == ["cifar-10-batches-py"]


def test_a_wrong_checksum_is_refused_and_nothing_kept(server, tmp_path):
    description = served(server, tar_of(BATCHES))
    server.files["cifar-10-python.tar.gz"] = tar_of(BATCHES | {"more": b"x"})
    with pytest.raises(DataError) as error:
        fetch(description, tmp_path)
    assert "wrong checksum" in str(error.value)
    assert description.remotes[0].md5 in str(error.value)
    assert visible(tmp_path) == []


def test_the_next_address_is_tried(server, tmp_path):
    description = served(server, tar_of(BATCHES))
    good = description.remotes[0]
    both = replace(good, urls=(server.url("missing"), *good.urls))
    fetch(replace(description, remotes=(both,)), tmp_path)
    assert len(server.ranges) == 2  # a file that is not there is not asked for again
    assert visible(tmp_path) == ["cifar-10-batches-py"]


def test_no_server_at_all(tmp_path):
    remote = RemoteFile("cifar-10-python.tar.gz", ("http://127.0.0.1:9/cifar-10-python.tar.gz",), "0" * 32)
    with pytest.raises(DataError, match="download failed"):
        fetch(replace(find_dataset("cifar10"), remotes=(remote,)), tmp_path)


def test_single_files_are_fetched_where_they_are_missing(server, tmp_path):
    files = {name: os.urandom(1000) for name in find_dataset("fashion").files}
    server.files = dict(files)
    remotes = tuple(RemoteFile(n, (server.url(n),), hashlib.md5(c).hexdigest()) for n, c in files.items())
    home = tmp_path / "fashion-mnist"
    home.mkdir()
    kept = next(iter(files))
    (home / kept).write_bytes(b"the user's own")
    fetch(replace(find_dataset("fashion"), remotes=remotes), tmp_path)
    assert {p.name: p.read_bytes() for p in home.iterdir()} == files | {kept: b"the user's own"}
    assert len(server.ranges) == 3


def test_a_folder_with_holes_is_left_alone(server, tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(DataError, match=r"batches\.meta: missing, although"):
        fetch(served(server, tar_of(BATCHES)), tmp_path)
    assert server.ranges == []


@pytest.mark.parametrize("member", ["../evil", "cifar-10-batches-py/../../evil", "/tmp/fedcc-evil"])
def test_a_tar_that_reaches_out_writes_nothing_outside(server, tmp_path, member):
    data = tmp_path / "data"
    data.mkdir()
    try:
        fetch(served(server, tar_of(BATCHES | {member: b"evil"})), data)
    except DataError as error:
        assert "outside" in str(error)  # noqa: PT017 - an absolute name may also be taken as one below the folder
        assert not (data / "cifar-10-batches-py").exists()
    else:
        assert member.startswith("/")
    assert visible(tmp_path) == ["data"]
    assert not Path("/tmp/fedcc-evil").exists()


def test_a_tar_with_a_link_out_is_refused(server, tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        link = tarfile.TarInfo("cifar-10-batches-py")
        link.type, link.linkname = tarfile.SYMTYPE, "../.."
        tar.addfile(link)
    with pytest.raises(DataError, match="cannot be unpacked"):
        fetch(served(server, buffer.getvalue()), tmp_path)
    assert visible(tmp_path) == ["cifar-10-python.tar.gz"]


@pytest.mark.parametrize("member", ["../evil", "a/../../evil", "/evil", "..\\evil", "C:\\evil"])
def test_a_zip_that_reaches_out_is_refused(server, tmp_path, member):
    data = tmp_path / "data"
    data.mkdir()
    content = zip_of({"tiny-imagenet-200/wnids.txt": b"n1", member: b"evil"})
    with pytest.raises(DataError, match="refused the member"):
        fetch(served(server, content, "tiny-imagenet-200.zip", "tiny"), data)
    assert visible(tmp_path) == ["data"]
    assert not (data / "tiny-imagenet-200").exists()


@pytest.mark.parametrize("limit", ["MAX_UNPACKED", "MAX_MEMBERS"])
def test_an_archive_that_would_fill_the_disk_is_refused(server, tmp_path, monkeypatch, limit):
    monkeypatch.setattr(fetching, limit, 5)
    zipped = zip_of({f"tiny-imagenet-200/{i}": b"x" for i in range(6)})
    for description in (served(server, tar_of(BATCHES)), served(server, zipped, "tiny-imagenet-200.zip", "tiny")):
        with pytest.raises(DataError, match=r"refused: over .* when unpacked"):
            fetch(description, tmp_path)
    assert visible(tmp_path) == ["cifar-10-python.tar.gz", "tiny-imagenet-200.zip"]


def test_an_encrypted_archive_is_refused(server, tmp_path):
    content = bytearray(zip_of({"tiny-imagenet-200/wnids.txt": b"n1"}))
    content[6] |= 1  # in the member's header and in the directory
    content[content.index(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(DataError, match=r"tiny-imagenet-200\.zip: cannot be unpacked: .*encrypted"):
        fetch(served(server, bytes(content), "tiny-imagenet-200.zip", "tiny"), tmp_path)


def test_an_archive_of_something_else(server, tmp_path):
    with pytest.raises(DataError, match=r"expected the folder cifar-10-batches-py/ in it, found \['other'\]"):
        fetch(served(server, tar_of({"other/x": b""})), tmp_path)
    (tmp_path / "cifar-10-python.tar.gz").unlink()
    with pytest.raises(DataError, match="cannot be unpacked"):
        fetch(served(server, b"no archive"), tmp_path)


def test_a_full_disk_names_the_folder(server, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    description = served(server, tar_of(BATCHES))
    monkeypatch.setattr(tarfile.TarFile, "extractall", full)
    with pytest.raises(DataError, match=f"{tmp_path}: no room left"):
        fetch(description, tmp_path)
    assert not (tmp_path / "cifar-10-batches-py").exists()


def test_load_fetches_what_is_absent(server, tmp_path, monkeypatch):
    """The files are not CIFAR's: that they were fetched and then refused by the reader shows both steps."""
    from fedcc.data import registry

    monkeypatch.setitem(registry.DATASETS, "cifar10", served(server, tar_of(BATCHES)))
    with pytest.raises(DataError, match=r"batches\.meta: truncated or altered: expected md5"):
        load("cifar10", tmp_path)
    assert len(server.ranges) == 1


def test_the_default_folder_is_made_when_it_is_needed(server, tmp_path, monkeypatch):
    """First use on a fresh machine: no cache folder, nothing named."""
    from fedcc.data import registry

    monkeypatch.delenv("FEDCC_DATA", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache" / name)
    monkeypatch.setitem(registry.DATASETS, "cifar10", served(server, tar_of(BATCHES)))
    assert not check("cifar10")[0].ok
    assert list(tmp_path.iterdir()) == []  # a look makes nothing
    with pytest.raises(DataError, match=r"batches\.meta: truncated or altered"):
        load("cifar10")
    assert visible(tmp_path / "cache" / "fedcc") == ["cifar-10-batches-py"]
    with pytest.raises(DataError, match="typo: no such data folder"):
        load("cifar10", tmp_path / "typo")
    assert visible(tmp_path) == ["cache"]


SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
from fedcc.data import find_dataset
from fedcc.data.dataset import RemoteFile
from fedcc.data.fetch import fetch
folder, url, md5 = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
fetch(replace(find_dataset("cifar10"), remotes=(RemoteFile("cifar-10-python.tar.gz", (url,), md5),)), Path(folder))
"""


def test_two_processes_at_once_download_once(server, tmp_path):
    remote = served(server, tar_of(BATCHES)).remotes[0]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), remote.urls[0], remote.md5]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        process.communicate(timeout=60)
    assert [process.returncode for process in both] == [0, 0]
    assert len(server.ranges) == 1
    assert visible(tmp_path) == ["cifar-10-batches-py"]


def a_tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member, content in members:
            member.size = member.size or len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def of_kind(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
    member.type, member.linkname = kind, link
    return member


def claiming(size: int) -> bytes:
    """A tar file whose first header, of a long name, claims so many bytes; zeros follow."""
    header = of_kind("x", tarfile.GNUTYPE_LONGNAME)
    header.size = size
    return gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(3 * 2**20))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (a_tar((of_kind("a", tarfile.SYMTYPE, "b"), b"")), "neither a file nor a folder"),
        (a_tar((of_kind("a", tarfile.FIFOTYPE), b"")), "neither a file nor a folder"),
        (a_tar((of_kind("a", tarfile.REGTYPE), b"x"), (of_kind("a/b", tarfile.REGTYPE), b"x")), "cannot be unpacked"),
        (a_tar((of_kind("a", tarfile.DIRTYPE), b""), (of_kind("a", tarfile.REGTYPE), b"x")), "cannot be unpacked"),
        (a_tar((of_kind("a", tarfile.REGTYPE), b"x"))[:60] + b"\xff" * 9, "cannot be unpacked"),
        (b"not compressed", "cannot be unpacked"),
        (claiming(2 * 2**20), "a header claims 2,0"),
    ],
    ids=["link", "pipe", "below a file", "file and folder", "damaged", "no gzip", "header"],
)
def test_an_odd_tar_is_refused_in_one_line(server, tmp_path, content, said):
    with pytest.raises(DataError, match=said) as refused:
        fetch(served(server, content), tmp_path)
    assert "cifar-10-python.tar.gz" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "cifar-10-batches-py").exists()


@pytest.mark.parametrize("file", ["cifar-10-python.tar.gz", "cifar-10-python.zip"])
def test_a_bomb_is_refused_before_it_is_unpacked(server, tmp_path, monkeypatch, file):
    monkeypatch.setattr("fedcc.data.fetch.MAX_UNPACKED", 2**20, raising=False)
    members = {f"cifar-10-batches-py/{n}": bytes(400_000) for n in range(3)}
    content = tar_of(members) if file.endswith(".gz") else zip_of(members)
    with pytest.raises(DataError, match="over 1,048,576 bytes"):
        fetch(served(server, content, file), tmp_path)
    assert not (tmp_path / "cifar-10-batches-py").exists()


def test_a_zip_with_a_damaged_or_odd_member_is_refused_in_one_line(server, tmp_path):
    whole = zip_of({"cifar-10-batches-py/a": b"x" * 100})
    link = zipfile.ZipInfo("cifar-10-batches-py/l")
    link.external_attr = 0o120777 << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        packed.writestr(link, "/etc/passwd")
    method = whole.index(b"PK\x01\x02") + 10
    unknown = whole[:method] + b"\x63\x00" + whole[method + 2 :]
    for content in (unknown, buffer.getvalue()):
        with pytest.raises(DataError, match="cannot be unpacked") as refused:
            fetch(served(server, content, "cifar-10-python.zip"), tmp_path)
        assert "\n" not in str(refused.value)
