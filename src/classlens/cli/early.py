"""What a command can check before it imports torch, which takes seconds: paths, names of methods and classes, `--out`.

Each check raises the error that the library would raise later, so nothing is decided here alone.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from classlens.cli.declared import declared
from classlens.core.method_text import AUTO, parse, refuse_unknown, split_names
from classlens.core.names import match
from classlens.data.labels import imagenet
from classlens.errors import ClasslensError, ImageError, MethodError

EMBEDDED = "efficientnet-lite0"  # the default of --model; its classes are those of ImageNet
RIVALS = "rivals"  # in --rather-than: all other classes


@cache
def _methods() -> dict[str, tuple[str, ...]]:
    """The options of each method, by its name."""
    return {entry["name"]: entry["options"] for entry in declared()}


def check_call(
    pictures: Sequence[Path],
    methods: str,
    model: str,
    classes: Iterable[str],
    out: Path,
    folder: bool,
    auto: bool = False,
) -> None:
    """All checks of a command that explains pictures."""
    check_pictures(pictures)
    check_methods(methods, auto)
    check_classes(model, classes)
    check_out(out, folder)


def check_methods(text: str, auto: bool = False) -> None:
    """Refuse unknown methods and options in names separated by commas, or `all`; with `auto`, also take "auto"."""
    if text == "all" or (auto and text == AUTO):
        return
    names = split_names(text)
    if not names:
        raise MethodError("no method was given; write names separated by commas, or all")
    for name in names:
        check_method(name)


def check_method(text: str, auto: bool = False) -> None:
    """Refuse a method that does not exist, or an option that it does not have; with `auto`, also take "auto"."""
    if auto and text == AUTO:
        return
    name, options = parse(text, _methods())
    refuse_unknown(name, options, _methods()[name])


def check_classes(model: str, names: Iterable[str]) -> None:
    """Refuse classes that the included network does not have; other networks must be loaded to know."""
    if model == EMBEDDED:
        for name in names:
            if name != RIVALS:
                match(imagenet(), name)


def check_pictures(paths: Sequence[Path]) -> None:
    """Refuse paths of which none exists; if some do, these are still explained."""
    if not any(os.path.lexists(path) for path in paths):
        raise ImageError(f"{paths[0]} does not exist: check the path")


def check_new(path: Path) -> None:
    """Refuse a bundle that exists already, or that cannot be written."""
    if os.path.lexists(path):
        raise ClasslensError(f"{path} exists already, and a bundle is never overwritten; choose another name")
    check_out(path, folder=path.suffix != ".zip")


def check_out(path: Path, folder: bool = True, option: str = "--out") -> None:
    """Refuse a folder, or a file, that cannot be written, before the work rather than after it."""
    if not folder and path.is_dir():
        raise ClasslensError(f"{option} {path} is a folder: give the name of a file")
    inside = path if folder else path.parent
    place = next(p for p in (inside, *inside.absolute().parents) if p.exists())
    if not place.is_dir():
        raise ClasslensError(f"{option} {path} cannot be written: {place} is a file; choose another folder")
    try:
        with tempfile.TemporaryFile(dir=place):  # permissions alone do not tell of read-only or special file systems
            pass
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ClasslensError(f"{option} {path} cannot be written: {why} in {place}; choose another folder") from None
