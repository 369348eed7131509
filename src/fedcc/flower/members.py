"""Who belongs to a federation: clients are added, revoked, and given new keys, even during a run.

A client's number is its place in ``[clients]`` of ``federation.toml``. New clients come last, and revoked ones keep
their place, so numbers never change and are never used again. The file is what counts: the server's app reads it
between rounds, and Flower's register of keys is made to agree with it (:func:`register_members`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from fedcc.core.files import write_whole
from fedcc.core.naming import printable, shortened, unknown
from fedcc.flower.folder import FORMAT, FederationFolder, Site, parse_clients
from fedcc.flower.keys import (
    key_fingerprint,
    key_name,
    listed_bytes,
    load_public_key,
    make_command_key,
    parse_public_key,
    public_bytes,
    read_key_file,
    write_public_half,
)
from fedcc.flower.own_network import client_network
from fedcc.flower.programs import FlowerError, environment

SUPERLINK = "fedcc"  # its name in Flower's configuration
SENT = ("ca.crt", "app.yaml", "command.pub")  # that every site receives, of ``operator``
# makes Flower's register agree with the keys given, in one process: its imports take over a second
REGISTER = """
import json, sys
from flwr.cli.flower_config import read_superlink_connection
from flwr.cli.utils import init_http_client_from_connection
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
keys = {key.encode(): name for name, key in json.load(sys.stdin).items()}
client = init_http_client_from_connection(read_superlink_connection(sys.argv[1]))
known = {n.public_key: n for n in client.ListNodes(ListNodesRequest()).nodes_info if n.status != "unregistered"}
for key, node in known.items():
    if key not in keys:
        client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
for key, name in keys.items():
    if key not in known:
        client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
