"""Explanation methods: `METHODS` maps each name to a function and its properties.

A method is a function with the `@method` decorator in any module of this package; being there is enough.
"""

import pkgutil
from importlib import import_module

from classlens.core.method_text import split_names
from classlens.methods.registry import (
    METHODS,
    UNRELIABLE,
    Balance,
    Case,
    LayerTrace,
    Method,
    Result,
    check_options,
    method_names,
    resolve,
)

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "METHODS",
    "UNRELIABLE",
    "Balance",
    "Case",
    "LayerTrace",
    "Method",
    "Result",
    "check_options",
    "method_names",
    "resolve",
    "split_names",
]
