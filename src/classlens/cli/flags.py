"""Commands whose flags come from the tests: each field of a test's options is a flag.

>>> add_command(app, evaluate, "evaluate", everything=True)        # evaluate(test, ..., **options)

The tests import torch, and `--help` should not wait for it. So the flags are stored in flags.json, which
`python tools/write_docs.py` writes from the registry; a test compares the two.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from classlens.core.method_text import split_names

FILE = Path(__file__).with_name("flags.json")
_ALL = "all"
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

    @property
    def parameter(self) -> inspect.Parameter:
        """For the command's signature."""
        tests = ", ".join(self.tests)
        text = f"{tests[0].upper()}{tests[1:]}: {self.help}{' (several: with commas)' if self.several else ''}."
        kind: Any = _KINDS[self.kind]
        annotation = Annotated[kind, typer.Option(help=text, metavar=self.metavar, min=self.least)]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=annotation)

    def read(self, test: str, value: Any) -> Any:
        """The value as the test's options take it; refused for a test that does not use it."""
        if test not in (*self.tests, _ALL) and value != self.default:
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
            if replace(before, tests=flag.tests) != flag:
                raise TypeError(f"{test.name} and {before.tests[0]} declare --{field.name} differently")
            found[field.name] = replace(flag, tests=tuple(dict.fromkeys((*before.tests, test.name))))
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


def add_command(app: typer.Typer, function: Callable[..., None], name: str, everything: bool = False) -> None:
    """Add `function(test, ..., **options)` to an app, with the flags of its tests; `everything`: also a test `all`."""
    tests = stored()[name]["tests"] | ({_ALL: "each on the data made for it."} if everything else {})
    flags = [Flag(**entry | {"tests": tuple(entry["tests"])}) for entry in stored()[name]["flags"]]
    parameters = {p.name: p for p in inspect.signature(function, eval_str=True).parameters.values()}
    parameters = {key: p for key, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
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
    app.command(function.__name__, no_args_is_help=True)(command)


def _test_argument(tests: dict[str, str]) -> Any:
    kind = StrEnum("Test", {name: name for name in tests})  # type: ignore[misc]
    text = " ".join(f"`{name}`: {question}" for name, question in tests.items())
    return Annotated[kind, typer.Argument(metavar="TEST", help=text)]
