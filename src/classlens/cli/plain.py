"""The look of the help: no Python types behind flags, examples line by line.

>>> app = App(help="Train a classifier.")
>>> @app.command()
... def run(quick: Annotated[bool, typer.Option("--quick")] = False) -> None: ...
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_ROOM = 70  # columns that a table of options needs
_PLACEHOLDERS = {"int": "N", "float": "X", "str": "TEXT", "Path": "PATH"}


class App(typer.Typer):
    """A group of commands with our settings."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            cls=PlainGroup,
            no_args_is_help=True,
            rich_markup_mode="markdown",
            pretty_exceptions_enable=False,  # main() prints errors as one line
            context_settings={"help_option_names": ["-h", "--help"]},
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Add a function as a command; its docstring is the help."""

        def add(function: Any) -> Any:
            usual: dict[str, Any] = {"cls": PlainCommand, "help": with_examples(inspect.getdoc(function) or "")}
            return super(App, self).command(name, **usual | settings)(function)

        return add


class PlainCommand(TyperCommand):
    """A command whose parameters are shown without Python types."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_plain(parameter) for parameter in super().get_params(ctx)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help; in a narrow terminal without frames, which would cut off the names of options."""
        columns, shown = shutil.get_terminal_size().columns, self
        if columns < _ROOM:
            shown = copy.copy(self)
            shown.rich_markup_mode = None
            shown.help = re.sub(r"(?s)```text\n(.*?)\n```", lambda block: _wrapped(block[1], columns), self.help or "")
            formatter.width = columns - 1  # its own limits suit wide terminals
            formatter.write_dl = functools.partial(formatter.write_dl, col_max=10)  # what it says needs the room
        super(PlainCommand, shown).format_help(ctx, formatter)


def _wrapped(examples: str, columns: int) -> str:
    """Examples that fit into a narrow terminal; a backspace in front keeps their lines."""
    room = functools.partial(textwrap.wrap, width=columns - 4, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(["\b", *(part for line in examples.splitlines() for part in room(line))])


class PlainGroup(TyperGroup):
    """The same for a group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_plain(parameter) for parameter in super().get_params(ctx)]


def _plain(parameter: Any) -> Any:
    """A parameter without its Python type: nothing behind a flag, N behind a number, choices as they are."""
    if parameter.param_type_name == "argument":
        parameter.display_type_rich = lambda ctx: None  # its name says enough
    elif getattr(parameter, "is_flag", False):
        parameter.metavar = ""
    elif parameter.metavar is None:
        kind = re.sub(r"\W|range|list", "", str(parameter.display_type_rich(None)))
        parameter.metavar = _PLACEHOLDERS.get(kind)
    return parameter


def with_examples(text: str) -> str:
    r"""The help text with its indented lines as one block of code, which keeps its lines.

    >>> print(with_examples("Do it.\n\n    classlens do this\n    classlens do that"))
    Do it.
    <BLANKLINE>
    ```text
    classlens do this
    classlens do that
    ```
    """
    return re.sub(
        r"(?m)(?:^    .*\n?)+", lambda block: f"```text\n{inspect.cleandoc(block.group())}\n```\n", text
    ).rstrip()
