"""Addresses of the server, as its operator and its sites write them: a host, or HOST:PORT.

This module imports nothing of the project, so that Flower's processes do not load torch.
"""

from __future__ import annotations

import ipaddress
import re

LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"  # of a name; containers have names with an underscore


def is_host(text: str) -> bool:
    """Whether a text is an IP address without brackets, or a name.

    >>> is_host("fed.example.org"), is_host("::1"), is_host("10.0.0.256"), is_host("fed.example.org:9092")
    (True, True, False, False)
    """
    try:
        ipaddress.ip_address(text)
        return "%" not in text
    except ValueError:
        labels = text.split(".")
        is_name = len(text) <= 253 and all(re.fullmatch(LABEL, label, re.ASCII) for label in labels)
        return is_name and not labels[-1].isdigit()  # an address with a slip


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT.

    >>> parse_address("[::]:9092")
    ('::', 9092)
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not is_host(host) or not re.fullmatch("[0-9]{1,5}", port, re.ASCII) or not 0 < int(port) < 2**16:
        raise ValueError(f"an address is HOST:PORT, got {text!r}")
    return host, int(port)


def write_address(host: str, port: int) -> str:
    """The address of a host's port; an IPv6 address may be given with brackets.

    >>> write_address("::1", 9092), write_address("[::1]", 9092)
    ('[::1]:9092', '[::1]:9092')
    """
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
