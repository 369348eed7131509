"""Archives as data sets come in: members outside the folder, links, devices, bombs, truncated and damaged ones."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import shutil
import stat
import struct
import tarfile
import warnings
import zipfile
import zlib
from pathlib import Path

from fedcc.data import fetch
from fedcc.data.dataset import DataError
from fuzz.harness import Case, Target, Wrong
from fuzz.mutate import mutated_bytes

HOME = "images"  # the folder that an archive must hold
ROOM = 2**20  # bytes that an archive may hold in these tests
NAMES = (
    HOME, f"{HOME}/a", f"{HOME}/b/c", f"{HOME}/", "../out", "/tmp/fedcc-fuzz-out", f"{HOME}/../../out", "..", ".", "",
    f"{HOME}/..", "a" * 300, f"{HOME}/" + "d/" * 400 + "x", "x\x00y", "\udcff", "C:\\x", "\\\\host\\x", "CON",
    f"{HOME}/a/b", f"./{HOME}/z", f"{HOME}//y", "~", f"{HOME}/link/x", "é", f"{HOME}/\n", " ",
)  # fmt: skip
LINKS = ("../../../out", "/etc/passwd", "/", "..", f"{HOME}/a", "a", "b", ".", "", "link", f"{HOME}/link", "/dev/zero",
         "/proc/self/mem", "\udcff", "x" * 300)  # fmt: skip
KINDS = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE,
         tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE, b"S", b"x", b"g", b"L", b"K", b"Z", b"V")  # fmt: skip


class Archive(Target):
    """``_unpack``: the folder appears whole or not at all, and nothing anywhere else."""

    file: str
    refusals = (DataError,)
    fast = False

    def prepare(self, folder: Path) -> None:
        self.examples = [self.pack(random.Random(n), plain=True) for n in range(4)]

    def begin(self, folder: Path) -> None:
        fetch.MAX_UNPACKED = ROOM

    def pack(self, rng: random.Random, plain: bool = False) -> bytes:
        raise NotImplementedError

    def make(self, rng: random.Random) -> Case:
        if rng.random() < 0.4:
            return {self.file: self.damaged(rng)}
        return {self.file: self.pack(rng)}

    def damaged(self, rng: random.Random) -> bytes:
        return mutated_bytes(rng, rng.choice(self.examples), self.examples)

    def check(self, case: Case, folder: Path) -> bool:
        content = case[self.file]
        assert content is not None
        data = folder / "above" / "data"
        data.mkdir(parents=True)
        canary = folder / "above" / "canary"
        canary.write_bytes(b"as it was")
        (data / self.file).write_bytes(content)
        try:
            fetch._unpack(data / self.file, data, HOME)
            taken = True
        except DataError as error:
            if "\n" in str(error):
                raise Wrong("a refusal of several lines") from error
            if str(data) not in str(error):
                raise Wrong("the refusal names no file") from error
            taken = False
        finally:
            seen = self.left(folder)
            for path in (Path("/tmp/fedcc-fuzz-out"), folder / "above"):
                _removed(path)
        wanted = {"above", "above/data", "above/canary", f"above/data/{self.file}"}
        own = f"above/data/{HOME}"
        odd = {n for n in seen if n not in wanted and not (taken and (n == own or n.startswith(f"{own}/")))}
        if odd:
            raise Wrong(
                f"left behind or written elsewhere: {'a link' if any(seen[n] is None for n in odd) else 'files'}"
            )
        if taken and own not in seen:
            raise Wrong("accepted, and the folder is not there")
        if taken and any(n.startswith(own) and size is None for n, size in seen.items()):
            raise Wrong("a link or a device was unpacked")
        if sum(size or 0 for n, size in seen.items() if n.startswith(own)) > 2 * ROOM:
            raise Wrong("a bomb was unpacked")
        return taken

    def left(self, folder: Path) -> dict[str, int | None]:
        """What lies in the folder, with sizes; None for what is neither file nor folder."""
        found: dict[str, int | None] = {}
        if Path("/tmp/fedcc-fuzz-out").exists():
            found["/tmp/fedcc-fuzz-out"] = 0
        for path in folder.rglob("*"):
            about = path.lstat()
            plain = stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)
            size = about.st_size if stat.S_ISREG(about.st_mode) else 0
            found[str(path.relative_to(folder))] = size if plain else None
        if (folder / "above" / "canary").read_bytes() != b"as it was":
            found["canary"] = 0
        return found


def _removed(path: Path) -> None:
    """Away with it, whatever it is and whoever may not read it."""
    for place, _, _ in os.walk(path):
        Path(place).chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


class Tar(Archive):
    """A tar file, compressed by gzip as upstream's is, or otherwise."""

    name, file = "tar", "images.tar.gz"

    def pack(self, rng: random.Random, plain: bool = False) -> bytes:
        buffer = io.BytesIO()
        how = rng.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT))
        with tarfile.open(fileobj=buffer, mode="w", format=how, errors="surrogateescape") as packed:
            for n in range(rng.choice((1, 2, 3, 5))):
                member = tarfile.TarInfo(f"{HOME}/{n}" if plain or rng.random() < 0.5 else rng.choice(NAMES))
                content = rng.randbytes(rng.choice((0, 1, 100, 1000)))
                member.size, member.mode = len(content), 0o644
                if not plain:
                    _spoil(rng, member)
                try:
                    packed.addfile(
                        member, io.BytesIO(content + b"\x00" * max(0, min(member.size, 10_000) - len(content)))
                    )
                except (ValueError, OverflowError, OSError, UnicodeError, struct.error):
                    continue  # tarfile itself does not write such a member
        content = buffer.getvalue()
        if not plain and rng.random() < 0.3:
            content = _spoiled_header(rng, content)
        if plain:
            return gzip.compress(content, 1, mtime=0)
        return _squeezed(rng, content)

    def damaged(self, rng: random.Random) -> bytes:
        packed = rng.choice(self.examples)
        if rng.random() < 0.5:
            return mutated_bytes(rng, packed, self.examples)
        return gzip.compress(mutated_bytes(rng, gzip.decompress(packed)), 1, mtime=0)


