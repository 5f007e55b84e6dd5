"""What the methods say of themselves, read from their source: a list without the seconds that torch takes to import.

>>> declared()[0]["name"]
'agf'
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any


def declared() -> list[dict[str, Any]]:
    """The keywords of each `@method(...)` in classlens/methods, with its name."""
    folder = Path(__file__).parents[1] / "methods"
    return [entry for file in sorted(folder.rglob("*.py")) for entry in _of_module(ast.parse(file.read_text("utf-8")))]


def _of_module(module: ast.Module) -> list[dict[str, Any]]:
    constants = {
        target.id: statement.value.value
        for statement in module.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    calls = [
        call
        for function in module.body
        if isinstance(function, ast.FunctionDef)
        for call in function.decorator_list
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "method"
    ]
    return [_keywords(call, constants) for call in calls]


def _keywords(call: ast.Call, constants: dict[str, Any]) -> dict[str, Any]:
    def value(node: ast.expr) -> Any:
        return constants[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)

    return {"name": value(call.args[0])} | {k.arg: value(k.value) for k in call.keywords if k.arg}
