"""What a site keeps on its disk (its audit log, noisy answers, nonces), and keys and statements that others send."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from fedcc.flower import succession
from fedcc.flower.answers import AnswerStore
from fedcc.flower.command import read_public_key
from fedcc.flower.keys import fingerprint, key_name, load_public_key, read_certificates, read_key_file
from fedcc.flower.ledger import Ledger
from fedcc.flower.nonces import Nonces
from fedcc.flower.policy import ALLOWED, ANSWERED, FIRST, AuditLog, Usage, _digest
from fedcc.flower.site_error import SiteError
from fedcc.flower.succession import Statement, Trust
from fuzz.harness import Case, Target, Wrong
from fuzz.mutate import RAW_JSON, mutated_bytes, mutated_tree, to_json

NONCE = "a" * 32


def audit_lines() -> list[dict[str, Any]]:
    """A log that is whole."""
    about: list[dict[str, Any]] = []
    for t in (1, 2):
        common = {"purpose": "train", "nonce": f"{t}" * 32}
        about += [
            {"kind": ALLOWED, **common, "run": "run1", "round": t, "samples": 0, "asked": "b" * 64, "trains": True},
            {"kind": "disclosed", **common, "run": "run1", "round": t, "share": "noisy", "answers": 5, "epsilon": 1.0,
             "columns": 11},
            {"kind": ANSWERED, **common, "answer": "sent", "bytes": 5, "sha256": "c" * 64},
        ]  # fmt: skip
    entries: list[dict[str, Any]] = []
    for line in about:
        previous = entries[-1]["digest"] if entries else FIRST
        entry = {"time": "2026-01-01T00:00:00+00:00", **line, "previous": previous}
        entries.append({**entry, "digest": _digest(entry)})
    return entries


class SiteFiles(Target):
    """``audit.jsonl``, ``noisy-answers`` and ``nonces``, damaged: what is believed is a part of what was written."""

    name, names_files = "site-files", False

    def prepare(self, folder: Path) -> None:
        self.lines = audit_lines()
        store = AnswerStore(folder)
        store.add([sha256(bytes([n])).digest() for n in range(6)], torch.arange(6))
        self.labels = store.labels
        self.files = {
            "audit.jsonl": "".join(json.dumps(line) + "\n" for line in self.lines).encode(),
            "noisy-answers": store.path.read_bytes(),
            "nonces": b"".join(f"{n}".encode() * 32 + b"\n" for n in range(4)),
        }

    def make(self, rng: random.Random) -> Case:
        name = rng.choice(("audit.jsonl", "audit.jsonl", *self.files))
        content = self.files[name]
        if rng.random() < 0.2:  # a power failure
            return {name: content[: rng.randrange(len(content))] + bytes(rng.choice((0, 0, 3)))}
        if name == "audit.jsonl" and rng.random() < 0.5:
            tree = mutated_tree(rng, self.lines, RAW_JSON, [self.lines], ("allowed", "sent", "noisy"))
            lines = tree if isinstance(tree, list) else [tree]
            return {name: b"".join(to_json(line) + b"\n" for line in lines)}
        return {name: mutated_bytes(rng, content, list(self.files.values()))}

    def check(self, case: Case, folder: Path) -> bool:
        [(name, content)] = case.items()
        for path in folder.iterdir():
            path.unlink()
        (folder / name).write_bytes(content or b"")
        return {"audit.jsonl": self.audit, "noisy-answers": self.answers, "nonces": self.nonces}[name](folder)

    def audit(self, folder: Path) -> bool:
        log = AuditLog(folder)
        entries = log.entries()
        if entries != self.lines[: len(entries)]:
            raise Wrong("a log that was changed is believed")
        Ledger.of(entries).text(), Usage.of(entries)
        log.disclosed("train", "run1", 3, NONCE, "labels", 5)
        if len(AuditLog(folder).entries()) != len(entries) + 1:
            raise Wrong("a line was lost")
        return True

    def answers(self, folder: Path) -> bool:
        if AnswerStore(folder).labels not in (self.labels, {}):
            raise Wrong("answers that were changed are believed")
        return True

    def nonces(self, folder: Path) -> bool:
        Nonces(folder).spend(NONCE)
        try:
            Nonces(folder).spend(NONCE)
        except SiteError:
            return True
        raise Wrong("a command can be sent twice")


class Keys(Target):
    """A public key that a site sends, the operator's key and CA at a site, and statements about new ones."""

    name, names_files = "keys", False

    def prepare(self, folder: Path) -> None:
        commands = [Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2)]
        self.command, texts = commands[0].public_key(), [self.text(c.public_key()) for c in commands]
        authorities = [self.authority(n) for n in (1, 2)]
        self.authorities = (authorities[0],)
        statements = [
            Statement("ca", succession._digest(authorities[0]), self.pem(authorities[1])).sign(commands[0]),
            Statement("command", succession._digest(self.command), texts[1]).sign(commands[0]),
        ]
        self.known = {texts[0], texts[1], *map(self.pem, authorities)}
        site = ec.derive_private_key(12345, ec.SECP384R1()).public_key()
        self.trees = [vars(statement) for statement in statements]
        self.files = {
            "new.pub": f"{self.text(site)} new\n".encode(),
            "command.pub": f"{texts[0]}\n".encode(),
            "ca.crt": self.pem(authorities[0]).encode(),
            "succession.json": json.dumps(self.trees).encode(),
        }

    @staticmethod
    def text(key: Any) -> str:
        return str(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode())

    @staticmethod
    def pem(certificate: x509.Certificate) -> str:
        return certificate.public_bytes(Encoding.PEM).decode()

    @staticmethod
    def authority(number: int) -> x509.Certificate:
        """A certificate that is the same in every process."""
        key = Ed25519PrivateKey.from_private_bytes(bytes([100 + number]) * 32)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedcc federation")])
        days = datetime(2026, 1, 1, tzinfo=UTC), datetime(2036, 1, 1, tzinfo=UTC)
        return x509.CertificateBuilder(name, name, key.public_key(), number, *days).sign(key, None)

    def make(self, rng: random.Random) -> Case:
        name = rng.choice((*self.files, "succession.json"))
        if name == "succession.json" and rng.random() < 0.7:
            words = ("ca", "command", *self.known)
            return {name: to_json(mutated_tree(rng, self.trees, RAW_JSON, [self.trees], words))}
        return {name: mutated_bytes(rng, self.files[name], list(self.files.values()))}

    def check(self, case: Case, folder: Path) -> bool:
        [(name, content)] = case.items()
        path = folder / name
        path.write_bytes(content or b"")
        if name == "succession.json":
            *_, now = Trust(self.authorities, self.command).follow(succession.parse(content or b""))
            if not {self.text(now.command), *map(self.pem, now.authorities)} <= self.known:
                raise Wrong("a key or CA that nobody has signed is trusted")
        elif name == "command.pub":
            read_public_key(path)
        elif name == "ca.crt":
            read_certificates(path)
        else:
            load_public_key(path)
            if len(fingerprint(path)) != 39 or not isinstance(key_name(read_key_file(path)), str):
                raise Wrong("no fingerprint")
        return True
