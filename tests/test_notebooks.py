"""The notebooks run from top to bottom, and are kept without what a run leaves in them.

Outputs are not committed: they would go stale without anybody noticing, hold times and paths of the machine that made
them, and fill the history with pictures. What is tested here is that whoever runs a notebook gets them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
PATHS = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|mnt|opt|usr|private|Users)/|[A-Z]:\\\\|file://")

each = pytest.mark.parametrize("name", NOTEBOOKS)


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text())


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 5


@each
def test_nothing_of_a_run_is_kept(name: str) -> None:
    notebook = read(name)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    text = (FOLDER / f"{name}.ipynb").read_text()
    assert not PATHS.search(text)
    assert len(text) < 50_000


@each
def test_it_begins_with_its_title_and_its_links_lead_somewhere(name: str) -> None:
    text = ["".join(cell["source"]) for cell in read(name)["cells"] if cell["cell_type"] == "markdown"]
    assert text[0].startswith("# ")
    links = [link for part in text for link in re.findall(r"\]\(([^)#]+)", part) if not link.startswith("http")]
    missing = [link for link in links if not (FOLDER / link).exists()]
    assert not missing


@each
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("nbclient", reason="notebooks are run with nbclient, which comes with nbmake")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as for the other tests: two busy threads are slower on shared machines
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    client.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert [path for path in tmp_path.iterdir() if path.name != "ipython"] == []  # it leaves no files where it runs
