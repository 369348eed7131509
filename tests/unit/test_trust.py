"""Whom a site trusts over the years: new CAs and command keys, other versions, clocks, folders of older versions."""

from __future__ import annotations

import json
import shutil
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from program import call

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedcc import __version__
from fedcc.flower import command, keys, succession, supernode
from fedcc.flower.command import Command, CommandSigner, read_public_key, work_together
from fedcc.flower.contact import reach
from fedcc.flower.folder import FederationFolder, Site
from fedcc.flower.gate import RenewedCertificate
from fedcc.flower.lifetime import Reminder, renew, rotate_command_key, warnings_of
from fedcc.flower.programs import FlowerError
from fedcc.flower.site_error import SiteError
from fedcc.flower.succession import ForgedSuccession, Trust, parse
from federation import make


@pytest.fixture
def folder(tmp_path: Path) -> FederationFolder:
    return make(tmp_path / "f", names=("north", "east"), models="mlp", skew="iid")


def asked(folder: FederationFolder, name: str = "north", version: str = __version__) -> Command:
    """A command of the server as the site reads it."""
    signer = CommandSigner(folder.command_key, version)
    _, content = signer.content("query.model", name, "run1", 1, folder.terms(name), None)
    return Command.read("query.model", content, Site.read(folder.site(name)))


def trusts(folder: FederationFolder, name: str = "north") -> tuple[bytes, bytes]:
    return (folder.site(name) / "ca.crt").read_bytes(), (folder.site(name) / "command.pub").read_bytes()


# -- statements


def test_a_command_with_a_new_key_is_obeyed_if_the_old_key_has_signed_it(folder: FederationFolder) -> None:
    before, old = trusts(folder), folder.command_key.read_bytes()
    rotate_command_key(folder)
    renew(folder, authority=True)
    rotate_command_key(folder)
    assert asked(folder).run == "run1"
    assert trusts(folder)[1] == (folder.operator / "command.pub").read_bytes() != before[1]
    authorities = keys.read_certificates(folder.site("north") / "ca.crt")
    assert authorities == keys.read_certificates(folder.operator / "ca.crt")
    assert len(authorities) == 2, "the old one until the server shows the new one"
    folder.command_key.write_bytes(old)  # whoever has the old key
    with pytest.raises(SiteError, match="not signed by this federation's server"):
        asked(folder)
    assert asked(folder, "east"), "a site that was away and has the old key still"


def test_a_rotation_that_was_interrupted_leaves_a_key_that_sites_obey(folder: FederationFolder) -> None:
    new = folder.command_key.with_name(succession.NEXT)
    keys.make_command_key(new)
    asked(folder)  # before the statement
    key = CommandSigner(folder.command_key).key
    digest = succession._digest(key.public_key())
    statement = succession.Statement("command", digest, new.with_suffix(".pub").read_text().strip())
    succession._append(folder.operator, statement.sign(key))
    before = trusts(folder)
    asked(folder)  # after it, before the new key is used
    assert trusts(folder) == before
    rotate_command_key(folder)
    asked(folder)
    assert trusts(folder)[1] == (folder.operator / "command.pub").read_bytes() != before[1]
    assert not new.exists()


def test_a_forged_succession_is_refused_and_nothing_is_written(folder: FederationFolder, tmp_path: Path) -> None:
    other = make(tmp_path / "other", names=("north", "east"), models="mlp", skew="iid")
    before = trusts(folder)
    renew(folder, authority=True)
    (statement,) = parse(succession.read_text(folder.operator))
    evil = keys.read_certificates(other.operator / "ca.crt")[0]
    pem = evil.public_bytes(keys.Encoding.PEM).decode()
    thief = Ed25519PrivateKey.generate()
    for forged in (replace(statement, value=pem), replace(statement, value=pem).sign(thief),
                   replace(statement, signature=""), replace(statement, kind="command", value=pem)):  # fmt: skip
        trust = Trust.read(folder.site("north"), read_public_key(folder.site("north") / "command.pub"))
        if forged.kind == "ca":
            with pytest.raises(ForgedSuccession, match="not signed with this federation's command key"):
                list(trust.follow([forged]))
        (folder.operator / succession.FILE).write_text(json.dumps([vars(forged)]))
        if forged.kind == "ca":
            with pytest.raises(SiteError, match="not signed with this federation's command key"):
                asked(folder)
        else:
            asked(folder)  # it is about nothing that the site has
        assert trusts(folder) == before
    digest = succession._digest(trust.command)
    stolen = succession.Statement("command", digest, (other.operator / "command.pub").read_text().strip()).sign(thief)
    (folder.operator / succession.FILE).write_text(json.dumps([vars(stolen)]))
    shutil.copy(other.command_key, folder.command_key)
    with pytest.raises(SiteError):
        asked(folder)
    assert trusts(folder) == before


