"""A notebook as a page: its text, its code, and the results that are stored in it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def page(path: Path) -> tuple[str, dict[str, bytes]]:
    """The notebook as Markdown, and its pictures by name."""
    cells = json.loads(path.read_text())["cells"]
    pictures: dict[str, bytes] = {}
    return "\n".join(part for cell in cells for part in parts(cell, path.stem, pictures)), pictures


def parts(cell: dict[str, Any], name: str, pictures: dict[str, bytes]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source + "\n"
        return
    yield f"```python\n{source}\n```\n"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            file = f"{name}-{len(pictures) + 1}.png"
            pictures[file] = base64.b64decode(data["image/png"])
            yield f"![Result of the code above]({file})\n"
        elif shown := "".join(output.get("text", data.get("text/plain", ""))):
            yield f"```text\n{shown.rstrip()}\n```\n"
