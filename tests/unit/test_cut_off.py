"""Commands of a federation that are cut off at any write, as by a power failure, and run again; old backups."""

from __future__ import annotations

import os
import shutil
import ssl
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from program import call

pytest.importorskip("flwr")

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key
from cryptography.x509 import Certificate

from fedcc.flower import succession, superlink
from fedcc.flower.command import Command, CommandSigner, read_public_key
from fedcc.flower.folder import FederationFolder, Site
from fedcc.flower.keys import fingerprint, listed_bytes, make_key_pair, public_bytes, read_certificates
from fedcc.flower.lifetime import renew, rotate_command_key
from fedcc.flower.members import add_client, replace_key, revoke_client, upgrade_federation
from fedcc.flower.site_error import SiteError
from fedcc.flower.succession import Trust, parse, read_text
from fedcc.flower.superlink import run_name
from fedcc.flower.supernode import CONNECTED, NOT_KNOWN, Credentials
from federation import make


class Cut(BaseException):
    """The machine is off."""


def is_cut(n: int, command: Callable[[], Any]) -> bool:
    """Whether a command is cut off before its write ``n``; nothing that it tries afterwards happens."""
    done = count()

    def guarded(write: Callable[..., Any]) -> Callable[..., Any]:
        def guard(*arguments: Any, **options: Any) -> Any:
            if next(done) >= n:
                if write is copyfile:
                    Path(arguments[1]).write_bytes(Path(arguments[0]).read_bytes()[:20])
                raise Cut
            return write(*arguments, **options)

        return guard

    copyfile = shutil.copyfile
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Path, "replace"), (Path, "unlink"), (Path, "mkdir"), (Path, "chmod"), (os, "link"),
                            (shutil, "copyfile")):  # fmt: skip
            patch.setattr(owner, name, guarded(getattr(owner, name)))
        try:
            command()
        except Cut:
            return True
    return False


def each_cut(path: Path, command: Callable[[Path], Any]) -> Iterator[Path]:
    """Copies of a folder in which a command was cut off, one for each write."""
    for n in count():
        copy = path.with_name(f"{path.name}{n}")
        shutil.copytree(path, copy)
        if not is_cut(n, lambda copy=copy: command(copy)):  # type: ignore[misc]
            assert n, "it writes something"
            return
        yield copy


@pytest.fixture
def folder(tmp_path: Path) -> FederationFolder:
    return make(tmp_path / "f", names=("north", "east"), models="mlp", skew="iid")


def asked(folder: FederationFolder, name: str = "north") -> Command:
    signer = CommandSigner(folder.command_key)
    _, content = signer.content("query.model", name, "run1", 1, folder.terms(name), None)
    return Command.read("query.model", content, Site.read(folder.site(name)))


def follow(folder: FederationFolder, name: str) -> Trust:
    """Have a site follow what the server shows to anybody."""
    site = folder.site(name)
    before = Trust.read(site, read_public_key(site / "command.pub"))
    *_, now = before.follow(parse(read_text(folder.operator)))
    now.write(site, before)
    return now


def check_server(folder: FederationFolder) -> None:
    """Every site comes to accept the server's certificate, and so do the operator's programs."""
    operator = folder.operator
    (server,) = read_certificates(operator / "server.crt")
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(operator / "server.crt", operator / "server.key")
    for accepted in (read_certificates(operator / "ca.crt"), *(follow(folder, n).authorities for n in folder.clients)):
        assert any(has_signed(authority, server) for authority in accepted)


def has_signed(authority: Certificate, server: Certificate) -> bool:
    with suppress(InvalidSignature):
        server.verify_directly_issued_by(authority)
        return True
    return False


def check_trust(folder: FederationFolder) -> None:
    """The server's files fit together, and every site has the newest CA and command key."""
    check_server(folder)
    operator = folder.operator
    (server,), (newest, *_) = (read_certificates(operator / f"{name}.crt") for name in ("server", "ca"))
    assert has_signed(newest, server)
    key = load_pem_private_key((operator / "ca.key").read_bytes(), None)
    assert key.public_key() == newest.public_key()
    command = CommandSigner(folder.command_key).key.public_key()
    assert read_public_key(operator / "command.pub") == command
    for name in folder.clients:
        assert asked(folder, name)
        now = follow(folder, name)
        assert (now.authorities[0], now.command) == (newest, command)
        assert asked(folder, name)


def add_east(folder: FederationFolder) -> None:
    """A site that receives its folder only now."""
    key = folder.site("east") / "east.pub"
    shutil.copy(folder.key("east"), key)
    folder.key("east").unlink()
    add_client(folder, "east", key)


def restart(folder: FederationFolder) -> None:
    succession.finish_rotation(folder.command_key)
    succession.forget_old_authorities(folder.operator)


