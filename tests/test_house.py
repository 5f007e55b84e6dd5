"""The habits that keep the house easy to find one's way in: short files, short functions, private means private."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import classlens

ROOT = Path(classlens.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FILE_LINES, FUNCTION_LINES = 400, 45


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef, command: bool) -> int:
    """How long a function is. A command is declared by its signature and its help: there, only the rest counts."""
    first = function.lineno
    if command:
        body = function.body[1:] if ast.get_docstring(function) else function.body
        first = body[0].lineno if body else function.lineno
    return (function.end_lineno or first) - first + 1


def _is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the parameters are declared as options of the command."""
    arguments = [*function.args.args, *function.args.kwonlyargs]
    return any("typer." in ast.unparse(a.annotation) for a in arguments if a.annotation is not None)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= FILE_LINES, f"{_name(path)} is too long: split it by what its parts are about"
    in_command = _name(path).startswith("cli/")
    long = {
        function.name: lines
        for function in _functions(ast.parse(text))
        if (lines := _lines(function, in_command and _is_command(function))) > FUNCTION_LINES
    }
    assert not long, "too long: give their parts names of their own"


def test_a_long_function_is_found() -> None:
    body = "".join(f"    x = {i}\n" for i in range(45))
    plain, command = (
        next(_functions(ast.parse(f"def f({arguments}):\n    '''Help.\n\n    More.\n    '''\n{body}")))
        for arguments in ("a", "a: Annotated[str, typer.Option()]")
    )
    assert (_is_command(plain), _is_command(command)) == (False, True)
    assert (_lines(plain, False), _lines(command, True)) == (50, 45)


def _private_imports(tree: ast.AST) -> list[str]:
    """Private names of other modules of classlens: imported, or taken from a module that is imported."""
    found, modules = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "classlens":
            found += [f"{node.module}.{name.name}" for name in node.names if name.name.startswith("_")]
            modules |= {name.asname or name.name for name in node.names}
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return found + [
        f"{node.value.id}.{node.attr}"
        for node in attributes
        if isinstance(node.value, ast.Name)
        and node.value.id in modules
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
    ]


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_module_takes_a_private_name_of_another(path: Path) -> None:
    assert _private_imports(ast.parse(path.read_text(encoding="utf-8"))) == []


def test_a_private_import_is_found() -> None:
    source = (
        "from classlens.render.panels import _draw, panels\nfrom classlens import explanation as core\ncore._prepare()"
    )
    assert _private_imports(ast.parse(source)) == ["classlens.render.panels._draw", "core._prepare"]
