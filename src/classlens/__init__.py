"""classlens: see where a vision network finds each class.

>>> import classlens
>>> m = classlens.load("efficientnet-lite0")
>>> e = classlens.explain(m, "photo.jpg", targets=["tabby", "espresso"])
>>> e.save("out")
"""

from classlens.compare import Comparison, compare
from classlens.errors import ClasslensError
from classlens.explain import Explanation, Report, explain
from classlens.methods import METHODS
from classlens.models import LoadedModel, load
from classlens.targets import top

__all__ = [
    "METHODS",
    "ClasslensError",
    "Comparison",
    "Explanation",
    "LoadedModel",
    "Report",
    "compare",
    "explain",
    "load",
    "top",
]
