"""What the server asks of a site: a command, signed so that a site obeys its own server and nobody else.

The signature covers the purpose, every text (run, round, site, terms, version, nonce, and the message's type and
header) and every array's bytes. A site checks it before it does anything else, accepts a nonce once, and answers with
the nonce, so an answer belongs to one command. No clock is involved.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedcc import __version__
from fedcc.core.naming import shortened
from fedcc.flower import succession
from fedcc.flower.codec import EncodedMessage, InvalidMessage, Texts, read_content, write_content
from fedcc.flower.folder import Site, disagreement
from fedcc.flower.keys import load_private_key, openssh_key
from fedcc.flower.site_error import SiteError
from fedcc.flower.succession import Trust

SCHEME = "fedcc command 1"
TEXTS = frozenset({"run", "round", "site", "version", "terms", "nonce", "kind", "header", "signature",
                   "succession"})  # fmt: skip
PURPOSES = ("train", "query.model", "query.predict")  # Flower routes others to the same functions
SAME_RELEASE = "versions must be the same up to the last number, such as 0.2.1 and 0.2.3"
OTHERS = ("home", "runtime", "warm")  # folders of a site's state that are of no run
UPGRADE = "`fedcc federation upgrade` on the server makes it"


def _signed_bytes(purpose: str, texts: Mapping[str, str], arrays: Mapping[str, bytes]) -> bytes:
    """What a signature covers: the arrays by their digests, everything else as it is."""
    covered = {name: text for name, text in texts.items() if name != "signature"}
    digests = {name: sha256(content).hexdigest() for name, content in arrays.items()}
    return json.dumps([SCHEME, purpose, covered, digests], sort_keys=True, separators=(",", ":")).encode()


# -------------------------------------------------------------------------------------------------------- the server


class CommandSigner:
    """The server's end: signs commands with ``operator/command.key``."""

    def __init__(self, path: Path, version: str = __version__):
        if not path.is_file():
            raise ValueError(f"{path} is missing: an older fedcc made this federation; {UPGRADE}")
        if not isinstance(key := load_private_key(path), Ed25519PrivateKey):
            raise ValueError(f"{path} must hold an Ed25519 private key; restore it from a copy")
        self.key, self.version, self.succession = key, version, succession.read_text(path.parent)

    def content(
        self, purpose: str, site: str, run: str, t: int, terms: Mapping[str, Any], message: EncodedMessage | None
    ) -> tuple[str, Any]:
        """A new command's nonce, and the command as the content of one of Flower's messages."""
        nonce = secrets.token_hex(16)
        texts = {"run": run, "round": str(t), "site": site, "version": self.version, "nonce": nonce}
        texts["terms"] = json.dumps(terms)
        if self.succession != "[]":
            texts["succession"] = self.succession
        whole = texts | ({"kind": message.kind, "header": message.text} if message else {})
        arrays = message.buffers if message else {}
        texts["signature"] = self.key.sign(_signed_bytes(purpose, whole, arrays)).hex()
        return nonce, write_content(texts, message)


# ------------------------------------------------------------------------------------------------------------ a site


