"""How a site comes to accept a new CA or a new key for commands: by a statement that the command key has signed.

A statement says which CA or key it replaces, so it leads from what a site has to what comes next and never back. The
operator's folder keeps all of them, in order, in ``succession.json``; every command carries them, and the gate shows
the file to anybody who asks, even to a site that no longer accepts the server's certificate. A site believes none of
these ways, only the signatures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from fedcc.core.files import write_whole
from fedcc.flower.keys import (
    make_command_key,
    make_server_certificate,
    new_authority,
    read_certificates,
    write_authority,
    write_certificates,
)

SCHEME = "fedcc succession 1"
FILE, NEXT = "succession.json", "next.key"
MOST, LARGEST = 100, 256 * 2**10  # statements, and bytes of all


class ForgedSuccession(ValueError):
    """A statement about what a site has that its command key has not signed."""


@dataclass(frozen=True)
class Statement:
    """``value`` replaces the CA or the command key with this digest."""

    kind: str  # "ca" or "command"
    replaces: str
    value: str  # PEM, or OpenSSH's form
    signature: str = ""

    @property
    def signed_bytes(self) -> bytes:
        return json.dumps([SCHEME, self.kind, self.replaces, self.value]).encode()

    def sign(self, key: Ed25519PrivateKey) -> Statement:
        return replace(self, signature=key.sign(self.signed_bytes).hex())


@dataclass(frozen=True, eq=False)
class Trust:
    """What a site accepts: the CAs' certificates, newest first, and the key of commands."""

    authorities: tuple[x509.Certificate, ...]
    command: Ed25519PublicKey

    def follow(self, statements: Sequence[Statement]) -> Iterator[Trust]:
        """This, and what it becomes with each statement that is about it."""
        trust = self
        yield trust
        for statement in statements:
            current = trust.authorities[:1] if statement.kind == "ca" else (trust.command,)
            if [statement.replaces] == [_digest(value) for value in current]:
                trust = trust.after(statement)
                yield trust

    def after(self, statement: Statement) -> Trust:
        """What it becomes with a statement, which the key of commands must have signed."""
        try:
            self.command.verify(bytes.fromhex(statement.signature), statement.signed_bytes)
        except (InvalidSignature, ValueError):
            raise ForgedSuccession(f"a new {statement.kind} is not signed with this federation's command key") from None
        if statement.kind == "ca":
            (new,) = x509.load_pem_x509_certificates(statement.value.encode())
            return replace(self, authorities=(new, *self.authorities))
        key = load_ssh_public_key(statement.value.encode())
        if not isinstance(key, Ed25519PublicKey):
            raise ForgedSuccession("a new command key must be an Ed25519 key")
        return replace(self, command=key)

    @staticmethod
    def read(site: Path, command: Ed25519PublicKey) -> Trust:
        path = site / "ca.crt"
        return Trust(tuple(read_certificates(path)) if path.exists() else (), command)

    def pem(self) -> str:
        return b"".join(authority.public_bytes(Encoding.PEM) for authority in self.authorities).decode()

    def write(self, site: Path, before: Trust) -> None:
        """Write what differs from before."""
        if self.authorities != before.authorities:
            write_whole(site / "ca.crt", self.pem())
        if _digest(self.command) != _digest(before.command):
            write_whole(site / "command.pub", _text(self.command) + "\n")


def parse(text: str | bytes) -> list[Statement]:
    """The statements of a text; a ValueError if it is anything else."""
    if len(text) > LARGEST:
        raise ValueError(f"statements may have {LARGEST:,} bytes, got {len(text):,}")
    try:
        found = json.loads(text)
        statements = [Statement(**entry) for entry in found]
    except (TypeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError("a succession is a list of statements") from None
    if len(statements) > MOST:
        raise ValueError(f"there may be {MOST} statements, got {len(statements)}")
    for statement in statements:
        if not all(isinstance(v, str) for v in vars(statement).values()) or statement.kind not in ("ca", "command"):
            raise ValueError("a statement has a kind, ca or command, and strings")
    return statements


# --------------------------------------------------------------------------------------------------------- the operator


def read_text(operator: Path) -> str:
    """The statements so far, as they are sent; a ValueError if the file is damaged: no site would obey a command."""
    path = operator / FILE
    if not path.exists():
        return "[]"
    content = path.read_bytes()
    try:
        parse(content)
        return content.decode()
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; restore it from a copy") from None


def replace_authority(operator: Path, hosts: Sequence[str], key: Ed25519PrivateKey) -> None:
    """Make a new CA and a certificate of it for the server; sites accept it by a statement.

    The old CA stays in ``ca.crt`` until the server starts again, since the one that runs shows its old certificate.
    The statement comes first, so that no CA is used that is not announced. If this is cut off, the CA that it has
    announced may be lost; the next statement replaces that one, so sites get from any CA to the newest.
    """
    authorities = read_certificates(operator / "ca.crt")
    known = authorities[_number_in_use(operator, authorities) or 0 :]
    last = known[0]
    for statement in parse(read_text(operator)):
        if (statement.kind, statement.replaces) == ("ca", _digest(last)):
            (last,) = x509.load_pem_x509_certificates(statement.value.encode())
    new_key, new = new_authority()
    _append(operator, Statement("ca", _digest(last), new.public_bytes(Encoding.PEM).decode()).sign(key))
    write_authority(operator, new_key, [new, *known])
    make_server_certificate(operator, hosts)


def forget_old_authorities(operator: Path) -> None:
    """Leave no CA in ``ca.crt`` that is older than that of the server's certificate.

    A newer one is of a replacement that was cut off; its key may be in ``ca.key`` already.
    """
    authorities = read_certificates(operator / "ca.crt")
    number = _number_in_use(operator, authorities)
    if number is not None and authorities[number + 1 :]:
        write_certificates(operator / "ca.crt", authorities[: number + 1])


def _number_in_use(operator: Path, authorities: Sequence[x509.Certificate]) -> int | None:
    """Which CA has signed the server's certificate, if one of them has."""
    server = read_certificates(operator / "server.crt")[0]
    for number, authority in enumerate(authorities):
        with suppress(InvalidSignature):
            server.verify_directly_issued_by(authority)
            return number
    return None


def replace_command_key(path: Path, key: Ed25519PrivateKey) -> None:
    """Replace the key of commands by a new one; sites accept it by a statement of the old one.

    The new key is on the disk before the statement is, and is used after it: a site never waits for a lost key.
    """
    if not finish_rotation(path):
        public = make_command_key(path.with_name(NEXT))
        _append(path.parent, Statement("command", _digest(key.public_key()), public.read_text().strip()).sign(key))
        finish_rotation(path)


def finish_rotation(path: Path) -> bool:
    """Use the new key of commands, if there is one that was announced."""
    new, public = path.with_name(NEXT), path.with_name(NEXT).with_suffix(".pub")
    announced = {statement.value for statement in parse(read_text(path.parent)) if statement.kind == "command"}
    if not public.exists() or public.read_text().strip() not in announced:
        return False
    if new.exists():
        new.replace(path)
    public.replace(path.with_suffix(".pub"))
    return True


def _append(operator: Path, statement: Statement) -> None:
    statements = [*parse(read_text(operator)), statement]
    write_whole(operator / FILE, json.dumps([vars(s) for s in statements[-MOST:]], indent=1))


def _text(key: Ed25519PublicKey) -> str:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def _digest(value: Any) -> str:
    is_key = isinstance(value, Ed25519PublicKey)
    return sha256(_text(value).encode() if is_key else value.public_bytes(Encoding.DER)).hexdigest()
