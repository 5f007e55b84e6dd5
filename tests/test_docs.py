import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _writer() -> object:
    spec = importlib.util.spec_from_file_location("write_docs", ROOT / "tools" / "write_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["methods.md"])
def test_pages_from_the_registry_are_fresh(name: str) -> None:
    written = _writer().PAGES[name]()  # type: ignore[attr-defined]
    assert (ROOT / "docs" / name).read_text() == written, "run python tools/write_docs.py"


def test_links_between_pages_lead_somewhere() -> None:
    import re

    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
