"""Runs the notebooks and stores what they show: `python tools/notebooks.py [NAME ...]`.

Pictures are stored as JPEG and times of the run are dropped, so that the files stay small. The fingerprint of the code
is stored beside the outputs: tests/test_notebooks.py fails if the code has changed since.
"""

from __future__ import annotations

import base64
import hashlib
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
KEPT = {"image/png", "image/jpeg", "text/html", "text/plain"}


def fingerprint(cells: list[dict[str, Any]]) -> str:
    """The fingerprint of a notebook's code cells."""
    code = "\0".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def smaller(output: dict[str, Any]) -> dict[str, Any]:
    """An output with its picture as JPEG, and without what the picture replaces."""
    data = {kind: value for kind, value in output.get("data", {}).items() if kind in KEPT}
    if "image/png" in data:
        from PIL import Image

        picture = Image.open(io.BytesIO(base64.b64decode(data.pop("image/png")))).convert("RGB")
        buffer = io.BytesIO()
        picture.thumbnail((900, 4000))
        picture.save(buffer, "JPEG", quality=75, optimize=True)
        data = {"image/jpeg": base64.b64encode(buffer.getvalue()).decode(), "text/plain": data.get("text/plain", "")}
    return {**output, **({"data": data, "metadata": {}} if data else {})}


def run(name: str) -> None:
    """Run one notebook and store its outputs."""
    import nbformat
    from nbclient import NotebookClient

    path = FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=900, resources={"metadata": {"path": folder}}).execute()
    for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), 1):
        cell.outputs = [nbformat.from_dict(smaller(output)) for output in cell.outputs]
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        cell.execution_count = number
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
        cell.metadata.pop("execution", None)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "classlens": {"code": fingerprint(notebook.cells)},
    }
    nbformat.write(notebook, path)
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    for given in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        run(given)
