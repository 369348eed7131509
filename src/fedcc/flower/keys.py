"""The keys of a federation: its certificate authority, a key pair for each site, the key that signs commands, and the
signature of the app.

The key that signs the app is made for one signature and forgotten, so whoever takes over the server later, with all its
files, still cannot make a site run anything else.
"""

from __future__ import annotations

import ipaddress
import json
import os
import time
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY = "fedcc federation"
DAYS = 825  # the longest that some TLS libraries accept for a server's certificate
USAGES = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
          "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip


def make_authority(folder: Path, hosts: Sequence[str]) -> None:
    """Write ``ca.crt`` and ``ca.key``, and ``server.crt`` and ``server.key`` for these names and addresses."""
    ca_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = (
        _certificate(AUTHORITY, ca_key, "key_cert_sign", "crl_sign")
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(identifier, critical=False)
    )
    server = (
        _certificate(hosts[0], server_key, "digital_signature")
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(h) for h in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    for name, key, certificate in (("ca", ca_key, ca), ("server", server_key, server)):
        _write_private(folder / f"{name}.key", key, PrivateFormat.PKCS8)
        (folder / f"{name}.crt").write_bytes(certificate.sign(ca_key, SHA256()).public_bytes(Encoding.PEM))


def make_key_pair(private: Path, public: Path) -> None:
    """Write a site's key pair in the form that Flower reads."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(private, key, PrivateFormat.OpenSSH)
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def make_command_key(private: Path) -> Path:
    """Write the key that signs commands, and beside it the public half, ``.pub``, whose path is returned."""
    key, public = Ed25519PrivateKey.generate(), private.with_suffix(".pub")
    _write_private(private, key, PrivateFormat.PKCS8)
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return public


def public_bytes(path: Path) -> bytes:
    """The key of a public key file as Flower lists it for a connected node."""
    key = serialization.load_ssh_public_key(path.read_bytes())
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
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.private_bytes(Encoding.PEM, form, serialization.NoEncryption()))


def _certificate(subject: str, key: ec.EllipticCurvePrivateKey, *usages: str) -> x509.CertificateBuilder:
    owner, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (subject, AUTHORITY))
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(issuer, owner, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.KeyUsage(**{usage: usage in usages for usage in USAGES}), critical=True)
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
