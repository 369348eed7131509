"""Clients that come and go: joining, adding, revoking and new keys; in a run too, with clients in this process."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from program import call

pytest.importorskip("flwr")

from fedcc.experiments.store import RunFolder
from fedcc.flower.cohort import NoQuorum
from fedcc.flower.folder import FederationFolder, Site
from fedcc.flower.keys import federation_fingerprint, fingerprint, make_authority, make_command_key, make_key_pair
from fedcc.flower.members import add_client, register_members, replace_key, revoke_client
from fedcc.flower.programs import FlowerError
from fedcc.flower.supernode import CONNECTED, NOT_KNOWN, Credentials
from federation import NAMES, LocalTransport, make

COMPRESSED = (  # a point in a form that is not read
    b"ecdsa-sha2-nistp384 AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAIbmlzdHAzODQAAABhCOhrmV41Dk0xKpWmt9XYzc20aC9YiAChzWyXLh"
    b"3LKlrDjZAEaVGwPMs7F5qJ/aiLG0hbnywfRLDdQc5uPDppC7+qvsHh/0rvskYf3aZim+y9Q890wT2MGhYlYSJD8ARhSA=="
)
MLP = {"models": "mlp", "rules": {"quorum": 1, "grace": 60.0}}


def new_key(tmp_path: Path, name: str) -> Path:
    make_key_pair(tmp_path / f"{name}.key", tmp_path / f"{name}.pub", name)
    return tmp_path / f"{name}.pub"


def add_site(folder: FederationFolder, tmp_path: Path, name: str = "new") -> None:
    """Add a client whose samples are those of north."""
    add_client(folder, name, new_key(tmp_path, name))
    shutil.copy(folder.site("north") / "data.npz", folder.site(name))


def when(transport: LocalTransport, text: str, action: Callable[[], Any]) -> Any:
    """A server that does something when its log says something for the first time."""
    server = transport.server()
    say, waiting = server.log.say, [action]

    def heard(line: str, *level: Any) -> None:
        say(line, *level)
        if line.startswith(text) and waiting:
            waiting.pop()()

    server.log.say = heard  # type: ignore[method-assign]
    return server


def present(folder: FederationFolder) -> list[list[str]]:
    return [record["federation"]["present"] for record in RunFolder(folder.run).metrics()]


def test_clients_come_and_go_between_rounds(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", rounds=4, **MLP)

    def change() -> None:
        revoke_client(folder, "east")
        add_site(folder, tmp_path)

    transport = LocalTransport(folder, share={*NAMES, "new"})
    when(transport, "round 1 of", change).train()
    others = ["north", "south", "west"]
    assert present(folder) == [list(NAMES), others, [*others, "new"], [*others, "new"]]
    first, second, *_ = records = RunFolder(folder.run).metrics()
    assert (first["federation"]["added"], second["federation"]["added"]) == ([], ["new"])
    assert [r["federation"]["revoked"] for r in records] == [[], *[["east"]] * 3]
    assert [r["present"] for r in records] == [[0, 1, 2, 3], [0, 2, 3], [0, 2, 3, 4], [0, 2, 3, 4]]
    assert ("east", "train", 2) not in transport.sent
    assert not [message for message in transport.sent if message[0] == "east" and message[1] != "train"]
    summary = json.loads((folder.run / "summary.json").read_text())
    assert summary["federation"] == {"clients": [*NAMES, "new"], "kept_models": [], "revoked": ["east"]}
    assert Site.read(folder.site("new")).number == 4


def test_a_client_that_is_revoked_during_a_round_is_not_waited_for_and_its_answer_does_not_count(
    tmp_path: Path,
) -> None:
    folder = make(tmp_path / "f", rounds=2, models="mlp", rules={"quorum": 4})
    transport = LocalTransport(folder, away={"west"})

    def change() -> None:
        revoke_client(folder, "east")  # it has answered
        revoke_client(folder, "west")  # it is waited for

    when(transport, "round 1: south has answered", change).train()
    assert present(folder) == [["north", "south"]] * 2


def test_a_client_that_is_revoked_at_the_end_of_a_round_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks for who is connected, its answer was used."""
    monkeypatch.setattr("fedcc.flower.cohort.ONLINE_SECONDS", 1000.0)
    folder = make(tmp_path / "f", rounds=1, models="mlp", rules={"quorum": 4})
    transport = LocalTransport(folder)
    when(transport, "round 1: west has answered", lambda: revoke_client(folder, "east")).train()
    assert present(folder) == [["north", "south", "west"]]


