"""Docstrings as Markdown: doctests become blocks of code, cross-references become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^(>>> .*(?:\n(?!\s*$).*)*)", re.MULTILINE)
ROLE = re.compile(r":(?:meth|class|func|mod|attr):`~?([^`]*)`")


class Markdown(griffe.Extension):
    """Rewrites the docstring of every object that is documented."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = ROLE.sub(lambda m: f"`{m[1].rpartition('.')[2]}`", obj.docstring.value)
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\1\n```", text)