@pytest.mark.parametrize("between", [
    asked, lambda folder: follow(folder, "north"), add_east, restart,
    lambda folder: (restart(folder), renew(folder, authority=False), check_server(folder)),
    lambda folder: (renew(folder, authority=False), check_server(folder), restart(folder)),
    rotate_command_key,
], ids=["again", "followed", "added", "restarted", "restarted, renewed", "renewed", "rotated"])  # fmt: skip
def test_a_new_ca_that_was_cut_off_locks_no_site_out(
    folder: FederationFolder, between: Callable[[FederationFolder], Any]
) -> None:
    """A site must get from the CA that it has to that of the server's certificate, whatever happens in between."""
    for path in each_cut(folder.path, lambda path: renew(FederationFolder.open(path), authority=True)):
        half = FederationFolder.open(path)
        assert asked(half)
        between(half)
        renew(half, authority=True)
        check_trust(half)
        restart(half)
        assert len(read_certificates(half.operator / "ca.crt")) == 1
        check_trust(half)


def test_a_ca_that_is_replaced_twice_without_a_restart_is_accepted_until_then(folder: FederationFolder) -> None:
    (first,) = read_certificates(folder.operator / "ca.crt")
    renew(folder, authority=True)
    renew(folder, authority=True)
    assert read_certificates(folder.operator / "ca.crt")[-1] == first, "the server that runs shows it"
    check_trust(folder)


@pytest.mark.parametrize("last", [rotate_command_key, lambda folder: renew(folder, authority=True)])
def test_a_rotation_of_the_command_key_that_was_cut_off_is_finished(
    folder: FederationFolder, last: Callable[[FederationFolder], Any]
) -> None:
    for path in each_cut(folder.path, lambda path: rotate_command_key(FederationFolder.open(path))):
        half = FederationFolder.open(path)
        assert asked(half)
        last(half)
        check_trust(half)
        rotate_command_key(half)
        check_trust(half)


def test_a_certificate_whose_renewal_was_cut_off_is_renewed(folder: FederationFolder) -> None:
    for path in each_cut(folder.path, lambda path: renew(FederationFolder.open(path), authority=False)):
        renew(FederationFolder.open(path), authority=False)
        check_trust(FederationFolder.open(path))


@pytest.mark.parametrize("name", ["east", "new"])
def test_a_client_whose_adding_was_cut_off_is_added(folder: FederationFolder, tmp_path: Path, name: str) -> None:
    """One that ``init`` has named, and another one."""
    make_key_pair(tmp_path / "own.key", tmp_path / "own.pub", name)
    if name == "east":
        folder.key(name).unlink()
    shutil.rmtree(folder.site(name), ignore_errors=True)

    def add(path: Path) -> FederationFolder:
        return add_client(FederationFolder.open(path), name, tmp_path / "own.pub")

    for path in each_cut(folder.path, add):
        assert add(path) == add(path) == FederationFolder.open(path)
        now = FederationFolder.open(path)
        assert name in now.members
        assert Site.open(now.site(name)).terms() == now.terms(name)
        check_trust(now)


def test_a_revocation_that_was_cut_off_is_finished(folder: FederationFolder) -> None:
    for path in each_cut(folder.path, lambda path: revoke_client(FederationFolder.open(path), "east")):
        assert revoke_client(FederationFolder.open(path), "east").members == ["north"]
        assert FederationFolder.open(path).members == ["north"]


def test_a_new_key_of_a_client_that_was_cut_off_is_taken(folder: FederationFolder, tmp_path: Path) -> None:
    """Also if all was written, but the server was not told."""
    make_key_pair(tmp_path / "own.key", tmp_path / "own.pub", "east")
    first = tmp_path / "first.pub"
    shutil.copy(folder.key("east"), first)

    def replace(path: Path) -> bool:
        return replace_key(FederationFolder.open(path), "east", tmp_path / "own.pub")

    for path in each_cut(folder.path, replace):
        assert replace(path)
        assert not replace(path)
        now = FederationFolder.open(path)
        assert public_bytes(now.key("east")) == public_bytes(tmp_path / "own.pub")
        with pytest.raises(ValueError, match="is or was in use"):
            replace_key(now, "east", first)


