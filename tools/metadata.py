"""A hook of the build: README.md as the long description of the package, and the project's addresses.

Where a package is shown, relative links lead nowhere. With a repository's address they become absolute, at the tag of
the version; without one, links become plain text and pictures are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|`[^`]*`)*)\]\((?!https?:|#)(?P<path>[^)\s]+)\)")


def long_description(readme: str, repository: str, version: str) -> str:
    """The text with links that work elsewhere.

    >>> long_description("See [the docs](docs/index.md).", "https://example.org/classlens", "1.2.0")
    'See [the docs](https://example.org/classlens/blob/v1.2.0/docs/index.md).'
    >>> long_description("See [the docs](docs/index.md).", "", "1.2.0")
    'See the docs.'
    """

    def replaced(match: re.Match[str]) -> str:
        picture, text, path = match["picture"], match["text"], match["path"]
        if not repository:
            return "" if picture else text
        return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/v{version}/{path})"

    return _LINK.sub(replaced, readme)


def addresses(repository: str) -> dict[str, str]:
    """The project's URLs."""
    paper = {"Paper": "https://doi.org/10.1609/aaai.v35i13.17374"}
    if not repository:
        return paper
    return {
        "Repository": repository, "Documentation": f"{repository}/blob/main/docs/index.md",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md", "Issues": f"{repository}/issues",
    } | paper  # fmt: skip


class MetadataHook(MetadataHookInterface):
    """What hatchling calls; `repository` stands in pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository, version = self.config["repository"].rstrip("/"), metadata["version"]
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = long_description(readme, repository, version)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = addresses(repository)
