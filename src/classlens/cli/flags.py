"""Commands whose flags come from the evaluations: each field of a test's options is one.

>>> add_command(app, evaluate, offers=lambda: frozenset({"classes", "head"}))        # evaluate(test, ..., **options)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

Offers = Callable[[], frozenset[str]]  # of an explainer


def add_command(app: typer.Typer, function: Callable[..., None], offers: Offers, everything: bool = False) -> None:
    """Add `function(test, ..., **options)` to an app, with the flags of all tests that an explainer can serve.

    They are looked up when the command is run or asked for help: the tests import torch, and no other command is to
    wait for that. `everything`: there is a test `all`.
    """

    class Completed(TyperCommand):
        """Hands over to the command with all flags."""

        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            return _complete(function, offers(), everything).make_context(info_name, args, parent, **extra)

    def listed() -> None: ...

    listed.__doc__ = function.__doc__
    app.command(function.__name__, cls=Completed)(listed)


@dataclass(frozen=True)
class _Flag:
    """A flag of one test, or of several that have it in common."""

    kind: Any
    default: Any
    about: Any  # classlens.evaluate.registry.Flag
    tests: tuple[str, ...]

    def parameter(self, name: str) -> inspect.Parameter:
        several = isinstance(self.default, tuple)
        tests = ", ".join(self.tests)
        text = f"{tests[0].upper()}{tests[1:]}: {self.about.help}{' (commas)' if several else ''}."
        shown = typer.Option(help=text, metavar=self.about.metavar, min=self.about.least)
        default = ",".join(self.default) if several else self.default
        kind: Any = str if several else self.kind
        annotation = Annotated[kind, shown]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flags(offers: frozenset[str] | None) -> dict[str, _Flag]:
    """By the name of the field. Without offers, those of all tests."""
    from classlens.evaluate import TESTS
    from classlens.evaluate.registry import flag_of

    found: dict[str, _Flag] = {}
    for test in TESTS.values():
        hints = get_type_hints(test.options)
        for field in fields(test.options) if offers is None or test.serves(offers) else ():
            about = flag_of(field)
            if offers is not None and about.needs and about.needs not in offers:
                continue
            before = found.get(field.name)
            if before is not None and (before.kind, before.default, before.about) != (
                hints[field.name],
                field.default,
                about,
            ):
                raise TypeError(f"{test.name} and {before.tests[0]} declare --{field.name} differently")
            tests = (*(before.tests if before else ()), test.name)
            found[field.name] = _Flag(hints[field.name], field.default, about, tests)
    return found


def options_given(given: dict[str, Any]) -> tuple[Any, ...]:
    """The values of the flags as options of the tests."""
    from classlens.evaluate import options_of_tests
    from classlens.methods import split_names

    several = {name for name, flag in _flags(None).items() if isinstance(flag.default, tuple)}
    return options_of_tests(**{k: tuple(split_names(v)) if k in several else v for k, v in given.items()})


def _complete(function: Callable[..., None], offers: frozenset[str], everything: bool) -> Any:
    """The command, as typer builds it from a signature."""
    parameters = {p.name: p for p in inspect.signature(function, eval_str=True).parameters.values()}
    parameters = {name: p for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    parameters["test"] = parameters["test"].replace(annotation=_test_argument(offers, everything))
    parameters |= {name: flag.parameter(name) for name, flag in _flags(offers).items()}

    def command(**given: Any) -> None:
        function(**given)

    command.__doc__ = function.__doc__
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: p.annotation for name, p in parameters.items()}
    app = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False)
    app.command(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})(command)
    return typer.main.get_command(app)


def _test_argument(offers: frozenset[str], everything: bool) -> Any:
    from classlens.evaluate import TESTS

    served = {name: test for name, test in TESTS.items() if test.serves(offers)}
    names = [*served, *(["all"] if everything else [])]
    text = " ".join(f"`{name}`: {test.question}" for name, test in served.items())
    kind = StrEnum("Test", {name: name for name in names})  # type: ignore[misc]
    return Annotated[
        kind,
        typer.Argument(metavar="TEST", help=f"{text} `all`: each on the data made for it." if everything else text),
    ]
