"""The signature of the one app that sites run.

An app is a file that names the Python code to run. With ``--trusted-entities`` a site's SuperNode runs only apps that a
trusted key has signed. The key is made for one signature and forgotten, so whoever takes over the server later, with
all its files, still cannot make a site run anything else.
"""

from __future__ import annotations

import json
import time
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.cli.build import build_fab_from_disk


def sign_app(app: Path) -> tuple[str, str]:
    """The public key for sites (YAML, for ``--trusted-entities``) and the signature (JSON, for the gate) of an app.

    Flower makes the same file of an app's folder every time, as long as its version is the same.
    """
    digest = sha256(build_fab_from_disk(app)).digest()
    key, now = Ed25519PrivateKey.generate(), int(time.time())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    signature = urlsafe_b64encode(key.sign(now.to_bytes(8, "big") + digest)).decode()
    proof = {"signed_at": now, "signature": signature}
    return f"fedcc: {public}\n", json.dumps({"fedcc": json.dumps(proof), "valid_license": "Valid"})
