"""What the gate tells the operator at the private port: who is connected, and what it has counted since its start.

This module imports nothing of the project, so that Flower's processes do not load torch.
"""

from __future__ import annotations

import http.client
import json
import ssl
from base64 import b64decode, b64encode
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATH = "/v1/fedcc/report"
SECONDS = 5.0  # for an answer
REASONS = {401: "key", 412: "key", 403: "rule", 408: "slow", 400: "size", 411: "size", 413: "size", 503: "busy"}


@dataclass
class GateCounts:
    """What the gate has counted."""

    refused: Counter[str] = field(default_factory=Counter)  # requests, by reason
    uploaded: Counter[int] = field(default_factory=Counter)  # bytes, by node

    def refuse(self, status: int, kind: str = "") -> None:
        self.refused[kind or REASONS.get(status, "other")] += 1

    def report(self, state: Any, refusals: Counter[int], ended: Counter[str], connections: int) -> bytes:
        """The report; ``state`` is Flower's, ``refusals`` are by node, ``ended`` are connections cut, by reason."""
        nodes = [
            {
                "key": b64encode(node.public_key).decode(),
                "online": node.status == "online",
                "uploaded": self.uploaded[node.node_id],
                "refused": refusals[node.node_id],
            }
            for node in state.get_node_info()
        ]
        refused = dict(self.refused)
        return json.dumps({"nodes": nodes, "refused": refused, "ended": dict(ended), "open": connections}).encode()


@dataclass(frozen=True)
class Report:
    """The report, as the operator's programs read it; clients by their public keys."""

    online: frozenset[bytes]
    uploaded: dict[bytes, int]
    refusals: dict[bytes, int]  # requests of registered clients
    refused: dict[str, int]
    ended: dict[str, int]
    open: int

    @staticmethod
    def fetch(port: int, authority: Path) -> Report:
        """The report of the SuperLink at this port of this machine; OSError or ValueError if there is none."""
        context = ssl.create_default_context(cafile=str(authority))
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=SECONDS, context=context)
        try:
            connection.request("GET", PATH)
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"it answers with status {response.status}")
            table = json.loads(response.read(2**24))
        except http.client.HTTPException as error:
            raise ValueError(f"it does not speak HTTP ({type(error).__name__})") from None
        finally:
            connection.close()
        nodes = {b64decode(node["key"]): node for node in table["nodes"]}
        return Report(
            frozenset(key for key, node in nodes.items() if node["online"]),
            {key: int(node["uploaded"]) for key, node in nodes.items()},
            {key: int(node["refused"]) for key, node in nodes.items()},
            table["refused"],
            table["ended"],
            int(table["open"]),
        )
