"""Who is at the other end of a connection on this machine, as its kernel says.

This module imports nothing of the project, so that Flower's processes do not load torch.
"""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path

ESTABLISHED = "01"
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))

Address = tuple[str, int]


def is_owned_by(client: Address, server: Address, user: int) -> bool:
    """Whether the client's end of a connection on this machine belongs to the user.

    The kernel's tables list it with its owner while it is open. A closed one would be listed as root's, so its state
    is checked too, and its inode, which is 0 once no process holds it.
    """
    ends = [f"{_hex(host)}:{port:04X}" for host, port in (client[:2], server[:2])]
    mapped_ends = [f"0000000000000000FFFF0000{end}" for end in ends]  # an IPv4 connection through an IPv6 socket
    for table in TABLES:
        for line in table.read_text().splitlines()[1:] if table.exists() else ():  # there may be no IPv6
            column = line.split()
            if column[1:3] in (ends, mapped_ends):
                return column[3] == ESTABLISHED and int(column[7]) == user and column[9] != "0"
    return False


def _hex(host: str) -> str:
    """An address as the kernel's tables write it: words of the machine's own byte order.

    >>> _hex("127.0.0.1") if sys.byteorder == "little" else "0100007F"
    '0100007F'
    """
    packed = ipaddress.ip_address(host.partition("%")[0]).packed
    words = (packed[i : i + 4] for i in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


def check_loopback(host: str) -> None:
    if not ipaddress.ip_address(host).is_loopback:
        raise ValueError(f"--host must be a loopback address, got {host}")
