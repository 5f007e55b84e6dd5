"""The notebooks run from top to bottom, and are stored with what they show: `python tools/notebooks.py`.

Stored outputs must not go stale without anybody noticing: they carry the fingerprint of the code that made them. They
hold no paths of the machine that made them, and little enough to be read over the web.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
PATHS = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|mnt|opt|usr|private|Users)/|[A-Z]:\\\\|file://")

each = pytest.mark.parametrize("name", NOTEBOOKS)


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text())


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks", FOLDER.parent / "tools" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 5


@each
def test_what_it_shows_is_stored_and_belongs_to_its_code(name: str) -> None:
    notebook = read(name)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    kept = notebook["metadata"]["classlens"]["code"]
    assert kept == tool().fingerprint(notebook["cells"]), f"run python tools/notebooks.py {name}"
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/jpeg" in output.get("data", {}) for output in outputs)
    assert [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"] == []


@each
def test_it_is_small_and_names_no_machine(name: str) -> None:
    text = (FOLDER / f"{name}.ipynb").read_text()
    assert read(name)["metadata"]["kernelspec"]["name"] == "python3"
    assert not PATHS.search(text)
    assert len(text) < 900_000


def test_a_change_of_the_code_is_noticed() -> None:
    cells = read(NOTEBOOKS[0])["cells"]
    before = tool().fingerprint(cells)
    assert tool().fingerprint([*cells, {"cell_type": "markdown", "source": ["text"]}]) == before
    first = next(cell for cell in cells if cell["cell_type"] == "code")
    first["source"] = [*first["source"], "\nprint(1)"]
    assert tool().fingerprint(cells) != before


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
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    client.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert [path for path in tmp_path.iterdir() if path.name != "ipython"] == []  # it leaves no files where it runs
