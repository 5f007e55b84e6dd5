"""Commands whose flags come from the tests: each field of a test's options is a flag.

>>> add_command(app, evaluate, "evaluate", groups=True)        # evaluate(test, ..., **options)

The tests import torch, and `--help` should not wait for it. So the flags are stored in flags.json, which
`python tools/write_docs.py` writes from the registry; a test compares the two.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from classlens.cli.plain import App, PlainCommand
from classlens.core.method_text import split_names

FILE = Path(__file__).with_name("flags.json")
_GROUPS = {"all": "each on the data made for it.", "truth": "those whose right answer is known, in one table."}
_KINDS: dict[str, Any] = {"str": str, "int": int, "float": float, "float | None": float | None}


@dataclass(frozen=True)
class Flag:
    """A flag of one test, or of several tests that share it."""

    name: str  # of the field
    kind: str  # a key of the types above
    default: Any
    several: bool  # it takes several values, separated by commas
    help: str
    metavar: str | None
    least: float | None
    tests: tuple[str, ...]
    proves: bool = False  # one of its tests is part of `truth`

    @property
    def parameter(self) -> inspect.Parameter:
        """For the command's signature."""
        tests = ", ".join(self.tests)
        text = f"{tests[0].upper()}{tests[1:]}: {self.help}{' (commas)' if self.several else ''}."
        kind: Any = _KINDS[self.kind]
        annotation = Annotated[kind, typer.Option(help=text, metavar=self.metavar, min=self.least)]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=annotation)

    def read(self, test: str, value: Any) -> Any:
        """The value as the test's options take it; refused for a test that does not use it."""
        groups = ("all", "truth") if self.proves else ("all",)
        if test not in (*self.tests, *groups) and value != self.default:
            flag = f"--{self.name.replace('_', '-')}"
            raise typer.BadParameter(f"{flag} is for {' and '.join(self.tests)}; do not use it with {test}")
        return tuple(split_names(value)) if self.several else value


# ------------------------------------------------------------------------------------------------- stored, registered


@cache
def stored() -> dict[str, Any]:
    """{command: {"tests": {name: question}, "flags": [...]}}, as flags.json has it."""
    found: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return found


def registered() -> dict[str, Any]:
    """The same, from the registry of tests."""
    from classlens.evaluate.settings import PLAIN
    from classlens.selfsup.evaluation import OFFERS

    return {"evaluate": _served(PLAIN.offers), "selfsup evaluate": _served(OFFERS)}


def _served(offers: frozenset[str]) -> dict[str, Any]:
    """The tests that an explainer supports, and their flags."""
    from classlens.evaluate import TESTS

    tests = {name: test for name, test in TESTS.items() if test.serves(offers)}
    found: dict[str, Flag] = {}
    for test in tests.values():
        hints = get_type_hints(test.options)
        for field in fields(test.options):
            flag = _flag(test.name, field, hints[field.name], offers)
            if flag is None:
                continue
            before = found.get(field.name, flag)
            if replace(before, tests=flag.tests, proves=flag.proves) != flag:
                raise TypeError(f"{test.name} and {before.tests[0]} declare --{field.name} differently")
            both = tuple(dict.fromkeys((*before.tests, test.name)))
            found[field.name] = replace(flag, tests=both, proves=before.proves or bool(test.proof))
    flags = [asdict(flag) | {"tests": list(flag.tests)} for flag in found.values()]
    return {"tests": {name: test.question for name, test in tests.items()}, "flags": flags}


def _flag(test: str, field: Any, hint: Any, offers: frozenset[str]) -> Flag | None:
    from classlens.evaluate.registry import flag_of

    about = flag_of(field)
    if about.needs and about.needs not in offers:
        return None
    several = isinstance(field.default, tuple)
    kind = "str" if several else getattr(hint, "__name__", str(hint))
    default = ",".join(field.default) if several else field.default
    return Flag(field.name, kind, default, several, about.help, about.metavar, about.least, (test,))


# -------------------------------------------------------------------------------------------------------- the command


def add_command(app: App, function: Callable[..., None], name: str, groups: bool = False) -> None:
    """Add `function(test, ..., **options)` to an app, with the flags of its tests; `groups`: also `all` and `truth`.

    The flags are looked up when the command runs or shows its help, so that tests which a user registers are there.
    """

    class Completed(PlainCommand):
        """Passes the call to the command with all flags."""

        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            return _complete(function, _known(name), groups).make_context(info_name, args, parent, **extra)

    def listed() -> None: ...

    listed.__doc__ = function.__doc__
    app.command(function.__name__, cls=Completed)(listed)


def _known(name: str) -> dict[str, Any]:
    """As the registry says if it is imported already: it may hold tests of a user. Otherwise as stored."""
    found: dict[str, Any] = (registered() if "classlens.evaluate.tests" in sys.modules else stored())[name]
    return found


def _complete(function: Callable[..., None], known: dict[str, Any], groups: bool) -> Any:
    """The command, as typer builds it from a signature."""
    flags = [Flag(**entry | {"tests": tuple(entry["tests"])}) for entry in known["flags"]]
    parameters = {p.name: p for p in inspect.signature(function, eval_str=True).parameters.values()}
    parameters = {key: p for key, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    tests = known["tests"] | (_GROUPS if groups else {})
    parameters["test"] = parameters["test"].replace(annotation=_test_argument(tests))
    for flag in flags:
        if flag.name in parameters:
            raise TypeError(f"{flag.tests[0]} declares --{flag.name}, which the command has already")
        parameters[flag.name] = flag.parameter

    def command(**given: Any) -> None:
        read = {flag.name: flag.read(str(given["test"]), given[flag.name]) for flag in flags}
        function(**given | read)

    command.__doc__ = function.__doc__
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {key: p.annotation for key, p in parameters.items()}
    app = App(add_completion=False)
    app.command(no_args_is_help=True)(command)
    return typer.main.get_command(app)


def _test_argument(tests: dict[str, str]) -> Any:
    kind = StrEnum("Test", {name: name for name in tests})  # type: ignore[misc]
    text = " ".join(f"`{name}`: {question}" for name, question in tests.items())
    return Annotated[kind, typer.Argument(metavar="TEST", help=text)]
