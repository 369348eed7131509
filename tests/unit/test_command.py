"""Commands: what a site obeys; with real processes: integration/test_federation_commands.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedcc.core.digests import DamagedFile
from fedcc.core.messages import Predictions
from fedcc.experiments.experiment import Experiment
from fedcc.flower.codec import EncodedMessage, encode, write_content
from fedcc.flower.command import PURPOSES, Command, CommandSigner, read_public_key
from fedcc.flower.folder import Site, Task
from fedcc.flower.keys import make_command_key
from fedcc.flower.nonces import Nonces
from fedcc.flower.site_error import CODES, SiteError, error_reason, error_texts, log_error

TASK = Task(10, tuple("0123456789"), (1, 8, 8), 5, "0" * 64)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    experiment = Experiment.resolve("fedcc", data="digits", device="cpu", clients=2, rounds=3, epochs=2)
    found = Site(tmp_path, experiment, TASK, "north", 0, "resnet8", "localhost:9092", False)
    make_command_key(tmp_path / "command.key")
    return found


def message(value: float = 0.5) -> EncodedMessage:
    return encode(Predictions(torch.full((2, 2), value)), "fp32", run="run1", round=1)


def sent(site: Site, purpose: str = "train", name: str = "north", run: str = "run1", t: int = 1, **terms: Any) -> Any:
    """A command of the site's server."""
    signer = CommandSigner(site.path / "command.key")
    return signer.content(purpose, name, run, t, {**site.terms(), **terms}, message())[1]


def changed(content: Any, **texts: str) -> Any:
    return RecordDict({**dict(content), "fedcc": ConfigRecord({**dict(content["fedcc"]), **texts})})


def code(site: Site, content: Any, purpose: str = "train") -> str:
    with pytest.raises(SiteError) as error:
        Command.read(purpose, content, site)
    assert error.value.code in CODES
    return error.value.code


def test_a_signed_command_arrives_whole(site: Site) -> None:
    command = Command.read("train", sent(site, t=2), site)
    assert (command.purpose, command.run, command.t) == ("train", "run1", 2)
    assert command.message.buffers == message().buffers


def test_any_change_breaks_the_signature(site: Site) -> None:
    content = sent(site)
    for name, value in dict(content["fedcc"]).items():
        zero, one = (b"0", b"1") if isinstance(value, bytes) else ("0", "1")  # a small array is among the texts
        other = value[:-1] + (zero if value[-1:] != zero else one)
        assert code(site, changed(content, **{name: other})) == "command", name
    assert code(site, changed(content, more="x")) == "command"
    assert code(site, content, "query.model") == "command"
    array = Array("float32", (4,), "fedcc", message(0.25).buffers["float32"])
    assert code(site, RecordDict({"fedcc": content["fedcc"], "arrays": ArrayRecord({"float32": array})})) == "command"
    without = {name: value for name, value in dict(content["fedcc"]).items() if not name.startswith("array:")}
    assert code(site, RecordDict({"fedcc": ConfigRecord(without)})) == "command"


def test_a_purpose_is_one_of_a_list(site: Site) -> None:
    """Flower routes ``train.default`` to the function for ``train``, and a server can sign what it likes."""
    for purpose in PURPOSES:
        assert Command.read(purpose, sent(site, purpose), site).purpose == purpose
    for purpose in ("train.default", "query", "query.predict.default", "evaluate", "Train", ""):
        assert code(site, sent(site, purpose), purpose) == "command"


def test_a_command_is_for_one_site_and_a_round_that_there_is(site: Site) -> None:
    assert code(site, sent(site, name="east")) == "command"
    for t in (-1, 0, 4, 7, 10**12):
        assert code(site, sent(site, t=t)) == "round"
    for run in ("", "../x", "a/b", "a" * 65, "\u0661", "home", "Warm", "runtime"):
        assert code(site, sent(site, run=run)) == "command"


def test_the_terms_are_those_that_the_site_has_agreed_to(site: Site) -> None:
    with pytest.raises(SiteError) as error:
        Command.read("train", sent(site, epochs=77), site)
    assert error_texts(error.value) == {"error": "terms", "field": "epochs", "value": "2"}
    assert "epochs is 77 on the server and 2 here" in str(error.value)


def test_every_term_is_compared(site: Site) -> None:
    """Also those that follow a table that differs by a value that is None."""
    terms = site.terms()
    with pytest.raises(SiteError, match="rounds is 99 on the server and 3 here"):
        Command.read("train", sent(site, settings={**terms["settings"], "more": None}, rounds=99), site)
    Command.read("train", sent(site, settings={**terms["settings"], "more": None}), site)