def _spoil(rng: random.Random, member: tarfile.TarInfo) -> None:
    if rng.random() < 0.4:
        member.type = rng.choice(KINDS)
        member.linkname = rng.choice(LINKS)
    if rng.random() < 0.2:
        member.size = rng.choice((0, 1, 10**6, 2**31, 2**40, 2**62))
    if rng.random() < 0.2:
        member.mode = rng.choice((0, 0o7777, 0o100644, 0o4755, 2**20))
    if rng.random() < 0.1:
        member.mtime = rng.choice((-1, 0, 2**33, 2**62, 1e300))
    if rng.random() < 0.1:
        member.uid = rng.choice((0, -1, 2**21, 2**31))
    if rng.random() < 0.2:
        key = rng.choice(("size", "path", "linkpath", "mtime", "GNU.sparse.major", "GNU.sparse.map", "GNU.sparse.size",
                          "GNU.sparse.realsize", "hdrcharset", "charset", "uid", "GNU.sparse.name", "é"))  # fmt: skip
        value = rng.choice(("0", "1", "-1", "9" * 30, "nan", "x", "", *NAMES, "0,1,2", "0,99999999999", "BINARY"))
        member.pax_headers = {key: value}


def _spoiled_header(rng: random.Random, content: bytes) -> bytes:
    """A field of a member's header changed, with the checksum made right again."""
    blocks = max(1, len(content) // 512)
    at = 512 * rng.randrange(blocks)
    header = bytearray(content[at : at + 512])
    if len(header) < 512:
        return content
    field, width = rng.choice(
        ((0, 100), (100, 8), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8), (345, 155), (386, 48))
    )
    value = rng.choice((rng.randbytes(width), b"\xff" * width, b"\x80" + b"\xff" * width, b"7" * width, b"\x00" * width,
                        b"\x80" + b"\x00" * width, b"-1", b"S", b"9" * width))  # fmt: skip
    header[field : field + width] = value[:width].ljust(width, b"\x00")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\x00 " % sum(header)
    return content[:at] + bytes(header) + content[at + 512 :]


