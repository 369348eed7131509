"""The keys of a federation: its certificate authority, a key pair for each site, the key that signs commands, and the
signature of the app.

The key that signs the app is made for one signature and forgotten, so whoever takes over the server later, with all its
files, still cannot make a site run anything else.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import shutil
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedcc.core.files import write_whole

AUTHORITY = "fedcc federation"
CA_DAYS, SERVER_DAYS = 3653, 365
WARN_DAYS = 30  # before a certificate expires
LARGEST = 4096  # bytes of a public key's file
PublicKey = ec.EllipticCurvePublicKey | Ed25519PublicKey
USAGES = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
          "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip


def make_authority(folder: Path) -> None:
    """Write the key and the certificate of a new CA."""
    key, authority = new_authority()
    write_authority(folder, key, [authority])


def new_authority() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """The key and the certificate of a new CA; nothing is written."""
    key = ec.generate_private_key(ec.SECP384R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    ca = (
        _certificate(AUTHORITY, key, CA_DAYS, "key_cert_sign", "crl_sign")
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(identifier, critical=False)
    )
    return key, ca.sign(key, SHA256())


def write_authority(folder: Path, key: ec.EllipticCurvePrivateKey, authorities: Sequence[x509.Certificate]) -> None:
    """Write ``ca.crt``, the newest CA first, and then its key: what is signed with the key is always accepted."""
    write_certificates(folder / "ca.crt", authorities)
    _write_private(folder / "ca.key", key, PrivateFormat.PKCS8)


def make_server_certificate(folder: Path, hosts: Sequence[str]) -> None:
    """Write ``server.key`` and ``server.crt`` for these names and addresses, signed by the CA of the folder."""
    ca_key = load_private_key(folder / "ca.key")
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP384R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    server = (
        _certificate(hosts[0], key, SERVER_DAYS, "digital_signature")
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(h) for h in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    _write_private(folder / "server.key", key, PrivateFormat.PKCS8)
    write_whole(folder / "server.crt", server.sign(ca_key, SHA256()).public_bytes(Encoding.PEM))


@contextmanager
def runtime_certificate(folder: Path) -> Iterator[Path]:
    """A folder with a new CA and, for this machine only, a certificate; it exists as long as the program that uses it.

    By it the processes of one program know each other: anybody on the machine can take a port that has become free.
    Nobody can sign another certificate, since the CA's key is not kept.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        make_authority(folder)
        make_server_certificate(folder, ["127.0.0.1"])
        (folder / "ca.key").unlink()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_certificates(path: Path) -> list[x509.Certificate]:
    """The certificates of a file; the first of ``ca.crt`` is the newest."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path} is damaged: it must hold certificates in PEM; restore it from a copy") from None


def write_certificates(path: Path, certificates: Sequence[x509.Certificate]) -> None:
    """Write certificates in PEM."""
    write_whole(path, b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates))


def days_left(certificate: x509.Certificate) -> float:
    """Days until a certificate expires, by this machine's clock."""
    return (certificate.not_valid_after_utc - datetime.now(UTC)).total_seconds() / 86_400


def expiry_warning(what: str, days: float, advice: str) -> str | None:
    """A warning, if a certificate expires soon or has expired.

    >>> expiry_warning("the certificate", 12.3, "renew it")
    'the certificate expires in 12 days: renew it'
    """
    if days > WARN_DAYS:
        return None
    return f"{what} {f'expires in {days:.0f} days' if days > 0 else f'expired {-days:.0f} days ago'}: {advice}"


def make_key_pair(private: Path, public: Path, name: str = "") -> None:
    """Write a site's key pair in the form that Flower reads; the public half may name the site."""
    _write_private(private, ec.generate_private_key(ec.SECP384R1()), PrivateFormat.OpenSSH)
    write_public_half(private, public, name)


def write_public_half(private: Path, public: Path, name: str = "") -> None:
    """Write the public half of a key that is on the disk, in OpenSSH's form."""
    text = load_private_key(private).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    write_whole(public, f"{text} {name}".strip() + "\n")


