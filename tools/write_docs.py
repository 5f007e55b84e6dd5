"""Writes what docs/ takes from the code: `python tools/write_docs.py` (a test checks that it is fresh)."""

from __future__ import annotations

import inspect
from pathlib import Path

from classlens.methods import METHODS

DOCS = Path(__file__).resolve().parents[1] / "docs"

HEAD = """# The methods

<!-- written by tools/write_docs.py from the registry -->

One name each, on any model: `classlens.explain(model, images, targets, method=NAME)`, `--method NAME`. Options go in
brackets or as keywords: `agf-release(without=A)`.

*per class*: asking for another class gives another map. *signed*: negative values speak against the class.
*conserves*: on ReLU-like networks the map sums to what was put in at the top, up to what the report says was absorbed.
`variant=release` is what the authors' released code computes; where it has slips, the default corrects them, and the
note says how.

Parts of layer-wise relevance propagation are covered by patents (EP3271863B1 and its family). If you use the methods
of the family *relevance propagation* commercially, check whether that concerns you.
"""


def methods_page() -> str:
    """docs/methods.md."""
    lines = [HEAD]
    for family in dict.fromkeys(m.family for m in METHODS.values()):
        lines += [
            f"\n## {family[0].upper()}{family[1:]}\n",
            "| name | what it is | per class | signed | conserves | options | paper |",
            "|---|---|---|---|---|---|---|",
        ]
        members = [m for m in METHODS.values() if m.family == family]
        for m in members:
            marks = " | ".join("yes" if mark else "–" for mark in (m.class_specific, m.signed, m.conserves))
            lines.append(f"| `{m.name}` | {m.summary} | {marks} | {', '.join(m.options) or '–'} | {m.paper} |")
        lines.append("")
        lines += [f"- **{m.name}**: {' '.join((inspect.getdoc(m.run) or '').split())}" for m in members]
    return "\n".join(lines) + "\n"


PAGES = {"methods.md": methods_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
        print(f"wrote docs/{name}")
