"""Imports torchvision, timm, transformers and open_clip, only when they are needed."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from classlens.errors import ModelError
from classlens.models._text import reason

_EXTRAS = {"transformers": "hf"}  # where the extra has another name than the library
_definitions: list[Any] = []  # an op disappears when the Library that defined it is garbage-collected


@cache
def import_torchvision() -> ModuleType:
    """Import torchvision, even if its compiled operations do not load.

    The build on PyPI is made for CUDA torch. With CPU torch, its library of compiled operations fails to load, and
    the import stops at `nms`, a detection operation that no classifier needs. Declaring the missing operations
    without an implementation lets the import succeed; a call of one still raises torch's error.
    """
    try:
        return _import("torchvision")
    except RuntimeError:  # "operator torchvision::nms does not exist"
        _forget("torchvision")
    _define_missing_ops()
    try:
        return _import("torchvision")
    except Exception as error:
        _forget("torchvision")
        raise ModelError(
            f"torchvision cannot be imported ({reason(error)}): "
            f"install the build that goes with torch {torch.__version__}"
        ) from error


@cache
def import_timm() -> ModuleType:
    """Import timm, which imports torchvision and needs the same workaround."""
    if find_spec("timm"):  # without it, timm itself is what to install
        import_torchvision()
    return _import("timm")


@cache
def import_transformers() -> ModuleType:
    """Import transformers, which imports torchvision where it is installed and needs the same workaround."""
    if find_spec("torchvision"):
        import_torchvision()
    return _import("transformers")


@cache
def import_open_clip() -> ModuleType:
    """Import open_clip, which imports torchvision and needs the same workaround."""
    if find_spec("open_clip"):
        import_torchvision()
    return _import("open_clip")


def _import(library: str) -> ModuleType:
    try:
        return import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise ModelError(
            f"{library} is not installed: pip install 'classlens[{_EXTRAS.get(library, library)}]'"
        ) from None


def _define_missing_ops() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for op in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, op):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _definitions.append(library)


def _forget(library: str) -> None:
    """Remove what a failed import left in `sys.modules`, so that the next import starts afresh."""
    for name in [name for name in sys.modules if name == library or name.startswith(f"{library}.")]:
        del sys.modules[name]