def test_revoked_clients_are_not_counted_by_predictions(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", rounds=1, **MLP)
    LocalTransport(folder, share=set()).server().train()
    revoke_client(folder, "east")
    np.savez(tmp_path / "in.npz", x=np.load(folder.path / "public.npz")["x"][:3])
    log = folder.operator / "run.log"
    before = log.read_text()
    transport = LocalTransport(FederationFolder.open(folder.path), share=set())
    transport.server().query(tmp_path / "in.npz", tmp_path / "out.npz")
    said = log.read_text().removeprefix(before)
    assert "asking 3 clients query.predict" in said
    assert "has answered query.predict (3 of 3)" in said
    assert "4 clients" not in said
    assert "of 4" not in said
    assert "east" not in {name for name, *_ in transport.sent}


def test_a_checkpoint_of_before_a_change_is_resumed(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", rounds=4, models="mlp", rules={"quorum": 4, "deadline": 1.0, "patience": 1})
    transport = LocalTransport(folder)
    server = when(transport, "round 1 of", lambda: transport.away.update(NAMES))
    with pytest.raises(NoQuorum):
        server.train()
    revoke_client(folder, "east")
    add_site(folder, tmp_path)
    LocalTransport(FederationFolder.open(folder.path), share={*NAMES, "new"}).server().train()
    others = ["north", "south", "west"]
    assert present(folder) == [list(NAMES), others, [*others, "new"], [*others, "new"]]


def test_a_client_that_has_not_joined_yet_counts_for_the_quorum(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", rounds=1, models="mlp", rules={"quorum": 4, "deadline": 1.0, "patience": 1})
    folder.key("west").unlink()
    with pytest.raises(NoQuorum, match="west is not connected"):
        LocalTransport(folder).server().train()


def test_a_key_that_changes_during_a_round_is_asked_again(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", rounds=1, models="mlp", rules={"quorum": 4})
    transport = LocalTransport(folder, fault=lambda *message: "late" if message == ("west", "train", 1) else None)

    def change() -> None:
        replace_key(folder, "west", new_key(tmp_path, "west"))
        transport.fault = lambda *_: None

    when(transport, "round 1: south has answered", change).train()
    assert present(folder) == [list(NAMES)]
    assert transport.sent.count(("west", "train", 1)) == 2


def test_a_folders_file_that_is_saved_half_does_not_stop_a_run(tmp_path: Path) -> None:
    """It is read every few seconds; an editor may be writing it. Half of it may be valid TOML, with fewer clients."""
    folder = make(tmp_path / "f", rounds=3, **MLP)
    file = folder.path / "federation.toml"
    whole = file.read_text()
    halves = ["", whole[: whole.index("west =")], whole[:-20], whole.replace("[clients]", "clients = 3\n[x]"),
              whole.replace("revoked", "x").replace("port", 'revoked = ["nobody"]\nport'), None]  # fmt: skip

    def change() -> None:
        for half in halves:
            file.unlink() if half is None else file.write_text(half)
            assert server.cohort.online() == set(NAMES)
            server.cohort.look_for_changes()
        file.write_text(whole)
        revoke_client(folder, "east")

    server = when(LocalTransport(folder), "round 1 of", change)
    server.train()
    others = ["north", "south", "west"]
    assert present(folder) == [list(NAMES), others, others]
    said = [line for line in (folder.operator / "run.log").read_text().splitlines() if "its present clients" in line]
    assert len(said) == 1, "it is said once"
    assert "federation.toml" in said[0]


# -- who is refused


@pytest.fixture
def folder(tmp_path: Path) -> FederationFolder:
    return make(tmp_path / "f", names=("north", "east"), models="mlp", skew="iid")


def test_numbers_are_never_used_again(folder: FederationFolder, tmp_path: Path) -> None:
    terms = folder.terms("east")
    with pytest.raises(ValueError, match="north has a key"):
        add_client(folder, "north", new_key(tmp_path, "north"))
    revoke_client(folder, "north")
    for name, words in (("north", "north was revoked, and its number is not used again"), ("a/b", "a client's name")):
        with pytest.raises(ValueError, match=words):
            add_client(folder, name, new_key(tmp_path, name.replace("/", "")))
    add_client(folder, "new", new_key(tmp_path, "new"))
    now = FederationFolder.open(folder.path)
    assert list(now.clients) == ["north", "east", "new"]
    assert now.terms("east") == terms
    assert (now.members, now.revoked) == (["east", "new"], ("north",))
    revoke_client(folder, "new")
    with pytest.raises(ValueError, match="east is the last client"):
        revoke_client(folder, "east")
    with pytest.raises(ValueError, match="unknown client 'esat'; did you mean 'east'"):
        revoke_client(folder, "esat")


def test_a_key_that_somebody_has_or_had_is_refused(folder: FederationFolder, tmp_path: Path) -> None:
    old = tmp_path / "copy.pub"
    old.write_text(" ".join(folder.key("north").read_text().split()[:2]))  # without its name
    with pytest.raises(ValueError, match="is or was in use"):
        add_client(folder, "new", old)
    replace_key(folder, "north", new_key(tmp_path, "north"))
    revoke_client(folder, "east")
    shutil.copy(folder.key("east"), tmp_path / "east.pub")
    for name, file in (("new", old), ("north", old)):
        with pytest.raises(ValueError, match="is or was in use"):
            add_client(folder, name, file) if name == "new" else replace_key(folder, name, file)
    with pytest.raises(ValueError, match="is the key of 'east', not of new"):
        add_client(folder, "new", tmp_path / "east.pub")
    with pytest.raises(ValueError, match="east was revoked"):
        replace_key(folder, "east", new_key(tmp_path, "east"))


def test_what_is_not_a_sites_key_is_refused(folder: FederationFolder, tmp_path: Path) -> None:
    make_command_key(tmp_path / "command.key")
    for content in (b"", b"hello", b"\xff" * 100, b"ssh-rsa " + b"A" * 10_000, (tmp_path / "command.pub").read_bytes(),
                    (folder.site("north") / "site.key").read_bytes(), COMPRESSED):  # fmt: skip
        (tmp_path / "x.pub").write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.pub must hold"):
            add_client(folder, "new", tmp_path / "x.pub")
    assert FederationFolder.open(folder.path) == folder


def test_the_key_that_was_compared_is_the_one_that_is_added(
    folder: FederationFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody replaces the file while two people compare fingerprints."""
    file, other = new_key(tmp_path, "new"), new_key(tmp_path, "x")

    def confirm(_: str) -> bool:
        file.write_text(" ".join(other.read_text().split()[:2]))
        return True

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", confirm)
    call(capsys, "federation", "add", folder.path, "new", file).failed("has changed since its fingerprint", code=2)
    assert FederationFolder.open(folder.path) == folder
    assert not folder.key("new").exists()


def test_settings_that_were_changed_while_two_people_compared_stay(folder: FederationFolder, tmp_path: Path) -> None:
    """A change writes the folder's files again: as they are, not as its program has read them."""
    changes = (("federation.toml", "grace = 5.0", "grace = 7.0"), ("experiment.toml", "epochs = 1", "epochs = 4"))
    for path, old, new in changes:
        text = (folder.path / path).read_text()
        assert old in text
        (folder.path / path).write_text(text.replace(old, new))
    add_client(folder, "new", new_key(tmp_path, "new"))
    revoke_client(folder, "east")
    now = FederationFolder.open(folder.path)
    assert (now.rules.grace, now.experiment.training.epochs, now.revoked) == (7.0, 4, ("east",))
    assert Site.open(now.site("new")).experiment.training.epochs == 4


def test_the_keys_of_many_clients_reach_the_server(folder: FederationFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux passes at most 128 KiB in one argument: no server started with more than 550 clients."""
    clients = {f"c{n}": "mlp" for n in range(700)}
    replace(folder, clients=clients).write()
    key = folder.key("north").read_bytes()
    for name in clients:
        folder.key(name).write_bytes(key)
    script = "import json, sys; keys = json.load(sys.stdin); sys.exit(f'{len(keys)} keys for {sys.argv[1]}')"
    monkeypatch.setattr("fedcc.flower.members.REGISTER", script)
    with pytest.raises(FlowerError, match="700 keys for fedcc"):
        register_members(folder, {})


def test_a_client_without_a_key_has_none_to_replace(folder: FederationFolder, tmp_path: Path) -> None:
    folder.key("east").unlink()
    with pytest.raises(ValueError, match="east has no key yet; `fedcc federation add FOLDER east FILE`"):
        replace_key(folder, "east", new_key(tmp_path, "east"))


def test_a_client_is_not_called_as_the_operators_file_in_its_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its public key, command.pub, would take the place of the key whose commands it obeys."""
    monkeypatch.chdir(tmp_path)
    call(capsys, "federation", "join", "command").failed("a client cannot be called command", code=2)
    assert not (tmp_path / "command").exists()


def test_a_new_client_needs_a_network_that_the_method_can_use(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", "fedavg", ("north", "east"), models="mlp", skew="iid")
    with pytest.raises(ValueError, match="needs one of the networks that clients have, mlp, got mlp64"):
        add_client(folder, "new", new_key(tmp_path, "new"), "mlp64")
    folder = make(tmp_path / "g", "fedcc", ("north", "east"), models="mlp,mlp64", skew="iid")
    with pytest.raises(ValueError, match="--model must name the network of a new client; the others have mlp, mlp64"):
        add_client(folder, "new", tmp_path / "new.pub")
    assert add_client(folder, "new", tmp_path / "new.pub", "mlp32").clients["new"] == "mlp32"


# -- the commands


def other_federation(place: Path, file: str) -> bytes:
    place.mkdir()
    make_authority(place)
    make_command_key(place / "command.key")
    (place / "app.yaml").write_text("fedcc: ssh-ed25519 AAAA\n")
    return (place / file).read_bytes()


def test_a_site_joins_with_a_key_of_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    init = ("federation", "init", "fed", "--client", "a", "--client", "b", "--skew", "iid", "--device", "cpu")
    said = call(capsys, *init).out
    assert "Fingerprint of the federation" in said
    assert not list(tmp_path.rglob("site.key"))
    assert FederationFolder.open(tmp_path / "fed").members == []
    joined = call(capsys, "federation", "join", "a").out
    assert fingerprint(Path("a/a.pub")) in joined
    assert stat.S_IMODE(Path("a/site.key").stat().st_mode) == 0o600
    key = Path("a/site.key").read_bytes()
    assert call(capsys, "federation", "join", "a").out == joined, "it shows the fingerprint again"
    assert Path("a/site.key").read_bytes() == key
    add = ("federation", "add", "fed", "a", "a/a.pub")
    make_key_pair(tmp_path / "other.key", tmp_path / "other.pub", "a")
    wrong = call(capsys, *add, "--fingerprint", fingerprint(tmp_path / "other.pub"))
    wrong.failed("it is another key", code=2)
    call(capsys, *add).failed("--fingerprint must be given where nobody can be asked", code=2)
    assert FederationFolder.open(tmp_path / "fed").members == []
    done = call(capsys, *add, "--fingerprint", fingerprint(Path("a/a.pub")).upper().replace(" ", ":"))
    assert "a is client 0" in done.out
    assert "Send to it: fed/sites/a\n" in done.out
    assert FederationFolder.open(tmp_path / "fed").members == ["a"]
    for file in Path("fed/sites/a").iterdir():
        shutil.copy(file, "a")
    theirs = federation_fingerprint(Path("fed/operator"))
    assert theirs in done.out
    assert theirs in call(capsys, "federation", "join", "a").out
    for file in ("command.pub", "ca.crt", "app.yaml"):  # what somebody else may have put there
        content = Path("a", file).read_bytes()
        Path("a", file).write_bytes(other_federation(tmp_path / file, file))
        assert theirs not in call(capsys, "federation", "join", "a").out
        Path("a", file).write_bytes(content)
    status = call(capsys, "federation", "status", "fed").out
    assert "has not sent its key yet" in status
    call(capsys, "federation", "revoke", "fed", "a")
    assert "revoked" in call(capsys, "federation", "status", "fed").out
    call(capsys, "federation", "join", "c")
    done = call(capsys, *add[:3], "c", "c/c.pub", "--model", "resnet14", "--fingerprint", fingerprint(Path("c/c.pub")))
    assert "c is client 2, with resnet14. Send to it: fed/sites/c\n" in done.out


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "5", '{"pid": 1}', '{"pid": "x", "inner": 5}', '{"pid": 1, "inner": null}']
)
def test_a_change_is_reported_though_the_servers_file_is_damaged(
    folder: FederationFolder, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (folder.operator / "server.json").write_text(content)
    done = call(capsys, "federation", "revoke", folder.path, "east")
    assert "east is revoked. Its number, 1," in done.out
    done.failed("the change is made, but a running server still uses the old keys", "server.json is damaged")
    assert FederationFolder.open(folder.path).members == ["north"]


def test_a_change_that_no_server_was_told_says_so(
    folder: FederationFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server in another container has a process id and a port that are not seen here."""

    def change(*words: Any) -> str:
        done = call(capsys, "federation", *words)
        assert done.code == 0, done
        return " ".join(done.out.split())

    file, other = new_key(tmp_path, "east"), new_key(tmp_path, "new")
    rotate = ("rotate", folder.path, file, "--client", "east", "--fingerprint", fingerprint(file))
    assert "warning" not in change(*rotate), "there never was a server"
    (folder.operator / "server.json").write_text(json.dumps({"pid": 2**22 + 1, "port": 5, "inner": 5}))
    untold = "warning: no running server is seen from here, so none was told"
    for done, *words in (
        ("east has this key already", *rotate),
        ("new is client 2", "add", folder.path, "new", other, "--fingerprint", fingerprint(other)),
        ("east is revoked", "revoke", folder.path, "east"),
        ("east is revoked", "revoke", folder.path, "east"),
    ):
        said = change(*words)
        assert done in said
        assert untold in said
        assert "run this again where it runs, or restart it" in said

    def refuse(_: FederationFolder) -> None:
        raise FlowerError("could not register the clients' keys: no connection")

    monkeypatch.setattr("fedcc.flower.superlink.is_serving", lambda _: True)
    monkeypatch.setattr("fedcc.flower.members.register_members", refuse)
    done = call(capsys, "federation", "revoke", folder.path, "new")
    assert "new is revoked" in done.out
    done.failed("the change is made, but", "no connection")


def test_a_site_uses_its_old_key_until_the_server_refuses_it(tmp_path: Path) -> None:
    def keys() -> dict[str, str]:
        return {path.stem: path.read_text() for path in tmp_path.glob("*.key")}

    (tmp_path / "site.key").write_text("old")
    own = Credentials(tmp_path)
    own.note(NOT_KNOWN)
    assert not own.change()
    (tmp_path / "next.key").write_text("new")
    own.note(CONNECTED)
    assert not own.change()
    own.note(NOT_KNOWN)
    assert own.change()
    assert keys() == {"site": "new", "previous": "old"}
    own.note(NOT_KNOWN)  # neither: the server was not told yet
    assert own.change()
    assert keys() == {"site": "old", "next": "new"}
    own.note(NOT_KNOWN)
    assert own.change()
    own.note(CONNECTED)
    assert keys() == {"site": "new"}