def load_private_key(path: Path) -> Any:
    """The private key of a file that :func:`_write_private` has written."""
    content = path.read_bytes()
    load = serialization.load_ssh_private_key if b"OPENSSH" in content else serialization.load_pem_private_key
    try:
        return load(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ValueError(f"{path} is damaged: it must hold a private key; restore it from a copy") from None


def check_app_key(path: Path) -> None:
    """Refuse a file that does not hold the key of an app, as :func:`sign_app` makes it."""
    if not isinstance(openssh_key(path.read_bytes().removeprefix(b"fedcc: ")), Ed25519PublicKey):
        raise ValueError(f"{path} is damaged: it must hold the app's key; all sites and the operator have the same")


def fingerprint(path: Path) -> str:
    """What two people compare of a public key: 128 bits of its SHA-256, in groups of four digits."""
    return key_fingerprint(load_public_key(path))


def key_fingerprint(key: PublicKey) -> str:
    """The fingerprint of a key."""
    return _spoken(b"fedcc key", key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def federation_fingerprint(folder: Path) -> str:
    """The same of what a site must have from its operator and nobody else: the command key, the CA and the app's key.

    ``folder`` is the operator's or a site's.
    """
    command = load_public_key(folder / "command.pub").public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    authority = read_certificates(folder / "ca.crt")[0].public_bytes(Encoding.DER)
    return _spoken(b"fedcc federation", command, authority, (folder / "app.yaml").read_bytes())


def _spoken(*parts: bytes) -> str:
    digits = sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()[:32]
    return " ".join(digits[i : i + 4] for i in range(0, 32, 4))


def read_key_file(path: Path) -> bytes:
    """The content of a public key's file, or so much of it that it is too long."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    with path.open("rb") as file:
        return file.read(LARGEST + 1)


def load_public_key(path: Path) -> PublicKey:
    """The public key of a file in OpenSSH's form: a site's (P-384) or that of commands (Ed25519)."""
    return parse_public_key(read_key_file(path), path)


def parse_public_key(content: bytes, path: Path) -> PublicKey:
    """The public key in the content of a file."""
    key = openssh_key(content)
    is_site_key = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)
    if not is_site_key and not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"{path} must hold a public key as `fedcc federation join` writes it")
    assert isinstance(key, ec.EllipticCurvePublicKey | Ed25519PublicKey)
    return key


def openssh_key(content: bytes) -> Any:
    """A public key in OpenSSH's form; None if it is none."""
    try:
        return serialization.load_ssh_public_key(content) if len(content) <= LARGEST else None
    except (ValueError, UnsupportedAlgorithm, NotImplementedError):  # the last for a compressed point
        return None


def key_name(content: bytes) -> str:
    """The name in a public key's file; empty if there is none."""
    words = content.decode(errors="replace").split(maxsplit=2)
    return words[2].strip() if len(words) > 2 else ""


def make_command_key(private: Path) -> Path:
    """Write the key that signs commands, and beside it the public half, ``.pub``, whose path is returned."""
    public = private.with_suffix(".pub")
    _write_private(private, Ed25519PrivateKey.generate(), PrivateFormat.PKCS8)
    write_public_half(private, public)
    return public


def public_bytes(path: Path) -> bytes:
    """The key of a public key file as Flower lists it for a connected node."""
    return listed_bytes(load_public_key(path))


def listed_bytes(key: PublicKey) -> bytes:
    """A key as Flower lists it."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def sign_app(app: Path) -> tuple[str, str]:
    """The public key for sites (YAML, for ``--trusted-entities``) and the signature (JSON, for the gate) of an app.

    Flower makes the same file of an app's folder every time, as long as its version is the same.
    """
    from flwr.cli.build import build_fab_from_disk

    digest = sha256(build_fab_from_disk(app)).digest()
    key, now = Ed25519PrivateKey.generate(), int(time.time())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    signature = urlsafe_b64encode(key.sign(now.to_bytes(8, "big") + digest)).decode()
    proof = {"signed_at": now, "signature": signature}
    return f"fedcc: {public}\n", json.dumps({"fedcc": json.dumps(proof), "valid_license": "Valid"})


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey, form: PrivateFormat) -> None:
    """Write a key that only its owner may read; the file never exists with wider permissions."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.private_bytes(Encoding.PEM, form, serialization.NoEncryption()))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _certificate(subject: str, key: ec.EllipticCurvePrivateKey, days: int, *usages: str) -> x509.CertificateBuilder:
    owner, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (subject, AUTHORITY))
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(issuer, owner, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.KeyUsage(**{usage: usage in usages for usage in USAGES}), critical=True)
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
