"""``fedcc federation``: clients join and are revoked, certificates renewed, keys rotated, folders upgraded."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from fedcc.cli.federation import Folder, federation_app

if TYPE_CHECKING:
    from fedcc.flower.folder import FederationFolder

ClientName = Annotated[str, Argument(metavar="NAME", help="The client's name.")]
KeyFile = Annotated[Path, Argument(metavar="FILE", help="The public key that the site has sent, NAME.pub.")]
Fingerprint = Annotated[
    str | None,
    Option(
        "--fingerprint", help="Compare with this fingerprint, which the site has read out. Without it, you are asked."
    ),
]


@federation_app.command()
def join(
    name: ClientName,
    folder: Annotated[
        Path | None,
        Option("--folder", help="Keep the key in this folder of the site. The default is NAME in the current one."),
    ] = None,
) -> None:
    """At a site: make its key. The private half stays in the site's folder; NAME.pub is for the operator.

    Run it again to see the fingerprints once more. The operator's files belong in the same folder.
    """
    from fedcc.flower.folder import parse_clients
    from fedcc.flower.keys import federation_fingerprint, fingerprint, make_key_pair, write_public_half

    parse_clients([name])
    folder = folder or Path(name)
    public = folder / f"{name}.pub"
    if not (folder / "site.key").exists():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        make_key_pair(folder / "site.key", public, name)
    elif not public.exists():
        write_public_half(folder / "site.key", public, name)
    typer.echo(f"Send to the operator: {public}")
    typer.echo(f"Read out to the operator: {fingerprint(public)}")
    if (folder / "site.toml").exists():
        typer.echo(f"Fingerprint of the federation, which the operator reads out: {federation_fingerprint(folder)}")
    else:
        typer.echo(f"Put what the operator sends into {folder}; the private key, {folder / 'site.key'}, stays there")


@federation_app.command()
def add(
    folder: Folder,
    name: ClientName,
    file: KeyFile,
    model: Annotated[str | None, Option(help="Give a new client this network, if the others have several.")] = None,
    fingerprint: Fingerprint = None,
) -> None:
    """Add a client, or take the key of one that `init` has named. A run in progress includes it from the next round."""
    from fedcc.flower.folder import FederationFolder
    from fedcc.flower.keys import federation_fingerprint
    from fedcc.flower.members import add_client

    federation = FederationFolder.open(folder.resolve())
    federation = add_client(federation, name, file, model, _confirm(file, fingerprint))
    number = list(federation.clients).index(name)
    typer.echo(f"{name} is client {number}, with {federation.clients[name]}. Send to it: {folder / 'sites' / name}")
    typer.echo(f"Read out to it, the fingerprint of the federation: {federation_fingerprint(federation.operator)}")
    _register(federation)


@federation_app.command()
def revoke(folder: Folder, name: ClientName) -> None:
    """Revoke a client: the server refuses its key at once, and a run in progress continues without it."""
    from fedcc.flower.folder import FederationFolder
    from fedcc.flower.members import revoke_client

    federation = revoke_client(FederationFolder.open(folder.resolve()), name)
    typer.echo(f"{name} is revoked. Its number, {list(federation.clients).index(name)}, and its name stay taken.")
    _register(federation)


@federation_app.command()
def renew(
    folder: Folder,
    ca: Annotated[bool, Option("--ca", help="Replace the CA too; sites accept it by its signature.")] = False,
) -> None:
    """Renew the server's certificate, which is valid for a year, and with --ca the CA, valid for ten."""
    from fedcc.flower.folder import FederationFolder
    from fedcc.flower.lifetime import renew as renew_certificates

    typer.echo(renew_certificates(FederationFolder.open(folder.resolve()), ca))


