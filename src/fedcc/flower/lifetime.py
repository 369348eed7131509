"""How long a federation's certificates are valid, and how the operator renews them and rotates the command key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from fedcc.flower.command import CommandSigner
from fedcc.flower.folder import FederationFolder
from fedcc.flower.keys import days_left, expiry_warning, make_server_certificate, read_certificates
from fedcc.flower.logs import Say
from fedcc.flower.succession import finish_rotation, replace_authority, replace_command_key

DAY = 86_400.0


def renew(folder: FederationFolder, authority: bool) -> str:
    """Make a new certificate for the server, of a new CA if asked for; what follows from it, in words."""
    if authority:
        finish_rotation(folder.command_key)  # sites that know the announced key believe no statement of the old one
        replace_authority(folder.operator, folder.hosts, CommandSigner(folder.command_key).key)
    else:
        make_server_certificate(folder.operator, folder.hosts)
    days = days_left(read_certificates(folder.operator / "server.crt")[0])
    ca_days = days_left(read_certificates(folder.operator / "ca.crt")[0])
    text = f"the server's certificate is valid for {days:.0f} days, the CA's for {ca_days:.0f}"
    if authority:
        return f"{text}; restart the server to use them. Sites accept the new CA, signed with the command key"
    return f"{text}; a running server uses it for new connections, nothing needs to be sent"


def rotate_command_key(folder: FederationFolder) -> None:
    """Replace the key that signs commands; a running server signs with the new one from its next question on."""
    replace_command_key(folder.command_key, CommandSigner(folder.command_key).key)


def warnings_of(folder: FederationFolder) -> list[str]:
    """What the operator should renew soon."""
    found = []
    for file, what, option in (("server.crt", "the server's certificate", ""), ("ca.crt", "the CA", " --ca")):
        if (path := folder.operator / file).is_file():
            advice = f"`fedcc federation renew {folder.path}{option}` renews it"
            found.append(expiry_warning(what, days_left(read_certificates(path)[0]), advice))
    return [warning for warning in found if warning]


class Reminder:
    """Says once a day what should be renewed soon; called often by a program that waits for something else."""

    def __init__(self, warnings: Callable[[], Iterable[str]], say: Say, first: float = 0.0):
        self.warnings, self.say, self.next = warnings, say, time.monotonic() + first

    def __call__(self) -> bool:
        if time.monotonic() >= self.next:
            self.next = time.monotonic() + DAY
            for warning in self.warnings():
                self.say(warning, "warning")
        return False
