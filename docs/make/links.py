"""Where a file of the repository is on the site, and links that lead there."""

from __future__ import annotations

import posixpath
import re

PROJECT = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
FILES = ("LICENSE", "CITATION.cff", "examples/", "experiments/")  # copied as they are
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def place(path: str) -> str | None:
    """A file's path on the site, from its path in the repository; None if it is not part of the site.

    >>> place("docs/lab/speed.md"), place("results/a.json"), place("README.md"), place("src/fedcc/cli/run.py")
    ('lab/speed.md', 'records/a.json', 'index.md', None)
    """
    if path == "README.md":
        return "index.md"
    if path in PROJECT:
        return path.lower()
    if path.startswith("docs/"):
        return path.removeprefix("docs/").replace(".ipynb", ".md")
    if path.startswith("results/"):
        return "records/" + path.removeprefix("results/")
    if path.startswith(FILES):
        return f"files/{path}.txt"
    return None


def moved(text: str, source: str, page: str) -> str:
    """The text of a file of the repository as that of a page of the site: its links lead to the same files.

    >>> moved("[all](docs/results.md#records) [x](https://a.b)", "README.md", "index.md")
    '[all](results.md#records) [x](https://a.b)'
    """

    def replaced(match: re.Match[str]) -> str:
        if "://" in match[2] or match[2].startswith("mailto:"):
            return match[0]
        target = place(posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2])))
        return match[0] if target is None else match[1] + posixpath.relpath(target, posixpath.dirname(page)) + match[3]

    return LINK.sub(replaced, text)