@federation_app.command()
def rotate(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="The federation's folder, or at a site the site's.")],
    file: Annotated[Path | None, Argument(metavar="FILE", help="With --client, the new key that it has sent.")] = None,
    client: Annotated[str | None, Option("--client", help="Replace this client's key with the one in FILE.")] = None,
    fingerprint: Fingerprint = None,
    another: Annotated[
        bool,
        Option("--another", help="At a site: make another new key, if the operator has not taken the one made before."),
    ] = False,
) -> None:
    """Replace a key. On the server: the key that signs commands, or with --client a client's. At a site: its own.

    Sites accept a new command key because the old one has signed it. A site's new key is sent to the operator as when
    it joined; the site uses its old key until the operator has replaced it. Until then, run it again at the site to see
    the fingerprint once more.
    """
    from fedcc.flower import members
    from fedcc.flower.folder import FederationFolder, Site
    from fedcc.flower.keys import federation_fingerprint, make_key_pair, write_public_half
    from fedcc.flower.keys import fingerprint as fingerprint_of
    from fedcc.flower.lifetime import rotate_command_key

    if (folder / "site.toml").is_file():
        site = Site.open(folder.resolve())
        public = site.path / f"{site.name}.pub"
        if (site.path / "previous.key").exists():
            raise ValueError(f"the last rotation in {site.path} is not finished: start the client until it connects")
        if another or not (site.path / "next.key").exists():
            make_key_pair(site.path / "next.key", public, site.name)
        else:  # the operator may have taken it already: nobody else has the private half
            write_public_half(site.path / "next.key", public, site.name)
        typer.echo(f"Send to the operator: {public}")
        typer.echo(f"Read out to the operator: {fingerprint_of(public)}")
        return
    if another:
        raise ValueError(f"--another is for a site's folder, {folder} is not one")
    if (client is None) != (file is None):
        raise ValueError("--client NAME and FILE belong together: the client, and the key that it has sent")
    federation = FederationFolder.open(folder.resolve())
    if client is None or file is None:
        rotate_command_key(federation)
        typer.echo("Commands are signed with a new key, which the old one has signed")
        typer.echo(f"Fingerprint of the federation: {federation_fingerprint(federation.operator)}")
        return
    changed = members.replace_key(federation, client, file, _confirm(file, fingerprint))
    typer.echo(f"{client} has a new key, in place of the old one" if changed else f"{client} has this key already")
    _register(federation)


@federation_app.command()
def upgrade(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="The federation's folder, or at a site the site's.")],
) -> None:
    """Upgrade a folder of an older fedcc, on the server or at a site. A run can be resumed afterwards."""
    from fedcc.flower import members
    from fedcc.flower.folder import FORMAT, FederationFolder, Site

    if (folder / "site.toml").is_file():
        members.upgrade_site(Site.read(folder.resolve()))
        typer.echo(f"{folder} has format {FORMAT}")
        return
    public = members.upgrade_federation(FederationFolder.read(folder.resolve()))
    typer.echo(f"{folder} has format {FORMAT}. Send to every site that lacks it, for its folder: {public}")


def _confirm(file: Path, expected: str | None) -> str:
    """The fingerprint of a key's file, if it is the one that the site has read out."""
    from fedcc.flower.keys import fingerprint

    found = fingerprint(file)
    typer.echo(f"{file} has the fingerprint {found}")
    if expected is None:
        if not sys.stdin.isatty():
            raise ValueError("--fingerprint must be given where nobody can be asked: what the site has read out")
        if not typer.confirm("Does the site read out the same?"):
            raise ValueError(f"{file} is not the site's key; ask it to send the key again")
    elif re.sub(r"[\s:-]", "", expected).lower() != found.replace(" ", ""):
        raise ValueError(f"{file} has the fingerprint {found}, the site has read out {expected}: it is another key")
    return found


def _register(federation: FederationFolder) -> None:
    """Tell the server, if it runs. The change is in the folder and was reported, whatever comes of this."""
    from fedcc.flower.members import register_members
    from fedcc.flower.programs import FlowerError
    from fedcc.flower.superlink import is_serving, server_file

    todo = "run this again where it runs, or restart it"
    try:
        if is_serving(federation):
            register_members(federation)
        elif server_file(federation).exists():
            typer.echo(
                "warning: no running server is seen from here, so none was told. One that runs elsewhere, such as in "
                f"another container, still uses the old keys: {todo}"
            )
    except (FlowerError, ValueError, OSError) as error:
        raise FlowerError(
            f"the change is made, but a running server still uses the old keys: {todo} ({error})"
        ) from None
