"""Mistakes are reported before torch is imported, in the library's own words."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from classlens.cli import early, flags, main
from classlens.core.targets import RIVALS
from classlens.data.labels import imagenet
from classlens.errors import ClasslensError, ImageError, MethodError, TargetError
from classlens.methods import METHODS, check_options, resolve
from classlens.models.sources import EMBEDDED, embedded

HEAVY = "torch", "matplotlib", "pandas", "pyarrow", "scipy"
# The command in a process of its own: its exit code, and which heavy libraries it imported.
SCRIPT = """
import sys
from classlens.cli import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    print("code", ended.code)
print("heavy", *[name for name in {heavy} if name in sys.modules])
"""


def in_a_process(folder: Path, *arguments: str) -> tuple[str, str]:
    script = SCRIPT.format(heavy=HEAVY)
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "photo.jpg").write_bytes(b"not opened")
    return tmp_path


MISTAKES = {
    "path": (["explain", "fhoto.jpg"], "error: fhoto.jpg does not exist: check the path"),
    "method": (["explain", "photo.jpg", "--method", "agff"], "error: there is no method 'agff'; did you mean agf"),
    "option": (["explain", "photo.jpg", "-M", "agf(wihtout=A)"], "error: agf has no option 'wihtout'; it has without"),
    "class": (["explain", "photo.jpg", "--class", "tabi"], "error: no class is named 'tabi'; nearest:"),
    "rival": (["explain", "photo.jpg", "--rather-than", "1000"], "error: there is no class 1000: the model has 1000"),
    "out": (["explain", "photo.jpg", "--out", "photo.jpg/maps"], "error: --out photo.jpg/maps cannot be written: "),
    "comparison": (["compare", "photo.jpg", "--methods", "agf,grad"], "error: there is no method 'grad'; did you mean"),
    "evaluation": (["evaluate", "all", "-d", ".", "-o", "r", "-M", "agff"], "error: there is no method 'agff'"),
    "report": (["report", "--data", ".", "--out", "."], "error: --out . is a folder: give the name of a file"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_without_torch(name: str, folder: Path) -> None:
    arguments, text = MISTAKES[name]
    said, error = in_a_process(folder, *arguments)
    assert error.startswith(text)
    assert len(error.splitlines()) == 1
    assert said.split() == ["code", "2", "heavy"]


@pytest.mark.parametrize("arguments", [["--help"], ["evaluate", "--help"], ["selfsup", "evaluate", "-h"], ["methods"]])
def test_help_does_not_import_torch(arguments: list[str], folder: Path) -> None:
    said, error = in_a_process(folder, *arguments)
    assert not error
    assert said.splitlines()[-1].split() == ["heavy"]


def test_importing_the_package_imports_almost_nothing() -> None:
    code = "import sys; before = set(sys.modules); import classlens; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name for name in done.stdout.split() if name.split(".")[0] not in sys.stdlib_module_names} == {"classlens"}


# ------------------------------------------------------------------------------------------ as the library says it


def test_the_included_network_has_the_classes_that_are_checked() -> None:
    assert early.EMBEDDED in EMBEDDED
    assert embedded(early.EMBEDDED).labels == imagenet()
    assert early.RIVALS == RIVALS


@pytest.mark.parametrize("text", ["agff", "agf(x=1)", "agf(", "lrp(variant)", "zzz"])
def test_methods_are_refused_with_the_words_of_the_registry(text: str) -> None:
    with pytest.raises(MethodError) as soon:
        early.check_method(text)
    with pytest.raises(MethodError) as later:
        check_options(*resolve(text))
    assert str(soon.value).split(";")[0] == str(later.value).split(";")[0]


def test_what_the_library_accepts_passes() -> None:
    early.check_methods("all")
    early.check_methods(",".join(METHODS))
    for method in METHODS.values():
        early.check_method(f"{method.name}({','.join(f'{option}=1' for option in method.options)})")
    early.check_classes(early.EMBEDDED, ["tabby", "281", RIVALS])
    early.check_classes("torchvision:resnet50", ["anything"])


def test_no_method_is_an_error() -> None:
    with pytest.raises(MethodError, match="no method was given"):
        early.check_methods(" , ")


def test_one_picture_that_exists_is_enough(tmp_path: Path) -> None:
    here, gone = tmp_path / "here.png", tmp_path / "gone.png"
    here.touch()
    early.check_pictures([gone, here])
    with pytest.raises(ImageError, match=r"gone\.png does not exist"):
        early.check_pictures([gone])


def test_an_output_must_be_writable(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, folder in (
        (tmp_path, True),
        (tmp_path / "a" / "b", True),
        (file, False),
        (tmp_path / "a" / "b.png", False),
    ):
        early.check_out(path, folder)
    for path, folder in ((file, True), (file / "b", True), (file / "b.png", False), (tmp_path, False)):
        with pytest.raises(ClasslensError, match=r"^--out "):
            early.check_out(path, folder)
    assert list(tmp_path.iterdir()) == [file]  # nothing was created


def test_an_unknown_class_of_the_included_network_is_refused() -> None:
    with pytest.raises(TargetError, match="no class is named"):
        early.check_classes(early.EMBEDDED, ["tabby", "no such thing"])


def test_the_stored_flags_are_those_of_the_tests() -> None:
    assert flags.stored() == flags.registered(), "run python tools/write_docs.py"


COMMANDS = "selfsup bank . --out", "selfsup train rotnet -d . -o", "train multilabel -d . -o", "report -d . -o"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_cannot_be_written_is_found_first(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by root, and on file systems that are read-only: a file is really created."""

    def refused(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), str(tmp_path / "maps")])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"error: --out {tmp_path}/maps cannot be written: read-only file system in {tmp_path}; choose another folder\n"
    )
