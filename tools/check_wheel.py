"""Build the package, install it away from the repository and use it: `make wheel`.

    python tools/check_wheel.py

The wheel goes into a new environment, where `classlens demo` and `classlens explain` must work. The source archive is
unpacked elsewhere, where its tests must find their files. Needs the `dev` extra.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A few tests of each kind that read files: goldens, docs, tools, notebooks.
SOME_TESTS = (
    "tests/methods/agf/test_agf.py::test_release_agrees_on_every_target", "tests/evaluate/tests/test_segmentation.py",
    "tests/test_docs.py::test_links_between_pages_lead_somewhere",
    "tests/test_docs.py::test_what_stands_beside_the_docs_agrees", "tests/test_skips.py", "tests/test_packaging.py",
)  # fmt: skip


def main() -> None:
    """Build, then check what was built; the folder goes away in the end."""
    with tempfile.TemporaryDirectory(prefix="classlens-") as folder:
        away = Path(folder)
        run(sys.executable, "-m", "hatchling", "build", "--directory", str(away / "dist"), where=ROOT)
        (wheel,), (archive,) = (list((away / "dist").glob(f"*{end}")) for end in (".whl", ".tar.gz"))
        check_contents(wheel)
        check_installed(wheel, away)
        check_archive(archive, away)
        print(f"{wheel.name} ({wheel.stat().st_size >> 10} kB) and {archive.name} ({archive.stat().st_size >> 10} kB)")


def run(*command: str, where: Path, **changes: str) -> str:
    """What a command says on stdout; if it fails, its output is shown and everything ends."""
    print("$", *(Path(word).name if word.startswith("/") else word for word in command), flush=True)
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=where, env=inherited | changes, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\nfailed with {done.returncode}")
    return done.stdout


def check_contents(wheel: Path) -> None:
    """Every file of the package is inside, and the long description has no link that leads nowhere."""
    source = ROOT / "src"
    wanted = {str(path.relative_to(source)) for path in (source / "classlens").rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as inside:
        names = set(inside.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = message_from_bytes(inside.read(metadata)).get_payload()
    missing = sorted(name for name in wanted - names if "__pycache__" not in name)
    dead = re.findall(r"\]\((?!https?:|#)[^)]*\)", str(text))
    if missing or dead:
        raise SystemExit(f"the wheel lacks {missing}; links that lead nowhere: {dead}")


def check_installed(wheel: Path, away: Path) -> None:
    """A new environment, nothing of the repository in reach."""
    python, command = (str(away / "env" / "bin" / name) for name in ("python", "classlens"))
    run(sys.executable, "-m", "venv", "--without-pip", str(away / "env"), where=away)
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", str(wheel), where=away, **pinned())
    where = run(python, "-c", "import classlens; print(classlens.__file__, classlens.__version__)", where=away)
    if not where.startswith(str(away / "env")):
        raise SystemExit(f"not the installed package: {where}")
    print(run(command, "--version", where=away).strip())
    run(command, "demo", "--out", "demo", where=away)
    picture = str(Path(where.split()[0]).parent / "assets" / "demo.jpg")
    found = json.loads(run(command, "explain", picture, "--top", "2", "--out", "out", "--json", where=away))
    if len(found["images"]) != 1 or not (away / "out" / "demo" / "figure.png").stat().st_size:
        raise SystemExit(f"classlens explain gave {found}")


def pinned() -> dict[str, str]:
    """The versions of constraints.txt, as the Makefile installs them."""
    return {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def check_archive(archive: Path, away: Path) -> None:
    """All tests can be collected from the unpacked archive, and some that read files are run."""
    with tarfile.open(archive) as inside:
        inside.extractall(away / "archive", filter="data")
    (unpacked,) = (away / "archive").iterdir()
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    here = {"PYTHONPATH": str(unpacked / "src")}
    print(run(*pytest, "--collect-only", where=unpacked, **here).splitlines()[-1])
    print(run(*pytest, *SOME_TESTS, where=unpacked, **here).splitlines()[-1])


if __name__ == "__main__":
    main()