@dataclass(frozen=True, eq=False)
class Command:
    """A command that a site has checked."""

    purpose: str
    run: str
    t: int
    nonce: str
    kind: str | None = None  # of the message, if there is one
    header: str | None = None
    arrays: Mapping[str, bytes] = field(default_factory=dict)

    @staticmethod
    def read(purpose: str, content: Any, site: Site) -> Command:
        """The command in a message's content, if the site's server has signed it for this site and it is in order."""
        if purpose not in PURPOSES:
            text = f"a command's purpose is {', '.join(PURPOSES[:-1])} or {PURPOSES[-1]}, got {shortened(purpose)}"
            raise SiteError("command", text)
        before = Trust.read(site.path, read_public_key(site.path / "command.pub"))
        texts, arrays, trust = _read_signed(purpose, content, before)
        if texts["site"] != site.name:
            raise SiteError("command", f"the command is for {shortened(texts['site'])}, this site is {site.name}")
        if not work_together(theirs := texts["version"], __version__):
            text = f"the server has fedcc {shortened(theirs)}, {site.name} has {__version__}; {SAME_RELEASE}"
            raise SiteError("version", text, value=__version__)
        if found := disagreement(json.loads(texts["terms"]), site.terms()):
            name, theirs, mine = found
            text = f"{site.name} has agreed to another experiment: {name} is {theirs} on the server and {mine} here"
            raise SiteError("terms", text, field=name, value=json.dumps(mine))
        run, nonce = texts["run"], texts["nonce"]
        if not re.fullmatch(r"[A-Za-z0-9]{1,64}", run, re.ASCII):  # it names a folder
            raise SiteError("command", f"a run is named by at most 64 letters and digits, got {shortened(run)}")
        if run.lower() in OTHERS:
            raise SiteError("command", f"a run cannot be called {run}: the site has another folder of this name")
        if not re.fullmatch(r"[0-9a-f]{32}", nonce, re.ASCII):
            raise SiteError("command", f"a nonce has 32 hexadecimal digits, got {shortened(nonce)}")
        last = site.experiment.build_method().rounds(site.experiment.training.rounds)
        if not re.fullmatch(r"[0-9]{1,9}", texts["round"], re.ASCII) or not 1 <= int(texts["round"]) <= last:
            raise SiteError("round", f"round must be from 1 to {last}, got {shortened(texts['round'])}")
        trust.write(site.path, before)
        return Command(purpose, run, int(texts["round"]), nonce, texts.get("kind"), texts.get("header"), arrays)

    @property
    def digest(self) -> str:
        """The digest of the method's message that it carries; another message is another question."""
        arrays = {name: sha256(content).hexdigest() for name, content in sorted(self.arrays.items())}
        return sha256(json.dumps([self.kind, self.header, arrays]).encode()).hexdigest()

    @property
    def message(self) -> EncodedMessage:
        """The method's message that it carries."""
        if self.kind is None or self.header is None:
            raise InvalidMessage(f"a command {self.purpose} must carry a message")
        return EncodedMessage.parse(self.kind, self.header, self.arrays)


def _read_signed(purpose: str, content: Any, trust: Trust) -> tuple[Texts, dict[str, bytes], Trust]:
    """The texts and arrays of a message's content, if the owner of the key has signed them; and whom to trust now.

    The key may have been replaced, as statements in the message prove; the last one that fits counts.
    """
    try:
        texts, arrays = read_content(content)
        if extra := sorted(set(texts) - TEXTS):
            raise InvalidMessage(f"{shortened(extra[0])} is not a part of a command")
        signature, covered = bytes.fromhex(texts["signature"]), _signed_bytes(purpose, texts, arrays)
        for now in reversed(list(trust.follow(succession.parse(texts.get("succession", "[]"))))):
            with suppress(InvalidSignature):
                now.command.verify(signature, covered)
                return texts, arrays, now
    except ValueError as error:
        raise SiteError("command", f"not a command: {error}") from None
    raise SiteError("command", "the command is not signed by this federation's server")


def work_together(one: str, other: str) -> bool:
    """Whether two versions understand each other: they differ in the patch release at most.

    >>> work_together("0.2.1", "0.2.7"), work_together("0.2.1", "0.3.1")
    (True, False)
    """
    release = re.compile(r"(\d{1,6}\.\d{1,6})\.\d{1,6}", re.ASCII)
    first, second = release.fullmatch(one), release.fullmatch(other)
    return one == other or bool(first and second and first[1] == second[1])


def read_public_key(path: Path) -> Ed25519PublicKey:
    """The key that a site's commands are signed with."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: the operator sends it with the site's folder; {UPGRADE}")
    if not isinstance(key := openssh_key(path.read_bytes()), Ed25519PublicKey):
        raise ValueError(f"{path} must hold an Ed25519 public key in OpenSSH's form; the operator sends it again")
    return key
