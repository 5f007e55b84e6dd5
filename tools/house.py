"""Draw the picture of the house from the real import graph: docs/images/house.svg.

    python tools/house.py            # write it
    python tools/house.py --check    # exit with 1 if it is out of date

One row for each room, in the order of the import contract in pyproject.toml. A dot says that the row's room imports
the column's room; the larger the dot, the more modules do. Every dot lies left of the diagonal, because a room
imports only rooms below it.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "house.svg"
STEP, TOP, LEFT, NAMES = 30, 120, 20, 110  # sizes in pixels


def rooms() -> list[str]:
    """Packages and modules of classlens, top layer first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [name.strip() for layer in layers for name in layer.split("|") if name.strip() != "__main__"]


def purpose(room: str) -> str:
    """The first line of a room's docstring."""
    base = ROOT / "src" / "classlens" / room
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    return text.splitlines()[0].replace("`", "") if text else ""


def imports(names: list[str]) -> dict[tuple[str, str], int]:
    """How many modules of one room import another room."""
    graph = grimp.build_graph("classlens", exclude_type_checking_imports=True)
    found: dict[tuple[str, str], int] = {}
    for module in sorted(graph.modules):
        parts = module.split(".")
        reached = {other.split(".")[1] for other in graph.find_modules_directly_imported_by(module) if "." in other}
        for other in reached:
            if len(parts) > 1 and parts[1] != other and parts[1] in names and other in names:
                found[parts[1], other] = found.get((parts[1], other), 0) + 1
    return found


def draw(names: list[str], found: dict[tuple[str, str], int]) -> str:
    """The triangle of imports as SVG."""
    columns = list(reversed(names))  # the ground floor first
    width = LEFT + NAMES + STEP * len(columns) + 760
    height = TOP + STEP * len(names) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for j, column in enumerate(columns):
        x = LEFT + NAMES + STEP * j + STEP // 2
        lines.append(f'<text x="{x}" y="{TOP - 8}" transform="rotate(-60 {x} {TOP - 8})" fill="#444">{column}</text>')
    for i, row in enumerate(names):
        y = TOP + STEP * i + STEP // 2
        if i % 2 == 0:
            lines.append(f'<rect y="{y - STEP // 2}" width="{width}" height="{STEP}" fill="#f4f6f8"/>')
        lines.append(f'<text x="{LEFT}" y="{y + 4}" font-weight="600" fill="#111">{row}</text>')
        for j, column in enumerate(columns):
            x = LEFT + NAMES + STEP * j + STEP // 2
            if row == column:
                lines.append(f'<rect x="{x - 4}" y="{y - 4}" width="8" height="8" fill="#c8ced4"/>')
            elif count := found.get((row, column)):
                radius = min(4 + count, 11)
                lines.append(f'<circle cx="{x}" cy="{y}" r="{radius}" fill="#1f6fe0"/>')
        x = LEFT + NAMES + STEP * len(columns) + 20
        lines.append(f'<text x="{x}" y="{y + 4}" fill="#444">{escape(purpose(row))}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    """Write the picture, or check it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="do not write; exit with 1 if the picture is out of date")
    check = parser.parse_args().check
    names = rooms()
    picture = draw(names, imports(names))
    if check and (not PICTURE.is_file() or PICTURE.read_text("utf-8") != picture):
        print("docs/images/house.svg is out of date; run python tools/house.py")
        return 1
    if not check:
        PICTURE.write_text(picture, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
