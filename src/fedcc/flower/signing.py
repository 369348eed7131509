"""One app and no other: what a site needs to know it by, and the proof that comes along with it.

An app is a file that names the Python to run. A site's SuperNode runs only apps that a trusted key has signed, if it is
told so (``--trusted-entities``). The key is made for one signature and forgotten: whoever takes over the server later,
with all that lies on it, still cannot have a site run anything else.
"""

from __future__ import annotations

import json
import time
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path


def built(app: Path) -> bytes:
    """The app in this folder as the file that Flower makes of it; the same every time with the same version."""
    from flwr.cli.build import build_fab_from_disk

    return build_fab_from_disk(app)


def signed(fab: bytes) -> tuple[str, str]:
    """What sites are handed (YAML, for ``--trusted-entities``) and the signature (JSON, for the gate)."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key, at = Ed25519PrivateKey.generate(), int(time.time())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    signature = urlsafe_b64encode(key.sign(at.to_bytes(8, "big") + sha256(fab).digest())).decode()
    proof = {"signed_at": at, "signature": signature}
    return f"fedcc: {public}\n", json.dumps({"fedcc": json.dumps(proof), "valid_license": "Valid"})
