"""Commands whose flags come from the tests: each field of a test's options is a flag.

>>> add_command(app, evaluate, offers=lambda: frozenset({"classes", "head"}))        # evaluate(test, ..., **options)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

Offers = Callable[[], frozenset[str]]  # of an explainer
_ALL = "all"


def add_command(app: typer.Typer, function: Callable[..., None], offers: Offers, everything: bool = False) -> None:
    """Add `function(test, ..., **options)` to an app, with the flags of all tests that an explainer supports.

    The flags are looked up when the command runs or shows its help: the tests import torch, and other commands should
    not wait for that. `everything`: there is also a test `all`.
    """

    class Completed(TyperCommand):
        """Passes the call to the command with all flags."""

        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            return _complete(function, offers(), everything).make_context(info_name, args, parent, **extra)

    def listed() -> None: ...

    listed.__doc__ = function.__doc__
    app.command(function.__name__, cls=Completed)(listed)


@dataclass(frozen=True)
class _Flag:
    """A flag of one test, or of several tests that share it."""

    name: str  # of the field
    kind: Any
    default: Any
    about: Any  # classlens.evaluate.registry.Flag
    tests: tuple[str, ...]

    @property
    def several(self) -> bool:
        """Whether it takes several values, separated by commas."""
        return isinstance(self.default, tuple)

    @property
    def shown_default(self) -> Any:
        return ",".join(self.default) if self.several else self.default

    @property
    def parameter(self) -> inspect.Parameter:
        """For the command's signature."""
        tests = ", ".join(self.tests)
        text = f"{tests[0].upper()}{tests[1:]}: {self.about.help}{' (commas)' if self.several else ''}."
        kind: Any = str if self.several else self.kind
        annotation = Annotated[kind, typer.Option(help=text, metavar=self.about.metavar, min=self.about.least)]
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, keyword, default=self.shown_default, annotation=annotation)

    def check(self, test: str, value: Any) -> None:
        """Refuse a value for a test that does not use it."""
        if test not in (*self.tests, _ALL) and value != self.shown_default:
            flag = f"--{self.name.replace('_', '-')}"
            raise typer.BadParameter(f"{flag} is for {' and '.join(self.tests)}; do not use it with {test}")


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
            flag = _Flag(field.name, hints[field.name], field.default, about, (test.name,))
            before = found.get(field.name, flag)
            if replace(before, tests=flag.tests) != flag:
                raise TypeError(f"{test.name} and {before.tests[0]} declare --{field.name} differently")
            found[field.name] = replace(flag, tests=tuple(dict.fromkeys((*before.tests, test.name))))
    return found


def options_given(given: dict[str, Any]) -> tuple[Any, ...]:
    """The values of the flags as options of the tests."""
    from classlens.evaluate import options_of_tests
    from classlens.methods import split_names

    several = {name for name, flag in _flags(None).items() if flag.several}
    return options_of_tests(**{k: tuple(split_names(v)) if k in several else v for k, v in given.items()})


def _complete(function: Callable[..., None], offers: frozenset[str], everything: bool) -> Any:
    """The command, as typer builds it from a signature."""
    parameters = {p.name: p for p in inspect.signature(function, eval_str=True).parameters.values()}
    parameters = {name: p for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    parameters["test"] = parameters["test"].replace(annotation=_test_argument(offers, everything))
    flags = _flags(offers)
    taken = sorted(flags.keys() & parameters.keys())
    if taken:
        raise TypeError(f"{flags[taken[0]].tests[0]} declares --{taken[0]}, which the command has already")
    parameters |= {name: flag.parameter for name, flag in flags.items()}

    def command(**given: Any) -> None:
        for name, flag in flags.items():
            flag.check(str(given["test"]), given[name])
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
    questions = {name: test.question for name, test in served.items()}
    if everything:
        questions[_ALL] = "each on the data made for it."
    kind = StrEnum("Test", {name: name for name in questions})  # type: ignore[misc]
    text = " ".join(f"`{name}`: {question}" for name, question in questions.items())
    return Annotated[kind, typer.Argument(metavar="TEST", help=text)]
