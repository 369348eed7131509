"""The federation's certificate authority, the server's certificate, and a key pair for each site."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 825  # the longest that some TLS libraries accept for a server's certificate
USAGES = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
          "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read; it never exists with wider permissions."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def make_authority(folder: Path, hosts: Sequence[str]) -> None:
    """Write ``ca.crt`` and ``ca.key``, and ``server.crt`` and ``server.key`` for these names and addresses."""
    ca_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = (
        _certificate("fedcc federation", ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(identifier, critical=False)
    )
    server = (
        _certificate(hosts[0], server_key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(h) for h in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    for name, key, certificate in (("ca", ca_key, ca), ("server", server_key, server)):
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_secret(folder / f"{name}.key", private)
        (folder / f"{name}.crt").write_bytes(certificate.sign(ca_key, SHA256()).public_bytes(Encoding.PEM))


def make_key_pair(private: Path, public: Path) -> None:
    """Write a site's key pair in the form that Flower reads."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def public_bytes(path: Path) -> bytes:
    """The key of a public key file as Flower lists it for a connected node."""
    return load_ssh_public_key(path.read_bytes()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _certificate(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name("fedcc federation"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=DAYS))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*names: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage in names for usage in USAGES})


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
