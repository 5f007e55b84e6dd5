"""classlens: see where a vision network finds each class.

>>> import classlens
>>> m = classlens.load("efficientnet-lite0")
>>> e = classlens.explain(m, "photo.jpg", targets=["tabby", "espresso"])
>>> e.save("out")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from classlens import selfsup, trust
    from classlens.choice import Choice, choose
    from classlens.comparison import Comparison, compare
    from classlens.concept import Concepts, concepts
    from classlens.core.targets import above, box, detection, like, neuron, region, text, top, unlike
    from classlens.errors import ClasslensError
    from classlens.explanation import Explanation, Report, explain
    from classlens.methods import METHODS
    from classlens.models import LoadedModel, load

    __version__: str

# The module of each public name. Names are imported on first use: importing torch takes seconds, and `classlens --help`
# should be fast.
_HOMES = {
    "METHODS": "methods", "Choice": "choice", "ClasslensError": "errors", "Comparison": "comparison",
    "Concepts": "concept", "Explanation": "explanation", "LoadedModel": "models", "Report": "explanation",
    "choose": "choice", "compare": "comparison", "concepts": "concept", "explain": "explanation", "load": "models",
    **dict.fromkeys(
        ("above", "box", "detection", "like", "neuron", "region", "text", "top", "unlike"), "core.targets"
    ),
}  # fmt: skip
_MODULES = ("selfsup", "trust")

__all__ = [
    "METHODS",
    "Choice",
    "ClasslensError",
    "Comparison",
    "Concepts",
    "Explanation",
    "LoadedModel",
    "Report",
    "above",
    "box",
    "choose",
    "compare",
    "concepts",
    "detection",
    "explain",
    "like",
    "load",
    "neuron",
    "region",
    "selfsup",
    "text",
    "top",
    "trust",
    "unlike",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("classlens")
    if name in _MODULES:
        return import_module(f"classlens.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'classlens' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"classlens.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
