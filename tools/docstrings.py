"""For the documentation: docstrings as people read them here, turned into what mkdocstrings draws.

Examples (`>>> ...`) are code, wherever they stand in the text; Markdown would take them for quotations of quotations.
The comments behind a class's fields are their descriptions. mkdocs.yml names this file to griffe.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).+)*", re.M)  # up to the next empty line
COMMENT = re.compile(r"  # (?!type:|noqa)(.+)$")


def fenced(text: str) -> str:
    r"""A docstring with a fence around each example.

    >>> fenced(">>> 1 + 1\n2")
    '```pycon\n>>> 1 + 1\n2\n```'
    """

    def fence(match: re.Match[str]) -> str:
        lines = [line.removeprefix(match["indent"]) for line in match[0].splitlines()]
        return "\n".join(["```pycon", *lines, "```"])

    return EXAMPLE.sub(fence, text)


def described(fields: dict[str, list[str]]) -> str:
    r"""The section of a docstring that tells of fields, from the lines of code that declare them.

    >>> described({"k": ["    k: int  # how many"]})
    'Attributes:\n    k: how many'
    """
    comments = {name: COMMENT.search(lines[-1]) for name, lines in fields.items() if lines}
    told = [f"    {name}: {comment[1] if comment else '–'}" for name, comment in comments.items()]
    return "\n".join(["Attributes:", *told]) if any(comments.values()) else ""


class Examples(griffe.Extension):
    """Fences the examples of every docstring, and adds the fields of classes."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        fields = {
            name: attribute.lines for name, attribute in cls.attributes.items()
            if attribute.annotation and "property" not in attribute.labels and not name.startswith("_")
        }  # fmt: skip
        if cls.docstring and (section := described(fields)):
            cls.docstring.value = f"{cls.docstring.value}\n\n{section}"
