"""What is said of the package: its version, its long description, its lowest versions."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import classlens

ROOT = Path(__file__).resolve().parents[1]


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_that_of_the_package(project: dict[str, Any]) -> None:
    assert classlens.__version__ == version("classlens") == project["version"]


def test_links_of_the_long_description_work_elsewhere() -> None:
    metadata: ModuleType = tool("metadata")
    text = "![A [b] `c`](docs/a.jpg)\n[docs](docs/b.md#c), [`d`](e.md), [web](https://f.org), [g](#h)"
    found = metadata.long_description(text.replace(" [b]", ""), "https://host.org/us/it", "1.2.3")
    base = "https://host.org/us/it"
    assert found == (
        f"![A `c`]({base}/raw/v1.2.3/docs/a.jpg)\n[docs]({base}/blob/v1.2.3/docs/b.md#c), "
        f"[`d`]({base}/blob/v1.2.3/e.md), [web](https://f.org), [g](#h)"
    )
    plain = metadata.long_description(text.replace(" [b]", ""), "", "1.2.3")
    assert plain == "\ndocs, `d`, [web](https://f.org), [g](#h)"


@pytest.mark.parametrize("repository", ["", "https://host.org/us/it"])
def test_no_link_of_the_readme_leads_nowhere(repository: str) -> None:
    metadata: ModuleType = tool("metadata")
    found = metadata.long_description((ROOT / "README.md").read_text(), repository, "1.2.3")
    targets = [line.partition(")")[0] for line in found.split("](")[1:]]
    assert [target for target in targets if not target.startswith("https://")] == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)", (ROOT / "README.md").read_text())
    badges = [address for address in pictures if address.startswith("https://")]
    assert found.count("![") == len(pictures if repository else badges)
    assert len(pictures) > len(badges) > 0
    assert metadata.addresses(repository)["Paper"].startswith("https://doi.org/")


def test_every_lower_bound_is_tested(project: dict[str, Any]) -> None:
    found = {line.partition("==")[0] for line in tool("lowest").lowest(project)}
    lines = [line for group in (project["dependencies"], *project["optional-dependencies"].values()) for line in group]
    named = {line.partition(">=")[0].partition("[")[0] for line in lines if ">=" in line}
    assert found == named - {"torch", "torchvision"}
    assert tool("lowest").as_tested("numpy==1\ntorch==2\ntorchvision==3") == ["torch==2", "torchvision==3"]
