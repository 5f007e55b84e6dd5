"""The help of every command, at two widths, and the lists."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from classlens.cli import app
from classlens.cli.plain import with_examples
from classlens.methods import METHODS
from classlens.models import KINDS, MODELS


def paths(command: Any, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command and group, as the words that call it."""
    children = getattr(command, "commands", {})
    return [before, *(path for name, child in children.items() for path in paths(child, (*before, name)))]


def said(*arguments: str, columns: int = 80) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("columns", [50, 80])
@pytest.mark.parametrize("path", paths(typer.main.get_command(app)), ids=" ".join)
def test_help_shows_no_python_types(path: tuple[str, ...], columns: int) -> None:
    text = said(*path, "--help", columns=columns)
    assert not re.search(r"<(bool|str|int|float|list|Path)\b", text)
    assert max(map(len, text.splitlines())) <= columns


@pytest.mark.parametrize("path", [("explain",), ("compare",), ("evaluate", "segmentation"), ("train", "multilabel")])
def test_a_narrow_terminal_shows_every_option_in_full(path: tuple[str, ...]) -> None:
    names = set(re.findall(r"--[a-z][\w-]+", said(*path, "--help", columns=120)))
    narrow = said(*path, "--help", columns=50)
    assert {name for name in names if not re.search(rf"{name}\b", narrow)} == set()
    assert "…" not in narrow
    assert "```" not in narrow


@pytest.mark.parametrize("columns", [50, 80])
def test_examples_stand_line_by_line(columns: int) -> None:
    lines = [line.strip() for line in said("explain", "--help", columns=columns).splitlines()]
    at = lines.index("classlens explain photo.jpg")
    examples = [line for line in lines[at : at + 6] if not line.startswith("--")]  # the rest of a long line
    assert [line.split()[:2] for line in examples[:3]] == [["classlens", "explain"]] * 3


def test_indented_lines_become_one_block() -> None:
    assert with_examples("Do.\n\n    a b\n    c\n\nThen.") == "Do.\n\n```text\na b\nc\n```\n\nThen."
    assert with_examples("Do.") == "Do."


@pytest.mark.parametrize(("command", "options"), [("explain", "mckMo"), ("compare", "mckMo"), ("evaluate", "mdMo")])
def test_frequent_options_are_short(command: str, options: str) -> None:
    text = said(command, "--help", columns=120)
    assert all(re.search(rf"--\w+ +-{letter} ", text) for letter in options)


def test_the_lists_are_also_json() -> None:
    methods, models = (json.loads(said(name, "--json")) for name in ("methods", "models"))
    assert {entry["name"] for entry in methods} == set(METHODS)
    assert {entry["name"]: entry["signed"] for entry in methods} == {m.name: m.signed for m in METHODS.values()}
    assert {entry["name"] for entry in models if entry["included"]} == set(MODELS)
    assert {entry["name"] for entry in models if not entry["included"]} == set(KINDS)


@pytest.mark.parametrize("columns", [50, 80])
def test_methods_can_be_read_in_a_narrow_terminal(columns: int) -> None:
    text = said("methods", columns=columns)
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    assert sum(len(line.split()) for line in lines) / len(lines) > 4  # words in a line
    assert all(method.summary in " ".join(text.split()) for method in METHODS.values())
    assert all(any(line.split()[:1] == [name] for line in lines) for name in METHODS)
