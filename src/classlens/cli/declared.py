"""The declarations of the methods, read from their source, to list them without importing torch.

>>> declared()[0]["name"]
'agf'
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any


def declared() -> list[dict[str, Any]]:
    """The keywords of each `@method(...)` in classlens/methods, with its name and its options."""
    folder = Path(__file__).parents[1] / "methods"
    modules = {file: ast.parse(file.read_text("utf-8")) for file in sorted(folder.rglob("*.py"))}
    return [
        _keywords(call, _constants(module) | _imported(module, modules)) | {"options": _options(function)}
        for module in modules.values()
        for function, call in _method_calls(module)
    ]


def _constants(module: ast.Module) -> dict[str, Any]:
    return {
        target.id: statement.value.value
        for statement in module.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def _imported(module: ast.Module, modules: dict[Path, ast.Module]) -> dict[str, Any]:
    """Constants that a module imports from another module of this package."""
    root = Path(__file__).parents[1]
    by_name = {".".join(("classlens", *file.relative_to(root).parts))[:-3]: m for file, m in modules.items()}
    return {
        name.asname or name.name: found[name.name]
        for statement in module.body
        if isinstance(statement, ast.ImportFrom) and statement.module in by_name
        for found in [_constants(by_name[statement.module])]
        for name in statement.names
        if name.name in found
    }


def _method_calls(module: ast.Module) -> list[tuple[ast.FunctionDef, ast.Call]]:
    return [
        (function, call)
        for function in module.body
        if isinstance(function, ast.FunctionDef)
        for call in function.decorator_list
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "method"
    ]


def _options(function: ast.FunctionDef) -> tuple[str, ...]:
    """The parameters of a method after the first, which is the case."""
    arguments = function.args
    return tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))[1:]


def _keywords(call: ast.Call, constants: dict[str, Any]) -> dict[str, Any]:
    def value(node: ast.expr) -> Any:
        return constants[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)

    return {"name": value(call.args[0])} | {k.arg: value(k.value) for k in call.keywords if k.arg}
