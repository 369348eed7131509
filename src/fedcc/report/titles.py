"""Names of data sets, skews and scenarios for people, and for files."""

from __future__ import annotations

import re
import zlib

from fedcc.data.registry import DATASETS
from fedcc.report.paper import Scenario


def title_of(data: str) -> str:
    """A data set's name for people; of a path its last part.

    >>> title_of("digits"), title_of("/home/me/my images"), title_of("mydata:load")
    ('Digits', 'my images', 'mydata:load')
    """
    return DATASETS[data].title if data in DATASETS else data.rstrip("/").rpartition("/")[2] or data


def skew_title(skew: str) -> str:
    """The skew as the paper writes it.

    >>> skew_title("dirichlet:0.05"), skew_title("classes:2"), skew_title("iid")
    ('Dir(0.05)', 'N = 2', 'iid')
    """
    kind, _, value = skew.partition(":")
    return {"dirichlet": f"Dir({value})", "classes": f"N = {value}"}.get(kind, skew) if value else skew


def scenario_title(scenario: Scenario) -> str:
    return f"{title_of(scenario[0])}, {skew_title(scenario[1])}"


def slug(text: str) -> str:
    """A text as part of a file's name; a long one is cut, and a checksum keeps it apart from others."""
    name = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "table"
    return name if len(name) <= 60 else f"{name[:50]}-{zlib.crc32(text.encode()):08x}"