@pytest.mark.parametrize("text", ["", "{", "5", "[5]", '[{"kind": "ca"}]', '[{"a": 1}]', "[" * 100_000, " " * 300_000,
                                  '[{"kind": "x", "replaces": "", "value": ""}]',
                                  '[{"kind": "ca", "replaces": 5, "value": ""}]'])  # fmt: skip
def test_what_is_no_succession_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


@pytest.mark.parametrize("content", [b"", b"[", b"[5]", b"\xff\xfe", b"5", b" " * 300_000])
def test_a_damaged_file_of_statements_is_named_before_any_site_is_asked(
    folder: FederationFolder, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = folder.operator / succession.FILE
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"succession\.json is damaged: (a succession is a list|statements may have)"):
        CommandSigner(folder.command_key)
    for words in (("server",), ("rotate",), ("renew", "--ca")):
        call(capsys, "federation", words[0], folder.path, *words[1:]).refused(f"{path} is damaged")
    assert path.read_bytes() == content


# -- versions


def test_patch_releases_work_together(folder: FederationFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    start = __version__.rpartition(".")[0]
    for version in (f"{start}.0", f"{start}.77"):
        assert asked(folder, version=version)
    for version in ("0.99.0", f"{start}", f"{start}.1.1", "x", "٠.1.0"):
        with pytest.raises(SiteError) as error:
            asked(folder, version=version)
        assert (error.value.code, error.value.value) == ("version", __version__)
        assert __version__ in str(error.value)
    monkeypatch.setattr(command, "__version__", "1.2.3")
    assert asked(folder, version="1.2.9")
    assert not work_together("1.2.3", "2.2.3")


# -- a site reaches its server


class Server:
    """A server at the federation's port: its certificate, the statements that it shows, and its clock."""

    def __init__(self, operator: Path, statements: str = "[]", ahead: float = 0.0, date: str = "", answer: bytes = b""):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if answer:  # instead of a proper one
                    self.wfile.write(answer)
                    return
                self.send_response_only(200)
                now = datetime.now(UTC) + timedelta(seconds=ahead)
                self.send_header("date", date or now.strftime("%a, %d %b %Y %H:%M:%S GMT"))
                self.end_headers()
                self.wfile.write(statements.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(operator / "server.crt", operator / "server.key")
        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.server.socket = self.context.wrap_socket(self.server.socket, server_side=True)
        self.address = f"localhost:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*arguments: Any, **options: Any) -> Server:
        started.append(Server(*arguments, **options))
        return started[-1]

    yield start
    for server in started:
        server.server.shutdown()
        server.server.server_close()


def test_a_site_accepts_a_new_ca_that_the_command_key_has_signed(
    folder: FederationFolder, serve: Callable[..., Server]
) -> None:
    site, old = folder.site("north"), serve(folder.operator)
    assert reach(old.address, site) == (None, [])
    renew(folder, authority=True)
    text = succession.read_text(folder.operator)
    reason, notes = reach(serve(folder.operator, text).address, site)  # it was away and knows the old CA only
    assert reason is None
    assert "the old one is no longer accepted" in notes[0]
    succession.forget_old_authorities(folder.operator)
    assert trusts(folder)[0] == (folder.operator / "ca.crt").read_bytes()
    with pytest.raises(FlowerError, match="does not show a certificate of this federation"):
        reach(old.address, site)


@pytest.mark.parametrize("answer", [b"\x1b[2J\x9b2J\x07 200 OK\r\n\r\n", b"HTTP/7\x1b[2J 200 OK\r\n\r\n",
                                    b"HTTP/1.1 2\x1b[2J0 OK\r\n\r\n", b"HTTP/1.1 0 \x1b[2J" + bytes(9000)])  # fmt: skip
def test_words_of_whoever_answers_cannot_control_a_terminal(
    folder: FederationFolder, serve: Callable[..., Server], answer: bytes
) -> None:
    reason, _ = reach(serve(folder.operator, answer=answer).address, folder.site("north"))
    assert reason
    assert reason.isprintable()
    assert len(reason) <= 200


def test_a_site_refuses_another_ca(folder: FederationFolder, tmp_path: Path, serve: Callable[..., Server]) -> None:
    other = make(tmp_path / "other", names=("north", "east"), models="mlp", skew="iid")
    before = trusts(folder)
    renew(folder, authority=True)
    (statement,) = parse(succession.read_text(folder.operator))
    mine = keys.read_certificates(other.operator / "ca.crt")[0].public_bytes(keys.Encoding.PEM).decode()
    forged = replace(statement, value=mine).sign(CommandSigner(other.command_key).key)
    for shown, words in (
        ([], "does not show a certificate of this federation"),
        ([statement], "does not show a certificate of this federation"),  # a true one, of another CA
        ([forged], "must not be trusted: a new ca is not signed with this federation's command key"),
    ):
        for name in ("ca.crt", "command.pub"):
            (folder.site("north") / name).write_bytes(before[name == "command.pub"])
        server = serve(other.operator, json.dumps([vars(s) for s in shown]))
        with pytest.raises(FlowerError, match=words):
            reach(server.address, folder.site("north"))
        authorities = keys.read_certificates(folder.site("north") / "ca.crt")
        assert keys.read_certificates(other.operator / "ca.crt")[0] not in authorities


def test_a_client_that_had_its_server_waits_while_somebody_else_answers(
    folder: FederationFolder, tmp_path: Path, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that wants a login first, or somebody on the way: it ended the client."""
    site, other = folder.site("north"), make(tmp_path / "other", names=("north", "east"), models="mlp", skew="iid")
    right, wrong = serve(folder.operator).address, serve(other.operator, date=f"1 Jan {9 * 10**20} 0:00 GMT").address
    said: list[str] = []
    sessions: list[str] = []

    class Ended(Exception):
        pass

    def run(*_: Any) -> None:
        sessions.append("session")
        if len(sessions) == 2:
            raise Ended

    class Nothing:
        folder = tmp_path

        def __init__(self, _: Path):
            pass

        def close(self) -> None:
            pass

    def take_part(*servers: str) -> None:
        answers = iter(servers)
        monkeypatch.setattr(supernode, "reach", lambda _, site: reach(next(answers), site))
        supernode.take_part(Site.read(site), site / "data.npz", lambda line, *_: said.append(line))

    monkeypatch.setattr(supernode, "_run_supernode", run)
    monkeypatch.setattr(supernode, "ForkServer", Nothing)
    monkeypatch.setattr(supernode, "RETRY_SECONDS", 0.0)
    (site / "state" / "home" / "apps" / "half").mkdir(parents=True)
    with pytest.raises(FlowerError, match="does not show a certificate of this federation"):
        take_part(wrong)
    assert not sessions
    assert not (site / "state" / "home" / "apps").exists(), "an app that was unpacked in part would be used"
    with (
        supernode.only_client(Site.read(site)),
        pytest.raises(FlowerError, match=r"another client takes part with .*; end it first"),
    ):
        take_part(right)
    with pytest.raises(Ended):
        take_part(right, wrong, wrong, "localhost:1", right)
    waiting = [line for line in said if "cannot be reached" in line]
    assert len(sessions) == len(waiting) == 2, "each reason is said once"
    assert f"the server cannot be reached ({wrong} does not show a certificate of this federation: " in waiting[0]
    assert "retrying until it can be" in waiting[0]
    assert "refused" in waiting[1]


@pytest.mark.parametrize(("days", "ahead", "words"), [
    (-5, 0, "shows a certificate that has expired: `fedcc federation renew` on the server renews it"),
    (-5, -10 * 86_400, "certificate has expired): this machine's clock is 240:00:00 ahead of the server's"),
])  # fmt: skip
def test_a_certificate_that_is_not_valid_and_a_clock_that_is_off_are_told_apart(
    folder: FederationFolder, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, days: int, ahead: float,
    words: str,
) -> None:  # fmt: skip
    valid = timedelta(days=365)
    with monkeypatch.context() as patch:

        class Then(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return datetime.now(tz) + timedelta(days=days) - valid

        patch.setattr(keys, "datetime", Then)
        keys.make_server_certificate(folder.operator, folder.hosts)
    with pytest.raises(FlowerError) as error:
        reach(serve(folder.operator, ahead=ahead).address, folder.site("north"))
    assert words in str(error.value).replace("240:00:01", "240:00:00")  # it is told in whole seconds


def test_a_clock_that_is_off_and_a_certificate_that_expires_soon_are_said(
    folder: FederationFolder, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert warnings_of(folder) == []
    monkeypatch.setattr(keys, "SERVER_DAYS", 20)
    monkeypatch.setattr(keys, "CA_DAYS", 29)
    renew(folder, authority=True)
    reason, notes = reach(serve(folder.operator, succession.read_text(folder.operator), ahead=250).address,
                          folder.site("north"))  # fmt: skip
    assert reason is None
    assert "this machine's clock is 4:10 behind the server's; beyond 5 minutes" in notes[1].replace("4:09", "4:10")
    assert notes[2:] == ["the server's certificate expires in 20 days: tell the operator to renew it",
                         "the federation's CA expires in 29 days: tell the operator to renew it with --ca"]  # fmt: skip
    status = " ".join(call(capsys, "federation", "status", folder.path).out.split())
    assert f"warning: the server's certificate expires in 20 days: `fedcc federation renew {folder.path}`" in status
    assert f"the CA expires in 29 days: `fedcc federation renew {folder.path} --ca`" in status
    said: list[str] = []
    remind = Reminder(lambda: warnings_of(folder), lambda line, level="info": said.append(f"{level} {line[:12]}"))
    remind(), remind()
    assert said == ["warning the server's", "warning the CA expir"], "once a day"


def test_a_server_that_runs_uses_a_renewed_certificate_and_waits_with_one_of_a_new_ca(
    folder: FederationFolder, serve: Callable[..., Server]
) -> None:
    operator, server = folder.operator, serve(folder.operator)
    RenewedCertificate(server.context, operator / "server.crt", operator / "server.key")

    def shown() -> str:
        host, _, port = server.address.partition(":")
        return ssl.get_server_certificate((host, int(port)))

    first = shown()
    assert first == (operator / "server.crt").read_text()
    renew(folder, authority=False)
    shown()  # its handshake notices
    second = shown()
    assert second == (operator / "server.crt").read_text() != first
    renew(folder, authority=True)
    assert [shown(), shown()] == [second, second]


def test_certificates_are_valid_as_long_as_the_pages_say(folder: FederationFolder) -> None:
    days = [keys.days_left(keys.read_certificates(folder.operator / f"{name}.crt")[0]) for name in ("server", "ca")]
    assert [round(d) for d in days] == [365, 3653]


# -- folders of older versions


def test_an_older_folder_is_refused_with_the_command_that_upgrades_it(
    folder: FederationFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    site = folder.site("north")
    for path in (folder.path / "federation.toml", *folder.path.glob("sites/*/site.toml")):
        path.write_text(path.read_text().replace("format = 2\n", ""))
    (folder.operator / "app.yaml").unlink()
    client = ("federation", "client", site, "--data", site / "data.npz")
    for words, path in ((("federation", "server", folder.path), folder.path), (client, site),
                        (("federation", "run", folder.path), folder.path),
                        (("federation", "revoke", folder.path, "north"), folder.path)):  # fmt: skip
        call(capsys, *words).refused(f"has format 1, of an older fedcc: `fedcc federation upgrade {path}` upgrades it")
    call(capsys, "federation", "upgrade", site)
    assert Site.open(site).format == 2
    call(capsys, "federation", "upgrade", folder.path)
    assert FederationFolder.open(folder.path) == folder
    assert Site.open(folder.site("east"))
    assert (folder.operator / "app.yaml").exists(), "a client that is added needs it"
    path = folder.path / "federation.toml"
    path.write_text(path.read_text().replace("format = 2", "format = 3"))
    call(capsys, "federation", "server", folder.path).refused("has format 3, this fedcc knows 2")