client.close()
"""


def write_site(folder: FederationFolder, name: str) -> Path:
    """Write the folder that a site receives; it holds no secrets."""
    site, number = folder.site(name), list(folder.clients).index(name)
    site.mkdir(parents=True, exist_ok=True)
    site.chmod(0o700)
    for file in SENT:
        shutil.copyfile(folder.operator / file, site / file)
    shutil.copyfile(folder.path / "public.npz", site / "public.npz")
    experiment = folder.experiment.with_options(data=Path(folder.experiment.split.data).name)  # no path of the operator
    networks = tuple(folder.clients.values())
    Site(site, experiment, folder.task, name, number, folder.clients[name], folder.address, False, networks).write()
    return site


def add_client(
    folder: FederationFolder, name: str, key_file: Path, model: str | None = None, confirmed: str | None = None
) -> FederationFolder:
    """Add a client with the public key that it has sent; or take the key of one that has none yet.

    ``confirmed`` is the fingerprint that was compared. If the client has this key already, nothing is written: an
    ``add`` that was cut off can be run again.
    """
    with changing(folder) as folder:
        parse_clients([name])
        key = _new_key(folder, name, key_file, confirmed)
        if name in folder.revoked:
            raise ValueError(f"{name} was revoked, and its number is not used again; give the client another name")
        if folder.key(name).exists() and name in folder.clients:
            if _has_key(folder, name, key):
                return folder
            raise ValueError(f"{name} has a key; `fedcc federation rotate FOLDER --client {name} FILE` replaces it")
        if name in folder.clients and model not in (None, folder.clients[name]):
            raise ValueError(f"{name} has the network {folder.clients[name]}, got --model {model}")
        if name not in folder.clients:
            network = _network(folder, model)
            folder = replace(folder, clients={**folder.clients, name: network})
        if not (folder.operator / "app.yaml").is_file():
            raise ValueError(f"{folder.operator / 'app.yaml'} is missing: copy it from a site's folder, all have the "
                             "same")  # fmt: skip
        write_site(folder, name)
        write_whole(folder.key(name), key)  # a client with a key has a folder
        folder.write()
    return folder


def replace_key(folder: FederationFolder, name: str, key_file: Path, confirmed: str | None = None) -> bool:
    """Replace a client's key by another that it has sent; the old one is refused from then on, for good.

    Returns whether it is another one.
    """
    with changing(folder) as folder:
        _check_member(folder, name)
        if not folder.key(name).is_file():
            raise ValueError(f"{name} has no key yet; `fedcc federation add FOLDER {name} FILE` takes its first one")
        key = _new_key(folder, name, key_file, confirmed)
        if _has_key(folder, name, key):
            return False
        old = folder.operator / "keys" / "old"
        old.mkdir(exist_ok=True)
        number = len(list(old.iterdir()))
        write_whole(old / f"{number}.pub", folder.key(name).read_bytes())
        write_whole(folder.key(name), key)
    return True


def revoke_client(folder: FederationFolder, name: str) -> FederationFolder:
    """Revoke a client; its number and its name are not used again."""
    with changing(folder) as folder:
        if name in folder.revoked:
            return folder
        _check_member(folder, name)
        if len(folder.revoked) + 1 == len(folder.clients):
            raise ValueError(f"{name} is the last client; a federation needs at least one")
        folder = replace(folder, revoked=(*folder.revoked, name))
        folder.write()
    return folder


def register_members(folder: FederationFolder, env: Mapping[str, str] | None = None) -> None:
    """Make the running server's register agree with the folder: others are refused from then on."""
    env = dict(env or environment(folder.operator / "home"))
    with changing(folder) as folder:
        keys = json.dumps({name: public_bytes(folder.key(name)).decode() for name in folder.members})
        words = [sys.executable, "-P", "-c", REGISTER, SUPERLINK]  # keys of 550 clients do not fit into an argument
        completed = subprocess.run(words, env=env, input=keys, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise FlowerError(f"could not register the clients' keys: {printable(completed.stderr)[-500:]}")


def upgrade_federation(folder: FederationFolder) -> Path:
    """Give a federation of an older fedcc what it lacks; the public key of commands, which every site needs.

    Site folders that are still here are upgraded too; what is there already is left alone.
    """
    public = folder.command_key.with_suffix(".pub")
    with changing(folder) as folder:
        if not folder.command_key.exists():
            make_command_key(folder.command_key)
        if not public.exists():
            write_public_half(folder.command_key, public)
        for site in map(folder.site, folder.clients):
            if site.is_dir():
                if not (site / "command.pub").exists():
                    write_whole(site / "command.pub", public.read_bytes())
                if not (folder.operator / "app.yaml").exists() and (site / "app.yaml").exists():
                    write_whole(folder.operator / "app.yaml", (site / "app.yaml").read_bytes())
                upgrade_site(Site.read(site))
        replace(folder, format=FORMAT).write()
    return public


def upgrade_site(site: Site) -> None:
    """Give a site's folder of an older fedcc the form of today."""
    load_public_key(site.path / "command.pub")
    replace(site, format=FORMAT).write()


@contextmanager
def changing(folder: FederationFolder) -> Iterator[FederationFolder]:
    """The folder as all its files are now, while no other command changes it: it may have been read long ago."""
    from filelock import FileLock

    with FileLock(folder.operator / "members.lock"):
        yield FederationFolder.read(folder.path)


def _check_member(folder: FederationFolder, name: str) -> None:
    if name not in folder.clients:
        raise unknown("client", name, folder.clients)
    if name in folder.revoked:
        raise ValueError(f"{name} was revoked")


def _new_key(folder: FederationFolder, name: str, key_file: Path, confirmed: str | None) -> bytes:
    """The content of a file that is this client's public key and that nobody else has or had; others are refused.

    The file is read once: somebody may replace it while two people compare fingerprints.
    """
    content = read_key_file(key_file)
    new = parse_public_key(content, key_file)
    if not isinstance(new, EllipticCurvePublicKey):
        raise ValueError(f"{key_file} must hold a site's key, as `fedcc federation join` writes it")
    if confirmed is not None and key_fingerprint(new) != confirmed:
        raise ValueError(f"{key_file} has changed since its fingerprint was compared: compare it again")
    if (other := key_name(content)) not in ("", name):
        raise ValueError(f"{key_file} is the key of {shortened(other)}, not of {name}")
    for file in sorted((folder.operator / "keys").rglob("*.pub")):
        if (
            file not in (key_file, folder.key(name))
            and (file.parent.name == "old" or file.stem in folder.clients)
            and public_bytes(file) == listed_bytes(new)
        ):
            raise ValueError(f"{key_file} holds a key that is or was in use here; the site must make a new one")
    return content


def _has_key(folder: FederationFolder, name: str, key: bytes) -> bool:
    """Whether a client's key is the one in the content of a file."""
    path = folder.key(name)
    return listed_bytes(parse_public_key(key, path)) == public_bytes(path)


def _network(folder: FederationFolder, model: str | None) -> str:
    """The network of a new client: one that the others have, unless the server needs no model of it."""
    networks = list(dict.fromkeys(folder.clients.values()))
    if model is None and len(networks) > 1:
        raise ValueError(f"--model must name the network of a new client; the others have {', '.join(networks)}")
    model = model or networks[0]
    client_network(model, folder.task.shape)
    method = folder.experiment.build_method()
    if method.knows_networks:
        raise ValueError(f"{method.name} tells the clients each other's networks at the start; none can be added")
    if not method.uploads_models and model not in networks:
        raise ValueError(f"{method.name} needs one of the networks that clients have, {', '.join(networks)}, "
                         f"got {model}")  # fmt: skip
    return model
