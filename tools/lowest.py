"""The lowest versions that pyproject.toml allows, as constraints for pip; `make lowest` installs and tests them.

    python tools/lowest.py > lowest.txt
    pip install --constraint lowest.txt '.[dev]'

torch and torchvision stay as in constraints.txt: each release of torchvision fits one of torch only. The lower bound of
torch is that of the newest of its functions in use.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
AS_TESTED = ("torch", "torchvision")


def lowest(project: dict[str, Any]) -> list[str]:
    """`name==version` for each `name>=version` of a project, extras included.

    >>> lowest({"dependencies": ["numpy>=1.26", "torch>=2.6"], "optional-dependencies": {"web": ["gradio>=6.24"]}})
    ['gradio==6.24', 'numpy==1.26']
    """
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    found = (re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)$", line) for group in groups for line in group)
    bounds = dict(match.groups() for match in found if match)
    return [f"{name}=={version}" for name, version in sorted(bounds.items()) if name not in AS_TESTED]


def as_tested(constraints: str) -> list[str]:
    """The lines of constraints.txt that stay."""
    return [line for line in constraints.splitlines() if line.partition("==")[0] in AS_TESTED]


if __name__ == "__main__":
    print("\n".join(lowest(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])))
    print("\n".join(as_tested((ROOT / "constraints.txt").read_text())))