BOMB = gzip.compress(b"\x00" * (64 * 2**20), 9, mtime=0)


def _bomb() -> bytes:
    """A tar file of one file of zeros, 64 MiB, in 64 KiB."""
    member = tarfile.TarInfo(f"{HOME}/zeros")
    member.size = 64 * 2**20
    return gzip.compress(member.tobuf(), 1, mtime=0) + BOMB


def _squeezed(rng: random.Random, content: bytes) -> bytes:
    kind = rng.random()
    if kind < 0.7:
        return gzip.compress(content, 1, mtime=0)
    if kind < 0.75:
        return content
    if kind < 0.8:
        return bz2.compress(content, 1)
    if kind < 0.85:
        return lzma.compress(content, preset=0)
    if kind < 0.88:
        return gzip.compress(gzip.compress(content, 1, mtime=0), 1, mtime=0)
    if kind < 0.9:
        return _bomb()
    if kind < 0.95:  # thousands of members
        member = tarfile.TarInfo(f"{HOME}/m")
        return gzip.compress(b"".join(tarfile.TarInfo(f"{HOME}/m{n}").tobuf() for n in range(300)) + member.tobuf(), 1)
    whole = gzip.compress(content, 1, mtime=0)
    return whole[: rng.randrange(len(whole))]


class Zip(Archive):
    """A zip file."""

    name, file = "zip", "images.zip"

    def pack(self, rng: random.Random, plain: bool = False) -> bytes:
        buffer = io.BytesIO()
        warnings.simplefilter("ignore")  # of a name that is there twice
        with zipfile.ZipFile(buffer, "w") as packed:
            for n in range(rng.choice((1, 2, 3, 5))):
                name = f"{HOME}/{n}" if plain or rng.random() < 0.5 else rng.choice(NAMES)
                about = zipfile.ZipInfo("x", (1980, 1, 1, 0, 0, 0))
                about.filename = name
                about.compress_type = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
                content = rng.randbytes(rng.choice((0, 1, 100, 1000)))
                if not plain:
                    if rng.random() < 0.2:
                        about.compress_type = rng.choice((zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
                    if rng.random() < 0.3:
                        about.external_attr = (
                            rng.choice((0, stat.S_IFLNK | 0o777, stat.S_IFIFO, stat.S_IFCHR, 0o7777)) << 16
                        )
                        content = rng.choice(LINKS).encode("utf-8", "surrogatepass")
                    if rng.random() < 0.04:
                        content, about.compress_type = b"\x00" * (8 * ROOM), zipfile.ZIP_DEFLATED
                try:
                    packed.writestr(about, content)
                except (ValueError, UnicodeError, RuntimeError, OSError):
                    continue
        content = buffer.getvalue()
        return content if plain or rng.random() < 0.5 else _spoiled_entry(rng, content)


def _spoiled_entry(rng: random.Random, content: bytes) -> bytes:
    """A field of a local header, of the directory or of its end changed."""
    mark = rng.choice((b"PK\x03\x04", b"PK\x01\x02", b"PK\x01\x02", b"PK\x05\x06"))
    starts = [n for n in range(len(content)) if content.startswith(mark, n)]
    if not starts:
        return mutated_bytes(rng, content)
    at = rng.choice(starts) + rng.randrange(4, 46)
    width = rng.choice((1, 2, 4))
    value = rng.choice((0, 1, 2**7, 2**15, 2**31 - 1, 2**32 - 1, rng.getrandbits(32), len(content), zlib.crc32(b"")))
    return content[:at] + (value % 2 ** (8 * width)).to_bytes(width, "little") + content[at + width :]
