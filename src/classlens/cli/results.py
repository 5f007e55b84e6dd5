"""Prints the tables of a run, what is to be said of them, and the files that it wrote."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from classlens.evaluate.tables import Table


def print_results(tables: Iterable[Table], notes: Iterable[str], files: Iterable[Path], text: str = "") -> None:
    """Tables first; a terminal has its own width."""
    from classlens.evaluate.tables import terminal

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file has room
    for table in tables:
        console.print(terminal(table))
        console.print()
    lines = [*(f"note: {note}" for note in notes), *([text] if text else []), *(f"-> {file}" for file in files)]
    for line in lines:
        console.print(line, markup=False, highlight=False)