def test_nothing_is_a_command(site: Site) -> None:
    for content in (None, RecordDict({}), write_content({}), write_content({"signature": "zz"})):
        assert code(site, content) == "command"


def test_a_key_of_another_federation_signs_nothing_here(site: Site, tmp_path: Path) -> None:
    content = sent(site)
    make_command_key(tmp_path / "command.key")  # replaces the site's
    assert code(site, content) == "command"


def test_a_nonce_is_spent_once_and_stays_so(tmp_path: Path) -> None:
    Nonces(tmp_path).spend("a" * 32)
    Nonces(tmp_path).spend("b" * 32)
    with pytest.raises(SiteError) as error:
        Nonces(tmp_path).spend("a" * 32)
    assert error.value.code == "replay"


def test_files_that_are_missing_or_damaged(tmp_path: Path, site: Site) -> None:
    for read in (CommandSigner, read_public_key):
        path = tmp_path / "key"
        path.unlink(missing_ok=True)
        with pytest.raises(ValueError, match=r"is missing.*fedcc federation upgrade"):
            read(path)
        path.write_text("nonsense")
        with pytest.raises(ValueError, match=f"{path} (is damaged|must hold an Ed25519 public key)"):
            read(path)
    assert (site.path / "command.key").stat().st_mode & 0o777 == 0o600


# -- what the server is told about an error


@pytest.mark.parametrize(("error", "told"), [
    (ValueError("/home/north/data.npz has 329 samples"), {"error": "failed"}),
    (FileNotFoundError(2, "No such file", "/home/north"), {"error": "files"}),
    (MemoryError("329 samples"), {"error": "memory"}),
    (torch.cuda.OutOfMemoryError("329 samples"), {"error": "memory"}),
    (SiteError("rounds", "/home/north"), {"error": "rounds"}),
    (RecursionError(), {"error": "failed"}),
])  # fmt: skip
def test_an_errors_text_stays_at_the_site(error: Exception, told: dict[str, str]) -> None:
    assert error_texts(error) == told


def test_a_sites_log_shows_words_of_others_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    """An error's text and its traceback may hold what the server sent."""
    try:
        raise RuntimeError("no \x1b[2J\x9b2J\u202e")
    except RuntimeError as error:
        log_error(error)
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines)
    assert lines[-1] == "fedcc: failed: no \\x1b[2J\\x9b2J\\u202e"
    assert any(line.startswith('    raise RuntimeError("no') for line in lines)


def test_the_server_says_in_its_own_words_what_a_site_reports() -> None:
    def reason(**texts: str) -> str:
        return error_reason(texts, {"epochs": 2, "settings": {"lam": 0.5}}, "1.0")

    assert reason(error="failed", field="x", value="/home") == "an error at the site; its own log says which"
    assert reason(error="version", value="0.9") == "the site has another version of fedcc: 0.9, the server has 1.0"
    assert reason(error="terms", field="lam", value="0.7").endswith("lam is 0.5 on the server, 0.7 at the site")
    assert reason(error="terms", field="secret", value="0.7") == CODES["terms"]
    for texts in ({"error": "\x1b[2J\n"}, {"error": "version", "value": "\x1b]0;x\x07"}, {"error": "\u202e" * 10**4}):
        text = reason(**texts)
        assert text.isprintable(), text
        assert len(text) < 3000


def test_a_nonce_after_a_line_that_a_power_failure_cut_off_is_spent_too(tmp_path: Path) -> None:
    Nonces(tmp_path).spend("a" * 32)
    (tmp_path / "nonces").write_text("a" * 32 + "\n" + "b" * 11)
    Nonces(tmp_path).spend("c" * 32)
    for nonce in ("a" * 32, "c" * 32):
        with pytest.raises(SiteError, match="was obeyed before"):
            Nonces(tmp_path).spend(nonce)


@pytest.mark.parametrize("content", [b"\xff" * 33 + b"\n", b"a" * 31 + b"\n", b"a" * 32 + b"\n\n"])
def test_nonces_that_are_damaged_are_not_believed(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "nonces").write_bytes(content)
    with pytest.raises(DamagedFile, match="nonces is damaged"):
        Nonces(tmp_path).spend("c" * 32)


def test_a_key_of_a_kind_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "command.pub").write_text("ssh-unheard-of AAAADnNzaC11bmhlYXJkLW9m")
    with pytest.raises(ValueError, match="must hold an Ed25519 public key"):
        read_public_key(tmp_path / "command.pub")