def test_a_run_that_replaces_another_and_was_cut_off_is_not_mixed_up_with_it(
    folder: FederationFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the name of the old one the sites have trained models: a new run would start from them."""
    folder.run.mkdir()
    for name in ("summary.json", "models.json", "metrics.jsonl", "environment.json", "checkpoint-2-0a.safetensors"):
        (folder.run / name).write_text('{"accuracy": {"final": null}, "experiment": {}}')
    shutil.copy(folder.path / "experiment.toml", folder.run)
    (folder.operator / "run.json").write_text('{"run": "0123456789abcdef"}')
    monkeypatch.setattr(superlink, "close_to_others", lambda *_: None)
    monkeypatch.setattr(superlink, "check_server", lambda _: None)
    monkeypatch.setattr(superlink, "_run_app", lambda folder, *_: names.append(run_name(folder)))
    names: list[str] = []
    for path in each_cut(folder.path, lambda path: superlink.train(FederationFolder.open(path), True, print)):
        half = FederationFolder.open(path)
        with suppress(ValueError) if (half.run / "experiment.toml").exists() else nullcontext():
            superlink.train(half, False, print)
        superlink.train(half, True, print)
        assert names
        assert "0123456789abcdef" not in names
        assert not list(half.run.iterdir())


def test_an_upgrade_that_was_cut_off_is_finished(folder: FederationFolder) -> None:
    for file in (folder.path / "federation.toml", *folder.path.glob("sites/*/site.toml")):
        file.write_text(file.read_text().replace("format = 2\n", ""))
    for file in (*folder.path.rglob("command.*"), folder.operator / "app.yaml"):
        file.unlink()
    for path in each_cut(folder.path, lambda path: upgrade_federation(FederationFolder.read(path))):
        upgrade_federation(FederationFolder.read(path))
        now = FederationFolder.open(path)
        for name in now.clients:
            assert Site.open(now.site(name))
            assert (now.operator / "app.yaml").read_bytes() == (now.site(name) / "app.yaml").read_bytes()
        check_trust(now)


@pytest.mark.parametrize("words", [("join", "a", "--folder"), ("rotate",)], ids=["join", "rotate"])
def test_a_key_that_a_site_was_making_is_made(
    folder: FederationFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    start, name, key = (tmp_path / "a", "a", "site") if words[0] == "join" else (folder.site("north"), "north", "next")
    start.mkdir(exist_ok=True)

    def make_key(path: Path) -> Any:
        return call(capsys, "federation", *words, path)

    for path in each_cut(start, make_key):
        done = make_key(path)
        assert done.code == 0, done
        assert fingerprint(path / f"{name}.pub") in done.out
        assert (path / f"{key}.key").stat().st_mode & 0o777 == 0o600
        private: Any = load_ssh_private_key((path / f"{key}.key").read_bytes(), None)
        assert listed_bytes(private.public_key()) == public_bytes(path / f"{name}.pub")
        assert make_key(path).out == done.out, "it is shown again: the operator may have taken it already"


def test_a_new_key_of_a_site_that_was_made_is_shown_again(
    folder: FederationFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its private half is at the site alone: once the operator has taken the public one, no other gets the site in."""
    site = folder.site("north")
    first = call(capsys, "federation", "rotate", site).out
    key = (site / "next.key").read_bytes()
    (site / "north.pub").unlink()
    assert call(capsys, "federation", "rotate", site).out == first
    assert (site / "next.key").read_bytes() == key
    assert fingerprint(site / "north.pub") in first
    other = call(capsys, "federation", "rotate", site, "--another").out
    assert other != first
    assert fingerprint(site / "north.pub") in other
    assert (site / "next.key").read_bytes() != key
    call(capsys, "federation", "rotate", folder.path, "--another").refused("--another is for a site's folder")


def test_a_backup_of_before_new_keys_works_with_the_files_that_the_manual_names(
    folder: FederationFolder, tmp_path: Path
) -> None:
    """docs/operate.md, "Backup": no statement leads a site back, so that nobody else can lead it back either."""
    shutil.copytree(folder.operator, tmp_path / "backup")
    rotate_command_key(folder)
    renew(folder, authority=True)
    check_trust(folder)
    restart(folder)
    for name in folder.clients:  # as a client does when the server has shown the new certificate
        shutil.copy(folder.operator / "ca.crt", folder.site(name))
    shutil.rmtree(folder.operator)
    shutil.copytree(tmp_path / "backup", folder.operator)
    with pytest.raises(SiteError, match="not signed by this federation's server"):
        asked(folder)
    for name in folder.clients:
        shutil.copy(folder.operator / "command.pub", folder.site(name))
    assert asked(folder)
    (server,) = read_certificates(folder.operator / "server.crt")
    assert not any(has_signed(authority, server) for authority in follow(folder, "north").authorities)
    for name in folder.clients:
        shutil.copy(folder.operator / "ca.crt", folder.site(name))
    check_trust(folder)


@pytest.mark.parametrize(("files", "other"), [
    ({"site": "old", "next": "new"}, "new"), ({"site": "new", "previous": "old"}, "old"),
])  # fmt: skip
def test_a_change_of_a_sites_key_that_was_cut_off_is_made(tmp_path: Path, files: dict[str, str], other: str) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for name, text in files.items():
        (site / f"{name}.key").write_text(text)

    def change(path: Path) -> bool:
        own = Credentials(path)
        own.note(NOT_KNOWN)
        return own.change()

    for path in each_cut(site, change):
        assert (path / "site.key").read_text() == files["site"]
        assert change(path)
        assert (path / "site.key").read_text() == other
        assert change(path), "both keys are still there"
        assert {file.stem: file.read_text() for file in path.iterdir()} == files
        own = Credentials(path)
        own.note(CONNECTED)
        assert not (path / "previous.key").exists()
